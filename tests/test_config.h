// test_config.h - tests of runtime/json.h and dsconfig.h: text forms, the table of keys, the rules, the command line.
//
// The files of tests/config say in their first lines what must come of them ("// world 4", "// runs", "// refused KEY ...",
// "// later KEY ..." for what is not built yet, "// notes KEY ..."), and a test compares the set of keys that the report
// names with the set in the file: a message too many fails like one too few. They are written to the effect of public
// DeepSpeed configurations (01 to 69) and of two published guides (t01 to t13), and are the seeds of tests/fuzz_config.cpp.
// Other oracles: worked examples of the batch triangle, the grammar of RFC 8259 case by case, the effective table read back,
// and properties that must hold for thousands of random configurations.
#pragma once
#include "../dsconfig.h"
#include "dies.h"
#include <dirent.h>

// ---------------------------------------------------------------------------------------------------------------
// Frame: a configuration in memory and what was said about it

typedef struct {
    Config *c;
    ConfigReport report;
} Parsed;

// Overrides are separated by '|'.
static Parsed config_of(const char *text, const char *overrides, int64_t world) {
    Parsed p = {(Config *)host_alloc(sizeof(Config)), {}};
    char *copy = strdup(overrides), *save = NULL;
    const char *list[64];
    int n = 0;
    for (char *one = strtok_r(copy, "|", &save); one && n < 64; one = strtok_r(NULL, "|", &save)) list[n++] = one;
    config_parse(text, text ? (int64_t)strlen(text) : 0, "f.json", list, n, world, false, p.c, &p.report);
    free(copy);
    return p;
}

static void parsed_free(Parsed *p) {
    config_report_free(&p->report);
    free(p->c);
}

static int compare_texts(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

// The keys that messages of one kind name, each once, sorted, with blanks between them. "-" stands for a message without a key.
static const char *report_keys(const ConfigReport *report, ConfigMessageKind kind, char *dst, size_t room) {
    static char keys[256][300];
    const char *sorted[256];
    int n = 0;
    for (int i = 0; i < report->count && n < 256; i++) {
        if (report->message[i].kind != kind) continue;
        const char *at = strstr(report->message[i].text, ": ") + 2; // after the place
        size_t length = strcspn(at, " :");
        bool has_key = at[length] == ':' || strncmp(at + length, " = ", 3) == 0;
        snprintf(keys[n], sizeof keys[n], "%.*s", has_key ? (int)length : 1, has_key ? at : "-");
        sorted[n] = keys[n];
        n++;
    }
    qsort(sorted, (size_t)n, sizeof *sorted, compare_texts);
    size_t used = 0;
    dst[0] = 0;
    for (int i = 0; i < n; i++)
        if ((i == 0 || strcmp(sorted[i], sorted[i - 1]) != 0) && used < room) used += (size_t)snprintf(dst + used, room - used, "%s%s", used ? " " : "", sorted[i]);
    return dst;
}

static const char *sort_words(const char *words, char *dst, size_t room) { // sorted, each once
    char copy[4000];
    const char *sorted[256];
    char *save = NULL;
    int n = 0;
    snprintf(copy, sizeof copy, "%s", words);
    for (char *one = strtok_r(copy, " ", &save); one && n < 256; one = strtok_r(NULL, " ", &save)) sorted[n++] = one;
    qsort(sorted, (size_t)n, sizeof *sorted, compare_texts);
    size_t used = 0;
    dst[0] = 0;
    for (int i = 0; i < n; i++) if (i == 0 || strcmp(sorted[i], sorted[i - 1]) != 0) used += (size_t)snprintf(dst + used, room - used, "%s%s", used ? " " : "", sorted[i]);
    return dst;
}

static void expect_keys(Test *t, const char *what, const ConfigReport *report, ConfigMessageKind kind, const char *want) {
    char got[4000], sorted[4000], label[300];
    snprintf(label, sizeof label, "%s: keys %s", what, kind == CONFIG_PROBLEM ? "refused" : kind == CONFIG_UNBUILT ? "not built yet" : "noted");
    expect_equal_text(t, label, report_keys(report, kind, got, sizeof got), sort_words(want, sorted, sizeof sorted));
}

// The first message of this kind that contains `part`, or "".
static const char *report_find(const ConfigReport *report, ConfigMessageKind kind, const char *part) {
    for (int i = 0; i < report->count; i++) if (report->message[i].kind == kind && strstr(report->message[i].text, part)) return report->message[i].text;
    return "";
}

// All of what is said, for a failure's message.
static const char *report_text(const ConfigReport *report, char *dst, size_t room) {
    size_t used = 0;
    dst[0] = 0;
    for (int i = 0; i < report->count && used < room; i++) used += (size_t)snprintf(dst + used, room - used, "%s%s", i ? " | " : "", report->message[i].text);
    return dst;
}

static char *read_test_file(const char *path, int64_t *length) {
    char why[200];
    char *text = file_read_all(path, false, CONFIG_FILE_MAX, length, why, sizeof why);
    if (!text) die(EXIT_DATA, "%s: %s; tests run in the root of the repository", path, why);
    return text;
}

// ---------------------------------------------------------------------------------------------------------------
// JSON

// The grammar of RFC 8259: what a strict reader must accept...
static const char *const json_good[] = {
    "[]", "{}", " [ ] ", "[[]   ]", "[1]", "[-0]", "[0]", "[-1]", "[123]", "[1.5]", "[0e1]", "[0E+1]", "[1e-2]", "[123.456e78]", "[-0.0]", "[1E22]", "[1e+2]", "[20e1]", "[-123]", "[123e65]", "[0.000000000000000001]",
    "[true]", "[false]", "[null]", "true", "null", "42", "-0.1", "\"a\"", "\"\"", " \"x\" ", "[\"a\"]", "[1,null,\"x\",{}]", "[1\n]", " [1]", "[2] ", "\t[\r\n]\t", "[\"\\u0060\\u012a\\u12AB\"]", "[\"\\uD801\\udc37\"]",
    "[\"\\ud83d\\ude39\\ud83d\\udc8d\"]", "[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"]", "[\"\\\\u0000\"]", "[\"\\u0000\"]", "[\"\\\"\"]", "[\"a/*b*/c/*d//e\"]", "[\"\\\\a\"]", "[\"\\\\n\"]", "[\"\\u0012\"]", "[\"\\uFFFF\"]", "[ \"asd\"]", "[\"\\uDBFF\\uDFFF\"]",
    "[\"new\\u00A0line\"]", "[\"\xf4\x8f\xbf\xbf\"]", "[\"\xef\xbf\xbf\"]", "[\"\\u002c\"]", "[\"\xcf\x80\"]", "[\"\xf0\x9b\xbf\xbf\"]", "[\"asd \"]", "[\"\xe2\x80\xa8\"]", "[\"\xe2\x80\xa9\"]", "[\"\\u200B\"]", "[\"\\u2064\"]", "[\"\x7f\"]", "[\"a\x7f\x61\"]",
    "{\"a\":\"b\"}", "{\"a\":\"b\",\"a\":\"c\"}", "{\"\":0}", "{\"foo\\u0000bar\": 42}", "{\"min\": -1.0e+28, \"max\": 1.0e+28}", "{\"a\":[]}", "{\"title\":\"\\u041f\\u043e\"}", "{\n\"a\": \"b\"\n}", "{\"x\":[{\"id\": \"y\"}], \"z\":\"w\"}", "[[[[[[]]]]]]",
};
// ... and what it must refuse.
static const char *const json_bad[] = {
    "", " ", "[1 true]", "[\"\": 1]", "[\"\"],", "[,1]", "[1,,2]", "[\"x\",,]", "[\"x\"]]", "[\"\",]", "[\"x\"", "[x", "[3[4]]", "[1:2]", "[,]", "[-]", "[   , \"\"]", "[\"a\",\n4\n,1,", "[1,]", "[1,,]", "[\"\va\"\\f]", "[*]", "[\"\"", "[1,", "[1,\n1\n,1", "[{}",
    "[fals]", "[nul]", "[tru]", "[-01]", "[-1.0.]", "[-2.]", "[.-1]", "[.2e-3]", "[0.1.2]", "[0.3e+]", "[0.3e]", "[0.e1]", "[0E+]", "[0E]", "[0e+]", "[0e]", "[1 000.0]", "[1.0e+]", "[1.0e-]", "[1.0e]", "[1eE2]", "[2.e+3]", "[2.e-3]", "[2.e3]", "[9.e+]",
    "[Inf]", "[NaN]", "[-Infinity]", "[-NaN]", "[+1]", "[++1234]", "[+Inf]", "[-1x]", "[-foo]", "[- 1]", "[-012]", "[-.123]", "[-1e]", "[0x1]", "[0x42]", "[1+2]", "[1ea]", "[012]", "[1.8011670033376514H-308]", "[.123]", "[1.2a-3]", "[0e+-1]", "[\xef\xbc\x91]",
    "[\"x\", truth]", "{[: \"x\"}", "{\"x\", null}", "{\"x\"::\"b\"}", "{\"a\":\"a\" 123}", "{key: 'value'}", "{\"a\" b}", "{:\"b\"}", "{\"a\" \"b\"}", "{\"a\":", "{\"a\"", "{1:1}", "{9999E9999:1}", "{null:null,null:null}", "{\"id\":0,,,,,}", "{'a':0}", "{\"id\":0,}",
    "{\"a\":\"b\"}/**/", "{\"a\":\"b\"}/**//", "{\"a\":\"b\"}//", "{\"a\":\"b\"}/", "{\"a\":\"b\",,\"c\":\"d\"}", "{a: \"b\"}", "{\"a\":\"a", "{ \"foo\" : \"bar\", \"a\" }", "{\"a\":\"b\"}#", "{\"a\" = 1}",
    "[\"\\uD800\\\"]", "[\"\\uD800\\u\"]", "[\"\\uD800\\u1\"]", "[\"\\uD800\\u1x\"]", "[\\u00e9]", "[\"\\", "[\"\\x00\"]", "[\"\\\\\\\"]", "[\"\\\t\"]", "[\"\\\xf0\x9f\x8c\x80\"]", "[\"\\\"]", "[\"\\u00A\"]", "[\"\\uD834\\uDd\"]", "[\"\\uD800\\uD800\\x\"]", "[\"\\a\"]",
    "[\"\\uqqqq\"]", "[\"\\\xe5\"]", "['single quote']", "abc", "[\"a", "[\"new\nline\"]", "[\"\t\"]", "\"\\UA66D\"", "[\"asd]", "\"", "[\"a\xff\"]", "[\"\xe0\xff\"]", "[\"\xc0\xaf\"]", "[\"\xed\xa0\x80\"]", "[\"\x81\"]", "[\"\\uDADA\"]", "[\"\\uDd1e\\uD834\"]", "[\"\\uDFAA\"]", "[\"\xf8\x88\x80\x80\x80\"]",
    "<.>", "[<null>]", "[1]x", "[1]]", "[\"asd]", "a\xc3\xa5", "[True]", "1]", "{\"x\": true,", "[][]", "]", "\xef\xbb{}", "\xe5", "[", "2@", "{}}", "{\"\":", "{\"a\":/*comment*/\"b\"}", "{\"a\": true} \"x\"", "['", "[\"a\",", "[{", "{", "{[", "{,", "{'a'", "{\"a", "{\"a\": 'a'",
    "*", "{\"a\":\"b\"}#{}", "[\\u000A\"\"]", "[1", "[ false, nul", "[ true, fals", "[ false, tru", "{\"asd\":\"asd\"", "\xc2\xa0", "\xe2\x81\xa0", "\f[]", "[\f]", "\xff\xfe[\x00]\x00", "[1]\xe5",
};

static void test_json_grammar(Test *t) {
    Json j;
    for (size_t i = 0; i < sizeof json_good / sizeof *json_good; i++) {
        expect_true(t, json_parse(&j, json_good[i], (int64_t)strlen(json_good[i]), JSON_STRICT), "strict refuses \"%s\": %s", json_good[i], j.error);
        json_free(&j);
        expect_true(t, json_parse(&j, json_good[i], (int64_t)strlen(json_good[i]), JSON_TOLERANT), "tolerant refuses \"%s\": %s", json_good[i], j.error);
        json_free(&j);
    }
    for (size_t i = 0; i < sizeof json_bad / sizeof *json_bad; i++) {
        expect_true(t, !json_parse(&j, json_bad[i], (int64_t)strlen(json_bad[i]), JSON_STRICT) && j.error[0] && j.line > 0 && j.column > 0, "strict accepts \"%s\"", json_bad[i]);
        json_free(&j);
    }
    static const char zero[] = "[\"a\0b\"]"; // a zero byte inside the text
    expect_true(t, !json_parse(&j, zero, sizeof zero - 1, JSON_STRICT), "a zero byte in a string is accepted");
    expect_true(t, !json_parse(&j, "[1]\0", 4, JSON_TOLERANT), "a zero byte after the root is accepted");
    expect_true(t, json_parse(&j, "\xef\xbb\xbf{}", 5, JSON_STRICT), "a byte-order mark is refused: %s", j.error);
    json_free(&j);
}

// What the tolerant mode adds, and nothing else (the table at the head of json.h).
static void test_json_tolerance(Test *t) {
    static const struct { const char *text; int type, fault, remark; } row[] = { // of the value of the only member or element; -1: refused
        {"[1,]", JSON_NUMBER, 0, 0}, {"{\"a\":1,}", JSON_NUMBER, 0, 0}, {"[/*x*/1]", JSON_NUMBER, 0, 0}, {"[1 // x\n]", JSON_NUMBER, 0, 0}, {"# x\n[1]# y", JSON_NUMBER, 0, 0}, {"[1/**/]", JSON_NUMBER, 0, 0},
        {"['a\\'b']", JSON_STRING, 0, JSON_REMARK_QUOTES}, {"{'a':1}", JSON_NUMBER, 0, JSON_REMARK_QUOTES}, {"[True]", JSON_BOOL, 0, JSON_REMARK_PYTHON}, {"[False]", JSON_BOOL, 0, JSON_REMARK_PYTHON}, {"[None]", JSON_NULL, 0, JSON_REMARK_PYTHON},
        {"[auto]", JSON_BAD, JSON_FAULT_WORD, 0}, {"[TRUE]", JSON_BAD, JSON_FAULT_TEMPLATE, 0}, {"[yes]", JSON_BAD, JSON_FAULT_WORD, 0}, {"[/mnt/ssd]", JSON_BAD, JSON_FAULT_WORD, 0}, {"[a b c]", JSON_BAD, JSON_FAULT_WORD, 0},
        {"[CONFIG_MBSIZE]", JSON_BAD, JSON_FAULT_TEMPLATE, 0}, {"[${LR}]", JSON_BAD, JSON_FAULT_TEMPLATE, 0}, {"[${A,B}]", JSON_BAD, JSON_FAULT_TEMPLATE, 0}, {"[<lr>]", JSON_BAD, JSON_FAULT_TEMPLATE, 0}, {"[$LR]", JSON_BAD, JSON_FAULT_TEMPLATE, 0}, {"[@lr@]", JSON_BAD, JSON_FAULT_TEMPLATE, 0},
        {"[.5]", JSON_BAD, JSON_FAULT_NUMBER, 0}, {"[5.]", JSON_BAD, JSON_FAULT_NUMBER, 0}, {"[+1]", JSON_BAD, JSON_FAULT_NUMBER, 0}, {"[01]", JSON_BAD, JSON_FAULT_NUMBER, 0}, {"[0x10]", JSON_BAD, JSON_FAULT_NUMBER, 0}, {"[1_000]", JSON_BAD, JSON_FAULT_NUMBER, 0},
        {"[NaN]", JSON_BAD, JSON_FAULT_NOT_FINITE, 0}, {"[-Infinity]", JSON_BAD, JSON_FAULT_NOT_FINITE, 0}, {"[inf]", JSON_BAD, JSON_FAULT_NOT_FINITE, 0}, {"{\"a\"=1}", JSON_NUMBER, JSON_FAULT_EQUALS, 0}, {"{a:1}", JSON_NUMBER, JSON_FAULT_KEY, 0},
        {"[,]", -1, 0, 0}, {"[1,,2]", -1, 0, 0}, {"[1 /* x ]", -1, 0, 0}, {"{\"a\" 1}", -1, 0, 0}, {"{1: 1}", -1, 0, 0}, {"{{ lr }}", -1, 0, 0}, {"['a]", -1, 0, 0}, {"[1] 2", -1, 0, 0}, {"[\"a\nb\"]", -1, 0, 0}, {"[\"\\'\"]", -1, 0, 0}, {"[]]", -1, 0, 0}, {"[1}", -1, 0, 0},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        Json j;
        bool read = json_parse(&j, row[i].text, (int64_t)strlen(row[i].text), JSON_TOLERANT);
        t->compared++;
        if (row[i].type < 0) {
            if (read) test_fail(t, "\"%s\" is accepted", row[i].text);
        } else if (!read) test_fail(t, "\"%s\" is refused: %s", row[i].text, j.error);
        else if (j.count < 2 || j.node[1].type != row[i].type || j.node[1].fault != row[i].fault || j.node[1].remark != row[i].remark)
            test_fail(t, "\"%s\" gives type %d, fault %d, remark %d", row[i].text, j.node[1].type, j.node[1].fault, j.node[1].remark);
        json_free(&j);
    }
    static const struct { const char *text, *says; } correction[] = {
        {"[.5]", "write 0.5"}, {"[-.5]", "write -0.5"}, {"[5.]", "write 5"}, {"[+1]", "write 1"}, {"[01]", "write 1"}, {"[-007]", "write -7"}, {"[0x10]", "write 16"}, {"[1_000]", "write 1000"}, {"[1e]", "write digits"}, {"[auto]", "quote this value: \"auto\""}, {"[5.e3]", "write 5e3"},
    };
    for (size_t i = 0; i < sizeof correction / sizeof *correction; i++) {
        Json j;
        char text[256];
        if (!json_parse(&j, correction[i].text, (int64_t)strlen(correction[i].text), JSON_TOLERANT)) { test_fail(t, "\"%s\": %s", correction[i].text, j.error); continue; }
        expect_contains(t, correction[i].text, json_fault_text(&j, 1, text, sizeof text), correction[i].says);
        json_free(&j);
    }
}

static void test_json_nodes(Test *t) {
    const char *text = "{\n  \"a\": [1, {\"b\": \"x\\u0000\\u20ac\\ud834\\udd1e\"}],\n  // comment\n  \"c\":\n    true, \"a\": null\n}";
    Json j;
    if (!json_parse(&j, text, (int64_t)strlen(text), JSON_TOLERANT)) { test_fail(t, "%s", j.error); return; }
    int a = json_find(&j, 0, "a"), c = json_find(&j, 0, "c"), object = j.node[j.node[a].first].next, b = json_find(&j, object, "b");
    expect_equal_i64(t, "nodes", j.count, 7);
    expect_equal_i64(t, "members of the root", j.node[0].count, 3);
    expect_equal_i64(t, "line of a", j.node[a].line, 2);
    expect_equal_i64(t, "line of c", j.node[c].line, 4);
    expect_equal_i64(t, "line of the second a", j.node[j.count - 1].line, 5);
    expect_equal_i64(t, "its twin", j.node[j.count - 1].twin, a);
    expect_equal_i64(t, "twin of the first a", j.node[a].twin, -1);
    expect_equal_i64(t, "bytes of b", j.node[b].length, 1 + 1 + 3 + 4);
    expect_same_bytes(t, "b", json_text(&j, b), "x\0\xe2\x82\xac\xf0\x9d\x84\x9e", 10);
    expect_equal_i64(t, "absent key", json_find(&j, 0, "d"), -1);
    expect_equal_i64(t, "key of a list", json_find(&j, a, "a"), -1);
    json_free(&j);
    static const struct { const char *text; int line, column; int64_t offset; } place[] = {
        {"{\n \"a\": 1\n \"b\": 2}", 3, 2, 11}, {"[1, 2", 1, 6, 5}, {"\n\n  [\"abc]", 3, 9, 10}, {"[\"a\xff\"]", 1, 4, 3}, {"{\"a\": \"\\x\"}", 1, 9, 8}, {"", 1, 1, 0},
    };
    for (size_t i = 0; i < sizeof place / sizeof *place; i++) {
        expect_true(t, !json_parse(&j, place[i].text, (int64_t)strlen(place[i].text), JSON_TOLERANT), "\"%s\" is accepted", place[i].text);
        expect_equal_i64(t, "line", j.line, place[i].line);
        expect_equal_i64(t, "column", j.column, place[i].column);
        expect_equal_i64(t, "offset", j.offset, place[i].offset);
    }
}

static void test_json_limits(Test *t) {
    Json j;
    int64_t n = 200000;
    char *text = (char *)host_alloc((size_t)n * 10 + 64);
    memset(text, '[', (size_t)n);
    expect_true(t, !json_parse(&j, text, n, JSON_STRICT) && strstr(j.error, "64 nested"), "200,000 brackets: %s", j.error);
    for (int depth = 63; depth <= 65; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        expect_equal_i64(t, "nested brackets accepted", json_parse(&j, text, 2 * depth, JSON_STRICT), depth <= JSON_DEPTH);
        json_free(&j);
    }
    for (int extra = 0; extra <= 2; extra++) { // strings at the limit
        int64_t length = JSON_STRING_MAX + extra;
        memset(text, 'x', (size_t)length + 2);
        text[0] = text[length + 1] = '"';
        expect_equal_i64(t, "long string accepted", json_parse(&j, text, length + 2, JSON_STRICT), extra == 0);
        json_free(&j);
    }
    int64_t used = 1; // many members: the search for twins must not be quadratic
    text[0] = '{';
    for (int i = 0; i < 150000; i++) used += snprintf(text + used, 32, "\"%x\":1,", i);
    used += snprintf(text + used, 32, "\"0\":2}");
    double start = clock_seconds();
    expect_true(t, json_parse(&j, text, used, JSON_STRICT), "150,001 members: %s", j.error);
    double seconds = clock_seconds() - start;
    expect_true(t, seconds < 2, "reading 150,001 members took %.2f s", seconds);
    expect_equal_i64(t, "twin of the last member", j.node[j.count - 1].twin, 1);
    json_free(&j);
    free(text);
}

static void test_json_numbers(Test *t) {
    static const struct { const char *text; int kind; int64_t value; } whole[] = {
        {"0", JSON_WHOLE, 0}, {"-0", JSON_WHOLE, 0}, {"5e8", JSON_WHOLE, 500000000}, {"5E+8", JSON_WHOLE, 500000000}, {"1.0", JSON_WHOLE, 1}, {"1.5e1", JSON_WHOLE, 15}, {"1200e-2", JSON_WHOLE, 12}, {"-3.0e2", JSON_WHOLE, -300}, {"0.0", JSON_WHOLE, 0}, {"0e999999999999", JSON_WHOLE, 0},
        {"9223372036854775807", JSON_WHOLE, INT64_MAX}, {"-9223372036854775808", JSON_WHOLE, INT64_MIN}, {"9223372036854775808", JSON_TOO_LARGE, 0}, {"-9223372036854775809", JSON_TOO_LARGE, 0}, {"9.223372036854775807e18", JSON_WHOLE, INT64_MAX}, {"92233720368547758070e-1", JSON_WHOLE, INT64_MAX},
        {"1e19", JSON_TOO_LARGE, 0}, {"1e400", JSON_TOO_LARGE, 0}, {"1e999999999999999999999", JSON_TOO_LARGE, 0}, {"9007199254740993", JSON_WHOLE, 9007199254740993}, {"2.5", JSON_FRACTION, 0}, {"15099494.4", JSON_FRACTION, 0}, {"1e-1", JSON_FRACTION, 0}, {"1e-400", JSON_FRACTION, 0}, {"12e-999999999999999999", JSON_FRACTION, 0},
        {"10.50", JSON_FRACTION, 0}, {"100000000000000000000e-20", JSON_WHOLE, 1},
    };
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        int64_t value;
        int kind = json_to_i64(whole[i].text, (int64_t)strlen(whole[i].text), &value);
        expect_equal_i64(t, whole[i].text, kind, whole[i].kind);
        if (kind == JSON_WHOLE && whole[i].kind == JSON_WHOLE) expect_equal_i64(t, whole[i].text, value, whole[i].value);
    }
    static const struct { const char *text; bool finite; double value; } real[] = {
        {"6e-5", true, 6e-5}, {"1e308", true, 1e308}, {"1e309", false, 0}, {"-1e400", false, 0}, {"1e-400", true, 0}, {"0.1", true, 0.1}, {"-0.0", true, -0.0}, {"2.2250738585072014e-308", true, 2.2250738585072014e-308}, {"5e-324", true, 5e-324},
    };
    for (size_t i = 0; i < sizeof real / sizeof *real; i++) {
        double value;
        bool finite = json_to_double(real[i].text, &value);
        expect_equal_i64(t, real[i].text, finite, real[i].finite);
        if (finite && real[i].finite) expect_true(t, value == real[i].value, "%s gives %.17g", real[i].text, value);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The table

static void test_table(Test *t) {
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        const ConfigKey *k = &config_keys[i];
        if (k->treatment == TREAT_HEADING) continue;
        expect_equal_i64(t, k->path, config_find_key(k->path), i); // no path twice
        for (const char *s = k->text; *s; s++) expect_true(t, *s >= 32 && *s < 127, "%s: text is not plain ASCII", k->path);
        expect_true(t, k->text[0] != 0, "%s has no text", k->path);
        char parent[256];
        snprintf(parent, sizeof parent, "%s", k->path);
        char *dot = strrchr(parent, '.');
        if (dot) {
            *dot = 0;
            int p = config_find_key(parent);
            expect_true(t, p >= 0 && config_keys[p].treatment == TREAT_SECTION, "%s is not in a section", k->path);
        }
        if (k->treatment == TREAT_ALIAS) {
            int target = config_find_key(k->accepts);
            expect_true(t, target >= 0 && config_keys[target].treatment != TREAT_ALIAS, "%s: no target %s", k->path, k->accepts);
            if ((k->flags & EXCLUSIVE) && strchr(k->path, '.')) expect_true(t, strncmp(k->path, k->accepts, strlen(parent) + 1) == 0, "%s: an exclusive alias must be in its target's section", k->path);
        }
        if (k->treatment == TREAT_REFUSE || k->treatment == TREAT_REFUSE_ON) expect_true(t, strchr(k->text, ';') || strchr(k->text, '?'), "%s: the text has no remedy", k->path);
        if (k->treatment == TREAT_LATER) expect_true(t, k->size > 0, "%s has no field", k->path);
        if (k->size) { // the field fits its type, no other row has it, and the default is accepted
            static const uint32_t size[] = {0, 1, 8, 8, 0, 0, 16, 4, 0};
            if (size[k->type]) expect_equal_i64(t, k->path, k->size, size[k->type]);
            if (k->type == KEY_CHOICE) expect_true(t, k->size == 1 || k->size == 4, "%s: size %u", k->path, k->size);
            for (int o = 0; o < i; o++) expect_true(t, !config_keys[o].size || config_keys[o].offset + config_keys[o].size <= k->offset || k->offset + k->size <= config_keys[o].offset, "%s and %s share a field", k->path, config_keys[o].path);
            char value[CONFIG_VALUE_MAX];
            config_initial(k, value); // dies if the default is not accepted
        }
        if (k->with[0]) {
            char words[200], *save = NULL;
            snprintf(words, sizeof words, "%s", k->with);
            for (char *w = strtok_r(words, " ", &save); w; w = strtok_r(NULL, " ", &save)) expect_true(t, strstr("AdamW Lion SGD WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest", w) != NULL, "%s: with %s", k->path, w);
        }
    }
}

// {"a.b": VALUE} as nested objects.
static const char *nest(const char *path, const char *value, char *dst, size_t room) {
    char copy[256], *save = NULL;
    size_t used = 0;
    int depth = 0;
    snprintf(copy, sizeof copy, "%s", path);
    for (char *part = strtok_r(copy, ".", &save); part; part = strtok_r(NULL, ".", &save), depth++) used += (size_t)snprintf(dst + used, room - used, "{\"%s\": ", part);
    used += (size_t)snprintf(dst + used, room - used, "%s", value);
    while (depth-- > 0) used += (size_t)snprintf(dst + used, room - used, "}");
    return dst;
}

// Every key, once with "auto", null and a value of the wrong type: a verdict at once, and never silence where the row has no field.
static void test_every_key(Test *t) {
    char text[1024], all[2000];
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        const ConfigKey *k = &config_keys[i];
        if (k->treatment == TREAT_HEADING || strchr(k->path, '*')) continue;
        const ConfigKey *row = k->treatment == TREAT_ALIAS ? &config_keys[config_find_key(k->accepts)] : k;
        int flags = k->flags | row->flags;
        Parsed p = config_of(nest(k->path, "\"auto\"", text, sizeof text), "", 1);
        bool whole = row->treatment == TREAT_SECTION || row->treatment == TREAT_FEATURE || row->treatment == TREAT_REFUSE || row->type == KEY_ANY;
        if (!whole && !(flags & (AUTO | WORD_AUTO))) expect_contains(t, k->path, report_text(&p.report, all, sizeof all), "\"auto\" has no meaning");
        else expect_true(t, strstr(report_text(&p.report, all, sizeof all), "\"auto\" has no meaning") == NULL, "%s = auto: %s", k->path, all);
        if (row->size && (flags & AUTO)) expect_equal_i64(t, k->path, p.c->key[config_index(row)].origin, ORIGIN_AUTO);
        parsed_free(&p);

        p = config_of(nest(k->path, "null", text, sizeof text), "", 1);
        bool said = report_find(&p.report, CONFIG_NOTICE, k->path)[0] || report_find(&p.report, CONFIG_PROBLEM, k->path)[0];
        expect_true(t, said || (flags & NULL_OK), "%s = null is accepted in silence", k->path);
        parsed_free(&p);

        const char *wrong = row->type == KEY_OBJECT ? "7" : "{\"x\": [1]}";
        p = config_of(nest(k->path, wrong, text, sizeof text), "", 1);
        if (row->type != KEY_ANY) expect_true(t, report_find(&p.report, CONFIG_PROBLEM, k->path)[0] != 0, "%s = %s is not refused: %s", k->path, wrong, report_text(&p.report, all, sizeof all));
        else { // at least its section is mentioned
            char top[256];
            snprintf(top, sizeof top, " %.*s", (int)strcspn(k->path, "."), k->path);
            expect_true(t, report_find(&p.report, CONFIG_PROBLEM, top)[0] || report_find(&p.report, CONFIG_NOTICE, top)[0], "%s = %s passes in silence", k->path, wrong);
        }
        parsed_free(&p);
    }
}

// Every key with one letter missing is refused by name, and the right one is suggested.
static void test_misspelt(Test *t) {
    char path[256], text[1024];
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        const ConfigKey *k = &config_keys[i];
        if (k->treatment == TREAT_HEADING || k->treatment == TREAT_REFUSE || strchr(k->path, '*')) continue;
        const char *dot = strrchr(k->path, '.'), *last = dot ? dot + 1 : k->path;
        size_t cut = (size_t)(last - k->path) + strlen(last) / 2, length = strlen(k->path);
        if (strlen(last) < 4) continue;
        memcpy(path, k->path, cut);
        strcpy(path + cut, k->path + cut + 1);
        char section[256];
        snprintf(section, sizeof section, "%.*s.*", (int)(last - k->path) - 1, k->path);
        if (config_find_key(path) >= 0 || (dot && config_find_key(section) >= 0)) continue; // the rest of the word is a key, or anything goes here
        Parsed p = config_of(nest(path, "true", text, sizeof text), "", 1);
        const char *message = report_find(&p.report, CONFIG_PROBLEM, path);
        expect_contains(t, path, message, "is no key");
        char wanted[300];
        snprintf(wanted, sizeof wanted, "\"%.*s\"", (int)length, k->path);
        expect_contains(t, path, message, wanted);
        parsed_free(&p);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Files

static void check_file(Test *t, const char *name) {
    char path[600], line[1000], all[3000], label[64];
    int64_t length, world = 1;
    snprintf(path, sizeof path, "tests/config/%s", name);
    char *text = read_test_file(path, &length), refused[1000] = "", later[1000] = "", notes[1000] = "", verdict = 0;
    bool notes_given = false;
    for (const char *at = text; strncmp(at, "// ", 3) == 0; at += strcspn(at, "\n") + 1) { // the rows at its head
        snprintf(line, sizeof line, "%.*s", (int)strcspn(at, "\n"), at);
        if (sscanf(line, "// world %" SCNd64, &world) == 1) continue;
        if (strcmp(line, "// runs") == 0) verdict = 'r';
        else if (sscanf(line, "// refused %999[^\n]", refused) == 1) verdict = 'x';
        else if (sscanf(line, "// later %999[^\n]", later) == 1) verdict = verdict ? verdict : 'l';
        else if (strncmp(line, "// notes", 8) == 0) { notes_given = true; snprintf(notes, sizeof notes, "%s", line + 8); }
    }
    expect_true(t, verdict != 0, "%s says no verdict", name);
    Parsed p = {(Config *)host_alloc(sizeof(Config)), {}};
    config_parse(text, length, name, NULL, 0, world, false, p.c, &p.report);
    snprintf(label, sizeof label, "%.60s", name);
    expect_keys(t, label, &p.report, CONFIG_PROBLEM, refused);
    expect_keys(t, label, &p.report, CONFIG_UNBUILT, later);
    if (notes_given) expect_keys(t, label, &p.report, CONFIG_NOTICE, notes);
    for (int i = 0; i < p.report.count; i++) { // the form "file:line: key = value: what; what to do"
        const char *m = p.report.message[i].text;
        bool refusal = p.report.message[i].kind == CONFIG_PROBLEM || p.report.message[i].kind == CONFIG_UNBUILT;
        expect_true(t, strncmp(m, name, strlen(name)) == 0, "\"%s\" does not begin with the file", m);
        if (refusal) expect_true(t, m[strlen(name)] == ':' && json_is_digit(m[strlen(name) + 1]) && strstr(m, " = ") && strpbrk(strstr(m, " = "), ";?"), "\"%s\" lacks line, value or remedy", m);
    }
    if (verdict == 'r') expect_equal_i64(t, report_text(&p.report, all, sizeof all), config_refusals(&p.report), 0);
    parsed_free(&p);
    free(text);
}

static int count_files(Test *t, void (*check)(Test *t, const char *name)) {
    DIR *folder = opendir("tests/config");
    char *names[256];
    int n = 0;
    if (!folder) { test_fail(t, "tests/config: %s; tests run in the root of the repository", strerror(errno)); return 0; }
    for (struct dirent *e; (e = readdir(folder)) && n < 256;) if (strstr(e->d_name, ".json")) names[n++] = strdup(e->d_name);
    closedir(folder);
    qsort(names, (size_t)n, sizeof *names, compare_texts);
    for (int i = 0; i < n; i++) { check(t, names[i]); free(names[i]); }
    return n;
}

static void test_files(Test *t) {
    int n = count_files(t, check_file);
    expect_true(t, n >= 85, "only %d files in tests/config", n);
}

// A file that ends anywhere is refused, except where only blanks after the last brace are missing.
static void test_cut_files(Test *t) {
    static const char *const names[] = {"tests/config/39-template-auto-everywhere.json", "tests/config/t13-sequence.json"};
    Config *c = (Config *)host_alloc(sizeof *c);
    for (int f = 0; f < 2; f++) {
        int64_t length;
        char *text = read_test_file(names[f], &length), *exact;
        int64_t last = length;
        while (text[last - 1] != '}') last--;
        for (int64_t n = 0; n < length; n++) {
            ConfigReport report = {};
            exact = (char *)malloc((size_t)n + 1); // its own block, so that the sanitizer sees a read beyond the end
            memcpy(exact, text, (size_t)n);
            exact = (char *)realloc(exact, n ? (size_t)n : 1);
            config_parse(exact, n, "cut.json", NULL, 0, 1, false, c, &report);
            if (n >= last) expect_true(t, strstr(report_find(&report, CONFIG_PROBLEM, "column"), "column") == NULL, "cut after the end, at %" PRId64, n);
            else expect_true(t, report.of[CONFIG_PROBLEM] > 0, "%s cut at byte %" PRId64 " is accepted", names[f], n);
            free(exact);
            config_report_free(&report);
        }
        free(text);
    }
    free(c);
}

// ---------------------------------------------------------------------------------------------------------------
// Text forms, messages, combinations: small texts and what must be said

typedef struct {
    const char *text, *overrides;
    int64_t world;
    const char *refused, *later, *notes; // sets of keys; notes null = not looked at
    const char *says;                    // part of some message, or null
} ConfigCase;

static void check_cases(Test *t, const ConfigCase *row, size_t n) {
    char all[3000];
    for (size_t i = 0; i < n; i++) {
        Parsed p = config_of(row[i].text, row[i].overrides, row[i].world);
        char label[120];
        snprintf(label, sizeof label, "%.80s %.30s", row[i].text ? row[i].text : "", row[i].overrides);
        expect_keys(t, label, &p.report, CONFIG_PROBLEM, row[i].refused);
        expect_keys(t, label, &p.report, CONFIG_UNBUILT, row[i].later);
        if (row[i].notes) expect_keys(t, label, &p.report, CONFIG_NOTICE, row[i].notes);
        if (row[i].says) expect_contains(t, label, report_text(&p.report, all, sizeof all), row[i].says);
        parsed_free(&p);
    }
}
#define CHECK_CASES(t, rows) check_cases(t, rows, sizeof rows / sizeof *rows)
#define MICRO "\"train_micro_batch_size_per_gpu\": 1"

static void test_forms(Test *t) {
    static const ConfigCase row[] = {
        // F1: comments, trailing commas, byte-order mark
        {"\xef\xbb\xbf{ # a\n // b\n /* c */ " MICRO ", }", "", 1, "", "", "", NULL},
        // F2: duplicates, at any depth, and two spellings of one key
        {"{" MICRO ",\n\"steps_per_print\": 1,\n\"steps_per_print\": 1}", "", 1, "steps_per_print", "", "", "f.json:3: steps_per_print = 1: the key is already on line 2; keep one"},
        {"{" MICRO ", \"fp16\": {\"enabled\": true, \"hysteresis\": 2, \"enabled\": false}}", "", 1, "fp16.enabled", "", "", NULL},
        {"{" MICRO ", \"steps\\u005fper_print\": 1, \"steps_per_print\": 2}", "", 1, "steps_per_print", "", "", NULL},
        {"{" MICRO ", \"autotuning\": {\"x\": 1, \"x\": 2}}", "", 1, "autotuning.x", "", "autotuning", NULL},
        {"{" MICRO ", \"aio\": {\"thread_count\": 2, \"intra_op_parallelism\": 2}}", "", 1, "", "", NULL, NULL},
        {"{" MICRO ", \"zero_optimization\": {\"stage\": 3, \"max_live_parameters\": 1, \"stage3_max_live_parameters\": 1}}", "", 2, "zero_optimization.max_live_parameters", "", "", "keep one of them"},
        {"{" MICRO ", \"bf16\": {\"enabled\": true}, \"bfloat16\": {\"enabled\": true}}", "", 1, "bfloat16", "", "", NULL},
        {"{" MICRO ", \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_steps\": 5, \"warmup_num_steps\": 6}}}", "", 1, "scheduler.params.warmup_num_steps", "", NULL, "differs from the same setting on line 1"},
        // F3: letter case, blanks
        {"{" MICRO ", \"Steps_Per_Print\": 1}", "", 1, "Steps_Per_Print", "", "", "did you mean \"steps_per_print\"?"},
        {"{" MICRO ", \"gradient_accumulation_steps \": 1}", "", 1, "-", "", "", "did you mean \"gradient_accumulation_steps\"?"},
        // F4, F5
        {"", "", 1, "-", "", "", "the file is empty"},
        {" \n ", "", 1, "-", "", "", "there is nothing in it"},
        {"[1]", "", 1, "-", "", "", "the whole is a list; a configuration is an object"},
        {"7", "", 1, "-", "", "", "the whole is a number"},
        {"{" MICRO "} x", "", 1, "-", "", "", "expected the end of the text, found \"x\""},
        // F6
        {"{" MICRO ", \"zero_optimization\": {\"stage\": auto,\n \"overlap_comm\": true}}", "", 1, "zero_optimization.stage", "", "", "quote this value: \"auto\""},
        // F7
        {"{" MICRO ", \"fp16\": {\"enabled\": False}, \"checkpoint\": {\"load_path\": None}, \"dump_state\": True}", "", 1, "", "", "fp16.enabled", "Python's spelling"},
        // F8
        {"{" MICRO ", \"steps_per_print\" = 5}", "", 1, "steps_per_print", "", "", "use ':'"},
        // F9
        {"{'train_micro_batch_size_per_gpu': 1, 'optimizer': {'type': 'SGD'}}", "", 1, "", "", "train_micro_batch_size_per_gpu", "single quotes"},
        // F10, F11
        {"{\"train_micro_batch_size_per_gpu\": 2.0, \"zero_optimization\": {\"reduce_bucket_size\": 5E+8, \"allgather_bucket_size\": 5e8}}", "", 1, "", "", "", NULL},
        {"{" MICRO ", \"zero_optimization\": {\"stage3_prefetch_bucket_size\": 15099494.4}}", "", 1, "zero_optimization.stage3_prefetch_bucket_size", "", "", "give 15099494 or 15099495"},
        {"{" MICRO ", \"steps_per_print\": 2.5}", "", 1, "steps_per_print", "", "", "give 2 or 3"},
        // F12
        {"{\"train_micro_batch_size_per_gpu\": \"2\", \"zero_optimization\": {\"reduce_bucket_size\": \"500000000\", \"allgather_bucket_size\": \"5e8\"}}", "", 1, "", "", "train_micro_batch_size_per_gpu zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size", "a number in quotes"},
        {"{" MICRO ", \"steps_per_print\": \"ten\"}", "", 1, "steps_per_print", "", "", "is a string, but this key takes a whole number"},
        // F13
        {"{" MICRO ", \"fp16\": {\"enabled\": \"true\"}, \"bf16\": {\"enabled\": \"False\"}, \"wall_clock_breakdown\": 1, \"dump_state\": 0}", "", 1, "", "", "fp16.enabled bf16.enabled wall_clock_breakdown dump_state", NULL},
        {"{" MICRO ", \"fp16\": {\"enabled\": \"yes\"}, \"wall_clock_breakdown\": 2}", "", 1, "fp16.enabled wall_clock_breakdown", "", "", "takes true or false"},
        // F14
        {"{\"train_micro_batch_size_per_gpu\": true}", "", 1, "train_micro_batch_size_per_gpu", "", "", "is a boolean, but this key takes a whole number"},
        // F15
        {"{" MICRO ", \"gradient_clipping\": NaN, \"fp16\": {\"loss_scale\": 1e400}, \"optimizer\": {\"params\": {\"lr\": -Infinity}}, \"steps_per_print\": 1e19}", "", 1, "gradient_clipping fp16.loss_scale optimizer.params.lr steps_per_print", "", "", NULL},
        // F16
        {"{" MICRO ", \"gradient_clipping\": .5, \"optimizer\": {\"params\": {\"lr\": +1, \"eps\": 1., \"weight_decay\": 01}}, \"steps_per_print\": 0x10, \"vocabulary_size\": 1_000}", "", 1,
         "gradient_clipping optimizer.params.lr optimizer.params.eps optimizer.params.weight_decay steps_per_print vocabulary_size", "", "", "write 0.5"},
        {"{" MICRO ", \"steps_per_print\": 1,000}", "", 1, "-", "", "", "without a comma"},
        // F17
        {"{" MICRO ", \"steps_per_print\": 99999999999999}", "", 1, "", "", "", NULL},
        {"{" MICRO ", \"steps_per_print\": 9223372036854775808}", "", 1, "steps_per_print", "", "", "does not fit into 64 bits"},
        // F18
        {"{" MICRO ", \"steps_per_print\": null, \"checkpoint\": {\"load_path\": null}, \"fp16\": null, \"zero_optimization\": {\"offload_param\": null}, \"aio\": null}", "", 1, "", "", "steps_per_print fp16", "null counts as not given"},
        // F19
        {"{" MICRO ", \"fp16\": 5, \"gradient_clipping\": {\"value\": 1}, \"optimizer\": [], \"steps_per_print\": [1]}", "", 1, "fp16 gradient_clipping optimizer steps_per_print", "", "", "is a number, but this section is an object"},
        // F20
        {"{\"train_micro_batch_size_per_gpu\": CONFIG_MBSIZE, \"optimizer\": {\"params\": {\"lr\": ${LR}}}, \"train_gpt\": {\"data\": {\"train\": \"${HOME}/x\"}}, \"steps_per_print\": {{ n }}}", "", 1, "-", "", "", "template"},
        {"{\"train_micro_batch_size_per_gpu\": CONFIG_MBSIZE, \"optimizer\": {\"params\": {\"lr\": ${LR}}}, \"train_gpt\": {\"data\": {\"train\": \"${HOME}/x\"}}}", "", 1, "train_micro_batch_size_per_gpu optimizer.params.lr train_gpt.data.train", "", "", "template"},
        // encodings
        {"{" MICRO ", \"train_gpt\": {\"data\": {\"train\": \"a\\u0000b\"}}}", "", 1, "train_gpt.data.train", "", "", "zero byte"},
        {"{" MICRO ", \"a\\u0000b\": 1}", "", 1, "a\\x00b", "", "", "is no key"},
        {"{" MICRO ", \"\x1b[31mred\": 1}", "", 1, "-", "", "", "control character \\x1b"},
        {"{" MICRO ", \"\\u001b[31mred\": \"\\u001b[0m\"}", "", 1, "\\x1b[31mred", "", "", "\\x1b[31mred = \"\\x1b[0m\""},
    };
    CHECK_CASES(t, row);
}

static void test_config_messages(Test *t) {
    static const ConfigCase row[] = {
        {"{" MICRO ", \"gradient_clipp1ng\": 1}", "", 1, "gradient_clipp1ng", "", "", "f.json:1: gradient_clipp1ng = 1: is no key; did you mean \"gradient_clipping\"?"},
        {"{" MICRO ", \"zero_optimization\": {\"aio\": {\"block_size\": 1}}}", "", 1, "zero_optimization.aio", "", "", "did you mean \"aio\"?"},
        {"{" MICRO ", \"zero_optimization\": {\"stage3_reduce_bucket_size\": 1}}", "", 1, "zero_optimization.stage3_reduce_bucket_size", "", "", "did you mean \"zero_optimization.reduce_bucket_size\""},
        {"{" MICRO ", \"zero_optimization\": {\"offload_parameters\": {}}}", "", 1, "zero_optimization.offload_parameters", "", "", "\"zero_optimization.offload_param\""},
        {"{" MICRO ", \"warmup_steps\": 5}", "", 1, "warmup_steps", "", "", "\"train_gpt.run.warmup_steps\""},
        {"{" MICRO ", \"lr\": 5}", "", 1, "lr", "", "", "\"optimizer.params.lr\""},
        {"{" MICRO ", \"optimizer\": {\"lr\": 5}}", "", 1, "optimizer.lr", "", "", "\"optimizer.params.lr\""},
        {"{" MICRO ", \"checkpoints\": {}}", "", 1, "checkpoints", "", "", "did you mean \"checkpoint\""},
        {"{" MICRO ", \"gradient-clipping\": 1}", "", 1, "gradient-clipping", "", "", "did you mean \"gradient_clipping\"?"},
        {"{" MICRO ", \"zzzzqqqq\": 1}", "", 1, "zzzzqqqq", "", "", "remove it (--help-config lists all keys)"},
        {"{" MICRO ", \"micro_batch_size\": 1, \"gradient_accumulation\": 2, \"model_parallel_size\": 2, \"log\": {}, \"session_params\": {}, \"autotuning_config\": {}}", "", 1, "micro_batch_size gradient_accumulation model_parallel_size log session_params autotuning_config", "", "", "did you mean \"train_micro_batch_size_per_gpu\"?"},
        {"{" MICRO ", \"pipeline\": {\"parallel_size\": 2}, \"tensor\": {\"parallel_size\": 2}}", "", 1, "pipeline.parallel_size tensor", "", "", "did you mean \"tensor_model_parallel_size\"?"},
        {"{" MICRO ", \"_comment\": {\"x\": [1, {\"y\": nope}]}, \"comment\": \"${X}\", \"fp16\": {\"_why\": 1}}", "", 1, "", "", "", NULL}, // comments are free of rules
        {"{" MICRO ", \"zero_optimization\": {\"find_unused_parameters\": true, \"grad_hooks\": true}}", "", 1, "zero_optimization.find_unused_parameters", "", "zero_optimization.grad_hooks", "Its sense is the opposite"},
        {"{" MICRO ", \"train_gpt\": {\"run\": {\"stepz\": 1}, \"modell\": {}}}", "", 1, "train_gpt.run.stepz train_gpt.modell", "", "", "\"train_gpt.run.steps\""},
        {"{" MICRO ", \"comet\": {\"enabled\": true, \"api_key\": \"hunter2\"}}", "", 1, "", "", "comet", "no network service"},
        {"{" MICRO ", \"wandb\": \"hunter2\"}", "", 1, "", "", "wandb", "wandb: has no effect"},
        {"{" MICRO ", \"num-layers\": 1, \"hidden-size\": 8, \"launcher\": \"x\", \"steps_per_print\": 0}", "", 1, "num-layers steps_per_print", "", "", "this is a run file of gpt-neox"},
        {"{" MICRO ", \"num-layers\": 1, \"launcher\": \"x\"}", "", 1, "num-layers launcher", "", "", "is no key"},
        {"{" MICRO ", \"zero_optimization\": {\"offload_param\": {\"devices\": 1}}}", "", 1, "zero_optimization.offload_param.devices", "", "", "did you mean \"zero_optimization.offload_param.device\"?"},
        {"{" MICRO ", \"a.b\": 1, \"compile.*\": 1, \"?\": 1}", "", 1, "a.b compile.* ?", "", "", NULL},
        {"{" MICRO ", \"\": 1, \"train_gpt\": {\"\": {\"\": 1}}}", "", 1, "- train_gpt.", "", "", "f.json:1: an empty name is no key"},
        {"{" MICRO ", \"backend\": \"gloo\"}", "", 1, "backend", "", "", NULL},
        {"{" MICRO ", \"backend\": \"nccl\"}", "", 1, "", "", "backend", NULL},
        {"{" MICRO ", \"zero_optimization\": true}", "", 2, "", "", "zero_optimization", "taken as {\"stage\": 1}"},
        {"{" MICRO ", \"zero_optimization\": false, \"allgather_size\": 5e8}", "", 2, "", "", "zero_optimization allgather_size", NULL},
        {"{" MICRO ", \"zero_optimization\": {\"stage\": true}}", "", 1, "zero_optimization.stage", "", "", NULL},
        {"{" MICRO ", \"zero_optimization\": {\"stage\": \"auto\"}}", "", 1, "zero_optimization.stage", "", "", "\"auto\" has no meaning"},
        {"{" MICRO ", \"zero_optimization\": {\"stage\": [0, 1]}}", "", 1, "zero_optimization.stage", "", "", "is a list"},
        {"{" MICRO ", \"zero_optimization\": {\"stage\": \"2\"}}", "", 2, "", "", "zero_optimization.stage", "a number in quotes"},
        {"{" MICRO ", \"zero_optimization\": {\"stage\": 4}}", "", 2, "zero_optimization.stage", "", "", "must be at least 0 and at most 3"},
        {"{" MICRO ", \"expert_parallel\": false, \"datastates_ckpt\": null, \"zero_optimization\": {\"zenflow\": null}}", "", 1, "", "", "expert_parallel datastates_ckpt zero_optimization.zenflow", NULL},
        {"{" MICRO ", \"zero_optimization\": {\"zenflow\": {\"topk_ratio\": 0.1}, \"zeropp_loco_param\": {}}}", "", 1, "zero_optimization.zenflow zero_optimization.zeropp_loco_param", "", "", "DeepSpeed 0.19"},
        {"{" MICRO ", \"elasticity\": {\"enabled\": \"true\"}, \"hybrid_engine\": {\"enabled\": 1}, \"eigenvalue\": {\"enabled\": 0, \"model_name\": \"x\"}, \"weight_quantization\": {}, \"quantize_training\": {\"enabled\": false}}", "", 1,
         "elasticity.enabled hybrid_engine.enabled weight_quantization quantize_training", "", "eigenvalue", NULL},
        {"{" MICRO ", \"sparse_attention\": {\"mode\": \"dense\"}, \"compression_training\": {\"x\": {\"enabled\": false}}, \"monitor_config\": {\"tensorboard\": {\"enabled\": false}}}", "", 1, "", "", "sparse_attention compression_training monitor_config", NULL},
        {"{" MICRO ", \"sparse_attention\": {\"block\": 16}, \"monitor_config\": {\"tensorboard\": {\"enabled\": true}}}", "", 1, "sparse_attention monitor_config.tensorboard.enabled", "", "", NULL},
        {"{" MICRO ", \"checkpoint\": {\"writer\": {\"type\": \"FAST\", \"io_buffer_size\": 1, \"decoupled\": false}, \"checkpoint_type\": \"universal\"}}", "", 1, "checkpoint.checkpoint_type", "", "checkpoint.writer.type checkpoint.writer.io_buffer_size", NULL},
        {"{" MICRO ", \"communication_data_type\": \"FP16\", \"seq_parallel_comm_data_type\": \"fp31\"}", "", 1, "seq_parallel_comm_data_type", "", "communication_data_type", "give one of fp32, bf16, fp16"},
        {"{" MICRO ", \"amp\": {\"enabled\": \"auto\", \"opt_level\": \"O1\"}, \"torch_autocast\": {\"enabled\": false, \"dtype\": \"bfloat16\"}}", "", 1, "", "", NULL, NULL},
        {"{" MICRO ", \"amp\": {\"enabled\": true, \"opt_level\": \"O1\"}}", "", 1, "amp.enabled", "", "", "use bf16.enabled"},
        {"{" MICRO ", \"csv_monitor\": {\"enabled\": true, \"output_path\": \"x\"}, \"comms_logger\": {\"enabled\": false, \"verbose\": true}, \"memory_breakdown\": true}", "", 1, "", "csv_monitor.enabled memory_breakdown", "comms_logger", NULL},
        {"{" MICRO ", \"flops_profiler\": {\"enabled\": false}}", "", 1, "", "", "", NULL}, // a switch that is off has its effect
        {"{" MICRO ", \"communication_data_type\": \"bfloat16\"}", "", 2, "", "", "", NULL},
        {"{" MICRO ", \"communication_data_type\": \"fp16\"}", "", 2, "", "", "communication_data_type", "without a loss scale"},
        {"{" MICRO ", \"communication_data_type\": \"fp16\", \"fp16\": {\"enabled\": true}}", "", 2, "", "", "", NULL},
        {"{" MICRO ", \"data_types\": {\"grad_accum_dtype\": \"bf16\"}}", "", 1, "data_types.grad_accum_dtype", "", "", "needs zero_optimization.stage 2 or 3"},
        {"{" MICRO ", \"data_types\": {\"grad_accum_dtype\": \"bf16\"}, \"zero_optimization\": {\"stage\": 2}}", "", 2, "", "", "", NULL},
        {"{" MICRO ", \"data_types\": {\"grad_accum_dtype\": \"half\"}, \"zero_optimization\": {\"stage\": 3}}", "", 2, "data_types.grad_accum_dtype", "", "", "too small a range"},
        {"{" MICRO ", \"data_types\": {\"grad_accum_dtype\": \"float32\", \"param_dtype\": null}}", "", 1, "", "", "", NULL},
    };
    CHECK_CASES(t, row);
    Parsed p = config_of("{" MICRO ", \"comet\": {\"enabled\": true, \"api_key\": \"hunter2\"}}", "", 1);
    char all[2000];
    expect_true(t, !strstr(report_text(&p.report, all, sizeof all), "hunter2"), "a secret is shown: %s", all);
    parsed_free(&p);
}

#define ZERO(members) "{" MICRO ", \"zero_optimization\": {" members "}}"
#define ACTIVATIONS(members) "{" MICRO ", \"activation_checkpointing\": {" members "}}"

static void test_combinations(Test *t) {
    static const ConfigCase row[] = {
        // C1, C2
        {"{" MICRO ", \"fp16\": {\"enabled\": true}, \"bf16\": {\"enabled\": true}}", "", 1, "fp16.enabled", "", "", "bf16.enabled is true as well"},
        {"{" MICRO ", \"amp\": {\"enabled\": true}, \"fp16\": {\"enabled\": true}}", "", 1, "amp.enabled", "", NULL, NULL},
        // C4 relaxed, C5
        {"{" MICRO ", \"gradient_accumulation_steps\": 8, \"pipeline_model_parallel_size\": 2, \"zero_optimization\": {\"stage\": 2, \"overlap_comm\": true}}", "", 4, "", "", "zero_optimization.stage", "travel for each of the 8 micro-batches"},
        {"{" MICRO ", \"gradient_accumulation_steps\": 8, \"pipeline_model_parallel_size\": 2, \"pipeline_schedule\": \"ZB-V\", \"zero_optimization\": {\"stage\": 3}}", "model.n_layer=4|model.n_head=4|model.n_embd=48", 4, "", "", "zero_optimization.stage", "whole gradients are kept until the last micro-batch"},
        {"{" MICRO ", \"bf16\": {\"enabled\": true}, \"gradient_accumulation_steps\": 8, \"pipeline_model_parallel_size\": 2, \"pipeline_schedule\": \"ZB-H1\", \"data_types\": {\"grad_accum_dtype\": \"bf16\"}, \"zero_optimization\": {\"stage\": 2}}", "", 4, "data_types.grad_accum_dtype", "", NULL, "whose backward pass is split"},
        // C6, C7, C8, C9, C10
        {ZERO("\"stage\": 2, \"offload_param\": {\"device\": \"cpu\"}"), "", 2, "zero_optimization.offload_param.device", "", NULL, "needs zero_optimization.stage 3, and it is 2"},
        {ZERO("\"stage\": 2, \"offload_param\": {\"device\": \"none\"}"), "", 2, "", "", "", NULL},
        {ZERO("\"stage\": 2, \"offload_optimizer\": {\"device\": \"nvme\"}"), "", 2, "zero_optimization.offload_optimizer.device", "", NULL, "DeepSpeed takes cpu then"},
        {ZERO("\"stage\": 0, \"offload_optimizer\": {\"device\": \"cpu\"}"), "", 2, "zero_optimization.offload_optimizer.device", "", NULL, "needs zero_optimization.stage 1 to 3"},
        {ZERO("\"stage\": 0, \"cpu_offload\": true"), "", 2, "zero_optimization.cpu_offload", "", NULL, "needs zero_optimization.stage 1 to 3"},
        {ZERO("\"stage\": 2, \"cpu_offload\": true, \"offload_optimizer\": {\"device\": \"cpu\"}"), "", 2, "zero_optimization.cpu_offload", "", NULL, NULL},
        {ZERO("\"stage\": 2, \"cpu_offload\": true, \"cpu_offload_use_pin_memory\": false"), "", 2, "", "", "zero_optimization.cpu_offload zero_optimization.cpu_offload_use_pin_memory optimizer.type", NULL},
        {ZERO("\"stage\": 3, \"offload_optimizer\": {\"device\": \"nvme\"}"), "", 2, "", "", "zero_optimization.offload_optimizer.device optimizer.type", "in the folder nvme"},
        {ZERO("\"stage\": 3, \"offload_optimizer\": {\"device\": \"nvme\", \"buffer_count\": 3}"), "", 2, "zero_optimization.offload_optimizer.buffer_count", "", NULL, NULL},
        {ZERO("\"stage\": 3, \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \"/no/such/folder\"}"), "", 2, "zero_optimization.offload_optimizer.nvme_path", "", NULL, "is no folder that can be written to"},
        {"{" MICRO ", \"aio\": {\"block_size\": 4096}}", "", 1, "", "", "aio.block_size", "has no effect without an offload device nvme"},
        {ZERO("\"stage\": 3, \"offload_param\": {\"device\": \"nvme\"}"), "", 2, "", "", "zero_optimization.offload_param.device optimizer.type", "in the folder nvme"},
        {ZERO("\"stage\": 2, \"offload_optimizer\": {\"device\": \"cpu\", \"ratio\": 0.5}"), "", 2, "zero_optimization.offload_optimizer.ratio", "", NULL, NULL},
        {ZERO("\"stage\": 3, \"offload_optimizer\": {\"device\": \"cpu\", \"ratio\": 1.5}"), "", 2, "zero_optimization.offload_optimizer.ratio", "", NULL, "at most 1"},
        // C11, C12, C13
        {"{" MICRO ", \"prescale_gradients\": true, \"gradient_predivide_factor\": 2, \"zero_optimization\": {\"stage\": 2}}", "", 2, "prescale_gradients gradient_predivide_factor", "", NULL, NULL},
        {"{" MICRO ", \"prescale_gradients\": true, \"gradient_predivide_factor\": 2, \"zero_optimization\": {\"stage\": 1}}", "", 2, "", "", "gradient_predivide_factor", "has no effect with prescale_gradients"},
        {"{" MICRO ", \"prescale_gradients\": true, \"zero_optimization\": {\"stage\": 2, \"reduce_scatter\": false}}", "", 2, "", "", "", NULL},
        {"{" MICRO ", \"gradient_predivide_factor\": 1e39}", "", 2, "gradient_predivide_factor", "", "", "between 1e-18 and 1e18"},
        {"{" MICRO ", \"gradient_predivide_factor\": 0}", "", 2, "gradient_predivide_factor", "", "", "must be above 0"},
        {ZERO("\"stage\": 3, \"zero_quantized_gradients\": true, \"reduce_scatter\": false"), "", 2, "zero_optimization.zero_quantized_gradients", "", "", NULL},
        {ZERO("\"stage\": 1, \"allgather_bucket_size\": 5"), "", 2, "zero_optimization.allgather_bucket_size", "", "", "is odd; give 4"},
        {ZERO("\"stage\": 3, \"allgather_bucket_size\": 5"), "", 2, "", "", "", NULL},
        // C14
        {"{" MICRO ", \"optimizer\": {\"type\": \"OneBitLamb\"}, \"zero_optimization\": {\"stage\": 1}}", "", 2, "optimizer.type", "", "", "use AdamW, Adam, SGD or Lion"},
        // C16, C17, C18
        {"{" MICRO ", \"fp16\": {\"enabled\": true, \"fp16_master_weights_and_grads\": true}}", "", 1, "fp16.fp16_master_weights_and_grads", "", "", NULL},
        {"{" MICRO ", \"bf16\": {\"enabled\": true, \"bf16_optimizer_states\": true}}", "", 1, "bf16.bf16_optimizer_states", "", "", "needs bf16.bf16_master_weights_and_grads"},
        {"{" MICRO ", \"fp16\": {\"enabled\": true, \"loss_scale\": -1, \"loss_scale_window\": 0, \"hysteresis\": 0, \"initial_scale_power\": 200, \"min_loss_scale\": false}}", "", 1, "fp16.loss_scale fp16.loss_scale_window fp16.hysteresis fp16.initial_scale_power fp16.min_loss_scale", "", "", NULL},
        // C19, C20
        {"{" MICRO ", \"activation_checkpointing\": {\"contiguous_memory_optimization\": true}}", "", 1, "", "", "activation_checkpointing.contiguous_memory_optimization", NULL},
        {"{" MICRO ", \"activation_checkpointing\": {\"partition_activations\": true, \"number_checkpoints\": false}}", "", 1, "", "", "activation_checkpointing.partition_activations", "nothing to split"},
        {ACTIVATIONS("\"policy\": \"none\", \"enabled\": true"), "", 1, "activation_checkpointing.policy", "", "", "activation_checkpointing.enabled asks for recomputation"},
        {ACTIVATIONS("\"policy\": \"norms\", \"number_checkpoints\": 4"), "", 1, "activation_checkpointing.number_checkpoints", "", "", "give that, or remove this key"},
        {ACTIVATIONS("\"policy\": \"ffn\", \"cpu_checkpointing\": true"), "", 1, "activation_checkpointing.cpu_checkpointing", "", "", NULL},
        {ACTIVATIONS("\"policy\": \"ffn\", \"enabled\": true"), "", 1, "", "", "", NULL},
        {ACTIVATIONS("\"policy\": \"everything\""), "", 1, "activation_checkpointing.policy", "", "", NULL},
        {ACTIVATIONS("\"number_checkpoints\": 4"), "pipeline.activation_checkpoint_interval=2", 1, "pipeline.activation_checkpoint_interval", "", "", "remove one of them"},
        {ACTIVATIONS("\"profile\": true, \"synchronize_checkpoint_boundary\": true"), "", 1, "", "", "activation_checkpointing.profile activation_checkpointing.synchronize_checkpoint_boundary", "no effect without recomputation"},
        {ACTIVATIONS("\"policy\": \"gelu\""), "run.gelu_apart=false", 1, "train_gpt.run.gelu_apart", "", "", "from stored values"},
        // C21 to C24
        {"{" MICRO ", \"tensor_model_parallel_size\": 2, \"tensor_parallel\": {\"autotp_size\": 4}}", "", 8, "tensor_parallel.autotp_size", "", NULL, "differs from the same setting on line 1"},
        {"{" MICRO ", \"tensor_model_parallel_size\": 2, \"tensor_parallel\": {\"autotp_size\": 2, \"tp\": {\"tp_size\": 2}}}", "", 8, "", "", "tensor_parallel.autotp_size tensor_parallel.tp.tp_size", "repeats the setting"},
        {"{" MICRO ", \"tensor_parallel\": {\"autotp_size\": 0}, \"pipeline\": {\"stages\": \"auto\"}}", "", 8, "", "", "", NULL},
        {"{" MICRO ", \"pipeline\": {\"stages\": 2, \"partition\": \"type:block\"}}", "", 8, "pipeline.partition", "", NULL, NULL},
        {"{" MICRO ", \"sequence_parallel_size\": 2}", "model.n_layer=2|model.n_head=3|model.n_embd=48|run.seq_len=65", 2, "sequence_parallel_size", "", "", "does not divide the model's 3 heads"},
        {"{" MICRO ", \"sequence_parallel_size\": 2}", "model.n_layer=2|model.n_head=4|model.n_embd=48|run.seq_len=65", 2, "sequence_parallel_size", "", "", "does not divide the model's 65 tokens"},
        {"{" MICRO ", \"tensor_model_parallel_size\": 2}", "model.n_layer=2|model.n_head=3|model.n_embd=48", 2, "tensor_model_parallel_size", "", "", "does not divide the model's 3 heads"},
        {"{" MICRO ", \"tensor_model_parallel_size\": 2}", "model.n_layer=2|model.n_head=4|model.n_embd=48|model.n_inner=75", 2, "tensor_model_parallel_size", "", "", "75 channels inside the MLP"},
        {"{" MICRO ", \"tensor_model_parallel_size\": 2}", "model.n_layer=2|model.n_head=4|model.n_embd=48|run.seq_len=65", 2, "tensor_model_parallel_size", "", "", "does not divide the model's 65 tokens of a sample"},
        {"{" MICRO ", \"tensor_model_parallel_size\": 2, \"sequence_parallel_size\": 2}", "model.n_layer=2|model.n_head=2|model.n_embd=48|run.seq_len=64", 4, "sequence_parallel_size", "", "", "times tensor_model_parallel_size does not divide the model's 2 heads"},
        {"{" MICRO ", \"tensor_model_parallel_size\": 2, \"sequence_parallel_size\": 2}", "model.n_layer=2|model.n_head=4|model.n_embd=48|run.seq_len=62", 4, "sequence_parallel_size", "", "", "times tensor_model_parallel_size does not divide the model's 62 tokens"},
        {"{" MICRO ", \"tensor_model_parallel_size\": 2, \"sequence_parallel_size\": 2}", "model.n_layer=2|model.n_head=4|model.n_embd=48|run.seq_len=64", 4, "", "", "", NULL},
        {"{" MICRO ", \"tensor_model_parallel_size\": 2, \"sequence_parallel_size\": 2}", "run.tensor_parallel_pieces=3|model.n_layer=2|model.n_head=4|model.n_embd=48|run.seq_len=64", 4, "train_gpt.run.tensor_parallel_pieces", "", "", "times the tensor and sequence degrees does not divide the model's 64 tokens"},
        {"{" MICRO ", \"tensor_model_parallel_size\": 2, \"sequence_parallel_size\": 2}", "run.tensor_parallel_pieces=4|model.n_layer=2|model.n_head=4|model.n_embd=48|run.seq_len=64", 4, "", "", "", NULL},
        {"{" MICRO "}", "run.tensor_parallel_pieces=3|model.n_layer=2|model.n_head=4|model.n_embd=48|run.seq_len=64", 2, "", "", "train_gpt.run.tensor_parallel_pieces", "has no effect without tensor_model_parallel_size"},
        {ACTIVATIONS("\"partition_activations\": true"), "tensor_model_parallel_size=2", 2, "", "", "", "keeps its own rows of a checkpoint"},
        {"{" MICRO ", \"gradient_accumulation_steps\": 8, \"pipeline_model_parallel_size\": 4, \"pipeline_schedule\": \"interleaved\"}", "model.n_layer=7|model.n_head=4|model.n_embd=48", 4, "pipeline_model_parallel_size", "", "", "x 2 chunks is more than the model's 7 layers"},
        {"{" MICRO ", \"gradient_accumulation_steps\": 8, \"pipeline_model_parallel_size\": 4, \"pipeline_schedule\": \"zb-v\"}", "model.n_layer=7|model.n_head=4|model.n_embd=48", 4, "pipeline_model_parallel_size", "", "", "x 2 chunks is more than the model's 7 layers"},
        {"{" MICRO ", \"gradient_accumulation_steps\": 7, \"pipeline_model_parallel_size\": 4, \"pipeline_schedule\": \"Zb-h1\"}", "model.n_layer=4|model.n_head=4|model.n_embd=48", 4, "", "", "", NULL},
        {"{" MICRO ", \"gradient_accumulation_steps\": 8, \"pipeline_model_parallel_size\": 4, \"pipeline_schedule\": \"ZB-V\", \"virtual_pipeline_model_parallel_size\": 3}", "model.n_layer=8|model.n_head=4|model.n_embd=48", 4, "", "", "virtual_pipeline_model_parallel_size", "each stage has two chunks"},
        {"{" MICRO ", \"gradient_accumulation_steps\": 8, \"pipeline_model_parallel_size\": 4, \"pipeline_schedule\": \"gpipe\", \"virtual_pipeline_model_parallel_size\": 3}", "", 4, "", "", "virtual_pipeline_model_parallel_size", NULL},
        {"{" MICRO ", \"pipeline_schedule\": \"DualPipe\"}", "", 4, "pipeline_schedule", "", "", "give one of 1F1B, GPipe, Interleaved, ZB-H1, ZB-V"},
        // C25, C26, C27
        {ZERO("\"stage\": 1"), "", 1, "", "", "zero_optimization.stage", "there is nothing to shard"},
        {ZERO("\"stage\": 1"), "communication_data_type=fp16|sequence_parallel_size=2", 2, "", "", "communication_data_type", "without a loss scale"}, // its ranks share weights, and add gradients
        {ZERO("\"stage\": 1"), "communication_data_type=fp16|tensor_model_parallel_size=2", 2, "", "", "zero_optimization.stage communication_data_type", "has no effect with one data-parallel rank"},
        {ZERO("\"stage\": 2, \"stage3_max_live_parameters\": 5, \"max_reuse_distance\": 6"), "", 2, "", "", "zero_optimization.stage3_max_live_parameters zero_optimization.max_reuse_distance", "has no effect below zero_optimization.stage 3"},
        {"{" MICRO ", \"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"warmup_num_steps\": 10, \"total_num_steps\": 500}}}", "run.steps=100", 1, "", "", "scheduler.params.total_num_steps", "differs from train_gpt.run.steps = 100"},
        {"{" MICRO ", \"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"warmup_num_steps\": 10, \"total_num_steps\": 10}}}", "", 1, "", "", "scheduler.params.total_num_steps", "is not more than warmup_num_steps"},
        // C28, C29, C30, C32
        {"{" MICRO ", \"gradient_clipping\": 1, \"optimizer\": {\"params\": {\"max_grad_norm\": 2}}}", "", 1, "optimizer.params.max_grad_norm", "", "", NULL},
        {"{" MICRO ", \"checkpoint\": {\"keep_n_most_recent\": 5, \"num_checkpoints_to_keep\": 2}}", "", 1, "checkpoint.keep_n_most_recent", "", "", NULL},
        {"{" MICRO ", \"flops_profiler\": {\"enabled\": true, \"profile_step\": 50}}", "run.steps=10", 1, "", "flops_profiler.enabled", "flops_profiler.profile_step", "beyond the last update, 10"},
        {ZERO("\"stage\": 3, \"offload_optimizer\": {\"device\": \"cpu\"}"), "", 2, "", "", "optimizer.type", "AdamW on the CPU"},
        // optimizers
        {"{" MICRO ", \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"momentum\": 0.9, \"nesterov\": true}}}", "", 1, "optimizer.params.momentum optimizer.params.nesterov", "", "", "belongs to SGD"},
        {"{" MICRO ", \"optimizer\": {\"type\": \"sgd\", \"params\": {\"momentum\": 0.9, \"nesterov\": true, \"betas\": [0.9, 0.95], \"eps\": 1e-6}}}", "", 1, "", "", "optimizer.params.betas optimizer.params.eps", "SGD does not use it"},
        {"{" MICRO ", \"optimizer\": {\"type\": \"SGD\", \"params\": {\"nesterov\": true}}}", "", 1, "optimizer.params.nesterov", "", "", "needs a momentum"},
        {"{" MICRO ", \"optimizer\": {\"type\": \"torch.optim.Adam\"}}", "", 1, "optimizer.type", "", "", NULL},
        {"{" MICRO ", \"optimizer\": {\"type\": \"Muon\"}}", "", 1, "", "optimizer.type", "", NULL},
        {"{" MICRO ", \"optimizer\": {\"type\": \"Adam\", \"params\": {\"betas\": [0.9], \"amsgrad\": true, \"weight_decay\": -1, \"eps\": 0, \"maximize\": true}}}", "", 1, "optimizer.params.betas optimizer.params.amsgrad optimizer.params.weight_decay optimizer.params.eps optimizer.params.maximize", "", "", "give a list of two numbers"},
        {"{" MICRO ", \"optimizer\": {\"type\": \"Adam\", \"params\": {\"betas\": [0.9, 1], \"amsgrad\": false, \"fused\": null, \"torch_adam\": \"True\"}}}", "", 1, "optimizer.params.betas", "", "optimizer.params.amsgrad optimizer.params.fused optimizer.params.torch_adam", "below 1"},
        {"{" MICRO ", \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"adam_w_mode\": false}}}", "", 1, "", "", "optimizer.params.adam_w_mode", NULL},
        // schedulers
        {"{" MICRO ", \"scheduler\": {\"type\": \"CosineAnnealingLR\"}}", "", 1, "scheduler.type", "", "", "is no scheduler of this program"},
        {"{" MICRO ", \"scheduler\": {\"params\": {\"warmup_num_steps\": 5}}}", "", 1, "scheduler.type", "", "", "is missing"},
        {"{" MICRO ", \"scheduler\": {\"type\": \"warmuplr\", \"params\": {\"warmup_type\": \"cubic\"}}}", "", 1, "scheduler.params.warmup_type", "", "scheduler.type", "taken as WarmupLR"},
        {"{" MICRO ", \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_num_steps\": -1, \"warmup_max_lr\": [1e-3, 2e-3], \"warmup_min_lr\": [1e-5]}}}", "", 1, "scheduler.params.warmup_num_steps scheduler.params.warmup_max_lr", "", "", "is a list of 2 numbers"},
        {"{" MICRO ", \"scheduler\": {\"type\": \"WarmupCosineLR\"}}", "", 1, "scheduler.params.total_num_steps", "", "", "WarmupCosineLR needs it"},
        {"{" MICRO ", \"scheduler\": {\"type\": \"OneCycle\", \"params\": {\"cycle_min_lr\": 1}}}", "", 1, "scheduler.params.cycle_max_lr scheduler.params.cycle_min_lr", "", "", "OneCycle needs it"},
        {"{" MICRO ", \"scheduler\": {\"type\": \"OneCycle\", \"params\": {\"cycle_min_lr\": 1e-5, \"cycle_max_lr\": 1e-3, \"total_num_steps\": 5}}}", "", 1, "", "", "scheduler.params.total_num_steps", "beta2 to 0.99"},
        {"{" MICRO ", \"scheduler\": {\"type\": \"LRRangeTest\", \"params\": {\"lr_range_test_step_size\": 0, \"lr_range_test_min_lr\": \"auto\"}}}", "", 1, "scheduler.params.lr_range_test_step_size scheduler.params.lr_range_test_min_lr", "", "", NULL},
        {"{" MICRO ", \"scheduler\": {\"type\": \"WarmupLR\"}}", "run.lr_schedule=cosine", 1, "train_gpt.run.lr_schedule", "", "", "stands beside a scheduler"},
        {"{" MICRO "}", "run.warmup_steps=5", 1, "", "", "train_gpt.run.warmup_steps", "has no effect without"},
        // model and run
        {"{" MICRO "}", "model.preset=gpt2-124M|model.init_from=x", 1, "train_gpt.model.preset", "", "", "stands beside train_gpt.model.init_from"},
        {"{" MICRO "}", "model.preset=gpt5", 1, "train_gpt.model.preset", "", NULL, "is no preset"},
        {"{" MICRO "}", "model.n_layer=2", 1, "train_gpt.model.n_head train_gpt.model.n_embd", "", "", "a shape needs"},
        {"{" MICRO "}", "model.n_layer=2|model.n_head=3|model.n_embd=64", 1, "train_gpt.model.n_embd", "", "", "cannot be divided by n_head = 3"},
        {"{" MICRO "}", "model.preset=gpt2-124M|run.seq_len=2048", 1, "train_gpt.run.seq_len", "", "", "more than the model's 1024 positions"},
        {"{" MICRO ", \"vocabulary_size\": 50304}", "model.preset=gpt2-124M", 1, "vocabulary_size", "", "", "is not train_gpt.model.vocab_size = 50257"},
        {"{" MICRO ", \"vocabulary_size\": 50304}", "model.preset=gpt2-124M|model.vocab_size=50304", 1, "", "", "", NULL},
        {"{" MICRO ", \"vocabulary_size\": 211}", "model.vocab_size=212", 1, "vocabulary_size", "", "vocabulary_size", "make them equal"},
        {"{" MICRO "}", "run.resume=../x", 1, "train_gpt.run.resume", "", "", "is no tag"},
        {"{" MICRO "}", "run.resume=.x", 1, "train_gpt.run.resume", "", "", "is no tag"},
        {"{" MICRO "}", "run.resume=-rf", 1, "train_gpt.run.resume", "", "", "is no tag"},
        {"{" MICRO "}", "run.resume=\"\"", 1, "train_gpt.run.resume", "", "", "is no tag"},
        {"{" MICRO "}", "run.resume=a/b|run.steps=-1|run.seed=x", 1, "train_gpt.run.resume train_gpt.run.steps train_gpt.run.seed", "", "", NULL},
        // sequence parallelism without a degree
        {"{" MICRO ", \"sequence_parallel\": {\"enabled\": true}}", "", 8, "", "", "", "sequence_parallel_size = 4"}, // 4 heads, 256 tokens
        {"{" MICRO ", \"sequence_parallel\": {\"enabled\": true}, \"sequence_parallel_size\": 2}", "", 8, "", "", "", NULL},
        {"{" MICRO ", \"sequence_parallel\": {\"enabled\": true}, \"tensor_model_parallel_size\": 2}", "", 8, "", "", "", "sequence_parallel_size = 2"},
        {"{" MICRO ", \"sequence_parallel\": {\"enabled\": true}, \"tensor_model_parallel_size\": 4}", "", 16, "", "", "", "sequence_parallel_size = 1"}, // 16 does not divide the heads
        {"{" MICRO ", \"data_parallel_size\": 3}", "", 4, "data_parallel_size", "", "", "= 4; remove the key"},
        {"{" MICRO ", \"data_parallel_size\": \"auto\"}", "", 4, "", "", "", NULL},
        {"{" MICRO ", \"compile\": {\"passes\": [\"z3\", \"autosp\"]}}", "", 4, "compile.passes", "", "", "set sequence_parallel_size"},
        {"{" MICRO ", \"compile\": {\"passes\": [\"z9\"]}}", "", 4, "compile.passes", "", "", NULL},
        {"{" MICRO ", \"bf16\": {\"enabled\": true}, \"data_types\": {\"param_dtype\": \"fp16\", \"buffer_dtype\": \"bfloat16\"}, \"tensor_parallel\": {\"dtype\": \"half\"}}", "", 4, "data_types.param_dtype tensor_parallel.dtype", "", "data_types.buffer_dtype", NULL},
        {"{" MICRO ", \"gradient_allreduce_op\": \"sum\", \"optimizer\": {\"params\": {\"fp32_optimizer_states\": false}}}", "", 4, "", "optimizer.params.fp32_optimizer_states", "", NULL},
        {"{" MICRO ", \"gradient_allreduce_op\": \"sum\", \"zero_optimization\": {\"stage\": 3}}", "", 4, "gradient_allreduce_op", "", "", "cannot be with zero_optimization.stage 3"},
    };
    CHECK_CASES(t, row);
}

// ---------------------------------------------------------------------------------------------------------------
// The batch triangle

static void test_batch_triangle(Test *t) {
    static const struct { const char *name; BatchTriangle given; const char *blame; int64_t train, micro, accumulation, data; const char *says; } row[] = {
        // world, tensor, pipeline, sequence, train, micro, accumulation
        {"B1 equal", {8, 1, 1, 1, 64, 4, 2}, NULL, 64, 4, 2, 8, ""},
        {"B1 unequal", {2, 1, 1, 1, 256, 2, 18}, "train_batch_size", 0, 0, 0, 0, "= 72; set it to 72"},
        {"B1 with degrees", {16, 2, 2, 1, 64, 4, 2}, "train_batch_size", 0, 0, 0, 0, "4 data-parallel ranks (16 / tensor 2 / pipeline 2 / sequence 1) = 32"},
        {"B2", {16, 1, 1, 1, 1024, 8, 0}, NULL, 1024, 8, 8, 16, ""},
        {"B2 not whole", {8, 1, 1, 1, 100, 8, 0}, "train_batch_size", 0, 0, 0, 0, "64 and 128"},
        {"B3: practice guide, first block", {16, 1, 1, 1, 1024, 0, 8}, NULL, 1024, 8, 8, 16, ""},
        {"B3 not whole", {3, 1, 1, 1, 20, 0, 5}, "train_batch_size", 0, 0, 0, 0, "15 and 30"},
        {"B3: settings guide, 175B on 64", {64, 8, 4, 1, 2048, 0, 16}, NULL, 2048, 64, 16, 2, ""},
        {"B4: hybrid on 8", {8, 2, 4, 1, 0, 4, 8}, NULL, 32, 4, 8, 1, ""},
        {"B4: parallel on 8", {8, 4, 2, 1, 0, 4, 8}, NULL, 32, 4, 8, 1, ""},
        {"B5", {8, 1, 1, 1, 64, 0, 0}, NULL, 64, 8, 1, 8, ""},
        {"B5 not whole", {6, 1, 1, 1, 64, 0, 0}, "train_batch_size", 0, 0, 0, 0, "60 and 66"},
        {"B5 below one a rank", {64, 1, 1, 1, 32, 0, 0}, "train_batch_size", 0, 0, 0, 0, "can: 64"},
        {"B6", {8, 2, 1, 1, 0, 3, 0}, NULL, 12, 3, 1, 4, ""},
        {"B7 accumulation only", {2, 1, 1, 1, 0, 0, 4}, NULL, 40, 5, 4, 2, ""},
        {"B7 nothing", {2, 1, 1, 1, 0, 0, 0}, NULL, 10, 5, 1, 2, ""},
        {"B10", {12, 5, 1, 1, 0, 1, 1}, "tensor_model_parallel_size", 0, 0, 0, 0, "a divisor of 12: 1, 2, 3, 4, 6, 12"},
        {"B10 more degrees than ranks", {2, 1, 4, 1, 0, 1, 1}, "pipeline_model_parallel_size", 0, 0, 0, 0, "2 ranks cannot be divided"},
        {"B10 sequence", {4, 1, 1, 3, 0, 1, 1}, "sequence_parallel_size", 0, 0, 0, 0, "4 ranks"},
        {"B10 huge degrees", {4, INT64_MAX, INT64_MAX, INT64_MAX, 0, 1, 1}, "tensor_model_parallel_size", 0, 0, 0, 0, "4 ranks"},
        {"sequence", {16, 2, 2, 2, 0, 1, 3}, NULL, 6, 1, 3, 2, ""},
        {"overflow", {1024, 1, 1, 1, 0, INT64_C(1) << 40, INT64_C(1) << 40}, "train_micro_batch_size_per_gpu", 0, 0, 0, 0, "64 bits"},
        {"overflow of three", {1024, 1, 1, 1, 8, INT64_C(1) << 40, INT64_C(1) << 40}, "train_batch_size", 0, 0, 0, 0, "set it to"},
        {"overflow of the unit", {1024, 1, 1, 1, 8, INT64_MAX, 0}, "train_batch_size", 0, 0, 0, 0, "cannot be divided"},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        BatchTriangle solved;
        int64_t data;
        char why[800] = "";
        const char *blame = config_solve_batch(&row[i].given, 5, &solved, &data, why, sizeof why);
        expect_equal_text(t, row[i].name, blame ? blame : "", row[i].blame ? row[i].blame : "");
        expect_contains(t, row[i].name, why, row[i].says);
        if (blame || row[i].blame) continue;
        expect_equal_i64(t, row[i].name, solved.train, row[i].train);
        expect_equal_i64(t, row[i].name, solved.micro, row[i].micro);
        expect_equal_i64(t, row[i].name, solved.accumulation, row[i].accumulation);
        expect_equal_i64(t, row[i].name, data, row[i].data);
    }
    static const ConfigCase files[] = { // B7, B8, B9, B12
        {"{}", "", 2, "", "", "train_micro_batch_size_per_gpu", "4 samples a rank, so 8 an update"},
        {"{\"train_batch_size\": \"auto\", \"train_micro_batch_size_per_gpu\": \"auto\", \"gradient_accumulation_steps\": \"auto\"}", "", 2, "", "", "train_micro_batch_size_per_gpu", NULL},
        {"{\"train_batch_size\": 0, \"train_micro_batch_size_per_gpu\": -1, \"gradient_accumulation_steps\": true}", "", 1, "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps", "", "", NULL},
        {"{\"train_batch_size\": 1.5}", "", 1, "train_batch_size", "", "", "give 1 or 2"},
        {"{\"train_micro_batch_size_per_gpu\": 1, \"gradient_accumulation_steps\": 6, \"pipeline_model_parallel_size\": 4, \"pipeline_schedule\": \"Interleaved\"}", "model.preset=gpt2-124M", 4, "gradient_accumulation_steps", "", "", "the next one is 8"},
        {"{\"train_micro_batch_size_per_gpu\": 1, \"gradient_accumulation_steps\": 2, \"pipeline_model_parallel_size\": 4}", "model.preset=gpt2-124M", 4, "", "", "gradient_accumulation_steps", "60 % of the time is idle"},
        {"{\"train_micro_batch_size_per_gpu\": 1, \"gradient_accumulation_steps\": 2, \"pipeline_model_parallel_size\": 4, \"pipeline_schedule\": \"ZB-H1\"}", "model.preset=gpt2-124M", 4, "", "", "gradient_accumulation_steps", "45 % of the time is idle (the bubble is (2p-1-m)/(2m+2p-1))"},
        {"{\"train_micro_batch_size_per_gpu\": 1, \"tensor_model_parallel_size\": 2}", "", 1, "tensor_model_parallel_size", "", "", "1 rank cannot be divided"},
    };
    CHECK_CASES(t, files);
}

// ---------------------------------------------------------------------------------------------------------------
// Values: defaults, what is derived, auto, presets, overrides

static void test_values(Test *t) {
    Parsed p = config_of(NULL, "", 1);
    Config *c = p.c;
    expect_equal_i64(t, "refusals without anything", config_refusals(&p.report), 0);
    expect_equal_i64(t, "train_batch_size", c->batch.train_batch_size, 4);
    expect_equal_i64(t, "optimizer", c->optimizer.type, OPTIMIZER_ADAMW);
    expect_near(t, "lr", c->optimizer.lr, 1e-3, 0);
    expect_near(t, "beta1", c->optimizer.betas[0], 0.9, 0);
    expect_near(t, "beta2", c->optimizer.betas[1], 0.999, 0);
    expect_near(t, "gradient_clipping", c->gradient_clipping, 1, 0);
    expect_equal_i64(t, "dtype", c->dtype, DTYPE_FP32);
    expect_equal_i64(t, "schedule", c->scheduler.type, SCHEDULE_CONSTANT);
    expect_equal_i64(t, "steps", c->run.steps, 1000);
    expect_equal_i64(t, "steps_per_print", c->steps_per_print, 10);
    expect_equal_i64(t, "timeout", c->zero.timeout, 1800);
    expect_equal_i64(t, "scale power", c->fp16.initial_scale_power, 16); // and not the 32 of a section with nothing but "enabled"
    expect_equal_i64(t, "vocabulary", c->model.vocab_size, 256);
    expect_equal_i64(t, "n_inner", c->model.n_inner, 4 * c->model.n_embd);
    expect_equal_i64(t, "seq_len", c->run.seq_len, c->model.n_positions);
    expect_equal_i64(t, "world", c->world, 1);
    expect_equal_text(t, "resume", c->run.resume, "auto");
    expect_contains(t, "what is said", report_find(&p.report, CONFIG_INFO, "gradient_clipping"), "1.0");
    expect_contains(t, "what is said", report_find(&p.report, CONFIG_INFO, "small GPT-2"), "4 layers");
    parsed_free(&p);

    static const struct { const char *text, *overrides, *path, *value; int origin; } row[] = {
        {"{\"fp16\": {\"enabled\": true}}", "", "fp16.initial_scale_power", "16", ORIGIN_DEFAULT},
        {"{\"fp16\": {\"enabled\": true}}", "", "fp16.hysteresis", "2", ORIGIN_DEFAULT},
        {"{\"fp16\": {\"min_loss_scale\": 1e-5}}", "", "fp16.min_loss_scale", "1e-05", ORIGIN_FILE},
        {"{\"activation_checkpointing\": {\"number_checkpoints\": 4}}", "", "activation_checkpointing.policy", "block", ORIGIN_DERIVED},
        {"{}", "activation_checkpointing.cpu_checkpointing=true", "activation_checkpointing.policy", "block", ORIGIN_DERIVED},
        {"{}", "pipeline.activation_checkpoint_interval=3", "activation_checkpointing.policy", "block", ORIGIN_DERIVED},
        {"{\"activation_checkpointing\": {\"enabled\": true, \"policy\": \"norms\"}}", "", "activation_checkpointing.policy", "norms", ORIGIN_FILE},
        {"{}", "activation_checkpointing.policy=gelu", "train_gpt.run.gelu_apart", "true", ORIGIN_DERIVED},
        {"{\"activation_checkpointing\": {\"policy\": \"auto\"}}", "", "activation_checkpointing.policy", "none", ORIGIN_AUTO},
        {"{\"optimizer\": {\"type\": \"lion\"}}", "", "optimizer.params.betas", "[0.9, 0.99]", ORIGIN_DERIVED},
        {"{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"adam_w_mode\": false}}}", "", "optimizer.params.adam_w_mode", "false", ORIGIN_FILE},
        {"{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"adam_w_mode\": false}}}", "", "optimizer.params.adam_w_mode", "true", ORIGIN_FILE},
        {"{\"optimizer\": {\"params\": {\"max_grad_norm\": 0.25}}}", "", "gradient_clipping", "0.25", ORIGIN_FILE},
        {"{\"gradient_clipping\": \"auto\"}", "", "gradient_clipping", "1", ORIGIN_AUTO},
        {"{\"optimizer\": {\"params\": {\"lr\": 3e-4}}, \"scheduler\": {\"type\": \"WarmupLR\"}}", "", "scheduler.params.warmup_max_lr", "0.0003", ORIGIN_DERIVED},
        {"{\"optimizer\": {\"params\": {\"lr\": 3e-4}}, \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_max_lr\": \"auto\"}}}", "", "scheduler.params.warmup_max_lr", "0.0003", ORIGIN_AUTO},
        {"{\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_min_lr\": [1e-5]}}}", "", "scheduler.params.warmup_min_lr", "1e-05", ORIGIN_FILE},
        {"{\"scheduler\": {\"type\": \"WarmupLR\"}}", "", "scheduler.params.warmup_type", "log", ORIGIN_DEFAULT},
        {"{\"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"total_num_steps\": \"auto\"}}}", "run.steps=77", "scheduler.params.total_num_steps", "77", ORIGIN_AUTO},
        {"{\"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"total_num_steps\": 400000}}}", "", "train_gpt.run.steps", "400000", ORIGIN_DERIVED},
        {"{\"scheduler\": {\"type\": \"OneCycle\", \"params\": {\"cycle_min_lr\": 0, \"cycle_max_lr\": 1, \"cycle_first_step_size\": 7}}}", "", "scheduler.params.cycle_second_step_size", "7", ORIGIN_DERIVED},
        {"{}", "run.lr_schedule=cosine|run.steps=50", "train_gpt.run.total_steps", "50", ORIGIN_DERIVED},
        {"{\"zero_optimization\": {\"stage\": 3}}", "", "zero_optimization.overlap_comm", "true", ORIGIN_DERIVED},
        {"{\"zero_optimization\": {\"stage\": 2}}", "", "zero_optimization.overlap_comm", "false", ORIGIN_DERIVED},
        {"{\"zero_optimization\": {\"stage\": 3, \"reduce_bucket_size\": \"auto\"}}", "model.preset=gpt2-124M", "zero_optimization.reduce_bucket_size", "589824", ORIGIN_AUTO},
        {"{\"zero_optimization\": {\"stage\": 3, \"stage3_prefetch_bucket_size\": \"auto\"}}", "model.preset=gpt2-124M", "zero_optimization.stage3_prefetch_bucket_size", "530841", ORIGIN_AUTO}, // int(0.9 x 768 x 768)
        {"{\"zero_optimization\": {\"stage\": 3, \"param_persistence_threshold\": \"auto\"}}", "model.preset=gpt2-124M", "zero_optimization.stage3_param_persistence_threshold", "7680", ORIGIN_AUTO},
        {"{\"zero_optimization\": {\"stage\": 3, \"cpu_offload_param\": true}}", "", "zero_optimization.offload_param.device", "cpu", ORIGIN_FILE},
        {"{\"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"nvme\", \"nvme_path\": \"here/nvme\"}}}", "run.output_dir=here", "zero_optimization.offload_param.nvme_path", "\"here/nvme\"", ORIGIN_FILE},
        {"{\"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"nvme\"}}}", "run.output_dir=here", "zero_optimization.offload_param.nvme_path", "\"here/nvme\"", ORIGIN_DERIVED},
        {"{\"tensor_parallel\": {\"tensor_parallel\": {\"tp_size\": 1}}}", "", "tensor_model_parallel_size", "1", ORIGIN_FILE},
        {"{\"steps_per_print\": 1e5}", "", "steps_per_print", "100000", ORIGIN_FILE},
        {"{\"bfloat16\": {\"enabled\": true}}", "", "bf16.enabled", "true", ORIGIN_FILE},
        {"{\"fp16\": {\"enabled\": true}, \"tensor_parallel\": {\"dtype\": \"auto\"}}", "", "tensor_parallel.dtype", "fp16", ORIGIN_AUTO}, // found by fuzzing
        {"{}", "model.preset=GPT3-6.7b", "train_gpt.model.n_embd", "4096", ORIGIN_PRESET},
        {"{}", "model.preset=gpt3-6.7B", "train_gpt.model.n_positions", "2048", ORIGIN_PRESET},
        {"{}", "model.preset=gpt2-1558M", "train_gpt.model.n_head", "25", ORIGIN_PRESET},
        {"{}", "model.preset=gpt2-1558M", "train_gpt.model.vocab_size", "50257", ORIGIN_PRESET},
        {"{}", "model.preset=gpt2-124M|model.n_layer=3", "train_gpt.model.n_layer", "3", ORIGIN_COMMAND_LINE},
        {"{}", "model.preset=gpt2-124M|model.n_layer=3", "train_gpt.model.n_embd", "768", ORIGIN_PRESET},
        {"{}", "model.n_layer=2|model.n_head=2|model.n_embd=32", "train_gpt.model.n_positions", "1024", ORIGIN_DERIVED},
        {"{}", "model.n_layer=2|model.n_head=2|model.n_embd=32|run.seq_len=40", "train_gpt.model.n_positions", "40", ORIGIN_DERIVED},
        {"{}", "model.n_layer=2|model.n_head=2|model.n_embd=32|data.train=a.bin", "train_gpt.model.vocab_size", "50257", ORIGIN_DERIVED},
        {"{}", "model.n_layer=2|model.n_head=2|model.n_embd=32|data.train=a.txt", "train_gpt.model.vocab_size", "256", ORIGIN_DERIVED},
        {"{}", "model.init_from=x", "train_gpt.model.n_layer", "0", ORIGIN_DEFAULT}, // told by the folder, later
        {"{\"vocabulary_size\": 216}", "", "train_gpt.model.vocab_size", "216", ORIGIN_DERIVED},
        {"{\"train_gpt\": {\"run\": {\"steps\": 5}}}", "run.steps=6", "train_gpt.run.steps", "6", ORIGIN_COMMAND_LINE},
        {"{\"train_gpt\": {\"run\": {\"steps\": 5}}}", "train_gpt.run.steps=7|run.steps=8", "train_gpt.run.steps", "8", ORIGIN_COMMAND_LINE},
        {"{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 4}", "train_micro_batch_size_per_gpu=8", "gradient_accumulation_steps", "4", ORIGIN_DERIVED},
        {"{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 4, \"gradient_accumulation_steps\": 8}", "train_micro_batch_size_per_gpu=8|gradient_accumulation_steps=auto", "gradient_accumulation_steps", "4", ORIGIN_AUTO},
        {"{\"checkpoint\": {\"load_path\": \"old\"}}", "checkpoint.load_path=null", "checkpoint.load_path", "\"\"", ORIGIN_DEFAULT},
        {"{\"gradient_clipping\": 0.5}", "optimizer.params.max_grad_norm=2", "gradient_clipping", "2", ORIGIN_COMMAND_LINE},
        {"{}", "optimizer.params.betas=[0.8, 0.95]", "optimizer.params.betas", "[0.8, 0.95]", ORIGIN_COMMAND_LINE},
        {"{}", "zero_optimization={\"stage\": 2}", "zero_optimization.stage", "2", ORIGIN_COMMAND_LINE},
        {"{}", "bf16.enabled=True", "bf16.enabled", "true", ORIGIN_COMMAND_LINE},
        {"{}", "run.resume=100", "train_gpt.run.resume", "\"100\"", ORIGIN_COMMAND_LINE},
        {"{}", "data.train=/a b/#1 'x' \"y\", {z}.txt", "train_gpt.data.train", "\"/a b/#1 'x' \\\"y\\\", {z}.txt\"", ORIGIN_COMMAND_LINE},
        {"{}", "run.sample_prompt=Once upon a time", "train_gpt.run.sample_prompt", "\"Once upon a time\"", ORIGIN_COMMAND_LINE},
        {"{}", "run.sample_prompt=a=b", "train_gpt.run.sample_prompt", "\"a=b\"", ORIGIN_COMMAND_LINE},
        {"{}", "data.val=v.txt", "train_gpt.run.eval_every", "100", ORIGIN_DERIVED},
        {"{}", "", "train_gpt.run.eval_every", "0", ORIGIN_DERIVED},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char value[2 * CONFIG_PATH_MAX], label[200], all[1500];
        p = config_of(row[i].text, row[i].overrides, 1);
        int k = config_find_key(row[i].path);
        snprintf(label, sizeof label, "%.60s %.40s: %.70s", row[i].text, row[i].overrides, row[i].path);
        expect_equal_text(t, label, config_show_field(p.c, &config_keys[k], value, sizeof value), row[i].value);
        expect_equal_i64(t, label, p.c->key[k].origin, row[i].origin);
        if (!strstr(row[i].text, "offload")) expect_equal_i64(t, report_text(&p.report, all, sizeof all), config_refusals(&p.report), 0);
        parsed_free(&p);
    }
}

static void test_precision(Test *t) {
    static const struct { const char *fp16, *bf16; DType dtype; bool open; } row[] = { // null = no section
        {NULL, NULL, DTYPE_FP32, false}, {"true", NULL, DTYPE_FP16, false}, {NULL, "true", DTYPE_BF16, false}, {"\"auto\"", "\"auto\"", DTYPE_BF16, true}, {"\"auto\"", NULL, DTYPE_FP16, false}, {NULL, "\"auto\"", DTYPE_BF16, false},
        {"true", "\"auto\"", DTYPE_FP16, false}, {"\"auto\"", "true", DTYPE_BF16, false}, {"false", "\"auto\"", DTYPE_BF16, false}, {"\"auto\"", "false", DTYPE_FP16, false}, {"false", "false", DTYPE_FP32, false}, {"false", NULL, DTYPE_FP32, false},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char text[200] = "{\"train_batch_size\": 1";
        if (row[i].fp16) snprintf(text + strlen(text), 80, ", \"fp16\": {\"enabled\": %s}", row[i].fp16);
        if (row[i].bf16) snprintf(text + strlen(text), 80, ", \"bf16\": {\"enabled\": %s}", row[i].bf16);
        strcat(text, "}");
        Parsed p = config_of(text, "", 1);
        expect_equal_i64(t, text, config_refusals(&p.report), 0);
        expect_equal_i64(t, text, p.c->dtype, row[i].dtype);
        expect_equal_i64(t, text, p.c->fp16.enabled, row[i].dtype == DTYPE_FP16);
        expect_equal_i64(t, text, p.c->bf16.enabled, row[i].dtype == DTYPE_BF16);
        expect_equal_i64(t, text, p.c->precision_is_auto, row[i].open);
        parsed_free(&p);
    }
    Config c = {};
    c.dtype = DTYPE_BF16;
    c.bf16.enabled = c.precision_is_auto = true;
    config_fit_device(&c, 90);
    config_fit_device(&c, 0);
    expect_equal_i64(t, "on a new GPU, or none", c.dtype, DTYPE_BF16);
}

// ---------------------------------------------------------------------------------------------------------------
// Properties

// A configuration that was made of what another one prints is the same.
static void expect_read_back(Test *t, const Config *c, Parsed *p, const char *what, const char *printed) {
    char all[1500];
    t->compared++;
    if (config_refusals(&p->report) > 0) test_fail(t, "%s: the %s is refused: %s", what, printed, report_text(&p->report, all, sizeof all));
    else {
        for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
            const ConfigKey *k = &config_keys[i];
            if (!config_in_table(c, i)) continue;
            t->compared++;
            if (memcmp((const char *)c + k->offset, (const char *)p->c + k->offset, k->size) != 0) test_fail(t, "%s: %s differs after reading the %s back", what, k->path, printed);
        }
        expect_equal_i64(t, what, p->c->dtype, c->dtype);
        expect_equal_i64(t, what, p->c->optimizer.type, c->optimizer.type);
        expect_equal_i64(t, what, p->c->scheduler.type, c->scheduler.type);
    }
    parsed_free(p);
}

// What --inspect-config prints of a configuration that was read from a JSON: the same one, and nothing is said of defaults in it.
static void expect_short_json(Test *t, const Parsed *from, int64_t world, const char *what) {
    char *text = NULL;
    size_t length = 0;
    FILE *f = open_memstream(&text, &length);
    config_print_json(f, from->c, &from->report);
    fclose(f);
    Parsed p = {(Config *)host_alloc(sizeof(Config)), {}};
    config_parse(text, (int64_t)length, "short json", NULL, 0, world, false, p.c, &p.report);
    for (int i = 0; i < CONFIG_KEY_COUNT; i++)
        if (config_row_given(p.c, i)) expect_true(t, !config_needless(p.c, i, &p.report), "%s: something is said of the default of %s", what, config_keys[i].path);
    expect_read_back(t, from->c, &p, what, "short JSON");
    free(text);
}

// The effective table, line by line as overrides, and its JSON as a file must give the same configuration.
static void expect_round_trip(Test *t, const Config *c, int64_t world, const char *what) {
    char *text = NULL;
    size_t length = 0;
    FILE *f = open_memstream(&text, &length);
    config_print_json(f, c, NULL);
    fclose(f);
    Json j;
    expect_true(t, json_parse(&j, text, (int64_t)length, JSON_STRICT), "%s: line %d: %s", what, j.line, j.error);
    json_free(&j);
    Parsed p = {(Config *)host_alloc(sizeof(Config)), {}};
    config_parse(text, (int64_t)length, "json", NULL, 0, world, false, p.c, &p.report);
    expect_short_json(t, &p, world, what);
    expect_read_back(t, c, &p, what, "JSON of the effective table");
    free(text);
    f = open_memstream(&text, &length);
    config_print_table(f, c);
    fclose(f);
    const char *list[400];
    int n = 0;
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line && n < 400; line = strtok_r(NULL, "\n", &save)) {
        if (line[0] == '#') continue;
        char *origin = line; // the last " # " begins the origin
        for (char *at = line; (at = strstr(at, " # ")); at++) origin = at;
        while (origin > line && origin[-1] == ' ') origin--;
        *origin = 0;
        char *equals = strstr(line, " = "); // "key = value" becomes "key=value"
        memmove(equals, "=", 1);
        memmove(equals + 1, equals + 3, strlen(equals + 3) + 1);
        list[n++] = line;
    }
    p = {(Config *)host_alloc(sizeof(Config)), {}};
    config_parse(NULL, 0, "", list, n, world, false, p.c, &p.report);
    expect_read_back(t, c, &p, what, "effective table");
    free(text);
}

static void round_trip_file(Test *t, const char *name) {
    char path[600];
    int64_t length, world = 1;
    snprintf(path, sizeof path, "tests/config/%s", name);
    char *text = read_test_file(path, &length), *at = strstr(text, "// world ");
    if (at) sscanf(at, "// world %" SCNd64, &world);
    Parsed p = {(Config *)host_alloc(sizeof(Config)), {}};
    config_parse(text, length, name, NULL, 0, world, false, p.c, &p.report);
    if (config_refusals(&p.report) == 0) expect_round_trip(t, p.c, world, name);
    parsed_free(&p);
    free(text);
}

static void test_round_trip(Test *t) {
    count_files(t, round_trip_file);
    static const char *const overrides[] = {
        "", "run.lr_schedule=cosine|run.warmup_steps=3", "scheduler.type=OneCycle|scheduler.params.cycle_min_lr=1e-5|scheduler.params.cycle_max_lr=[1e-3]", "scheduler.type=LRRangeTest|optimizer.type=Lion", "optimizer.type=SGD|optimizer.params.momentum=0.9|optimizer.params.nesterov=true",
        "model.preset=gpt3-13B|run.seq_len=100|data.train=\"a \\\"b\\\" \\\\ c # d.txt\"", "run.sample_prompt=tab\tand \xc3\xa9 a\xc2\x85" "b \xe2\x80\xa8", "optimizer.type=Adam|optimizer.params.adam_w_mode=false|optimizer.params.lr=0.1|gradient_clipping=3.3333333333333335", "scheduler.type=WarmupCosineLR|scheduler.params.total_num_steps=9|run.steps=0",
    };
    for (size_t i = 0; i < sizeof overrides / sizeof *overrides; i++) {
        Parsed p = config_of(NULL, overrides[i], 1);
        expect_equal_i64(t, overrides[i], config_refusals(&p.report), 0);
        expect_round_trip(t, p.c, 1, overrides[i]);
        parsed_free(&p);
    }
    char *newlines = (char *)host_alloc(CONFIG_PATH_MAX + 40); // every byte of the value becomes six in the table
    int used = sprintf(newlines, "run.sample_prompt=\"");
    for (int i = 0; i < (CONFIG_PATH_MAX - 8) / 2; i++) used += sprintf(newlines + used, "\\n");
    sprintf(newlines + used, "\"");
    Parsed p = config_of(NULL, newlines, 1);
    expect_equal_i64(t, "a text of newlines", (int64_t)strlen(p.c->run.sample_prompt), (CONFIG_PATH_MAX - 8) / 2);
    expect_round_trip(t, p.c, 1, "a text of newlines");
    parsed_free(&p);
    free(newlines);
}

// Random rows with random values, also contradictory ones: a verdict, always the same, and if it is good, then with a batch that
// multiplies up, sizes that fit, and an effective table that reads back.
static void test_random(Test *t) {
    static const char *const pool[] = {"true", "false", "0", "1", "2", "3", "4", "8", "64", "0.5", "1e-3", "5e8", "-1", "\"auto\"", "null", "\"cpu\"", "\"nvme\"", "\"none\"", "\"fp16\"", "\"bf16\"", "\"fp32\"", "\"AdamW\"", "\"SGD\"", "\"Lion\"", "\"WarmupLR\"", "\"WarmupDecayLR\"",
                                       "\"OneCycle\"", "\"Interleaved\"", "[0.9, 0.95]", "[1]", "{}", "\"x\"", "9223372036854775807", "1e308", "\"linear\"", "\"cosine\"", "\"gpt2-124M\""};
    int n_pool = sizeof pool / sizeof *pool, good = 0;
    for (int trial = 0; trial < 3000; trial++) {
        char override[8][400], text[3300] = "", all[3000];
        const char *list[8];
        int n = 1 + (int)(rng_bits(1, 1, (uint64_t)trial) % 8);
        for (int i = 0; i < n; i++) {
            uint64_t bits = rng_bits(2, (uint64_t)trial, (uint64_t)i);
            const ConfigKey *k;
            do {
                k = &config_keys[bits % (uint64_t)CONFIG_KEY_COUNT];
                bits = rng_mix(bits);
            } while (k->treatment == TREAT_HEADING || strchr(k->path, '*') || (i % 2 && k->treatment != TREAT_USE && k->treatment != TREAT_LATER)); // the keys with fields most of all
            char word[64];
            const char *value = pool[(bits >> 32) % (uint64_t)n_pool];
            if (bits >> 60 < 13 && k->treatment != TREAT_ALIAS) { // mostly a value of its type
                static const char *const small[] = {"1", "2", "4", "8", "64"};
                if (k->type == KEY_BOOL) value = pool[bits >> 40 & 1];
                else if (k->type == KEY_INT || k->type == KEY_FLOAT) value = small[(bits >> 40) % 5];
                else if (k->type == KEY_CHOICE) { config_word_at(k->accepts, (int)(bits >> 40 & 1), word, sizeof word); value = word; }
            }
            snprintf(override[i], sizeof override[i], "%s=%s", k->path, value);
            list[i] = override[i];
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s ", override[i]);
        }
        int64_t world = INT64_C(1) << rng_bits(3, 3, (uint64_t)trial) % 5;
        Parsed p = {(Config *)host_alloc(sizeof(Config)), {}}, q = {(Config *)host_alloc(sizeof(Config)), {}};
        config_parse(NULL, 0, "", list, n, world, false, p.c, &p.report);
        config_parse(NULL, 0, "", list, n, world, true, q.c, &q.report);
        expect_true(t, config_refusals(&q.report) == config_refusals(&p.report) + p.report.of[CONFIG_NOTICE] && q.report.of[CONFIG_NOTICE] == 0, "strict: %s", text);
        expect_same_bytes(t, text, q.c, p.c, offsetof(Config, key));
        if (config_refusals(&p.report) == 0) {
            const Config *c = p.c;
            good++;
            expect_true(t, c->batch.train_batch_size == c->batch.train_micro_batch_size_per_gpu * c->batch.gradient_accumulation_steps * c->parallel.data, "batch of %s", text);
            expect_equal_i64(t, text, c->parallel.data * c->parallel.sequence * c->parallel.tensor * c->parallel.pipeline, world);
            expect_true(t, c->run.seq_len <= c->model.n_positions && (c->model.n_head == 0 || c->model.n_embd % c->model.n_head == 0), "shape of %s", text);
            expect_round_trip(t, c, world, text);
        } else expect_true(t, report_text(&p.report, all, sizeof all)[0] != 0, "refused without a word: %s", text);
        parsed_free(&p);
        parsed_free(&q);
    }
    expect_true(t, good > 300, "only %d of 3000 random configurations are accepted: the test says little", good);
}

// Makes a locale below `folder`; false where the tool or its sources are missing.
static bool make_locale(const char *folder, const char *name) {
    char path[300], source[32];
    snprintf(path, sizeof path, "%s/%s.UTF-8", folder, name);
    snprintf(source, sizeof source, "%s", name);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr) || !freopen("/dev/null", "w", stdout)) _exit(1);
        execlp("localedef", "localedef", "--no-archive", "-c", "-i", source, "-f", "UTF-8", path, (char *)NULL);
        _exit(1);
    }
    int status = 1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return access(path, R_OK) == 0;
}

static void remove_tree(const char *path) { // of folders and files that a test made
    DIR *folder = opendir(path);
    for (struct dirent *e; folder && (e = readdir(folder));) {
        char inner[1000];
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        snprintf(inner, sizeof inner, "%.600s/%s", path, e->d_name);
        if (e->d_type == DT_DIR) remove_tree(inner);
        else unlink(inner);
    }
    if (folder) closedir(folder);
    rmdir(path);
}

// A value must read the same whatever the language of the user: a decimal comma (German), and an i without its dot (Turkish).
static void test_locale(Test *t) {
    static const char *const names[] = {"de_DE", "tr_TR"};
    const char *text = "{\"gradient_clipping\": 1.5, \"optimizer\": {\"type\": \"LION\", \"params\": {\"lr\": 6e-5, \"betas\": [0.9, 0.95]}}, \"pipeline_schedule\": \"INTERLEAVED\"}";
    Parsed plain = config_of(text, "model.layer_norm_epsilon=1.25e-5", 1);
    expect_near(t, "gradient_clipping", plain.c->gradient_clipping, 1.5, 0);
    expect_equal_i64(t, "optimizer", plain.c->optimizer.type, OPTIMIZER_LION);
    char folder[200];
    const char *tmp = getenv("TMPDIR");
    int tried = 0;
    snprintf(folder, sizeof folder, "%s/test_config.XXXXXX", tmp && tmp[0] ? tmp : "/tmp");
    if (!mkdtemp(folder)) { test_fail(t, "mkdtemp: %s", strerror(errno)); return; }
    setenv("LOCPATH", folder, 1);
    for (int i = 0; i < 2; i++) {
        char name[40], printed[20];
        snprintf(name, sizeof name, "%s.UTF-8", names[i]);
        if (!make_locale(folder, names[i]) || !setlocale(LC_ALL, name)) continue;
        tried++;
        snprintf(printed, sizeof printed, "%.1f", 1.5);
        Parsed p = config_of(text, "model.layer_norm_epsilon=1.25e-5", 1);
        expect_same_bytes(t, name, p.c, plain.c, offsetof(Config, key));
        expect_round_trip(t, p.c, 1, name);
        parsed_free(&p);
        setlocale(LC_ALL, "C");
        expect_equal_text(t, "1.5 in that language", printed, "1,5"); // or the locale proves nothing
    }
    unsetenv("LOCPATH");
    remove_tree(folder);
    parsed_free(&plain);
    if (!tried) test_skip(t, "localedef, or its sources in /usr/share/i18n, are not installed");
}

static void test_hostile(Test *t) {
    Config *c = (Config *)host_alloc(sizeof *c);
    int64_t room = 1 << 20, used = 0;
    char *text = (char *)host_alloc((size_t)room + 200);
    // a megabyte of unknown keys: bounded time, bounded list
    used += snprintf(text, 10, "{");
    for (int i = 0; used < room - 40; i++) used += snprintf(text + used, 40, "%s\"k%d\": %d", i ? "," : "", i, i);
    used += snprintf(text + used, 10, "}");
    ConfigReport report = {};
    double start = clock_seconds();
    config_parse(text, used, "big.json", NULL, 0, 1, false, c, &report);
    double seconds = clock_seconds() - start;
    expect_true(t, seconds < 2, "a megabyte of unknown keys took %.2f s", seconds);
    expect_true(t, report.of[CONFIG_PROBLEM] > 50000 && report.count <= 4 * CONFIG_MESSAGES_MAX, "%" PRId64 " problems, %d kept", report.of[CONFIG_PROBLEM], report.count);
    config_report_free(&report);
    // ten thousand overrides
    const char **list = (const char **)host_alloc(10000 * sizeof *list);
    for (int i = 0; i < 10000; i++) list[i] = i % 3 == 0 ? "a=" : i % 3 == 1 ? "=b" : "no.such.key=1";
    config_parse(NULL, 0, "", list, 10000, 1, false, c, &report);
    expect_equal_i64(t, "problems of 10,000 overrides", report.of[CONFIG_PROBLEM], 10000);
    config_report_free(&report);
    free(list);
    // nothing from a file reaches a terminal unescaped, and formats are no formats
    static const char *const values[] = {"%n%s%s%s%n", "\\u001b]0;x\\u0007", "\\r\\n", "\\u009b31m", "$(touch x)", "`touch x`", "; touch x", "| touch x", "\\u202e"};
    for (size_t v = 0; v < sizeof values / sizeof *values; v++)
        for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
            if (config_keys[i].treatment == TREAT_HEADING || strchr(config_keys[i].path, '*')) continue;
            char nested[1000], quoted[100];
            snprintf(quoted, sizeof quoted, "\"%s\"", values[v]);
            nest(config_keys[i].path, quoted, nested, sizeof nested);
            Parsed p = config_of(nested, "", 1);
            for (int m = 0; m < p.report.count; m++)
                for (const char *s = p.report.message[m].text; *s; s++)
                    if ((unsigned char)*s < 32 || *s == 127 || (*s == '\xc2' && (unsigned char)s[1] < 0xa0)) { test_fail(t, "a control byte in \"%s\"", p.report.message[m].text); break; }
            t->compared += p.report.count;
            parsed_free(&p);
        }
    expect_true(t, access("x", F_OK) != 0, "something was executed");
    // a long value is cut between two characters, not inside one (found by fuzzing)
    for (int length = 100; length < 140; length++) {
        char nested[600] = "{\"optimizer\": {\"type\": \"";
        for (int i = 0; i < length; i++) strcat(nested, i % 3 == 0 ? "x" : i % 3 == 1 ? "\xc3\xa9" : "\xe2\x82\xac");
        strcat(nested, "\"}, \"gradient_clipping\": \"");
        for (int i = 0; i < length / 2; i++) strcat(nested, "\xe2\x82\xac");
        strcat(nested, "\"}");
        Parsed p = config_of(nested, "", 1);
        for (int m = 0; m < p.report.count; m++) expect_true(t, json_utf8_fault(p.report.message[m].text, (int64_t)strlen(p.report.message[m].text)) < 0, "half a character in \"%s\"", p.report.message[m].text);
        parsed_free(&p);
    }
    // long values in every text key
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        const ConfigKey *k = &config_keys[i];
        if (k->type != KEY_TEXT || !k->size) continue;
        for (int64_t length = k->size - 1; length <= k->size; length++) {
            char *value = (char *)host_alloc((size_t)length + 3), *nested = (char *)host_alloc((size_t)length + 600);
            memset(value, 'x', (size_t)length + 2);
            value[0] = value[length + 1] = '"';
            nest(k->path, value, nested, (size_t)length + 600);
            Parsed p = config_of(nested, "", 1);
            bool refused = strstr(report_find(&p.report, CONFIG_PROBLEM, k->path), "is longer than") != NULL;
            expect_equal_i64(t, k->path, refused, length == k->size);
            parsed_free(&p);
            free(nested);
            free(value);
        }
    }
    free(text);
    free(c);
}

// ---------------------------------------------------------------------------------------------------------------
// The command line: config_load in a child

typedef struct {
    const char *arguments; // separated by '|'
    const char *environment; // NAME=value, separated by '|'
    const char *input;       // file that standard input reads
    int rank;
} LoadCase;

static void load_child(void *arg) {
    LoadCase *l = (LoadCase *)arg;
    static char program[] = "train_gpt";
    char *argv[32] = {program}, *save = NULL;
    int argc = 1;
    for (char *one = strtok_r(strdup(l->arguments), "|", &save); one && argc < 31; one = strtok_r(NULL, "|", &save)) argv[argc++] = one;
    static const char *const unset[] = {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "PMI_RANK", "PMIX_RANK", "DEEPSPEED_TIMEOUT"};
    for (size_t i = 0; i < sizeof unset / sizeof *unset; i++) unsetenv(unset[i]);
    for (char *one = strtok_r(strdup(l->environment), "|", &save); one; one = strtok_r(NULL, "|", &save)) putenv(one);
    if (!freopen("/dev/null", "w", stdout) || !freopen(l->input, "r", stdin)) _exit(99);
    message_rank = l->rank;
    Config *c = config_load(argc, argv);
    if (!c) _exit(0);
    for (const Config *w = c; c->plan && w; w = w->next_world)
        fprintf(stderr, "plan world=%" PRId64 " batch=%" PRId64 "%s memory=%g%s; ", w->world, w->batch.train_batch_size, w->batch_follows ? "*" : "", w->device_memory, w->refused ? " refused" : "");
    fprintf(stderr, "loaded world=%" PRId64 " steps=%" PRId64 " timeout=%" PRId64 " local_rank=%" PRId64 " world=%" PRId64 " prompt=%s export=%s load=%s/%s\n", c->world, c->run.steps, c->zero.timeout, c->local_rank, c->world, c->generate ? c->generate_prompt : "-", c->export_dir, c->load_dir, c->load_tag);
}

static void test_command_line(Test *t) {
    char folder[200], good[300], text[DIES_TEXT_BYTES];
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/test_config.XXXXXX", tmp && tmp[0] ? tmp : "/tmp");
    if (!mkdtemp(folder)) { test_fail(t, "mkdtemp: %s", strerror(errno)); return; }
    snprintf(good, sizeof good, "%s/good.json", folder);
    FILE *f = fopen(good, "w");
    fputs("{\"train_batch_size\": 8, \"train_gpt\": {\"run\": {\"steps\": 5}}}\n", f);
    fclose(f);
    char huge[300], fifo[300], link[300], empty[300];
    snprintf(huge, sizeof huge, "%s/huge.json", folder);
    snprintf(fifo, sizeof fifo, "%s/fifo", folder);
    snprintf(link, sizeof link, "%s/loop", folder);
    snprintf(empty, sizeof empty, "%s/empty.json", folder);
    f = fopen(huge, "w");
    expect_true(t, f && ftruncate(fileno(f), INT64_C(1) << 30) == 0, "no sparse file");
    if (f) fclose(f);
    f = fopen(empty, "w");
    if (f) fclose(f);
    expect_true(t, mkfifo(fifo, 0600) == 0 && symlink(link, link) == 0, "no fifo or link");
    static const struct { const char *arguments, *environment; int code; const char *says; } row[] = { // @ is the folder
        {"", "", -1, "loaded world=1 steps=1000 timeout=1800 local_rank=0 world=1 prompt=- export= load=/"},
        {"-c|@/good.json", "", -1, "steps=5"},
        {"--config=@/good.json", "", -1, "steps=5"},
        {"--deepspeed_config|@/good.json|run.steps=6", "", -1, "steps=6"},
        {"--deepspeed|@/good.json|--local_rank=3", "", -1, "local_rank=3"},
        {"--deepspeed|-c|@/good.json", "", -1, "note: --deepspeed without a file"},
        {"-c|@/good.json|--generate|Once upon|--load_dir|d|--load_tag|step-5", "", -1, "prompt=Once upon export= load=d/step-5"},
        {"--export=x", "", -1, "export=x"},
        {"-c|base64:eyJ0cmFpbl9ncHQiOnsicnVuIjp7InN0ZXBzIjo5fX19", "", -1, "steps=9"},
        {"-c|base64:!!", "", 2, "is no base64"},
        {"-c|-", "", -1, "steps=5"},
        {"@/good.json", "", 2, "a configuration file is named with -c"},
        {"--run.steps=5", "", 2, "have no dashes"},
        {"-c|@/good.json|--check-config", "", 0, ""},
        {"-c|@/good.json|--check-config|--world|8", "", 0, ""},
        {"-c|@/good.json|--check-config|--world|7", "", 2, "good.json:1: train_batch_size = 8: cannot be divided"},
        {"-c|@/good.json|--world|8", "", 2, "--world belongs to --check-config"},
        {"--help-config", "", 0, ""}, {"--help", "", 0, ""}, {"-h", "", 0, ""}, {"--version", "", 0, ""},
        {"-c|@/good.json|zero_optimization.stage=1", "", -1, "note: command line: zero_optimization.stage = 1: one data-parallel rank"},
        {"-c|@/good.json|zero_optimization.stage=1|--strict", "", 2, "zero_optimization.stage = 1: one data-parallel rank"},
        {"-c|@/none.json", "", 2, "error: @/none.json: No such file or directory; name a configuration"},
        {"-c|@", "", 2, "is a folder, not a file"},
        {"-c|@/fifo", "", 2, "is not a regular file"},
        {"-c|/dev/zero", "", 2, "is not a regular file"},
        {"-c|@/huge.json", "", 2, "1073741824 bytes, more than the limit of 16777216"},
        {"-c|@/loop", "", 2, "is a symbolic link (or a loop of them)"},
        {"-c|@/empty.json", "", 2, "empty.json: the file is empty"},
        {"-c", "", 2, "-c needs a value after it"},
        {"-c|@/good.json|-c|@/empty.json", "", 2, "-c is given twice"},
        {"run.stepz=5", "", 2, "command line: train_gpt.run.stepz = 5: is no key of this section; did you mean \"train_gpt.run.steps\"?"},
        {"run.steps=", "", 2, "has no value after the '='"},
        {"=5", "", 2, "has no key before the '='"},
        {"run.steps=five", "", 2, "command line: train_gpt.run.steps = \"five\": is a string, but this key takes a whole number"},
        {"steps", "", 2, "is neither an option nor an override"},
        {"--no-such-switch", "", 2, "--no-such-switch is no option"},
        {"--plan", "", -1, "plan world=1 batch=4 memory=0; loaded"}, {"--inspect", "", 2, "takes a folder and stands alone"}, {"--inspect-config", "", 2, "train_gpt --inspect-config DIR"},
        {"-c|@/good.json|--plan|run.steps=6", "WORLD_SIZE=2|RANK=0", -1, "plan world=2 batch=8 memory=0; loaded world=2 steps=6"},
        {"-c|@/good.json|--plan|1,2,4|--device-memory|80", "", -1, "plan world=1 batch=8 memory=80; plan world=2 batch=8 memory=80; plan world=4 batch=8 memory=80; "},
        {"-c|@/good.json|--plan=1,3", "", -1, "3 ranks: @/good.json:1: train_batch_size = 8: cannot be divided"},
        {"-c|@/good.json|--plan=1,3", "", -1, "plan world=1 batch=8 memory=0; plan world=3 batch=8 memory=0 refused; "},
        {"-c|@/good.json|--plan|1,3,8|train_micro_batch_size_per_gpu=2", "", -1, "plan world=1 batch=8 memory=0; plan world=3 batch=6* memory=0; plan world=8 batch=16* memory=0; "},
        {"-c|@/good.json|--plan|3", "", 2, "good.json:1: train_batch_size = 8: cannot be divided"},
        {"--plan|1,,2", "", 2, "--plan takes numbers of ranks"}, {"--plan|0", "", 2, "--plan takes"}, {"--plan=", "", 2, "--plan takes"}, {"--plan|1,", "", 2, "--plan takes"}, {"--plan|1000001", "", 2, "--plan takes"},
        {"--plan|--check-config", "", 2, "cannot be in one run"}, {"--plan|--export|x", "", 2, "cannot be in one run"},
        {"--device-memory|80", "", 2, "--device-memory belongs to --plan"}, {"--plan|--device-memory|much", "", 2, "needs a number of GiB"}, {"--plan|--device-memory", "", 2, "needs a number of GiB"},
        {"--host-memory|80", "", 2, "--host-memory belongs to --plan"}, {"--plan|--host-memory|-1", "", 2, "--host-memory needs a number of GiB"}, {"--plan|--host-memory|1e999", "", 2, "--host-memory needs"},
        {"--load_tag|../x", "", 2, "a tag has letters"}, {"--load_tag|-rf", "", 2, "a tag has letters"}, {"--load_tag=", "", 2, "needs a value"}, {"--generate", "", 2, "needs a prompt"}, {"--local_rank=x", "", 2, "needs a number"},
        {"--generate|x|--export|y", "", 2, "cannot be in one run"},
        {"--load_dir|a|--load_dir|b", "", 2, "given twice"},
        {"-c|@/good.json", "OMPI_COMM_WORLD_SIZE=8|WORLD_SIZE=2", -1, "world=8 steps=5"},
        {"-c|@/good.json", "WORLD_SIZE=2|RANK=0", -1, "world=2 steps=5"},
        {"-c|@/good.json", "WORLD_SIZE=3|RANK=0", 2, "train_batch_size = 8: cannot be divided"},
        {"-c|@/good.json", "SLURM_NTASKS=2|PMI_RANK=0", -1, "world=2 steps=5"},
        {"-c|@/good.json", "SLURM_NTASKS=2", -1, "world=1 steps=5"},
        {"-c|@/good.json", "SLURM_NTASKS=3|SLURM_STEP_ID=0|SLURM_STEP_NUM_TASKS=2", -1, "world=2 steps=5"}, // srun without PMI
        {"-c|@/good.json", "SLURM_STEP_NUM_TASKS=2", -1, "world=1 steps=5"},
        {"-c|@/good.json", "WORLD_SIZE=x", -1, "note: the environment variable WORLD_SIZE = \"x\" is no number of ranks; ignored"},
        {"-c|@/good.json", "WORLD_SIZE=1|LOCAL_RANK=2", -1, "local_rank=2"},
        {"-c|@/good.json", "OMPI_COMM_WORLD_LOCAL_RANK=1|LOCAL_RANK=2", 2, "unset one of them"},
        {"-c|@/good.json", "DEEPSPEED_TIMEOUT=2", -1, "timeout=120"},
        {"-c|@/good.json|zero_optimization.timeout=7", "DEEPSPEED_TIMEOUT=2", -1, "timeout=7"},
        {"-c|@/good.json", "DEEPSPEED_TIMEOUT=x", -1, "note: the environment variable DEEPSPEED_TIMEOUT"},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char arguments[1000] = "", says[600] = "", label[200];
        for (const char *s = row[i].arguments; *s; s++) snprintf(arguments + strlen(arguments), 300, *s == '@' ? "%s" : "%.1s", *s == '@' ? folder : s);
        for (const char *s = row[i].says; *s; s++) snprintf(says + strlen(says), 300, *s == '@' ? "%s" : "%.1s", *s == '@' ? folder : s);
        LoadCase l = {arguments, row[i].environment, good, 0};
        int code = run_in_child(load_child, &l, text);
        snprintf(label, sizeof label, "%.100s %.60s", row[i].arguments, row[i].environment);
        expect_equal_i64(t, label, code, row[i].code);
        expect_contains(t, label, text, says);
        if (row[i].code == 2) { // one problem, one line
            char *newline = strchr(text, '\n');
            expect_true(t, newline && newline[1] == 0, "%s: more than one line: %s", label, text);
        }
    }
    // a rank other than 0 that nobody ends meanwhile tells its verdict itself, as one line
    static const char *const alike[] = {"no.such=1", "--no-such-option"};
    for (int i = 0; i < 2; i++) {
        LoadCase alone = {alike[i], "WORLD_SIZE=2|RANK=1", good, 1};
        expect_equal_i64(t, "code on rank 1", run_in_child(load_child, &alone, text), 2);
        char *newline = strchr(text, '\n');
        expect_contains(t, "what rank 1 says", text, "rank 1: ");
        expect_true(t, newline && newline[1] == 0, "rank 1 says more than one line: %s", text);
    }
    unlink(good); unlink(huge); unlink(fifo); unlink(link); unlink(empty);
    expect_true(t, rmdir(folder) == 0, "%s is not empty", folder);
}

static void old_gpu_child(void *arg) {
    Config c = {};
    c.dtype = DTYPE_BF16;
    c.bf16.enabled = true;
    c.precision_is_auto = *(bool *)arg;
    config_fit_device(&c, 70);
    if (c.dtype == DTYPE_FP16 && c.fp16.enabled && !c.bf16.enabled) fprintf(stderr, "fell back\n");
}

static void test_old_gpu(Test *t) {
    char text[DIES_TEXT_BYTES];
    bool open = false;
    expect_dies(t, EXIT_CONFIG, "compute capability 7.0", old_gpu_child, &open);
    open = true;
    expect_equal_i64(t, "auto on an old GPU", run_in_child(old_gpu_child, &open, text), -1);
    expect_contains(t, "auto on an old GPU", text, "fell back");
}

static void wide_model_child(void *arg) {
    Config c = {};
    c.model.n_embd = *(int64_t *)arg;
    config_fit_channels(&c, 12544, c.model.n_embd > 16384);
    fprintf(stderr, "fits\n");
}

static void test_wide_model(Test *t) {
    char text[DIES_TEXT_BYTES];
    int64_t width = 12552;
    expect_dies(t, EXIT_CONFIG, "train_gpt.model.n_embd = 12552: LayerNorm's backward pass takes at most 12544 channels on this GPU", wide_model_child, &width);
    width = 16392;
    expect_dies(t, EXIT_CONFIG, "channels on any GPU; lower n_embd", wide_model_child, &width);
    width = 12544;
    expect_equal_i64(t, "the widest model", run_in_child(wide_model_child, &width, text), -1);
    expect_contains(t, "the widest model", text, "fits");
}

static const TestRow config_tests[] = {
    {"json_grammar", test_json_grammar},
    {"json_tolerance", test_json_tolerance},
    {"json_nodes", test_json_nodes},
    {"json_limits", test_json_limits},
    {"json_numbers", test_json_numbers},
    {"table", test_table},
    {"every_key", test_every_key},
    {"misspelt", test_misspelt},
    {"files", test_files},
    {"cut_files", test_cut_files},
    {"forms", test_forms},
    {"messages", test_config_messages},
    {"combinations", test_combinations},
    {"batch", test_batch_triangle},
    {"values", test_values},
    {"precision", test_precision},
    {"round_trip", test_round_trip},
    {"random", test_random},
    {"locale", test_locale},
    {"hostile", test_hostile},
    {"command_line", test_command_line},
    {"old_gpu", test_old_gpu},
    {"wide_model", test_wide_model},
    {NULL, NULL},
};
