// safetensors.h - the file format of model weights: reading files of strangers, writing files that everybody can read.
//
// A file is a u64 N, N bytes of JSON, then the data of all tensors; everything is little-endian. The JSON maps a name to
//     {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}      offsets from the start of the data
// and "__metadata__" to a flat map of texts. The rules are those of the reference parser (huggingface/safetensors,
// tensor.rs); whatever breaks one is refused:
//   1. N is at most 100,000,000 and at most what the file holds; nothing is allocated before that is known.
//   2. The JSON is strict, valid UTF-8, begins with '{' and may be followed by blanks only. No key occurs twice, compared
//      after unescaping; no name is empty or holds a zero byte.
//   3. end - begin is the product of the shape times the width of the type. Empty and 0-dimensional tensors are legal.
//   4. Sorted by begin, the tensors follow each other without hole or overlap and end with the file. The order of the
//      names in the JSON means nothing.
// Beyond the reference, every count is bounded (SAFETENSORS_*_MAX), and types whose elements are not whole bytes are
// refused because rule 3 could not be checked.
//
// The grammar is so small a part of JSON (two levels, known keys, no numbers but counts) that it is read here in one pass,
// in place and without recursion: a header of 100 MB costs its own size and 112 bytes a tensor, where a tree of JSON values
// would cost a gigabyte. No sum or product is formed before it is known to fit.
//
// Messages in `why` say what is wrong, without the path of the file, and are safe to print.
#pragma once
#include "tensor.h"
#include <sys/random.h>

enum {
    SAFETENSORS_HEADER_MAX = 100000000, // bytes of JSON
    SAFETENSORS_TENSORS_MAX = 1000000,
    SAFETENSORS_METADATA_MAX = 10000,   // entries
    SAFETENSORS_NAME_MAX = 65536,       // bytes of one name, unescaped
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
    const char *name;                    // unescaped, in SafeTensors.header
    int type;                            // index into safetensors_types
    int ndim;                            // 0 to SAFETENSORS_RANK_MAX
    int64_t shape[SAFETENSORS_RANK_MAX];
    int64_t begin, end;                  // bytes from the start of the file
} SafeTensor;

typedef struct {
    const char *key, *value;             // unescaped; value may hold anything that a text may
} SafeMetadata;

typedef struct {
    int fd;                              // -1 = none
    int64_t file_bytes, data_begin;
    char *header;                        // the JSON, taken apart in place; names point into it
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

static inline int64_t safetensors_numel(const SafeTensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

// Prints a shape as [2, 3].
static inline const char *safetensors_shape_text(char *dst, size_t room, int ndim, const int64_t *shape) {
    size_t o = (size_t)snprintf(dst, room, "[");
    for (int i = 0; i < ndim && o < room; i++) o += (size_t)snprintf(dst + o, room - o, "%s%" PRId64, i ? ", " : "", shape[i]);
    if (o < room) snprintf(dst + o, room - o, "]");
    return dst;
}

// ---------------------------------------------------------------------------------------------------------------
// Reading the header

typedef struct {
    char *start, *at, *end; // the JSON; start[0] is its first byte
    char *why;
    size_t room;
} SafeScan;

static inline bool scan_fail(SafeScan *s, const char *expected) {
    char found[16] = "its end";
    if (s->at < s->end) text_escape(found, sizeof found, s->at, 1);
    return safetensors_fail(s->why, s->room, "header, byte %td: expected %s, found %s", s->at - s->start + 8, expected, found);
}

static inline void scan_blanks(SafeScan *s) {
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\t' || *s->at == '\n' || *s->at == '\r')) s->at++;
}

// Skips blanks, then takes c if it is next.
static inline bool scan_take(SafeScan *s, char c) {
    scan_blanks(s);
    if (s->at == s->end || *s->at != c) return false;
    s->at++;
    return true;
}

static inline int scan_hex4(const char *p, const char *end) { // -1 = not four hexadecimal digits
    int x = 0;
    if (end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) return -1;
        x = x * 16 + digit;
    }
    return x;
}

// Length of the UTF-8 character at p, 0 when it is none: too long a form, a surrogate or above U+10FFFF (RFC 3629).
static inline int utf8_length(const unsigned char *p, int64_t left) {
    if (p[0] < 0x80) return 1;
    int n = p[0] >= 0xc2 && p[0] <= 0xdf ? 2 : (p[0] & 0xf0) == 0xe0 ? 3 : p[0] >= 0xf0 && p[0] <= 0xf4 ? 4 : 0;
    if (n == 0 || n > left) return 0;
    for (int i = 1; i < n; i++) if ((p[i] & 0xc0) != 0x80) return 0;
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f)) return 0;
    if ((p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f)) return 0;
    return n;
}

// Reads the escape after a backslash at s->at - 1 and stores its character at *out. Never longer than its source.
static inline bool scan_escape(SafeScan *s, char **out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *found = s->at < s->end && *s->at ? strchr(from, *s->at) : NULL;
    if (found) { *(*out)++ = to[found - from]; s->at++; return true; }
    if (s->at == s->end || *s->at != 'u') return scan_fail(s, "a known escape");
    int c = scan_hex4(s->at + 1, s->end);
    if (c < 0) return scan_fail(s, "four hexadecimal digits after \\u");
    s->at += 5;
    if (c >= 0xd800 && c <= 0xdfff) { // UTF-16 pairs: a first half, then \u and a second one
        int low = c < 0xdc00 && s->end - s->at >= 6 && s->at[0] == '\\' && s->at[1] == 'u' ? scan_hex4(s->at + 2, s->end) : -1;
        if (low < 0xdc00 || low > 0xdfff) return scan_fail(s, "the other half of a \\u pair");
        s->at += 6;
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    }
    if (c == 0) return scan_fail(s, "a text without zero bytes");
    char *o = *out;
    if (c < 0x80) *o++ = (char)c;
    else {
        if (c < 0x800) *o++ = (char)(0xc0 | (c >> 6));
        else {
            if (c < 0x10000) *o++ = (char)(0xe0 | (c >> 12));
            else { *o++ = (char)(0xf0 | (c >> 18)); *o++ = (char)(0x80 | ((c >> 12) & 0x3f)); }
            *o++ = (char)(0x80 | ((c >> 6) & 0x3f));
        }
        *o++ = (char)(0x80 | (c & 0x3f));
    }
    *out = o;
    return true;
}

// Reads a text and unescapes it in place; *text points at it and it ends in a zero byte.
static inline bool scan_text(SafeScan *s, char **text, int64_t *length) {
    if (!scan_take(s, '"')) return scan_fail(s, "'\"'");
    char *out = *text = s->at;
    for (;;) {
        if (s->at == s->end) return scan_fail(s, "'\"' at the end of a text");
        unsigned char c = (unsigned char)*s->at;
        if (c == '"') break;
        if (c == '\\') {
            s->at++;
            if (!scan_escape(s, &out)) return false;
            continue;
        }
        if (c < 0x20) return scan_fail(s, "a text without bare control characters");
        int n = utf8_length((const unsigned char *)s->at, s->end - s->at);
        if (n == 0) return scan_fail(s, "valid UTF-8");
        for (int i = 0; i < n; i++) *out++ = *s->at++;
    }
    s->at++; // the closing quote, which may be the byte that becomes the zero
    *out = 0;
    *length = out - *text;
    return true;
}

// Reads a count: digits, no sign, no leading zero, no fraction, below 2^63.
static inline bool scan_count(SafeScan *s, int64_t *value) {
    scan_blanks(s);
    if (s->at == s->end || *s->at < '0' || *s->at > '9') return scan_fail(s, "a whole number of at least 0");
    if (*s->at == '0' && s->end - s->at > 1 && s->at[1] >= '0' && s->at[1] <= '9') return scan_fail(s, "a number without leading zeros");
    int64_t x = 0;
    for (; s->at < s->end && *s->at >= '0' && *s->at <= '9'; s->at++)
        if (__builtin_mul_overflow(x, (int64_t)10, &x) || __builtin_add_overflow(x, (int64_t)(*s->at - '0'), &x)) return scan_fail(s, "a number below 2^63");
    if (s->at < s->end && (*s->at == '.' || *s->at == 'e' || *s->at == 'E')) return scan_fail(s, "a number without fraction or exponent");
    *value = x;
    return true;
}

// Reads [a, b, ...]: at most `most` counts.
static inline bool scan_counts(SafeScan *s, int64_t *value, int most, int *n) {
    *n = 0;
    if (!scan_take(s, '[')) return scan_fail(s, "'['");
    if (scan_take(s, ']')) return true;
    do {
        if (*n == most) return scan_fail(s, most == 2 ? "']' after two offsets" : "']' after at most 8 dimensions");
        if (!scan_count(s, &value[(*n)++])) return false;
    } while (scan_take(s, ','));
    return scan_take(s, ']') || scan_fail(s, "',' or ']'");
}

// Reads {"key": "value", ...} of __metadata__.
static inline bool scan_metadata(SafeScan *s, SafeTensors *st) {
    if (!scan_take(s, '{')) return scan_fail(s, "'{' after \"__metadata__\"");
    if (scan_take(s, '}')) return true;
    int64_t most = min_i64(SAFETENSORS_METADATA_MAX, (s->end - s->at) / 6 + 1); // "":"", has six bytes
    st->metadata = (SafeMetadata *)host_alloc((size_t)most * sizeof(SafeMetadata));
    do {
        char *key, *value;
        int64_t length;
        if (st->n_metadata == most) return safetensors_fail(s->why, s->room, "header: more than %d entries in __metadata__", SAFETENSORS_METADATA_MAX);
        if (!scan_text(s, &key, &length)) return false;
        if (!scan_take(s, ':')) return scan_fail(s, "':'");
        if (!scan_text(s, &value, &length)) return false;
        st->metadata[st->n_metadata++] = (SafeMetadata){key, value};
    } while (scan_take(s, ','));
    return scan_take(s, '}') || scan_fail(s, "',' or '}'");
}

// Reads {"dtype": ..., "shape": ..., "data_offsets": ...} in any order, and checks rule 3. Offsets stay relative here.
static inline bool scan_tensor(SafeScan *s, SafeTensor *t) {
    char shown[128];
    text_escape(shown, sizeof shown, t->name, strlen(t->name));
    enum { HAS_DTYPE = 1, HAS_SHAPE = 2, HAS_OFFSETS = 4 };
    int have = 0, n;
    if (!scan_take(s, '{')) return scan_fail(s, "'{' after the name of a tensor");
    do {
        char *key, *type;
        int64_t length, offset[2];
        if (!scan_text(s, &key, &length)) return false;
        int field = strcmp(key, "dtype") == 0 ? HAS_DTYPE : strcmp(key, "shape") == 0 ? HAS_SHAPE : strcmp(key, "data_offsets") == 0 ? HAS_OFFSETS : 0;
        char key_shown[64];
        text_escape(key_shown, sizeof key_shown, key, strlen(key));
        if (field == 0) return safetensors_fail(s->why, s->room, "header: tensor \"%s\" has the unknown key \"%s\"; known are dtype, shape and data_offsets", shown, key_shown);
        if (have & field) return safetensors_fail(s->why, s->room, "header: tensor \"%s\" has the key \"%s\" twice", shown, key_shown);
        have |= field;
        if (!scan_take(s, ':')) return scan_fail(s, "':'");
        if (field == HAS_DTYPE) {
            if (!scan_text(s, &type, &length)) return false;
            for (t->type = 0; t->type < SAFETENSORS_TYPES && strcmp(type, safetensors_types[t->type].name) != 0;) t->type++;
            char type_shown[64];
            text_escape(type_shown, sizeof type_shown, type, strlen(type));
            if (t->type == SAFETENSORS_TYPES) return safetensors_fail(s->why, s->room, "header: tensor \"%s\" has the type \"%s\", which is unknown here or not made of whole bytes", shown, type_shown);
        } else if (field == HAS_SHAPE) {
            if (!scan_counts(s, t->shape, SAFETENSORS_RANK_MAX, &t->ndim)) return false;
        } else {
            if (!scan_counts(s, offset, 2, &n)) return false;
            if (n != 2) return safetensors_fail(s->why, s->room, "header: tensor \"%s\": data_offsets must have two numbers", shown);
            t->begin = offset[0];
            t->end = offset[1];
        }
    } while (scan_take(s, ','));
    if (!scan_take(s, '}')) return scan_fail(s, "',' or '}'");
    if (have != (HAS_DTYPE | HAS_SHAPE | HAS_OFFSETS))
        return safetensors_fail(s->why, s->room, "header: tensor \"%s\" lacks its %s", shown, !(have & HAS_DTYPE) ? "dtype" : !(have & HAS_SHAPE) ? "shape" : "data_offsets");
    int64_t bytes = safetensors_types[t->type].bytes;
    for (int i = 0; i < t->ndim; i++)
        if (__builtin_mul_overflow(bytes, t->shape[i], &bytes)) return safetensors_fail(s->why, s->room, "header: tensor \"%s\": its shape has more than 2^63 bytes", shown);
    if (t->end < t->begin) return safetensors_fail(s->why, s->room, "header: tensor \"%s\" ends at byte %" PRId64 " before it begins at %" PRId64, shown, t->end, t->begin);
    if (t->end - t->begin != bytes) {
        char shape[200];
        return safetensors_fail(s->why, s->room, "header: tensor \"%s\" of type %s and shape %s needs %" PRId64 " bytes, but its data_offsets hold %" PRId64, shown, safetensors_types[t->type].name, safetensors_shape_text(shape, sizeof shape, t->ndim, t->shape), bytes, t->end - t->begin);
    }
    return true;
}

static inline int safetensors_by_place(const void *a, const void *b) {
    const SafeTensor *x = (const SafeTensor *)a, *y = (const SafeTensor *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1; // empty ones first
    return strcmp(x->name, y->name);
}
static inline int safetensors_by_name(const void *a, const void *b) { return strcmp((*(SafeTensor *const *)a)->name, (*(SafeTensor *const *)b)->name); }
static inline int safetensors_by_key(const void *a, const void *b) { return strcmp(((const SafeMetadata *)a)->key, ((const SafeMetadata *)b)->key); }

// Rules 2 and 4, once all entries are read: sorts, and compares neighbours.
static inline bool safetensors_check(SafeTensors *st, char *why, size_t room) {
    char shown[128], other[128];
    int64_t at = 0, data_bytes = st->file_bytes - st->data_begin;
    bool sorted = true;
    for (int i = 1; i < st->n_tensors; i++) sorted &= safetensors_by_place(&st->tensor[i - 1], &st->tensor[i]) < 0;
    if (!sorted) qsort(st->tensor, (size_t)st->n_tensors, sizeof(SafeTensor), safetensors_by_place);
    for (int i = 0; i < st->n_tensors; i++) {
        SafeTensor *t = &st->tensor[i];
        st->by_name[i] = t;
        text_escape(shown, sizeof shown, t->name, strlen(t->name));
        if (t->end > data_bytes) return safetensors_fail(why, room, "tensor \"%s\" ends at byte %" PRId64 " of the data, but the file holds only %" PRId64 "; the file is cut or damaged", shown, t->end, data_bytes);
        if (t->begin != at) return safetensors_fail(why, room, "tensor \"%s\" begins at byte %" PRId64 " of the data, %s byte %" PRId64 ", where the one before ends", shown, t->begin, t->begin < at ? "overlapping the tensor up to" : "leaving a hole after", at);
        at = t->end;
        t->begin += st->data_begin; // cannot overflow: end <= data_bytes = file_bytes - data_begin
        t->end += st->data_begin;
    }
    if (at != data_bytes) return safetensors_fail(why, room, "the tensors end at byte %" PRId64 " of the data, but the file holds %" PRId64, at, data_bytes);
    qsort(st->by_name, (size_t)st->n_tensors, sizeof *st->by_name, safetensors_by_name);
    for (int i = 1; i < st->n_tensors; i++)
        if (strcmp(st->by_name[i - 1]->name, st->by_name[i]->name) == 0) return safetensors_fail(why, room, "tensor \"%s\" occurs twice", text_escape(shown, sizeof shown, st->by_name[i]->name, strlen(st->by_name[i]->name)));
    if (st->n_metadata) qsort(st->metadata, (size_t)st->n_metadata, sizeof *st->metadata, safetensors_by_key);
    for (int i = 1; i < st->n_metadata; i++)
        if (strcmp(st->metadata[i - 1].key, st->metadata[i].key) == 0) return safetensors_fail(why, room, "__metadata__ has the key \"%s\" twice", text_escape(other, sizeof other, st->metadata[i].key, strlen(st->metadata[i].key)));
    return true;
}

// Takes the JSON apart: st->header (header_bytes long) is changed in place, st->file_bytes and st->data_begin are known.
// Fills the rest of st; on failure what was filled is freed by safetensors_close.
static inline bool safetensors_parse(SafeTensors *st, int64_t header_bytes, char *why, size_t room) {
    SafeScan s = {st->header, st->header, st->header + header_bytes, why, room};
    bool metadata_seen = false;
    if (s.at == s.end || *s.at != '{') return scan_fail(&s, "'{' as the first byte");
    s.at++;
    // The shortest entry is "a":{"dtype":"U8","shape":[],"data_offsets":[0,0]} and has 50 bytes. The pages of this
    // allocation that no tensor reaches are never touched.
    int64_t most = min_i64(SAFETENSORS_TENSORS_MAX, header_bytes / 50 + 1);
    st->tensor = (SafeTensor *)host_alloc((size_t)most * sizeof(SafeTensor));
    if (!scan_take(&s, '}')) {
        do {
            char *name;
            int64_t length;
            if (!scan_text(&s, &name, &length)) return false;
            if (!scan_take(&s, ':')) return scan_fail(&s, "':'");
            if (strcmp(name, "__metadata__") == 0) {
                if (metadata_seen) return safetensors_fail(why, room, "header: \"__metadata__\" occurs twice");
                metadata_seen = true;
                if (!scan_metadata(&s, st)) return false;
                continue;
            }
            if (length == 0) return safetensors_fail(why, room, "header: a tensor has the empty name");
            if (length > SAFETENSORS_NAME_MAX) return safetensors_fail(why, room, "header: a tensor's name has %" PRId64 " bytes, more than %d", length, SAFETENSORS_NAME_MAX);
            if (st->n_tensors == most) return safetensors_fail(why, room, "header: more than %d tensors", SAFETENSORS_TENSORS_MAX);
            SafeTensor *t = &st->tensor[st->n_tensors];
            t->name = name;
            if (!scan_tensor(&s, t)) return false;
            st->n_tensors++;
        } while (scan_take(&s, ','));
        if (!scan_take(&s, '}')) return scan_fail(&s, "',' or '}'");
    }
    scan_blanks(&s);
    if (s.at != s.end) return scan_fail(&s, "nothing but blanks after the last '}'");
    st->by_name = (SafeTensor **)host_alloc((size_t)st->n_tensors * sizeof *st->by_name);
    return safetensors_check(st, why, room);
}

// Safe to call on a zeroed struct whose fd is -1, and after a failed open.
static inline void safetensors_close(SafeTensors *st) {
    if (st->fd >= 0) close(st->fd);
    free(st->header);
    free(st->tensor);
    free(st->by_name);
    free(st->metadata);
    memset(st, 0, sizeof *st);
    st->fd = -1;
}

// Opens `name` below the folder of descriptor `folder` (or AT_FDCWD). The last component may be a link only if
// follow_link says so: the user named it himself. Regular files only. On failure nothing is left open, and *st is closed.
static inline bool safetensors_open_at(SafeTensors *st, int folder, const char *name, bool follow_link, char *why, size_t room) {
    memset(st, 0, sizeof *st);
    st->fd = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (follow_link ? 0 : O_NOFOLLOW));
    struct stat info;
    uint64_t n = 0;
    bool ok = false;
    if (st->fd < 0) safetensors_fail(why, room, "%s", errno == ELOOP ? "is a symbolic link; put the file itself there (cp -L copies what a link points to)" : strerror(errno));
    else if (fstat(st->fd, &info) != 0) safetensors_fail(why, room, "%s", strerror(errno));
    else if (!S_ISREG(info.st_mode)) safetensors_fail(why, room, "is not a regular file");
    else if (info.st_size < 8) safetensors_fail(why, room, "has %lld bytes; a safetensors file has at least 10", (long long)info.st_size);
    else if (!file_read_at(st->fd, &n, 8, 0)) safetensors_fail(why, room, "%s", errno ? strerror(errno) : "became shorter while it was read");
    else if (n > (uint64_t)info.st_size - 8) safetensors_fail(why, room, "says that its header has %" PRIu64 " bytes, but only %lld follow; the file is cut, or no safetensors file", n, (long long)info.st_size - 8);
    else if (n > SAFETENSORS_HEADER_MAX) safetensors_fail(why, room, "has a header of %" PRIu64 " bytes, more than %d", n, SAFETENSORS_HEADER_MAX);
    else {
        st->file_bytes = info.st_size;
        st->data_begin = 8 + (int64_t)n;
        st->header = (char *)host_alloc((size_t)n + 1);
        if (!file_read_at(st->fd, st->header, (int64_t)n, 8)) safetensors_fail(why, room, "%s", errno ? strerror(errno) : "became shorter while it was read");
        else ok = safetensors_parse(st, (int64_t)n, why, room);
    }
    if (!ok) safetensors_close(st);
    return ok;
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
static inline bool safetensors_read(const SafeTensors *st, const SafeTensor *t, int64_t first, int64_t count, float *dst, char *why, size_t room) {
    char shown[128];
    text_escape(shown, sizeof shown, t->name, strlen(t->name));
    if (t->type >= SAFE_FIRST_WITHOUT_FP32) return safetensors_fail(why, room, "tensor \"%s\" has type %s; weights are read from F32, BF16, F16 and F64", shown, safetensors_types[t->type].name);
    int64_t width = safetensors_types[t->type].bytes;
    CHECK(first >= 0 && count >= 0 && count <= (t->end - t->begin) / width - first, "elements %" PRId64 " + %" PRId64 " of \"%s\"", first, count, shown);
    bool ok = true;
    errno = 0;
    if (t->type == SAFE_F64) {
        double piece[2048];
        for (int64_t done = 0; ok && done < count; done += 2048) {
            int64_t n = min_i64(2048, count - done);
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
    return ok || safetensors_fail(why, room, "tensor \"%s\": %s", shown, errno ? strerror(errno) : "the file became shorter while it was read");
}

// ---------------------------------------------------------------------------------------------------------------
// Writing: declare all tensors, then append their data in the same order, piece by piece. The file appears under its name
// only when it is complete and on disk.

typedef struct {
    int folder, fd;        // the folder is the caller's
    char name[256], temporary[280];
    int64_t data_bytes;    // that the declared tensors hold
    int64_t written;       // of them, so far
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

// Unpublishes: the temporary file goes, the name stays untouched.
static inline void safetensors_abandon(SafeWriter *w) {
    if (w->fd >= 0) {
        close(w->fd);
        unlinkat(w->folder, w->temporary, 0);
    }
    w->fd = -1;
}

// Starts a file `name` (a plain name) in the folder. Names must differ from each other; type, ndim and shape are given,
// begin and end are filled. Fails early when the disk has no room.
static inline bool safetensors_create(SafeWriter *w, int folder, const char *name, SafeTensor *tensor, int n, const SafeMetadata *metadata, int n_metadata, char *why, size_t room) {
    uint64_t nonce = 0;
    if (getrandom(&nonce, sizeof nonce, 0) != (ssize_t)sizeof nonce) nonce = (uint64_t)getpid(); // O_EXCL guards, not the nonce
    w->folder = folder;
    w->written = 0;
    snprintf(w->name, sizeof w->name, "%s", name);
    snprintf(w->temporary, sizeof w->temporary, ".tmp-%.200s-%016" PRIx64, name, nonce);
    w->fd = openat(folder, w->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (w->fd < 0) return safetensors_fail(why, room, "cannot be created: %s", strerror(errno));
    int64_t header_bytes;
    char *header = safetensors_header(tensor, n, metadata, n_metadata, &header_bytes);
    w->data_bytes = n ? tensor[n - 1].end - header_bytes : 0;
    // Reserves the blocks, so that a full disk is found now. File systems that cannot do it say EOPNOTSUPP.
    bool ok = fallocate(w->fd, 0, 0, header_bytes + w->data_bytes) == 0 || errno == EOPNOTSUPP || errno == EINTR;
    ok = ok && file_write_all(w->fd, header, header_bytes);
    if (!ok) safetensors_fail(why, room, "cannot be written, %" PRId64 " bytes: %s", header_bytes + w->data_bytes, strerror(errno));
    free(header);
    if (!ok) safetensors_abandon(w);
    return ok;
}

// Appends data of the declared tensors. On failure the file is abandoned.
static inline bool safetensors_append(SafeWriter *w, const void *src, int64_t bytes, char *why, size_t room) {
    CHECK(bytes >= 0 && bytes <= w->data_bytes - w->written, "%" PRId64 " bytes more than %s declares", bytes, w->name);
    if (!file_write_all(w->fd, src, bytes)) {
        safetensors_fail(why, room, "cannot be written beyond byte %" PRId64 " of the data: %s", w->written, strerror(errno));
        safetensors_abandon(w);
        return false;
    }
    w->written += bytes;
    return true;
}

// Makes the file durable and gives it its name. A file of that name is replaced. On failure the file is abandoned.
static inline bool safetensors_finish(SafeWriter *w, char *why, size_t room) {
    CHECK(w->written == w->data_bytes, "%s has %" PRId64 " of %" PRId64 " bytes", w->name, w->written, w->data_bytes);
    bool ok = fsync(w->fd) == 0; // once: after an error the pages may be marked clean, and a second call would lie
    int error = errno;
    ok = close(w->fd) == 0 && ok; // network file systems and quotas report here
    if (ok) {
        ok = renameat(w->folder, w->temporary, w->folder, w->name) == 0 && fsync(w->folder) == 0;
        error = errno;
    }
    w->fd = -1;
    if (!ok) {
        unlinkat(w->folder, w->temporary, 0);
        return safetensors_fail(why, room, "cannot be completed: %s", strerror(error));
    }
    return true;
}
