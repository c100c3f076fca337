// test_safetensors.h - safetensors files: headers that are legal and hostile, data, and the writer.
//
// Oracle: files that the tests write themselves, byte by byte. The rows are in test_formats.h.
#pragma once
#include "../huggingface.cu"
#include "dies.h"

// ---------------------------------------------------------------------------------------------------------------
// Folders and files

typedef struct {
    char path[256];
} FormatsFolder;

static FormatsFolder formats_folder(void) {
    FormatsFolder f;
    const char *base = getenv("TMPDIR");
    snprintf(f.path, sizeof f.path, "%s/test-formats-XXXXXX", base && strlen(base) < 200 ? base : "/tmp");
    CHECK(mkdtemp(f.path), "mkdtemp %s: %s", f.path, strerror(errno));
    return f;
}

static const char *formats_path(char room[600], const FormatsFolder *f, const char *name) {
    snprintf(room, 600, "%s/%s", f->path, name);
    return room;
}

static void formats_remove_below(int folder) { // closes the descriptor
    DIR *listing = fdopendir(folder);
    for (struct dirent *e; listing && (e = readdir(listing));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        int below = openat(folder, e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (below >= 0) formats_remove_below(below);
        unlinkat(folder, e->d_name, below >= 0 ? AT_REMOVEDIR : 0);
    }
    if (listing) closedir(listing);
}

static void formats_remove_path(const char *path) {
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder >= 0) formats_remove_below(folder);
    rmdir(path);
}
static void formats_remove(const FormatsFolder *f) { formats_remove_path(f->path); }

static int formats_entries(const char *path) { // names in a folder, -1 if there is none
    DIR *listing = opendir(path);
    int n = -2;
    if (!listing) return -1;
    while (readdir(listing)) n++;
    closedir(listing);
    return n;
}

static void formats_write(const char *path, const void *bytes, int64_t n) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    CHECK(fd >= 0 && file_write_all(fd, bytes, n), "%s: %s", path, strerror(errno));
    close(fd);
}

static void formats_write_text(const FormatsFolder *f, const char *name, const char *text) {
    char path[600];
    formats_write(formats_path(path, f, name), text, (int64_t)strlen(text));
}

static char *formats_read(const char *path, int64_t *bytes) {
    char why[256];
    char *text = file_read_all(path, true, 1 << 30, bytes, why, sizeof why);
    CHECK(text, "%s: %s", path, why);
    return text;
}

// A safetensors file: header length n, the JSON, and data_bytes of data counting 0, 1, 2, ...
static void formats_write_raw(const char *path, uint64_t n, const char *json, int64_t json_bytes, int64_t data_bytes) {
    char *all = (char *)host_alloc((size_t)(8 + json_bytes + data_bytes));
    memcpy(all, &n, 8);
    memcpy(all + 8, json, (size_t)json_bytes);
    for (int64_t i = 0; i < data_bytes; i++) all[8 + json_bytes + i] = (char)i;
    formats_write(path, all, 8 + json_bytes + data_bytes);
    free(all);
}

static void formats_write_json(const char *path, const char *json, int64_t data_bytes) {
    formats_write_raw(path, strlen(json), json, (int64_t)strlen(json), data_bytes);
}

static int formats_descriptors(void) { return formats_entries("/proc/self/fd"); }

// ---------------------------------------------------------------------------------------------------------------
// safetensors: headers

static void expect_refused(Test *t, const char *path, const char *what, const char *part) {
    SafeTensors st;
    char why[512] = "";
    bool opened = safetensors_open(&st, path, why, sizeof why);
    t->compared += 2;
    if (opened) test_fail(t, "%s was accepted; expected \"%s\"", what, part);
    else if (!strstr(why, part)) test_fail(t, "%s: \"%.300s\" does not contain \"%s\"", what, why, part);
    for (const char *c = why; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) { test_fail(t, "%s: the message holds the control byte %d", what, *c); break; }
    if (opened) safetensors_close(&st);
}

static void test_header_lengths(Test *t) {
    FormatsFolder f = formats_folder();
    char path[600];
    const char *json = "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    uint64_t json_bytes = strlen(json), size = 8 + json_bytes + 4;
    const struct { uint64_t n; const char *part; } rows[] = {
        {0, "found the end"}, {1, "found the end"}, {json_bytes - 1, "found the end"}, {json_bytes + 1, "nothing but blanks"},
        {size - 8, "nothing but blanks"}, {size - 7, "only 57 follow"},
        {100000001, "only 57 follow"}, {1ull << 63, "only 57 follow"}, {~0ull, "only 57 follow"}, {~0ull - 7, "only 57 follow"},
    };
    formats_path(path, &f, "x");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char what[64];
        snprintf(what, sizeof what, "header length %" PRIu64, rows[i].n);
        formats_write_raw(path, rows[i].n, json, (int64_t)json_bytes, 4);
        expect_refused(t, path, what, rows[i].part);
    }
    for (int bytes = 0; bytes < 8; bytes++) { // cut inside the length
        formats_write(path, "\2\0\0\0\0\0\0", bytes);
        expect_refused(t, path, "a file shorter than its length field", "at least 10");
    }
    // a file that does hold 100,000,001 bytes of header: the limit, and no allocation before it (sparse, so cheap here)
    formats_write_raw(path, 100000001, json, (int64_t)json_bytes, 0);
    CHECK(truncate(path, 8 + 100000001) == 0, "%s", strerror(errno));
    expect_refused(t, path, "a header of 100,000,001 bytes", "more than 100000000");
    for (int64_t cut = 8; cut < (int64_t)size; cut++) { // every cut of a good file
        formats_write_raw(path, json_bytes, json, (int64_t)json_bytes, 4);
        CHECK(truncate(path, cut) == 0, "%s", strerror(errno));
        expect_refused(t, path, "a cut file", cut < (int64_t)size - 4 ? "follow" : "holds only");
    }
    formats_write_raw(path, json_bytes, json, (int64_t)json_bytes, 5);
    expect_refused(t, path, "one byte appended", "end at byte 4 of the data, but the file holds 5");
    formats_remove(&f);
}

#define U8_4 "{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}"
#define ONE(type, shape, offsets) "{\"a\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static void test_header_faults(Test *t) {
    static const struct { const char *json; int64_t data_bytes; const char *part; } rows[] = {
        // ranges
        {"{\"a\":" U8_4 ",\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}", 6,
            "\"b\" begins at byte 2 of the data, overlapping the tensor up to byte 4"},
        {"{\"a\":" U8_4 ",\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[5,9]}}", 9,
            "\"b\" begins at byte 5 of the data, leaving a hole after byte 4"},
        {"{\"a\":" U8_4 ",\"b\":" U8_4 "}", 4, "\"b\" begins at byte 0 of the data, overlapping"},
        {"{\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[1,5]}}", 5,
            "\"b\" begins at byte 1 of the data, leaving a hole after byte 0"},
        {ONE("U8", "[4]", "[4,0]"), 4, "\"a\" ends at byte 0 of the data, before it begins at 4"},
        {ONE("U8", "[4]", "[0,4]"), 3, "\"a\" ends at byte 4 of the data, but the file holds only 3"},
        {ONE("U8", "[4]", "[0,4]"), 5, "the tensors end at byte 4 of the data, but the file holds 5"},
        {"{}", 1, "the tensors end at byte 0 of the data, but the file holds 1"},
        {ONE("U8", "[4]", "[9223372036854775803,9223372036854775807]"), 4, "ends at byte 9223372036854775807"},
        {ONE("U8", "[4]", "[9223372036854775804,9223372036854775808]"), 4, "2^63 or more"},
        {ONE("U8", "[4]", "[0]"), 4, "must be two numbers"}, {ONE("U8", "[4]", "[0,2,4]"), 4, "more than 2 numbers"},
        {ONE("U8", "[4]", "[]"), 4, "must be two numbers"},
        {ONE("U8", "[4]", "[-0,4]"), 4, "whole number"}, {ONE("U8", "[4]", "[0.0,4]"), 4, "whole number"},
        {ONE("U8", "[4]", "[0,4e0]"), 4, "whole number"},
        {ONE("U8", "[4]", "[00,4]"), 4, "leading zero"}, {ONE("U8", "[4]", "[0,\"4\"]"), 4, "whole number"},
        {ONE("U8", "[4]", "[0,4,]"), 4, "more than 2 numbers"},
        {ONE("U8", "[4]", "{}"), 4, "expected '['"}, {ONE("U8", "[4]", "null"), 4, "expected '['"},
        // shapes and types
        {ONE("F32", "[4]", "[0,4]"), 4, "\"a\", type F32, shape [4], needs 16 bytes, but its data_offsets span 4"},
        {ONE("U8", "[2,3]", "[0,4]"), 4, "shape [2, 3], needs 6 bytes"}, {ONE("U8", "[]", "[0,4]"), 4, "shape [], needs 1 bytes"},
        {ONE("U8", "[0]", "[0,4]"), 4, "shape [0], needs 0 bytes"},
        {ONE("U8", "[1,1,1,1,1,1,1,1,4]", "[0,4]"), 4, "more than 8 numbers"}, {ONE("U8", "[-4]", "[0,4]"), 4, "whole number"},
        {ONE("U8", "[4.0]", "[0,4]"), 4, "whole number"},
        {ONE("U8", "4", "[0,4]"), 4, "expected '['"}, {ONE("U8", "[[4]]", "[0,4]"), 4, "whole number"},
        {ONE("U8", "[4,]", "[0,4]"), 4, "whole number"},
        {ONE("U8", "[4294967296,4294967296,4294967297]", "[0,4]"), 4, "2^63 bytes or more"},
        {ONE("F64", "[2305843009213693952]", "[0,4]"), 4, "2^63 bytes or more"},
        {ONE("U8", "[9223372036854775807,2,0]", "[0,0]"), 0, "2^63 bytes or more"}, // as the reference: overflow counts before the zero
        {ONE("F4", "[8]", "[0,4]"), 4, "type \"F4\", which is unknown here or not made of whole bytes"},
        {ONE("F6_E2M3", "[4]", "[0,3]"), 3, "F6_E2M3"},
        {ONE("f32", "[1]", "[0,4]"), 4, "type \"f32\""}, {ONE("", "[1]", "[0,4]"), 4, "type \"\""},
        {ONE("F32\\u0000", "[1]", "[0,4]"), 4, "zero byte"}, {ONE("\\u001b[2J", "[1]", "[0,4]"), 4, "\\x1b[2J"},
        {"{\"a\":{\"dtype\":3,\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "expected '\"'"},
        // keys
        {"{\"a\":{\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "\"a\" has no dtype"},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", 4, "\"a\" has no shape"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, "\"a\" has no data_offsets"}, {"{\"a\":{}}", 0, "expected '\"'"},
        {"{\"a\":null}", 0, "expected '{'"}, {"{\"a\":[]}", 0, "expected '{'"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"dtype\":\"U8\"}}", 4, "\"a\" has the key \"dtype\" twice"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"x\":1}}", 4, "unknown key \"x\""},
        {"{\"a\":" U8_4 ",\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[4,5]}}", 5, "\"a\" occurs twice"},
        {"{\"a\":" U8_4 ",\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[4,5]}}", 5, "\"a\" occurs twice"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "\"__metadata__\" occurs twice"},
        {"{\"__metadata__\":{},\"\\u005f_metadata__\":{}}", 0, "\"__metadata__\" occurs twice"},
        {"{\"__metadata__\":{\"k\":\"1\",\"\\u006b\":\"2\"}}", 0, "key \"k\" twice"}, {"{\"__metadata__\":{\"k\":1}}", 0, "expected '\"'"},
        {"{\"__metadata__\":{\"k\":{}}}", 0, "expected '\"'"},
        {"{\"__metadata__\":{\"k\":[[[[[[[[[[]]]]]]]]]]}}", 0, "expected '\"'"}, {"{\"__metadata__\":[]}", 0, "expected '{'"},
        {"{\"__metadata__\":null}", 0, "expected '{'"},
        // names
        {"{\"\":" U8_4 "}", 4, "empty name"}, {"{\"a\\u0000b\":" U8_4 "}", 4, "zero byte"}, {"{\"a\nb\":" U8_4 "}", 4, "not closed"},
        {"{\"a\x01\":" U8_4 "}", 4, "control character"},
        {"{\"\\u001b[31mred\":{\"dtype\":\"U9\",\"shape\":[],\"data_offsets\":[0,0]}}", 4, "\\x1b[31mred"},
        {"{\"\\ud800\":" U8_4 "}", 4, "surrogate"}, {"{\"\\udc00\":" U8_4 "}", 4, "surrogate"},
        {"{\"\xff\":" U8_4 "}", 4, "not valid UTF-8"}, {"{\"\xc0\x80\":" U8_4 "}", 4, "not valid UTF-8"},
        {"{\"\xed\xa0\x80\":" U8_4 "}", 4, "not valid UTF-8"}, {"{\"\xf4\x90\x80\x80\":" U8_4 "}", 4, "not valid UTF-8"},
        {"{\"\\x41\":" U8_4 "}", 4, "backslash"}, {"{\"\\u12\":" U8_4 "}", 4, "four hexadecimal digits"},
        {"{'a':" U8_4 "}", 4, "expected '\"'"}, {"{a:" U8_4 "}", 4, "expected '\"'"},
        // structure
        {"", 0, "expected '{'"}, {"[]", 0, "expected '{'"}, {" {}", 0, "expected '{'"}, {"\xef\xbb\xbf{}", 0, "expected '{'"},
        {"{", 0, "found the end"}, {"{\"a\"", 0, "expected ':'"}, {"{\"a", 0, "not closed"},
        {"{\"a\":" U8_4 ",}", 4, "expected '\"'"}, {"{\"a\":" U8_4 "}x", 4, "nothing but blanks"},
        {"{\"a\":" U8_4 "}{}", 4, "nothing but blanks"}, {"{\"a\":" U8_4 " /**/}", 4, "expected ',' or '}'"},
        {"{\"a\" " U8_4 "}", 4, "expected ':'"}, {"{\"a\":{\"dtype\" \"U8\"}}", 4, "expected ':'"}, {"{,}", 0, "expected '\"'"},
    };
    FormatsFolder f = formats_folder();
    char path[600];
    formats_path(path, &f, "x");
    int before = formats_descriptors();
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        formats_write_json(path, rows[i].json, rows[i].data_bytes);
        expect_refused(t, path, rows[i].json, rows[i].part);
    }
    // a name of 1 MiB
    size_t n = 1 << 20;
    char *json = (char *)host_alloc(n + 200);
    json[0] = '{';
    json[1] = '"';
    memset(json + 2, 'n', n);
    snprintf(json + 2 + n, 198, "\":" U8_4 "}");
    formats_write_json(path, json, 4);
    expect_refused(t, path, "a name of 1 MiB", "longer than the limit");
    free(json);
    expect_equal_i64(t, "open descriptors after refusals", formats_descriptors(), before);
    // things that are no regular file
    char link[600];
    CHECK(mkfifo(formats_path(link, &f, "fifo"), 0600) == 0, "%s", strerror(errno));
    expect_refused(t, link, "a FIFO", "not a regular file");
    expect_refused(t, f.path, "a folder", "not a regular file");
    expect_refused(t, formats_path(link, &f, "missing"), "a missing file", "No such file");
    formats_write_json(path, ONE("U8", "[4]", "[0,4]"), 4);
    CHECK(symlink(path, formats_path(link, &f, "link")) == 0, "%s", strerror(errno));
    SafeTensors st;
    char why[256];
    expect_true(t, safetensors_open(&st, link, why, sizeof why), "a link that the user names is followed: %s", why);
    safetensors_close(&st);
    expect_true(t, !safetensors_open_at(&st, AT_FDCWD, link, false, why, sizeof why), "a link inside a folder was followed");
    expect_contains(t, "reason", why, "symbolic link");
    formats_remove(&f);
}

// Forms that are legal though unusual.
static void test_header_legal(Test *t) {
    static const struct { const char *json; int64_t data_bytes; int n; const char *name; int type; int ndim; int64_t begin; } rows[] = {
        {"{}", 0, 0, NULL, 0, 0, 0}, {"{ }  \n\t\r ", 0, 0, NULL, 0, 0, 0}, {"{\"__metadata__\":{}}", 0, 0, NULL, 0, 0, 0},
        {"{\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, 1, "s", SAFE_F32, 0, 0},
        {"{\"e\":{\"dtype\":\"BF16\",\"shape\":[3,0],\"data_offsets\":[0,0]}}", 0, 1, "e", SAFE_BF16, 2, 0},
        {"{\"z\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[4,6]},\"a\":" U8_4 "}", 6, 2, "z", 5, 1, 4},
        // order of names means nothing
        {"{\"a\":" U8_4 ",\"e2\":{\"dtype\":\"I64\",\"shape\":[0],\"data_offsets\":[4,4]},\"e1\":{\"dtype\":\"I64\",\"shape\":[0],\"data_offsets\":[0,0]}}", 4, 3, "e1", 17, 1, 0},
        {"{\"\\u00e9\\ud83d\\ude00\\\"\\\\\\/\\b\\f\\n\\r\\t\":" U8_4 "}", 4, 1, "\xc3\xa9\xf0\x9f\x98\x80\"\\/\b\f\n\r\t", 5, 1, 0},
        {"{\"../x/\xc3\xa9\":{\"data_offsets\":[0,4],\"shape\":[1,1,1,1,1,1,1,4],\"dtype\":\"U8\"}}", 4, 1, "../x/\xc3\xa9", 5, 8, 0},
        {"{ \"a\" : { \"dtype\" : \"U8\" , \"shape\" : [ 4 ] , \"data_offsets\" : [ 0 , 4 ] } }", 4, 1, "a", 5, 1, 0},
    };
    FormatsFolder f = formats_folder();
    char path[600], why[512] = "";
    formats_path(path, &f, "x");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        SafeTensors st;
        formats_write_json(path, rows[i].json, rows[i].data_bytes);
        bool ok = safetensors_open(&st, path, why, sizeof why);
        expect_true(t, ok, "%s was refused: %s", rows[i].json, why);
        if (!ok) continue;
        expect_equal_i64(t, "tensors", st.n_tensors, rows[i].n);
        for (int k = 1; k < st.n_tensors; k++)
            expect_true(t, st.tensor[k - 1].end == st.tensor[k].begin, "tensors are not sorted by place");
        const SafeTensor *found = rows[i].name ? safetensors_find(&st, rows[i].name) : NULL;
        if (rows[i].name) {
            expect_true(t, found, "%s: no tensor \"%s\"", rows[i].json, rows[i].name);
            if (found) {
                expect_equal_i64(t, "type", found->type, rows[i].type);
                expect_equal_i64(t, "ndim", found->ndim, rows[i].ndim);
                expect_equal_i64(t, "begin", found->begin, st.data_begin + rows[i].begin);
            }
        }
        expect_true(t, !safetensors_find(&st, "nobody"), "found a tensor that is not there");
        safetensors_close(&st);
    }
    // all types, and metadata
    char json[4096], text[64];
    int o = snprintf(json, sizeof json, "{\"__metadata__\":{\"z\":\"\",\"format\":\"pt\"}");
    int64_t at = 0;
    for (int i = 0; i < SAFETENSORS_TYPES; i++, at += 3 * safetensors_types[i - 1].bytes)
        o += snprintf(json + o, sizeof json - (size_t)o,
            ",\"%s\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", safetensors_types[i].name,
            safetensors_types[i].name, at, at + 3 * safetensors_types[i].bytes);
    snprintf(json + o, sizeof json - (size_t)o, "}");
    formats_write_json(path, json, at);
    SafeTensors st;
    bool ok = safetensors_open(&st, path, why, sizeof why);
    expect_true(t, ok, "all types: %s", why);
    if (ok) {
        expect_equal_i64(t, "types", st.n_tensors, SAFETENSORS_TYPES);
        expect_equal_i64(t, "metadata", st.n_metadata, 2);
        expect_equal_text(t, "first key", st.metadata[0].key, "format");
        expect_equal_text(t, "its value", st.metadata[0].value, "pt");
        float values[3];
        for (int i = 0; i < st.n_tensors; i++) {
            bool read = safetensors_read(&st, &st.tensor[i], 0, 3, values, why, sizeof why);
            snprintf(text, sizeof text, "type %s as fp32: %d", st.tensor[i].name, read);
            expect_true(t, read == (st.tensor[i].type < SAFE_FIRST_WITHOUT_FP32), "%s", text);
        }
        safetensors_close(&st);
    }
    formats_remove(&f);
}

// A header of the largest size with a million tensors: bounded CPU time and memory. One tensor more: refused.
static void open_large_header(void *path) {
    struct rusage before, after;
    SafeTensors st;
    char why[512] = "";
    int64_t header_kb = 0;
    struct stat info;
    getrusage(RUSAGE_SELF, &before);
    bool ok = safetensors_open(&st, (const char *)path, why, sizeof why);
    getrusage(RUSAGE_SELF, &after);
    double seconds = (double)(after.ru_utime.tv_sec - before.ru_utime.tv_sec) + 1e-6 * (double)(after.ru_utime.tv_usec - before.ru_utime.tv_usec);
    if (stat((const char *)path, &info) == 0) header_kb = info.st_size / 1024;
    fprintf(stderr, "%d tensors, %.2f s, %.2f times the header%s\n", ok ? st.n_tensors : -1, seconds,
        (double)(after.ru_maxrss - before.ru_maxrss) / (double)header_kb, why);
}

static void test_large_header(Test *t) {
    FormatsFolder f = formats_folder();
    char path[600], text[DIES_TEXT_BYTES];
    formats_path(path, &f, "x");
    enum { ENTRY = 96 };
    for (int extra = 0; extra < 2; extra++) {
        int n = SAFETENSORS_TENSORS_MAX + extra;
        size_t room = (size_t)n * ENTRY + 16, o = 0;
        char *json = (char *)host_alloc(room);
        json[o++] = '{';
        for (int i = 0; i < n; i++) { // shuffled numbers: neither names nor places are sorted
            int64_t k = (int64_t)i * 7919 % n;
            o += (size_t)snprintf(json + o, room - o,
                "%s\"model.layers.%07d.self_attn.weight\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}", i ? "," : "", (int)k);
        }
        json[o++] = '}';
        if (!extra) while (o < SAFETENSORS_HEADER_MAX && o < room) json[o++] = ' ';
        formats_write_raw(path, o, json, (int64_t)o, 0);
        free(json);
        int code = run_in_child(open_large_header, path, text);
        int tensors = 0;
        double seconds = 1e9, times = 1e9;
        expect_equal_i64(t, "end of the child", code, -1);
        bool parsed = sscanf(text, "%d tensors, %lf s, %lf times", &tensors, &seconds, &times) == 3;
        expect_true(t, parsed, "child said \"%.200s\"", text);
        expect_equal_i64(t, "tensors", tensors, extra ? -1 : SAFETENSORS_TENSORS_MAX);
        if (extra) expect_contains(t, "reason", text, "more than 1000000 tensors");
#if !defined(__SANITIZE_ADDRESS__) && !defined(DEBUG)
        expect_near(t, "seconds of CPU time", seconds, 0, 4.0); // 1 s on an idle machine
        expect_near(t, "memory over header", times, 0, 4.0);
#endif
    }
    formats_remove(&f);
}

// ---------------------------------------------------------------------------------------------------------------
// safetensors: data, and writing

// x rounded to a format with `bits` of significand and the given smallest normal exponent: nearest, ties to even, by rint.
static double round_to(double x, int bits, int min_exponent) {
    int exponent;
    frexp(x, &exponent);
    double unit = ldexp(1.0, (exponent - 1 > min_exponent ? exponent - 1 : min_exponent) - bits + 1);
    return rint(x / unit) * unit;
}

// x as an export in that type has it: in bf16 as in training, where ties of masters go away from zero.
static float round_as_exported(double x, DType type) {
    if (type == DTYPE_FP32) return (float)x;
    if (type == DTYPE_FP16) return (float)round_to(x, 11, -14);
    int exponent;
    frexp(x, &exponent);
    double unit = ldexp(1.0, (exponent - 1 > -126 ? exponent - 1 : -126) - 7);
    return (float)(round(x / unit) * unit);
}

// Values that meet every case of rounding: both signs, ties, subnormals, near the largest.
static float awkward_value(int64_t i) {
    static const float special[] = {0.0f, -0.0f, 1.0f, -1.5f, 1.00390625f, 1.01171875f, -1.00390625f, 1.00048828125f, 1.00146484375f,
        65504.0f, 65519.0f, -65519.9f, 5.9604645e-8f, 2.9802322e-8f, 8.9406967e-8f, 6.097555e-5f, -6.1035156e-5f, 1e-9f};
    if (i < (int64_t)(sizeof special / sizeof *special)) return special[i];
    return (float)(rng_normal(11, 5, (uint64_t)i) * ldexp(1.0, (int)(rng_bits(11, 6, (uint64_t)i) % 26) - 20));
}

static void test_data_types(Test *t) {
    enum { N = 5000 };
    FormatsFolder f = formats_folder();
    char path[600], why[512] = "", json[600];
    formats_path(path, &f, "x");
    snprintf(json, sizeof json, "{\"f64\":{\"dtype\":\"F64\",\"shape\":[%d],\"data_offsets\":[0,%d]},\"f32\":{\"dtype\":\"F32\",\"shape\":[%d],\"data_offsets\":[%d,%d]},"
             "\"bf16\":{\"dtype\":\"BF16\",\"shape\":[%d],\"data_offsets\":[%d,%d]},\"f16\":{\"dtype\":\"F16\",\"shape\":[%d],\"data_offsets\":[%d,%d]}}", N, 8 * N, N, 8 * N, 12 * N, N, 12 * N, 14 * N, N, 14 * N, 16 * N);
    formats_write_json(path, json, 0);
    double *d = (double *)host_alloc(N * 8);
    float *x = (float *)host_alloc(N * 4), *got = (float *)host_alloc(N * 4);
    uint16_t *b = (uint16_t *)host_alloc(N * 2), *h = (uint16_t *)host_alloc(N * 2);
    for (int i = 0; i < N; i++) {
        x[i] = awkward_value(i);
        d[i] = (double)x[i] * 1.0000001;
        b[i] = float_to_bf16(x[i]);
        h[i] = float_to_fp16(x[i]);
    }
    int fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    bool written = fd >= 0 && file_write_all(fd, d, N * 8) && file_write_all(fd, x, N * 4) && file_write_all(fd, b, N * 2);
    CHECK(written && file_write_all(fd, h, N * 2), "%s", strerror(errno));
    close(fd);
    SafeTensors st;
    bool ok = safetensors_open(&st, path, why, sizeof why);
    expect_true(t, ok, "%s", why);
    static const char *const names[] = {"f64", "f32", "bf16", "f16"};
    for (int k = 0; ok && k < 4; k++) {
        const SafeTensor *s = safetensors_find(&st, names[k]);
        static const int64_t ranges[][2] = {{0, N}, {0, 0}, {N, 0}, {1, 1}, {7, 2049}, {N - 1, 1}, {0, 1}, {2047, 2}};
        for (size_t r = 0; s && r < sizeof ranges / sizeof *ranges; r++) {
            int64_t first = ranges[r][0], n = ranges[r][1];
            expect_true(t, safetensors_read(&st, s, first, n, got, why, sizeof why), "%s: %s", names[k], why);
            for (int64_t i = 0; i < n; i++) {
                double v = x[first + i];
                double exact = k == 0 ? d[first + i] : k == 1 ? v : k == 2 ? round_to(v, 8, -126) : round_to(v, 11, -14);
                float want = (float)exact;
                expect_true(t, got[i] == want && signbit(got[i]) == signbit(want), "%s[%" PRId64 "] is %g, expected %g", names[k],
                    first + i, (double)got[i], (double)want);
            }
        }
    }
    // the file becomes shorter after it was opened
    if (ok) {
        CHECK(truncate(path, st.file_bytes - 1) == 0, "%s", strerror(errno));
        expect_true(t, !safetensors_read(&st, safetensors_find(&st, "f16"), 0, N, got, why, sizeof why), "read beyond the end");
        expect_contains(t, "reason", why, "became shorter");
        safetensors_close(&st);
    }
    free(d); free(x); free(got); free(b); free(h);
    formats_remove(&f);
}

static void test_writer(Test *t) {
    FormatsFolder f = formats_folder();
    char path[600], why[512] = "";
    Io io;
    memset(&io, 0, sizeof io);
    IoHandle folder = {open(f.path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), ""};
    static const char *const names[] = {"plain", "quote\" back\\ tab\t esc\x1b", "\xc3\xa9/..", "empty", "scalar"};
    SafeTensor tensor[5];
    memset(tensor, 0, sizeof tensor);
    static const struct { int type, ndim; int64_t shape[3]; } form[] = {
        {SAFE_F32, 2, {3, 5, 0}}, {SAFE_BF16, 1, {7, 0, 0}}, {SAFETENSORS_TYPES - 1, 3, {2, 2, 2}}, {SAFE_F16, 2, {0, 9, 0}},
        {SAFE_F64, 0, {0, 0, 0}}};
    for (int i = 0; i < 5; i++) {
        tensor[i].name = names[i];
        tensor[i].type = form[i].type;
        tensor[i].ndim = form[i].ndim;
        memcpy(tensor[i].shape, form[i].shape, sizeof form[i].shape);
    }
    static const SafeMetadata metadata[] = {{"format", "pt"}, {"say \"hi\"\n", "\\ \x02"}};
    mode_t mask = umask(027);
    SafeWriter w;
    bool good = safetensors_create(&w, &io, &folder, "out.safetensors", tensor, 5, metadata, 2);
    umask(mask);
    expect_true(t, good, "%s", io.why);
    uint8_t data[256];
    for (int i = 0; i < 256; i++) data[i] = (uint8_t)(i * 7);
    for (int64_t at = 0; good && at < w.data_bytes; at += 11) good = safetensors_append(&w, data + at, min_i64(11, w.data_bytes - at));
    int64_t data_bytes = w.data_bytes;
    good = good && safetensors_finish(&w);
    expect_true(t, good, "%s", io.why);
    expect_equal_i64(t, "names in the folder", formats_entries(f.path), 1);
    SafeTensors st;
    good = good && safetensors_open(&st, formats_path(path, &f, "out.safetensors"), why, sizeof why);
    expect_true(t, good, "%s", why);
    if (good) {
        struct stat info;
        stat(path, &info);
        expect_equal_i64(t, "mode", info.st_mode & 0777, 0640);
        expect_equal_i64(t, "start of the data modulo 4096", st.data_begin % 4096, 0);
        expect_equal_i64(t, "bytes of data", st.file_bytes - st.data_begin, data_bytes);
        for (int i = 0; i < 5; i++) {
            const SafeTensor *s = safetensors_find(&st, names[i]);
            bool same = s && s->type == form[i].type && s->ndim == form[i].ndim && memcmp(s->shape, tensor[i].shape, sizeof s->shape) == 0;
            expect_true(t, same && s->begin == tensor[i].begin && s->end == tensor[i].end, "tensor %d differs", i);
        }
        int64_t bytes;
        char *all = formats_read(path, &bytes);
        expect_same_bytes(t, "data", all + st.data_begin, data, data_bytes);
        free(all);
        expect_equal_i64(t, "metadata", st.n_metadata, 2);
        expect_equal_text(t, "key", st.metadata[1].key, metadata[1].key);
        expect_equal_text(t, "value", st.metadata[1].value, metadata[1].value);
        safetensors_close(&st);
    }
    // a file or a link of that name is neither written nor followed; an abandoned file goes
    expect_true(t, !safetensors_create(&w, &io, &folder, "out.safetensors", tensor, 5, NULL, 0), "wrote over a file");
    expect_contains(t, "reason", io.why, "out.safetensors: create: File exists");
    CHECK(symlink("elsewhere", formats_path(path, &f, "link")) == 0, "%s", strerror(errno));
    expect_true(t, !safetensors_create(&w, &io, &folder, "link", tensor, 5, NULL, 0), "wrote through a link");
    expect_true(t, safetensors_create(&w, &io, &folder, "given up", tensor, 5, NULL, 0), "%s", io.why);
    safetensors_abandon(&w);
    expect_equal_i64(t, "names in the folder at the end", formats_entries(f.path), 2);
    close(folder.fd);
    formats_remove(&f);
}
