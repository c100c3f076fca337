// safetensors.h - the file format of model weights: reading files of strangers, writing files that everybody can read.
//
// A file is a u64 N, N bytes of JSON, then the data of all tensors; everything is little-endian. The JSON maps a name to
//     {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}      offsets from the start of the data
// and "__metadata__" to a flat map of texts. The rules are those of the reference parser (huggingface/safetensors,
// tensor.rs); whatever breaks one is refused:
//   1. N is at most 100,000,000 and at most what the file holds; nothing is allocated before that is known.
//   2. The JSON is strict, valid UTF-8, begins with '{' and may be followed by blanks only. No key occurs twice, compared
//      after unescaping; no name is empty; no text holds a zero byte or is longer than JSON_STRING_MAX.
//   3. end - begin is the product of the shape times the width of the type. Empty and 0-dimensional tensors are legal.
//   4. Sorted by begin, the tensors follow each other without hole or overlap and end with the file. The order of the
//      names in the JSON means nothing.
// Beyond the reference, every count is bounded (SAFETENSORS_*_MAX), and types whose elements are not whole bytes are
// refused because rule 3 could not be checked.
//
// The header is a small part of JSON (two levels, known keys, no numbers but counts), read here in one pass and without
// recursion over the scanner of json.h: a header of 100 MB costs twice its size and 112 bytes a tensor, where a tree of
// nodes could cost gigabytes. No sum or product is formed before it is known to fit.
//
// Messages in `why` say what is wrong, without the path of the file, and are safe to print.
#pragma once
#include "durable.h"
#include "json.h"
#include "tensor.h"

enum {
    SAFETENSORS_HEADER_MAX = 100000000, // bytes of JSON
    SAFETENSORS_TENSORS_MAX = 1000000,
    SAFETENSORS_METADATA_MAX = 10000,   // entries
    SAFETENSORS_RANK_MAX = 8,
    SAFETENSORS_DATA_ALIGNMENT = 4096,  // files written here pad the JSON so that the data starts at a multiple of this
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors files are read and written without swapping bytes");

// The first types have the numbers of DType, so that a DType is a SafeType as it stands.
typedef enum { SAFE_F32 = DTYPE_FP32, SAFE_BF16 = DTYPE_BF16, SAFE_F16 = DTYPE_FP16, SAFE_F64, SAFE_FIRST_WITHOUT_FP32 } SafeType;

static const struct {
    const char *name;
    int bytes;
} safetensors_types[] = {
    {"F32", 4}, {"BF16", 2}, {"F16", 2}, {"F64", 8}, // SafeType counts these
    {"BOOL", 1}, {"U8", 1}, {"I8", 1}, {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1},
    {"I16", 2}, {"U16", 2}, {"I32", 4}, {"U32", 4}, {"C64", 8}, {"I64", 8}, {"U64", 8},
};
enum { SAFETENSORS_TYPES = sizeof safetensors_types / sizeof *safetensors_types };

typedef struct {
    const char *name;                    // unescaped, in SafeTensors.pool
    int type;                            // index into safetensors_types
    int ndim;                            // 0 to SAFETENSORS_RANK_MAX
    int64_t shape[SAFETENSORS_RANK_MAX];
    int64_t begin, end;                  // bytes from the start of the file
} SafeTensor;

typedef struct {
    const char *key, *value;             // unescaped, in the pool
} SafeMetadata;

typedef struct {
    int fd;                              // -1 = none
    int64_t file_bytes, data_begin;
    char *pool;                          // the texts of the header
    int n_tensors, n_metadata;
    SafeTensor *tensor;                  // n_tensors, sorted by begin
    SafeTensor **by_name;                // n_tensors, sorted by name
    SafeMetadata *metadata;              // n_metadata, sorted by key
} SafeTensors;

PRINTF_LIKE(3, 4) static inline bool safetensors_fail(char *why, size_t room, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(why, room, format, args);
    va_end(args);
    return false;
}

// Opens a regular file `name` below the folder of descriptor `folder` (or AT_FDCWD) for reading and stores its size. The
// last component may be a link only if follow_link says so: the user named it himself. Returns -1 with a reason otherwise.
static inline int file_open_at(int folder, const char *name, bool follow_link, int64_t *size_bytes, char *why, size_t room) {
    struct stat st;
    int fd = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (follow_link ? 0 : O_NOFOLLOW));
    if (fd < 0)
        safetensors_fail(why, room, "%s", errno == ELOOP ? "is a symbolic link, which is not followed here; put the file itself there "
                                                           "(cp -L copies what links point to)" : strerror(errno));
    else if (fstat(fd, &st) != 0) safetensors_fail(why, room, "%s", strerror(errno));
    else if (!S_ISREG(st.st_mode)) safetensors_fail(why, room, "is not a regular file");
    else {
        *size_bytes = st.st_size;
        return fd;
    }
    if (fd >= 0) close(fd);
    return -1;
}

static inline int64_t safetensors_numel(const SafeTensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

#define SAFETENSORS_READABLE "weights are read from F32, BF16, F16 and F64"

// A name, a key or a type for a message.
static inline const char *safetensors_shown(char room[80], const char *text) { return text_escape(room, 80, text, strlen(text)); }

// Prints a shape as [2, 3].
static inline const char *safetensors_shape_text(char *dst, size_t room, int ndim, const int64_t *shape) {
    size_t o = (size_t)snprintf(dst, room, "[");
    for (int i = 0; i < ndim && o < room; i++) o += (size_t)snprintf(dst + o, room - o, "%s%" PRId64, i ? ", " : "", shape[i]);
    if (o < room) snprintf(dst + o, room - o, "]");
    return dst;
}

// ---------------------------------------------------------------------------------------------------------------
// Reading the header

static inline bool safetensors_expected(JsonParser *p, const char *what) {
    char here[32];
    return json_fail(p, "expected %s, found %s", what, json_here(p, here));
}

// Skips blanks, then takes c if it is next.
static inline bool safetensors_take(JsonParser *p, char c) {
    json_skip_blanks(p); // in strict mode there are no comments that could be left open
    if (p->at == p->end || *p->at != c) return false;
    p->at++;
    return true;
}

// Reads a text into the pool, where *text points at it.
static inline bool safetensors_text(JsonParser *p, const char **text) {
    int32_t at = 0, length = 0;
    *text = "";
    json_skip_blanks(p);
    if (p->at == p->end || *p->at != '"') return safetensors_expected(p, "'\"'");
    if (!json_quoted(p, &at, &length)) return false;
    *text = p->j->pool + at;
    return strlen(*text) == (size_t)length || json_fail(p, "the text before this holds a zero byte");
}

// Reads a count: digits without sign, leading zero, fraction or exponent, below 2^63.
static inline bool safetensors_count(JsonParser *p, int64_t *value) {
    json_skip_blanks(p);
    const char *s = p->at;
    *value = 0;
    for (; p->at < p->end && json_is_digit(*p->at); p->at++)
        if (__builtin_mul_overflow(*value, (int64_t)10, value) || __builtin_add_overflow(*value, (int64_t)(*p->at - '0'), value))
            return json_fail(p, "a number of 2^63 or more");
    if (p->at == s || !json_ends_word(p, p->at)) return safetensors_expected(p, "a whole number of at least 0");
    return p->at - s == 1 || *s != '0' || json_fail(p, "a number with a leading zero");
}

// Reads [a, b, ...]: at most `most` counts.
static inline bool safetensors_counts(JsonParser *p, int64_t *value, int most, int *n) {
    *n = 0;
    if (!safetensors_take(p, '[')) return safetensors_expected(p, "'['");
    if (safetensors_take(p, ']')) return true;
    do {
        if (*n == most) return json_fail(p, "a list of more than %d numbers", most);
        if (!safetensors_count(p, &value[(*n)++])) return false;
    } while (safetensors_take(p, ','));
    return safetensors_take(p, ']') || safetensors_expected(p, "',' or ']'");
}

// Reads {"key": "value", ...} of __metadata__.
static inline bool safetensors_parse_metadata(JsonParser *p, SafeTensors *st) {
    if (!safetensors_take(p, '{')) return safetensors_expected(p, "'{' after \"__metadata__\"");
    if (safetensors_take(p, '}')) return true;
    int64_t most = min_i64(SAFETENSORS_METADATA_MAX, (p->end - p->at) / 6 + 1); // "":"", has six bytes
    st->metadata = (SafeMetadata *)host_alloc((size_t)most * sizeof(SafeMetadata));
    do {
        const char *key, *value;
        if (st->n_metadata == most) return json_fail(p, "more than %d entries in __metadata__", SAFETENSORS_METADATA_MAX);
        if (!safetensors_text(p, &key)) return false;
        if (!safetensors_take(p, ':')) return safetensors_expected(p, "':'");
        if (!safetensors_text(p, &value)) return false;
        st->metadata[st->n_metadata++] = (SafeMetadata){key, value};
    } while (safetensors_take(p, ','));
    return safetensors_take(p, '}') || safetensors_expected(p, "',' or '}'");
}

// Rule 3 for one tensor; offsets are relative to the data here.
static inline bool safetensors_check_extent(JsonParser *p, const SafeTensor *t) {
    int64_t bytes = safetensors_types[t->type].bytes;
    char shown[80], shape[200];
    for (int i = 0; i < t->ndim; i++)
        if (__builtin_mul_overflow(bytes, t->shape[i], &bytes))
            return json_fail(p, "tensor \"%s\": a shape of 2^63 bytes or more", safetensors_shown(shown, t->name));
    if (t->end < t->begin)
        return json_fail(p, "tensor \"%s\" ends at byte %" PRId64 " of the data, before it begins at %" PRId64, safetensors_shown(shown,
            t->name), t->end, t->begin);
    return t->end - t->begin == bytes ||
           json_fail(p, "tensor \"%s\", type %s, shape %s, needs %" PRId64 " bytes, but its data_offsets span %" PRId64,
               safetensors_shown(shown, t->name),
                     safetensors_types[t->type].name, safetensors_shape_text(shape, sizeof shape, t->ndim, t->shape), bytes,
                         t->end - t->begin);
}

// Reads {"dtype": ..., "shape": ..., "data_offsets": ...} in any order.
static inline bool safetensors_parse_tensor(JsonParser *p, SafeTensor *t) {
    static const char *const fields[] = {"dtype", "shape", "data_offsets"};
    char shown[80], other[80];
    bool have[3] = {false, false, false};
    if (!safetensors_take(p, '{')) return safetensors_expected(p, "'{' after the name of a tensor");
    do {
        const char *key, *type;
        int64_t offset[2];
        int field = 0, n;
        if (!safetensors_text(p, &key)) return false;
        while (field < 3 && strcmp(key, fields[field]) != 0) field++;
        if (field == 3)
            return json_fail(p, "tensor \"%s\" has the unknown key \"%s\"; known are dtype, shape and data_offsets",
                safetensors_shown(shown, t->name), safetensors_shown(other, key));
        if (have[field]) return json_fail(p, "tensor \"%s\" has the key \"%s\" twice", safetensors_shown(shown, t->name), key);
        have[field] = true;
        if (!safetensors_take(p, ':')) return safetensors_expected(p, "':'");
        if (field == 0) {
            if (!safetensors_text(p, &type)) return false;
            while (t->type < SAFETENSORS_TYPES && strcmp(type, safetensors_types[t->type].name) != 0) t->type++;
            if (t->type == SAFETENSORS_TYPES)
                return json_fail(p, "tensor \"%s\" has the type \"%s\", which is unknown here or not made of whole bytes",
                    safetensors_shown(shown, t->name), safetensors_shown(other, type));
        } else if (field == 1) {
            if (!safetensors_counts(p, t->shape, SAFETENSORS_RANK_MAX, &t->ndim)) return false;
        } else {
            if (!safetensors_counts(p, offset, 2, &n)) return false;
            if (n != 2) return json_fail(p, "tensor \"%s\": data_offsets must be two numbers", safetensors_shown(shown, t->name));
            t->begin = offset[0];
            t->end = offset[1];
        }
    } while (safetensors_take(p, ','));
    if (!safetensors_take(p, '}')) return safetensors_expected(p, "',' or '}'");
    for (int i = 0; i < 3; i++) if (!have[i]) return json_fail(p, "tensor \"%s\" has no %s", safetensors_shown(shown, t->name), fields[i]);
    return safetensors_check_extent(p, t);
}

static inline bool safetensors_parse_entries(JsonParser *p, SafeTensors *st) {
    bool metadata_seen = false;
    // The shortest entry is "a":{"dtype":"U8","shape":[],"data_offsets":[0,0]} and has 50 bytes. Pages of this allocation
    // that no tensor reaches are never touched.
    int64_t most = min_i64(SAFETENSORS_TENSORS_MAX, (p->end - p->at) / 50 + 1);
    st->tensor = (SafeTensor *)host_alloc((size_t)most * sizeof(SafeTensor));
    safetensors_take(p, '{');
    bool empty = safetensors_take(p, '}');
    if (!empty) {
        do {
            const char *name;
            if (!safetensors_text(p, &name)) return false;
            if (!safetensors_take(p, ':')) return safetensors_expected(p, "':'");
            if (strcmp(name, "__metadata__") == 0) {
                if (metadata_seen) return json_fail(p, "\"__metadata__\" occurs twice");
                metadata_seen = true;
                if (!safetensors_parse_metadata(p, st)) return false;
                continue;
            }
            if (*name == 0) return json_fail(p, "a tensor with an empty name");
            if (st->n_tensors == most) return json_fail(p, "more than %d tensors", SAFETENSORS_TENSORS_MAX);
            st->tensor[st->n_tensors].name = name;
            if (!safetensors_parse_tensor(p, &st->tensor[st->n_tensors++])) return false;
        } while (safetensors_take(p, ','));
        if (!safetensors_take(p, '}')) return safetensors_expected(p, "',' or '}'");
    }
    json_skip_blanks(p);
    return p->at == p->end || safetensors_expected(p, "nothing but blanks after the last '}'");
}

static inline int safetensors_by_place(const void *a, const void *b) {
    const SafeTensor *x = (const SafeTensor *)a, *y = (const SafeTensor *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1; // empty ones first
    return strcmp(x->name, y->name);
}
static inline int safetensors_by_name(const void *a, const void *b) {
    return strcmp((*(SafeTensor *const *)a)->name, (*(SafeTensor *const *)b)->name);
}
static inline int safetensors_by_key(const void *a, const void *b) {
    return strcmp(((const SafeMetadata *)a)->key, ((const SafeMetadata *)b)->key);
}

// Rules 2 and 4, once all entries are read: sorts, and compares neighbours.
static inline bool safetensors_check(SafeTensors *st, char *why, size_t room) {
    char shown[80];
    int64_t at = 0, data_bytes = st->file_bytes - st->data_begin;
    bool sorted = true;
    for (int i = 1; i < st->n_tensors; i++) sorted &= safetensors_by_place(&st->tensor[i - 1], &st->tensor[i]) < 0;
    if (!sorted) qsort(st->tensor, (size_t)st->n_tensors, sizeof(SafeTensor), safetensors_by_place);
    for (int i = 0; i < st->n_tensors; i++) {
        SafeTensor *t = &st->tensor[i];
        st->by_name[i] = t;
        if (t->end > data_bytes)
            return safetensors_fail(why, room, "tensor \"%s\" ends at byte %" PRId64 " of the data, but the file holds only %" PRId64
                                    "; the file is cut or damaged", safetensors_shown(shown, t->name), t->end, data_bytes);
        if (t->begin != at)
            return safetensors_fail(why, room, "tensor \"%s\" begins at byte %" PRId64 " of the data, %s byte %" PRId64 ", where the one before ends",
                                    safetensors_shown(shown, t->name), t->begin, t->begin < at ? "overlapping the tensor up to"
                                        : "leaving a hole after", at);
        at = t->end;
        t->begin += st->data_begin; // cannot overflow: end <= data_bytes = file_bytes - data_begin
        t->end += st->data_begin;
    }
    if (at != data_bytes)
        return safetensors_fail(why, room, "the tensors end at byte %" PRId64 " of the data, but the file holds %" PRId64, at, data_bytes);
    qsort(st->by_name, (size_t)st->n_tensors, sizeof *st->by_name, safetensors_by_name);
    for (int i = 1; i < st->n_tensors; i++)
        if (strcmp(st->by_name[i - 1]->name, st->by_name[i]->name) == 0)
            return safetensors_fail(why, room, "tensor \"%s\" occurs twice", safetensors_shown(shown, st->by_name[i]->name));
    if (st->n_metadata) qsort(st->metadata, (size_t)st->n_metadata, sizeof *st->metadata, safetensors_by_key);
    for (int i = 1; i < st->n_metadata; i++)
        if (strcmp(st->metadata[i - 1].key, st->metadata[i].key) == 0)
            return safetensors_fail(why, room, "__metadata__ has the key \"%s\" twice", safetensors_shown(shown, st->metadata[i].key));
    return true;
}

// Reads header[0..bytes), when st->file_bytes and st->data_begin are known. What was filled on failure is freed by
// safetensors_close.
static inline bool safetensors_parse(SafeTensors *st, const char *header, int64_t bytes, char *why, size_t room) {
    Json json;
    memset(&json, 0, sizeof json);
    json.pool = st->pool = (char *)host_alloc((size_t)bytes + 2);
    JsonParser p = {&json, header, header, header + bytes, header, 1, 0, 0, JSON_STRICT};
    int64_t bad = json_utf8_fault(header, bytes);
    bool good;
    if (bad >= 0) {
        p.at += bad;
        good = json_fail(&p, "byte \\x%02x is not valid UTF-8", (unsigned)(unsigned char)header[bad]);
    } else if (bytes == 0 || *header != '{') good = safetensors_expected(&p, "'{'"); // blanks may follow, not precede
    else good = safetensors_parse_entries(&p, st);
    if (!good) return safetensors_fail(why, room, "header, byte %" PRId64 ": %s", json.offset, json.error);
    st->by_name = (SafeTensor **)host_alloc((size_t)st->n_tensors * sizeof *st->by_name);
    return safetensors_check(st, why, room);
}

// Safe to call on a zeroed struct whose fd is -1, and after a failed open.
static inline void safetensors_close(SafeTensors *st) {
    if (st->fd >= 0) close(st->fd);
    free(st->pool);
    free(st->tensor);
    free(st->by_name);
    free(st->metadata);
    memset(st, 0, sizeof *st);
    st->fd = -1;
}

// Opens a file as file_open_at does and reads its header. On failure nothing is left open, and *st is closed.
static inline bool safetensors_open_at(SafeTensors *st, int folder, const char *name, bool follow_link, char *why, size_t room) {
    memset(st, 0, sizeof *st);
    st->fd = file_open_at(folder, name, follow_link, &st->file_bytes, why, room);
    if (st->fd < 0) return false;
    uint64_t n = 0;
    bool good = false;
    if (st->file_bytes < 8) safetensors_fail(why, room, "has %" PRId64 " bytes; a safetensors file has at least 10", st->file_bytes);
    else if (!file_read_at(st->fd, &n, 8, 0))
        safetensors_fail(why, room, "%s", errno ? strerror(errno) : "became shorter while it was read");
    else if (n > (uint64_t)st->file_bytes - 8)
        safetensors_fail(why, room, "says that its header has %" PRIu64 " bytes, but only %" PRId64 " follow; the file is cut, or no safetensors file",
                         n, st->file_bytes - 8);
    else if (n > SAFETENSORS_HEADER_MAX)
        safetensors_fail(why, room, "has a header of %" PRIu64 " bytes, more than %d", n, SAFETENSORS_HEADER_MAX);
    else {
        st->data_begin = 8 + (int64_t)n;
        char *header = (char *)host_alloc((size_t)n);
        if (!file_read_at(st->fd, header, (int64_t)n, 8))
            safetensors_fail(why, room, "%s", errno ? strerror(errno) : "became shorter while it was read");
        else good = safetensors_parse(st, header, (int64_t)n, why, room);
        free(header);
    }
    if (!good) safetensors_close(st);
    return good;
}

static inline bool safetensors_open(SafeTensors *st, const char *path, char *why, size_t room) {
    return safetensors_open_at(st, AT_FDCWD, path, true, why, room);
}

// The tensor of that name, or null.
static inline SafeTensor *safetensors_find(const SafeTensors *st, const char *name) {
    int64_t low = 0, high = st->n_tensors;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int order = strcmp(st->by_name[middle]->name, name);
        if (order == 0) return st->by_name[middle];
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

// Reads elements [first, first + count) of t as fp32. Types: F32, BF16, F16 exactly, F64 rounded. False with a reason when
// the type is another one or the file does not give the bytes.
static inline bool safetensors_read(const SafeTensors *st, const SafeTensor *t, int64_t first, int64_t count, float *dst,
                                    char *why, size_t room) {
    char shown[80];
    safetensors_shown(shown, t->name);
    if (t->type >= SAFE_FIRST_WITHOUT_FP32)
        return safetensors_fail(why, room, "tensor \"%s\" has type %s; " SAFETENSORS_READABLE, shown, safetensors_types[t->type].name);
    const int64_t width = safetensors_types[t->type].bytes, numel = (t->end - t->begin) / width;
    CHECK(first >= 0 && count >= 0 && count <= numel - first, "elements %" PRId64 " + %" PRId64 " of \"%s\"", first, count, shown);
    bool ok = true;
    errno = 0;
    if (t->type == SAFE_F64) {
        double piece[1024];
        for (int64_t done = 0; ok && done < count; done += 1024) {
            int64_t n = min_i64(1024, count - done);
            ok = file_read_at(st->fd, piece, n * 8, t->begin + (first + done) * 8);
            for (int64_t i = 0; ok && i < n; i++) dst[done + i] = (float)piece[i];
        }
    } else {
        // 16-bit elements are read into the upper half of dst and widened upwards: element i is read before it is
        // overwritten, because i-th results end at byte 4i + 4 and its source begins at 2 * count + 2i.
        char *raw = (char *)dst + (4 - width) * count;
        ok = file_read_at(st->fd, raw, count * width, t->begin + first * width);
        if (ok && width == 2) {
            for (int64_t i = 0; i < count; i++) {
                uint16_t half;
                memcpy(&half, raw + 2 * i, 2);
                float x = t->type == SAFE_BF16 ? bf16_to_float(half) : fp16_to_float(half);
                memcpy(&dst[i], &x, 4);
            }
        }
    }
    const char *reason = errno ? strerror(errno) : "the file became shorter while it was read";
    return ok || safetensors_fail(why, room, "tensor \"%s\": %s", shown, reason);
}

// ---------------------------------------------------------------------------------------------------------------
// Writing: declare all tensors, then append their data in the same order, piece by piece. The file gets its name at once:
// whoever must never see half a file writes into a folder that is not yet public, as checkpoints and exports do.

typedef struct {
    Io *io;                // reasons of failures are in io->why
    const IoHandle *folder;
    IoHandle file;         // fd -1 = not open
    int64_t header_bytes, data_bytes; // the declared tensors hold data_bytes
    int64_t written;       // of data_bytes, so far
} SafeWriter;

// A text that grows in a buffer whose room was computed beforehand.
typedef struct {
    char *at, *end;
} SafeText;

PRINTF_LIKE(2, 3) static inline void safetensors_put(SafeText *o, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(o->at, (size_t)(o->end - o->at), format, args);
    va_end(args);
    CHECK(n >= 0 && n < o->end - o->at, "no room for %d bytes of a header", n);
    o->at += n;
}

// A JSON text with its quotes: at most 6 bytes a byte, and 2.
static inline void safetensors_put_text(SafeText *o, const char *text) {
    safetensors_put(o, "\"");
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c < 0x20) safetensors_put(o, "\\u%04x", c);
        else safetensors_put(o, c == '"' || c == '\\' ? "\\%c" : "%c", c);
    }
    safetensors_put(o, "\"");
}

// Builds the first bytes of a file: length, JSON and padding. Fills begin and end of the tensors (bytes from the start of
// the file). The caller frees the result, whose length is *bytes.
static inline char *safetensors_header(SafeTensor *tensor, int n, const SafeMetadata *metadata, int n_metadata, int64_t *bytes) {
    size_t room = SAFETENSORS_DATA_ALIGNMENT + 64;
    for (int i = 0; i < n; i++) room += 6 * strlen(tensor[i].name) + 21 * (SAFETENSORS_RANK_MAX + 2) + 80;
    for (int i = 0; i < n_metadata; i++) room += 6 * (strlen(metadata[i].key) + strlen(metadata[i].value)) + 8;
    char *header = (char *)host_alloc(room);
    SafeText o = {header + 8, header + room};
    safetensors_put(&o, "{");
    for (int i = 0; i < n_metadata; i++) {
        safetensors_put(&o, i ? "," : "\"__metadata__\":{");
        safetensors_put_text(&o, metadata[i].key);
        safetensors_put(&o, ":");
        safetensors_put_text(&o, metadata[i].value);
    }
    if (n_metadata) safetensors_put(&o, n ? "}," : "}");
    int64_t at = 0;
    for (int i = 0; i < n; i++) {
        SafeTensor *t = &tensor[i];
        t->begin = at;
        t->end = at += safetensors_numel(t) * safetensors_types[t->type].bytes;
        if (i) safetensors_put(&o, ",");
        safetensors_put_text(&o, t->name);
        safetensors_put(&o, ":{\"dtype\":\"%s\",\"shape\":[", safetensors_types[t->type].name);
        for (int d = 0; d < t->ndim; d++) safetensors_put(&o, "%s%" PRId64, d ? "," : "", t->shape[d]);
        safetensors_put(&o, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", t->begin, t->end);
    }
    safetensors_put(&o, "}");
    int64_t used = o.at - header;
    *bytes = round_up(used, SAFETENSORS_DATA_ALIGNMENT);
    memset(o.at, ' ', (size_t)(*bytes - used));
    uint64_t length = (uint64_t)*bytes - 8;
    memcpy(header, &length, 8);
    for (int i = 0; i < n; i++) { tensor[i].begin += *bytes; tensor[i].end += *bytes; }
    return header;
}

// Removes a file that is not finished. The reason of the failure that led here stays in io->why.
static inline bool safetensors_abandon(SafeWriter *w) {
    char name[IO_NAME_MAX];
    snprintf(name, sizeof name, "%s", w->file.name + (w->folder->name[0] ? strlen(w->folder->name) + 1 : 0));
    if (w->file.fd >= 0) close(w->file.fd);
    w->file.fd = -1;
    unlinkat(w->folder->fd, name, 0);
    return false;
}

// Starts a new file `name` (a plain name) in the folder. The names of tensors must differ from each other; name, type, ndim
// and shape are given, begin and end are filled. Finds a full disk before the first byte of data.
static inline bool safetensors_create(SafeWriter *w, Io *io, const IoHandle *folder, const char *name, SafeTensor *tensor, int n,
                                      const SafeMetadata *metadata, int n_metadata) {
    w->io = io;
    w->folder = folder;
    w->written = 0;
    if (!io_create(io, folder, name, &w->file)) return false;
    char *header = safetensors_header(tensor, n, metadata, n_metadata, &w->header_bytes);
    w->data_bytes = n ? tensor[n - 1].end - w->header_bytes : 0;
    bool good = io_allocate(io, &w->file, w->header_bytes + w->data_bytes) && io_write(io, &w->file, header, w->header_bytes, 0);
    free(header);
    return good || safetensors_abandon(w);
}

// Appends data of the declared tensors. On failure the file is gone.
static inline bool safetensors_append(SafeWriter *w, const void *src, int64_t bytes) {
    CHECK(bytes >= 0 && bytes <= w->data_bytes - w->written, "%" PRId64 " bytes more than %s declares", bytes, w->file.name);
    int64_t at = w->header_bytes + w->written;
    w->written += bytes;
    return io_write(w->io, &w->file, src, bytes, at) || safetensors_abandon(w);
}

// Makes the file durable (its name is the folder's data: io_sync that). On failure the file is gone.
static inline bool safetensors_finish(SafeWriter *w) {
    CHECK(w->written == w->data_bytes, "%s has %" PRId64 " of %" PRId64 " bytes", w->file.name, w->written, w->data_bytes);
    return (io_sync(w->io, &w->file) && io_close(w->io, &w->file)) || safetensors_abandon(w);
}
