// utils.h - what every other file needs: messages, checks, exit codes, safe files, counter-based random numbers.
//
// Errors come in two kinds. A user's mistake ends the program through die(): one line on stderr that says what is
// wrong, where, the value and what to do, and one of the exit codes below. A mistake of ours trips CHECK(), which
// prints file, line and values and leaves with EXIT_INTERNAL. Neither ever returns.
//
// Randomness is a function: rng_* below take (seed, purpose, index) and hold no state, so that a result never depends
// on the order of calls, the number of threads or the number of ranks.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------------------------
// Exit codes: the sysexits numbers where one fits. The manual promises them; supervisors act on them.

enum {
    EXIT_OK = 0,          // finished, or stopped on request after a save
    EXIT_CONFIG = 2,      // configuration or command line refused
    EXIT_DATA = 65,       // training data, model files or text unusable
    EXIT_CHECKPOINT = 66, // no readable checkpoint where one was asked for
    EXIT_INTERNAL = 70,   // a bug in this program
    EXIT_CANTCREAT = 73,  // an output file or folder cannot be created
    EXIT_IO = 74,         // reading or writing failed
    EXIT_PEER = 75,       // another rank is lost or hangs: starting again may help
    EXIT_NUMERICS = 76,   // NaN or infinity, or an overflow at the floor of the loss scale
};

// ---------------------------------------------------------------------------------------------------------------
// Messages

#define PRINTF_LIKE(fmt, first) __attribute__((format(printf, fmt, first)))

// Copies src to dst so that a terminal or a log can show it: control bytes, DEL and bytes >= 0x80 that are not valid
// UTF-8 become \xNN; a text longer than the room ends in "...". Everything that comes from a file or the command line
// passes through here before it is printed. Returns dst.
static inline const char *text_escape(char *dst, size_t room, const char *src, size_t length) {
    size_t o = 0;
    for (size_t i = 0; i < length;) {
        unsigned char c = (unsigned char)src[i];
        size_t n = 1; // bytes of this character when it is printable UTF-8, else 0
        if (c < 0x20 || c == 0x7f) n = 0;
        else if (c >= 0x80) {
            n = (c >= 0xc2 && c <= 0xdf) ? 2 : (c >= 0xe0 && c <= 0xef) ? 3 : (c >= 0xf0 && c <= 0xf4) ? 4 : 0;
            if (n > length - i) n = 0;
            for (size_t k = 1; k < n; k++) if (((unsigned char)src[i + k] & 0xc0) != 0x80) { n = 0; break; }
            unsigned char second = n > 1 ? (unsigned char)src[i + 1] : 0;
            if (c == 0xc2 && second < 0xa0) n = 0;                                           // C1 controls drive terminals too
            if ((c == 0xe0 && second < 0xa0) || (c == 0xf0 && second < 0x90)) n = 0;         // longer than need be
            if ((c == 0xed && second > 0x9f) || (c == 0xf4 && second > 0x8f)) n = 0;         // surrogates; beyond Unicode
        }
        if (o + (n ? n : 4) + 4 > room) { // keep room for the dots and the final zero
            if (room >= 4) { memcpy(dst + o, "...", 3); o += 3; }
            break;
        }
        if (n) { memcpy(dst + o, src + i, n); o += n; i += n; }
        else { snprintf(dst + o, room - o, "\\x%02x", c); o += 4; i += 1; }
    }
    dst[o] = 0;
    return dst;
}

// Which rank speaks; 0 with one rank. Set once, by comm_start's caller. Notes come from rank 0 alone; an error says its rank.
static int message_rank = 0;

// Told of the last line of this process, so that its peers leave with the same code instead of calling it lost. watch.cpp has
// it; a program without ranks does without.
__attribute__((weak)) void watch_last_words(int code, const char *line);

// One line on stderr, then the given exit code.
__attribute__((noreturn)) PRINTF_LIKE(2, 3) static inline void die(int code, const char *format, ...) {
    char line[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fflush(stdout);
    if (message_rank > 0) fprintf(stderr, "error: rank %d: %s\n", message_rank, line);
    else fprintf(stderr, "error: %s\n", line);
    fflush(stderr);
    if (watch_last_words) watch_last_words(code, line);
    _exit(code); // not exit(): no handler may hang the way out
}

// Behind the last of what somebody asked to be printed. A reader that went away has had enough; anything else that keeps it back is an error.
static inline void output_flush(void) {
    if (fflush(stdout) != 0 && errno != EPIPE) die(EXIT_IO, "standard output: %s", strerror(errno));
}

// Is this the rank to tell what all ranks find out alike? Rank 0 is, at once, and its end ends the job. Where rank 0 has nothing to
// tell (one host lacks the file), the job is still there after a while, and the rank that has speaks for itself.
static inline bool rank_tells(void) { return message_rank == 0 || usleep(1500000) == 0; }

// The same for what all ranks find out alike.
#define die_alike(code, ...)                                                                                           \
    do {                                                                                                               \
        if (!rank_tells()) _exit(code);                                                                                \
        die(code, __VA_ARGS__);                                                                                        \
    } while (0)

// The same where rank 0 has told the others, and so tells the user too.
#define die_told(code, ...)                                                                                            \
    do {                                                                                                               \
        if (message_rank > 0) { usleep(500000); _exit(code); }                                                         \
        die(code, __VA_ARGS__);                                                                                        \
    } while (0)

// A line for the user that changes nothing: "note: ..." on stderr.
PRINTF_LIKE(1, 2) static inline void note(const char *format, ...) {
    va_list args;
    char *text = NULL;
    if (message_rank > 0) return;
    va_start(args, format);
    fflush(stdout);
    if (vasprintf(&text, format, args) < 0) text = NULL;
    fprintf(stderr, "note: %s\n", text ? text : format); // in one piece, beside other ranks' output
    free(text);
    va_end(args);
}

// Our own invariants; a failure is a bug of this program.
#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) check_failed(__FILE__, __LINE__, #cond, __VA_ARGS__);                                             \
    } while (0)

__attribute__((noreturn)) PRINTF_LIKE(4, 5) static inline void check_failed(const char *file, int line, const char *cond,
                                                                            const char *format, ...) {
    char what[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    die(EXIT_INTERNAL, "%s:%d: %s (expected %s); this is a bug in train_gpt, please report it with this line", file, line, what, cond);
}

// ---------------------------------------------------------------------------------------------------------------
// Small arithmetic

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Seconds on a clock that nobody can set back.
static inline double clock_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void *host_alloc(size_t bytes) { // never null; zeroed
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) die(EXIT_INTERNAL, "out of host memory: %zu bytes asked for; lower the model or batch size", bytes);
    return p;
}

// ---------------------------------------------------------------------------------------------------------------
// Files: only regular files are ever read, links are not followed at the last component, lengths are known first.

// Opens a regular file for reading and stores its size. Returns the descriptor, or -1 with a reason in `why`
// (a text without the path). follow_link: the user named this path himself, so a link is his wish.
static inline int file_open_read(const char *path, bool follow_link, int64_t *size_bytes, char *why, size_t why_room) {
    // O_NONBLOCK: opening a FIFO must fail below, not wait for a writer.
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | (follow_link ? 0 : O_NOFOLLOW));
    if (fd < 0) { snprintf(why, why_room, "%s", errno == ELOOP ? "is a symbolic link (or a loop of them)" : strerror(errno)); return -1; }
    struct stat st;
    if (fstat(fd, &st) != 0) { snprintf(why, why_room, "%s", strerror(errno)); close(fd); return -1; }
    if (!S_ISREG(st.st_mode)) { snprintf(why, why_room, "%s", S_ISDIR(st.st_mode) ? "is a folder, not a file" : "is not a regular file"); close(fd); return -1; }
    *size_bytes = st.st_size;
    return fd;
}

// Reads exactly `bytes` at `offset`; false (errno 0 = end of file) otherwise.
static inline bool file_read_at(int fd, void *dst, int64_t bytes, int64_t offset) {
    char *p = (char *)dst;
    while (bytes > 0) {
        ssize_t n = pread(fd, p, (size_t)min_i64(bytes, 1 << 30), offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) { if (n == 0) errno = 0; return false; }
        p += n; offset += n; bytes -= n;
    }
    return true;
}

// Writes exactly `bytes`; false with errno otherwise.
static inline bool file_write_all(int fd, const void *src, int64_t bytes) {
    const char *p = (const char *)src;
    while (bytes > 0) {
        ssize_t n = write(fd, p, (size_t)min_i64(bytes, 1 << 30));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) { if (n == 0) errno = EIO; return false; }
        p += n; bytes -= n;
    }
    return true;
}

// Reads a whole regular file of at most max_bytes into a fresh, zero-terminated buffer. Null with a reason otherwise.
static inline char *file_read_all(const char *path, bool follow_link, int64_t max_bytes, int64_t *size_bytes, char *why, size_t why_room) {
    int fd = file_open_read(path, follow_link, size_bytes, why, why_room);
    if (fd < 0) return NULL;
    if (*size_bytes > max_bytes) {
        snprintf(why, why_room, "has %" PRId64 " bytes, more than the limit of %" PRId64, *size_bytes, max_bytes);
        close(fd);
        return NULL;
    }
    char *text = (char *)host_alloc((size_t)*size_bytes + 1);
    if (!file_read_at(fd, text, *size_bytes, 0)) {
        snprintf(why, why_room, "%s", errno ? strerror(errno) : "became shorter while it was read");
        free(text); text = NULL;
    }
    close(fd);
    return text;
}

// ---------------------------------------------------------------------------------------------------------------
// Random numbers as a function. The mixer is the finaliser of MurmurHash3 / SplitMix64 (Steele, Lea, Flood 2014,
// "Fast splittable pseudorandom number generators"), applied to each word of the key in turn.

static inline uint64_t rng_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// 64 random bits for (seed, purpose, index).
static inline uint64_t rng_bits(uint64_t seed, uint64_t purpose, uint64_t index) {
    return rng_mix(index ^ rng_mix(purpose ^ rng_mix(seed)));
}

// Uniform in [0, 1), 53 bits.
static inline double rng_uniform(uint64_t seed, uint64_t purpose, uint64_t index) {
    return (double)(rng_bits(seed, purpose, index) >> 11) * 0x1p-53;
}

// The logarithm of an integer of 1 to 2^32, divided by 2^32: with x = 2^k m, 1/sqrt(2) <= m < sqrt(2), it is k log 2 + 2 artanh((m - 1) / (m + 1)).
static inline double log_of_fraction(uint64_t numerator) {
    union { double d; uint64_t u; } x, m, k;
    x.u = 0x4330000000000000ull | numerator;                            // 2^52 + numerator: an exact conversion that vectors have, too
    x.d = (x.d - 0x1p52) * 0x1p-32;
    k.u = (x.u - 0x3fe6a09e667f3bcdull + (64ull << 52)) >> 52;          // k + 64; the constant is 1/sqrt(2)
    m.u = x.u - (k.u << 52) + (64ull << 52);
    k.u |= 0x4330000000000000ull;
    double s = (m.d - 1) / (m.d + 1), t = s * s;
    double series = 1 / 3.0 + t * (1 / 5.0 + t * (1 / 7.0 + t * (1 / 9.0 + t * (1 / 11.0 + t * (1 / 13.0 + t * (1 / 15.0 + t * (1 / 17.0 + t * (1 / 19.0 + t * (1 / 21.0)))))))));
    return (k.d - (0x1p52 + 64)) * 0.6931471805599453 + 2 * (s + s * t * series);
}

// cos(2 pi numerator / 2^32), for integers below 2^32, by the Taylor series around the nearest quarter of the circle.
static inline double cos_of_turn(uint64_t numerator) {
    union { double d; uint64_t u; } x, even, odd;
    uint64_t shifted = numerator + (1ull << 29), quarter = shifted >> 30;
    x.u = 0x4330000000000000ull | (shifted & ((1ull << 30) - 1));
    double a = (x.d - (0x1p52 + 0x1p29)) * (6.283185307179586 * 0x1p-32), t = a * a; // |a| <= pi / 4
    even.d = 1 - t * (1 / 2.0 - t * (1 / 24.0 - t * (1 / 720.0 - t * (1 / 40320.0 - t * (1 / 3628800.0 - t * (1 / 479001600.0 - t * (1 / 87178291200.0 - t * (1 / 20922789888000.0))))))));
    odd.d = a - a * t * (1 / 6.0 - t * (1 / 120.0 - t * (1 / 5040.0 - t * (1 / 362880.0 - t * (1 / 39916800.0 - t * (1 / 6227020800.0 - t * (1 / 1307674368000.0)))))));
    // quarters 0 to 3: cos, -sin, -cos, sin
    uint64_t is_odd = 0 - (quarter & 1), sign = ((quarter + 1) & 2) << 62;
    x.u = ((even.u & ~is_odd) | (odd.u & is_odd)) ^ sign;
    return x.d;
}

// Standard normal by Box and Muller (1958); one value an index. Without branches and calls, so that a loop over indices is made of vector
// instructions: large models have billions of weights. Less than 1e-14 from the exact value.
static inline double rng_normal(uint64_t seed, uint64_t purpose, uint64_t index) {
    uint64_t bits = rng_bits(seed, purpose, index);
    return sqrt(-2.0 * log_of_fraction((bits >> 32) + 1)) * cos_of_turn(bits & 0xffffffffu);
}

// 64-bit FNV-1a of a text: turns names into purposes for rng_*.
static inline uint64_t text_hash(const char *text) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 0x100000001b3ull;
    return h;
}
