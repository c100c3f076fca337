// product_cache.h - a file that remembers which algorithm was fastest for a matrix product, so that later runs need not search.
//
// One line a product: the format's number, a checksum of all that follows, driver, library, the product's key, the algorithm as the
// library wrote it, and the GPU's name to the end of the line:
//
//     1 5d0c2f1a 13000 130100 3072 65536 768 ... 0000000000000042 ... NVIDIA H200
//
// Whoever finds another algorithm writes the whole file anew under a name of its own and renames it, so that a reader sees one complete
// file or another. Of two ranks that write at once the later one wins; what the other found comes with its next line, or is searched for again by a later run.
// Nothing depends on the file but time: who takes an algorithm from it checks it first (kernels/cuda/matmul.cu). What is damaged, or
// of another format, is left out with a note; lines of other GPUs, drivers and libraries stay, since a home folder may serve many hosts.
#pragma once
#include "crc32c.h"
#include "utils.h"

enum {
    PRODUCT_FORMAT = 1,
    PRODUCT_KEY = 15,           // numbers that tell one kind of product from another
    PRODUCT_ALGO = 8,           // words of an algorithm
    PRODUCT_NAME_MAX = 256,
    PRODUCT_LINE_MAX = 1024,
    PRODUCT_LINES_MAX = 4096,   // the oldest go first
};

// What an algorithm's speed, and whether it exists, depends on beside the product.
typedef struct {
    int64_t driver, library;
    char gpu[PRODUCT_NAME_MAX]; // printable
} ProductMachine;

typedef struct {
    ProductMachine machine;
    int64_t key[PRODUCT_KEY];
    uint64_t algo[PRODUCT_ALGO];
} ProductLine;

typedef struct {
    char path[4096];            // "" = no file
    char shown[512];            // printable
    ProductMachine machine;     // this one
    ProductLine *line;          // in the order of the file
    int n;
} ProductCache;

static inline ProductMachine product_machine(const char *gpu, int64_t driver, int64_t library) {
    ProductMachine m = {driver, library, ""};
    text_escape(m.gpu, sizeof m.gpu, gpu, strlen(gpu));
    return m;
}

static inline bool product_same(const ProductLine *l, const ProductMachine *machine, const int64_t key[PRODUCT_KEY]) {
    return l->machine.driver == machine->driver && l->machine.library == machine->library && strcmp(l->machine.gpu, machine->gpu) == 0 &&
           memcmp(l->key, key, sizeof l->key) == 0;
}

// The line with its newline; returns the length.
static inline int product_line_write(char dst[PRODUCT_LINE_MAX], const ProductLine *l) {
    char body[PRODUCT_LINE_MAX];
    int n = snprintf(body, sizeof body, "%" PRId64 " %" PRId64, l->machine.driver, l->machine.library);
    for (int i = 0; i < PRODUCT_KEY; i++) n += snprintf(body + n, sizeof body - (size_t)n, " %" PRId64, l->key[i]);
    for (int i = 0; i < PRODUCT_ALGO; i++) n += snprintf(body + n, sizeof body - (size_t)n, " %016" PRIx64, l->algo[i]);
    n += snprintf(body + n, sizeof body - (size_t)n, " %s", l->machine.gpu);
    CHECK(n > 0 && n < PRODUCT_LINE_MAX - 16, "a line of %d bytes", n); // 17 numbers of 20 digits, 8 of 16, and a name
    return snprintf(dst, PRODUCT_LINE_MAX, "%d %08x %s\n", PRODUCT_FORMAT, crc32c_extend(0, body, (size_t)n), body);
}

// One number and the space behind it; null when there is none.
static inline const char *product_number(const char *at, int base, uint64_t *value) {
    if (!at || *at == ' ') return NULL;
    char *end;
    *value = base == 10 ? (uint64_t)strtoll(at, &end, 10) : strtoull(at, &end, base);
    return end > at && *end == ' ' ? end + 1 : NULL;
}

// The line at `text`, which ends in a newline at text[length - 1]. True only for the very bytes that product_line_write gives.
static inline bool product_line_read(ProductLine *l, const char *text, size_t length) {
    char copy[PRODUCT_LINE_MAX], again[PRODUCT_LINE_MAX];
    uint64_t number = 0;
    if (length < 2 || length >= sizeof copy || text[length - 1] != '\n') return false;
    memcpy(copy, text, length - 1);
    copy[length - 1] = 0;
    memset(l, 0, sizeof *l);
    const char *at = product_number(copy, 10, &number);
    at = product_number(at, 16, &number); // the checksum is compared with the rest
    at = product_number(at, 10, &number);
    l->machine.driver = (int64_t)number;
    at = product_number(at, 10, &number);
    l->machine.library = (int64_t)number;
    for (int i = 0; i < PRODUCT_KEY; i++) {
        at = product_number(at, 10, &number);
        l->key[i] = (int64_t)number;
    }
    for (int i = 0; i < PRODUCT_ALGO; i++) at = product_number(at, 16, &l->algo[i]);
    if (!at || strlen(at) >= sizeof l->machine.gpu) return false;
    memcpy(l->machine.gpu, at, strlen(at) + 1);
    return (size_t)product_line_write(again, l) == length && memcmp(again, text, length) == 0;
}

// Puts a line where one of the same machine and product stands, else at the end.
static inline void product_put(ProductCache *c, const ProductLine *l) {
    for (int i = 0; i < c->n; i++)
        if (product_same(&c->line[i], &l->machine, l->key)) { c->line[i] = *l; return; }
    if (c->n == PRODUCT_LINES_MAX) memmove(c->line, c->line + 1, sizeof *l * (size_t)--c->n);
    c->line[c->n++] = *l;
}

// Reads the file, if it is there, beside what the cache holds: a line of this process that another has written over comes back with its next.
static inline void product_cache_read(ProductCache *c) {
    char why[256];
    int64_t bytes = 0;
    int bad = 0, first_bad = 0, number = 0;
    if (!c->path[0]) return;
    if (!c->line) c->line = (ProductLine *)host_alloc(sizeof(ProductLine) * PRODUCT_LINES_MAX);
    char *text = file_read_all(c->path, false, 2 * (int64_t)PRODUCT_LINES_MAX * PRODUCT_LINE_MAX, &bytes, why, sizeof why);
    if (!text) {
        if (access(c->path, F_OK) == 0) note("%s: %s; algorithms of matrix products are searched for again", c->shown, why);
        return;
    }
    for (const char *at = text, *end = text + bytes; at < end;) {
        const char *newline = (const char *)memchr(at, '\n', (size_t)(end - at)), *next = newline ? newline + 1 : end;
        ProductLine l;
        number++;
        if (product_line_read(&l, at, (size_t)(next - at))) product_put(c, &l);
        else if (bad++ == 0) first_bad = number;
        at = next;
    }
    free(text);
    if (bad) note("%s: %d line%s, the first in line %d, damaged or of another program: left out", c->shown, bad, bad == 1 ? "" : "s", first_bad);
}

// Where the file is: `setting` "none" = nowhere (""), "auto" = below the user's folder of caches, else the path itself.
static inline const char *product_cache_path(char *dst, size_t room, const char *setting) {
    const char *caches = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = 0;
    if (strcmp(setting, "none") == 0) n = 0, dst[0] = 0;
    else if (strcmp(setting, "auto") != 0) n = snprintf(dst, room, "%s", setting);
    else if (caches && caches[0] == '/') n = snprintf(dst, room, "%s/train_gpt/products", caches); // the XDG base directory specification: a path that is not absolute is invalid
    else if (home && home[0] == '/') n = snprintf(dst, room, "%s/.cache/train_gpt/products", home);
    else dst[0] = 0;
    if (n < 0 || (size_t)n >= room) dst[0] = 0;
    return dst;
}

static inline void product_cache_open(ProductCache *c, const char *path, ProductMachine machine) {
    free(c->line);
    memset(c, 0, sizeof *c);
    CHECK(strlen(path) < sizeof c->path, "a path of %zu bytes", strlen(path));
    memcpy(c->path, path, strlen(path) + 1);
    text_escape(c->shown, sizeof c->shown, path, strlen(path));
    c->machine = machine;
    product_cache_read(c);
}

// The words of the algorithm, or null.
static inline const uint64_t *product_cache_find(const ProductCache *c, const int64_t key[PRODUCT_KEY]) {
    for (int i = 0; i < c->n; i++) if (product_same(&c->line[i], &c->machine, key)) return c->line[i].algo;
    return NULL;
}

// Writes all lines under a name that no other process uses, then renames it. False with errno.
static inline bool product_cache_write(const ProductCache *c) {
    char temporary[sizeof c->path + 64], folder[sizeof c->path], line[PRODUCT_LINE_MAX];
    memcpy(folder, c->path, sizeof folder);
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) { // each folder on the way; what is there stays
        *slash = 0;
        mkdir(folder, 0700);
        *slash = '/';
    }
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    snprintf(temporary, sizeof temporary, "%s.%ld.%lld%09ld", c->path, (long)getpid(), (long long)t.tv_sec, t.tv_nsec); // hosts may share the folder, and process numbers
    const int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    bool good = true;
    for (int i = 0; i < c->n && good; i++) good = file_write_all(fd, line, product_line_write(line, &c->line[i]));
    if (close(fd) != 0) good = false;
    if (good && rename(temporary, c->path) == 0) return true;
    const int error = errno;
    unlink(temporary);
    errno = error;
    return false;
}

// Keeps what a search found, beside what others have written since. A file that cannot be written is given up, with a note.
static inline void product_cache_store(ProductCache *c, const int64_t key[PRODUCT_KEY], const uint64_t algo[PRODUCT_ALGO]) {
    if (!c->path[0]) return;
    ProductLine l = {c->machine, {}, {}};
    memcpy(l.key, key, sizeof l.key);
    memcpy(l.algo, algo, sizeof l.algo);
    product_cache_read(c);
    product_put(c, &l);
    if (product_cache_write(c)) return;
    note("%s cannot be written: %s; the algorithms of matrix products are searched for again in each run (train_gpt.run.matmul_cache)", c->shown, strerror(errno));
    c->path[0] = 0;
}
