// json.h - reading JSON into a flat array of nodes, each of which knows its line.
//
// Two modes. JSON_STRICT is RFC 8259: files of other programs (Hugging Face configurations, safetensors headers). JSON_TOLERANT
// is for files that people write: it also takes the forms marked "accepted" below, and it does not stop at the forms marked
// "fault", but marks the node, so that the caller can list everything that is wrong with a file at once.
//
//   form                                               strict    tolerant
//   comments  # ...   // ...   /* ... */               error     accepted
//   comma after the last element                       error     accepted
//   UTF-8 byte-order mark at the very start            accepted  accepted
//   'single quotes' for strings and keys               error     accepted, with a remark
//   True False None                                    error     accepted, with a remark
//   unquoted word as a value, ${TEMPLATE}              error     fault
//   .5  5.  +1  01  0x10  1_000                        error     fault
//   NaN  Infinity  inf                                 error     fault
//   unquoted key; '=' for ':'                          error     fault
//
// In both modes: invalid UTF-8 (lone surrogates in \u escapes too), more than JSON_DEPTH nested brackets and strings longer than
// JSON_STRING_MAX bytes are errors; a key that occurs twice in one object is kept and marked (JsonNode.twin), for the caller to
// refuse. Numbers keep their spelling: json_to_i64 and json_to_double read them, in the same way in every locale.
//
// Invariants: node[0] is the root; a child comes after its parent; every text in the pool ends in a zero byte, but may hold
// zero bytes too (\u0000), hence the lengths.
#pragma once
#include "utils.h"
#include <locale.h>

#define JSON_DEPTH 64
#define JSON_STRING_MAX 65536

typedef enum { JSON_STRICT, JSON_TOLERANT } JsonMode;
typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT, JSON_BAD } JsonType; // BAD: see fault
typedef enum {
    JSON_FAULT_NONE, JSON_FAULT_WORD, JSON_FAULT_TEMPLATE, JSON_FAULT_NUMBER, JSON_FAULT_NOT_FINITE, JSON_FAULT_EQUALS, JSON_FAULT_KEY,
} JsonFault;
typedef enum { JSON_REMARK_NONE, JSON_REMARK_PYTHON, JSON_REMARK_QUOTES } JsonRemark;

typedef struct {
    uint8_t type, fault, remark;    // JsonType, JsonFault, JsonRemark
    bool truth;                     // of a JSON_BOOL
    int32_t line;                   // of the key, or of the value where there is none; from 1
    int32_t parent, next, first;    // nodes: the container, the next element in it, the first element of this one; -1 = none
    int32_t count;                  // elements of an array or object
    int32_t key, key_length;        // offset into the pool, decoded; key is -1 outside objects
    int32_t text, length;           // a string's decoded bytes, a number's or bad word's spelling
    int32_t twin;                   // an earlier element of the same object with the same key, or -1
    int32_t begin, end;             // where the value stands in the text that was parsed: bytes [begin, end)
} JsonNode;

typedef struct {
    JsonNode *node;
    int32_t count;
    char *pool;
    int line, column;               // of the error; columns count bytes, from 1
    int64_t offset;                 // of the error, in bytes from the start
    char error[256];                // why json_parse returned false
} Json;

static inline const char *json_key(const Json *j, int n) { return j->node[n].key < 0 ? "" : j->pool + j->node[n].key; }
static inline const char *json_text(const Json *j, int n) { return j->pool + j->node[n].text; }
static inline const char *json_type_name(int type) {
    static const char *const name[] = {"null", "a boolean", "a number", "a string", "a list", "an object", "an unreadable value"};
    return name[type];
}

static inline void json_free(Json *j) {
    free(j->node);
    free(j->pool);
    memset(j, 0, sizeof *j);
}

// The element of an object with this key, or -1. Of twins, the first.
static inline int json_find(const Json *j, int object, const char *key) {
    if (object < 0 || j->node[object].type != JSON_OBJECT) return -1;
    size_t length = strlen(key);
    for (int c = j->node[object].first; c >= 0; c = j->node[c].next)
        if ((size_t)j->node[c].key_length == length && memcmp(json_key(j, c), key, length) == 0) return c;
    return -1;
}

// ---------------------------------------------------------------------------------------------------------------
// Numbers

static inline bool json_is_digit(char c) { return c >= '0' && c <= '9'; }

// Whether s[0..n) is a number by the grammar of JSON.
static inline bool json_number_valid(const char *s, int64_t n) {
    int64_t i = 0, start;
    if (i < n && s[i] == '-') i++;
    if (i < n && s[i] == '0') i++;
    else {
        start = i;
        while (i < n && json_is_digit(s[i])) i++;
        if (i == start) return false;
    }
    if (i < n && s[i] == '.') {
        start = ++i;
        while (i < n && json_is_digit(s[i])) i++;
        if (i == start) return false;
    }
    if (i < n && (s[i] == 'e' || s[i] == 'E')) {
        i++;
        if (i < n && (s[i] == '+' || s[i] == '-')) i++;
        start = i;
        while (i < n && json_is_digit(s[i])) i++;
        if (i == start) return false;
    }
    return i == n;
}

typedef enum { JSON_WHOLE, JSON_FRACTION, JSON_TOO_LARGE } JsonWhole;

// The exact value of a valid number, if it is whole and fits in 64 bits: 5e8, 1.0 and 1.5e1 are whole. Works on the decimal digits,
// so that nothing is rounded on the way.
static inline JsonWhole json_to_i64(const char *s, int64_t n, int64_t *value) {
    bool negative = n > 0 && s[0] == '-';
    int64_t mantissa_end = 0, fraction = 0, exponent = 0, i;
    bool seen_dot = false, nonzero = false;
    for (; mantissa_end < n && s[mantissa_end] != 'e' && s[mantissa_end] != 'E'; mantissa_end++) {
        if (s[mantissa_end] == '.') seen_dot = true;
        else if (seen_dot) fraction++;
        nonzero |= s[mantissa_end] >= '1' && s[mantissa_end] <= '9';
    }
    *value = 0;
    if (!nonzero) return JSON_WHOLE;
    i = mantissa_end + 1;
    bool minus = i < n && s[i] == '-';
    if (i < n && (s[i] == '-' || s[i] == '+')) i++;
    for (; i < n; i++) exponent = min_i64(exponent * 10 + (s[i] - '0'), 1000000);
    exponent = (minus ? -exponent : exponent) - fraction; // value = digits * 10^exponent
    int64_t end = mantissa_end;
    for (; exponent < 0 && end > 0; end--) { // drop zeros at the end of the mantissa instead
        if (s[end - 1] == '.') continue;
        if (s[end - 1] != '0') return JSON_FRACTION;
        exponent++;
    }
    for (i = negative; i < end; i++) {
        if (s[i] == '.') continue;
        int64_t digit = s[i] - '0';
        if (__builtin_mul_overflow(*value, (int64_t)10, value) || __builtin_sub_overflow(*value, digit, value)) return JSON_TOO_LARGE;
    }
    for (; exponent > 0; exponent--) if (__builtin_mul_overflow(*value, (int64_t)10, value)) return JSON_TOO_LARGE;
    if (!negative && __builtin_sub_overflow((int64_t)0, *value, value)) return JSON_TOO_LARGE; // so far it was negated: the range is larger there
    return JSON_WHOLE;
}

// The nearest double of a valid, zero-terminated number; false if that is infinite. Too small a number becomes 0.
static inline bool json_to_double(const char *s, double *value) {
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0); // strtod alone would read a decimal comma in some locales
    CHECK(c != (locale_t)0, "newlocale failed: %s", strerror(errno));
    *value = strtod_l(s, NULL, c);
    freelocale(c);
    return isfinite(*value);
}

// ---------------------------------------------------------------------------------------------------------------
// The parser

typedef struct {
    Json *j;
    const char *text, *at, *end, *line_start;
    int line;
    int32_t node_room;
    int32_t pool_used;
    JsonMode mode;
} JsonParser;

PRINTF_LIKE(2, 3) static inline bool json_fail(JsonParser *p, const char *format, ...) {
    Json *j = p->j;
    if (j->error[0]) return false; // the first one counts
    va_list args;
    va_start(args, format);
    vsnprintf(j->error, sizeof j->error, format, args);
    va_end(args);
    j->line = p->line;
    j->column = (int)(p->at - p->line_start) + 1;
    j->offset = p->at - p->text;
    return false;
}

// What stands at p->at, for a message.
static inline const char *json_here(const JsonParser *p, char room[32]) {
    if (p->at == p->end) return "the end of the text";
    room[0] = '"';
    size_t length = 1;
    while (length < 4 && p->at + length < p->end && ((unsigned char)p->at[length] & 0xc0) == 0x80) length++; // one character
    text_escape(room + 1, 28, p->at, length);
    memcpy(room + strlen(room), "\"", 2);
    return room;
}

// Offset of the first byte that is not part of valid UTF-8 (overlong forms and surrogates are not), or -1.
static inline int64_t json_utf8_fault(const char *text, int64_t length) {
    const unsigned char *s = (const unsigned char *)text;
    for (int64_t i = 0; i < length;) {
        unsigned char c = s[i];
        int n = c < 0x80 ? 1 : (c >= 0xc2 && c <= 0xdf) ? 2 : (c >= 0xe0 && c <= 0xef) ? 3 : (c >= 0xf0 && c <= 0xf4) ? 4 : 0;
        if (n == 0 || n > length - i) return i;
        for (int k = 1; k < n; k++) if ((s[i + k] & 0xc0) != 0x80) return i;
        if ((c == 0xe0 && s[i + 1] < 0xa0) || (c == 0xed && s[i + 1] > 0x9f) || (c == 0xf0 && s[i + 1] < 0x90) || (c == 0xf4 && s[i + 1] > 0x8f))
            return i;
        i += n;
    }
    return -1;
}

static inline bool json_skip_blanks(JsonParser *p) { // and comments, where they are allowed
    while (p->at < p->end) {
        char c = *p->at;
        if (c == '\n') { p->line++; p->line_start = ++p->at; }
        else if (c == ' ' || c == '\t' || c == '\r') p->at++;
        else if (p->mode == JSON_TOLERANT && (c == '#' || (c == '/' && p->end - p->at > 1 && p->at[1] == '/'))) {
            while (p->at < p->end && *p->at != '\n') p->at++;
        } else if (p->mode == JSON_TOLERANT && c == '/' && p->end - p->at > 1 && p->at[1] == '*') {
            int first_line = p->line;
            for (p->at += 2; p->end - p->at < 2 || p->at[0] != '*' || p->at[1] != '/'; p->at++) {
                if (p->end - p->at < 2) return json_fail(p, "the comment that begins on line %d is not closed; end it with */", first_line);
                if (*p->at == '\n') { p->line++; p->line_start = p->at + 1; }
            }
            p->at += 2;
        } else break;
    }
    return true;
}

static inline int32_t json_add_node(JsonParser *p, int32_t parent) {
    Json *j = p->j;
    if (j->count == p->node_room) {
        p->node_room = p->node_room ? p->node_room * 2 : 64;
        j->node = (JsonNode *)realloc(j->node, (size_t)p->node_room * sizeof *j->node);
        if (!j->node) die(EXIT_INTERNAL, "out of host memory while reading JSON with more than %d values", j->count);
    }
    JsonNode *n = &j->node[j->count];
    memset(n, 0, sizeof *n);
    n->line = p->line;
    n->parent = parent;
    n->next = n->first = n->key = n->twin = -1;
    return j->count++;
}

static inline void json_pool_add(JsonParser *p, const char *bytes, int64_t n) {
    memcpy(p->j->pool + p->pool_used, bytes, (size_t)n); // never longer than the source (see json_parse)
    p->pool_used += (int32_t)n;
}

static inline int json_hex4(const char *s) { // value of four hexadecimal digits, or -1
    int v = 0;
    for (int i = 0; i < 4; i++) {
        char c = s[i];
        int d = json_is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    return v;
}

// \uXXXX, or a pair of them for a character beyond 16 bits; p->at is at the backslash.
static inline bool json_unicode_escape(JsonParser *p) {
    int code = p->end - p->at >= 6 ? json_hex4(p->at + 2) : -1;
    if (code < 0) return json_fail(p, "\\u must be followed by four hexadecimal digits");
    if (code >= 0xdc00 && code <= 0xdfff) return json_fail(p, "\\u%04x is the second half of a surrogate pair without its first", (unsigned)code);
    if (code >= 0xd800 && code <= 0xdbff) {
        int low = p->end - p->at >= 12 && p->at[6] == '\\' && p->at[7] == 'u' ? json_hex4(p->at + 8) : -1;
        if (low < 0xdc00 || low > 0xdfff) return json_fail(p, "\\u%04x is the first half of a surrogate pair without its second", (unsigned)code);
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        p->at += 6;
    }
    p->at += 6;
    char out[4];
    int n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const int lead[] = {0, 0, 0xc0, 0xe0, 0xf0}; // marks a character of n bytes
    for (int i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 63));
    out[0] = (char)(lead[n] | code);
    json_pool_add(p, out, n);
    return true;
}

// A quoted string into the pool. p->at is at the opening quote, which also closes it.
static inline bool json_quoted(JsonParser *p, int32_t *text, int32_t *length) {
    char quote = *p->at++;
    const char *start = p->at;
    *text = p->pool_used;
    for (;;) {
        if (p->at == p->end || *p->at == '\n') return json_fail(p, "the string that begins in column %d is not closed", (int)(start - p->line_start));
        if (p->pool_used - *text > JSON_STRING_MAX) return json_fail(p, "a string is longer than the limit of %d bytes", JSON_STRING_MAX);
        char c = *p->at;
        if (c == quote) break;
        if ((unsigned char)c < 0x20) return json_fail(p, "control character \\x%02x inside a string; write it as \\u%04x", (unsigned)c, (unsigned)c);
        if (c != '\\') { json_pool_add(p, p->at++, 1); continue; }
        char escape = p->at + 1 < p->end ? p->at[1] : 0;
        if (escape == 'u') {
            if (!json_unicode_escape(p)) return false;
            continue;
        }
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        const char *found = escape ? strchr(from, escape) : NULL;
        bool own_quote = escape == '\'' && quote == '\'';
        if (!found && !own_quote) {
            char here[32];
            p->at++;
            return json_fail(p, "%s after a backslash is no escape sequence of JSON; a backslash itself is written \\\\", json_here(p, here));
        }
        json_pool_add(p, own_quote ? "'" : &to[found - from], 1);
        p->at += 2;
    }
    p->at++;
    *length = p->pool_used - *text;
    json_pool_add(p, "", 1);
    return true;
}

static inline bool json_word_is(const char *s, int64_t n, const char *word) { // in any letter case
    for (int64_t i = 0; i < n; i++) if (word[i] == 0 || (s[i] >= 'A' && s[i] <= 'Z' ? s[i] + 32 : s[i]) != word[i]) return false;
    return word[n] == 0;
}

static inline bool json_ends_word(const JsonParser *p, const char *at) {
    if (at == p->end || strchr(" \t\r\n,]}", *at)) return true;
    return p->mode == JSON_TOLERANT && (*at == '#' || (*at == '/' && at + 1 < p->end && (at[1] == '/' || at[1] == '*')));
}

// A number, a literal, or in tolerant mode anything else without quotes (marked as bad).
static inline bool json_bare(JsonParser *p, JsonNode *n) {
    const char *s = p->at, *e = s;
    bool brace = p->end - s > 1 && s[0] == '$' && s[1] == '{';
    while (e < p->end && *e != '\n' && (brace || !json_ends_word(p, e))) if (*e++ == '}') brace = false;
    int64_t length = e - s;
    char here[32];
    if (length > JSON_STRING_MAX) return json_fail(p, "a value is longer than the limit of %d bytes", JSON_STRING_MAX);
    if (json_number_valid(s, length)) n->type = JSON_NUMBER;
    else if (length == 4 && memcmp(s, "true", 4) == 0) { n->type = JSON_BOOL; n->truth = true; }
    else if (length == 5 && memcmp(s, "false", 5) == 0) n->type = JSON_BOOL;
    else if (length == 4 && memcmp(s, "null", 4) == 0) n->type = JSON_NULL;
    else if (p->mode == JSON_STRICT || length == 0) return json_fail(p, "expected a value, found %s", json_here(p, here));
    else if (length == 4 && memcmp(s, "True", 4) == 0) { n->type = JSON_BOOL; n->truth = true; n->remark = JSON_REMARK_PYTHON; }
    else if (length == 5 && memcmp(s, "False", 5) == 0) { n->type = JSON_BOOL; n->remark = JSON_REMARK_PYTHON; }
    else if (length == 4 && memcmp(s, "None", 4) == 0) { n->type = JSON_NULL; n->remark = JSON_REMARK_PYTHON; }
    else {
        int64_t sign = *s == '-' || *s == '+';
        n->type = JSON_BAD;
        bool shouting = length > 2; // a name such as CONFIG_MBSIZE
        for (int64_t i = 0; i < length; i++) shouting &= (s[i] >= 'A' && s[i] <= 'Z') || s[i] == '_' || json_is_digit(s[i]);
        const char *word = s + sign;
        int64_t letters = length - sign;
        bool not_finite = json_word_is(word, letters, "nan") || json_word_is(word, letters, "inf") || json_word_is(word, letters, "infinity");
        if (not_finite) n->fault = JSON_FAULT_NOT_FINITE;
        else if (json_is_digit(*s) || sign || *s == '.') n->fault = JSON_FAULT_NUMBER;
        else n->fault = shouting || strchr("$<%@", *s) ? JSON_FAULT_TEMPLATE : JSON_FAULT_WORD;
        if (n->fault == JSON_FAULT_WORD) { // the word may go on after a blank: up to whatever ends an element
            while (e < p->end && !strchr("\n,]}", *e)) e++;
            while (strchr(" \t\r", e[-1])) e--;
            length = min_i64(e - s, JSON_STRING_MAX);
        }
    }
    n->text = p->pool_used;
    n->length = (int32_t)length;
    json_pool_add(p, s, length);
    json_pool_add(p, "", 1);
    p->at = e;
    return true;
}

// A key and its colon, into node n.
static inline bool json_member_key(JsonParser *p, int32_t node) {
    char here[32];
    int32_t key = 0, length = 0;
    JsonNode *n = &p->j->node[node];
    if (*p->at == '"' || (*p->at == '\'' && p->mode == JSON_TOLERANT)) {
        if (*p->at == '\'') n->remark = JSON_REMARK_QUOTES;
        if (!json_quoted(p, &key, &length)) return false;
    } else {
        const char *s = p->at, *e = s;
        while (e < p->end && !strchr(" \t\r\n,:={}[]\"'#", *e)) e++;
        if (p->mode == JSON_TOLERANT && json_is_digit(*s))
            return json_fail(p, "expected a key in quotes, found a number; if it belongs to the number before it, write that without a comma "
                             "inside");
        if (p->mode == JSON_TOLERANT && *s == '{')
            return json_fail(p, "expected a key in quotes, found \"{\"; this looks like a template whose variables were not filled in");
        if (p->mode == JSON_STRICT || e == s || e - s > JSON_STRING_MAX)
            return json_fail(p, "expected a key in quotes, found %s", json_here(p, here));
        n->fault = JSON_FAULT_KEY;
        key = p->pool_used;
        length = (int32_t)(e - s);
        json_pool_add(p, s, length);
        json_pool_add(p, "", 1);
        p->at = e;
    }
    n->key = key;
    n->key_length = length;
    if (!json_skip_blanks(p)) return false;
    bool equals = p->mode == JSON_TOLERANT && p->at < p->end && *p->at == '=';
    if (!equals && (p->at == p->end || *p->at != ':')) return json_fail(p, "expected ':' after the key, found %s", json_here(p, here));
    if (equals) n->fault = JSON_FAULT_EQUALS;
    p->at++;
    return json_skip_blanks(p);
}

static inline bool json_value(JsonParser *p, int32_t node, int depth);

// The elements of an array or object up to its closing bracket; p->at is at the opening one.
static inline bool json_elements(JsonParser *p, int32_t container, int depth) {
    bool object = *p->at == '{', after_comma = false;
    char close = object ? '}' : ']', here[32];
    int32_t last = -1;
    if (depth > JSON_DEPTH) return json_fail(p, "more than %d nested brackets", JSON_DEPTH);
    for (p->at++;;) {
        if (!json_skip_blanks(p)) return false;
        if (p->at == p->end)
            return json_fail(p, "the text ends before the '%c' that closes line %d's '%c'", close, p->j->node[container].line,
                             object ? '{' : '[');
        if (*p->at == close && !(after_comma && p->mode == JSON_STRICT)) break;
        int32_t n = json_add_node(p, container);
        if (object && !json_member_key(p, n)) return false;
        if (!json_value(p, n, depth)) return false;
        if (last < 0) p->j->node[container].first = n;
        else p->j->node[last].next = n;
        last = n;
        p->j->node[container].count++;
        if (!json_skip_blanks(p)) return false;
        after_comma = p->at < p->end && *p->at == ',';
        if (after_comma) p->at++;
        else if (p->at < p->end && *p->at != close) return json_fail(p, "expected ',' or '%c', found %s", close, json_here(p, here));
    }
    p->at++;
    return true;
}

static inline bool json_value_by_kind(JsonParser *p, int32_t node, int depth) {
    char c = p->at < p->end ? *p->at : 0;
    JsonNode *n = &p->j->node[node]; // json_elements may move the nodes: not used after it
    if (c == '{' || c == '[') {
        n->type = c == '{' ? JSON_OBJECT : JSON_ARRAY;
        return json_elements(p, node, depth + 1);
    }
    if (c == '"' || (c == '\'' && p->mode == JSON_TOLERANT)) {
        n->type = JSON_STRING;
        if (c == '\'') n->remark = JSON_REMARK_QUOTES;
        return json_quoted(p, &n->text, &n->length);
    }
    return json_bare(p, n);
}

static inline bool json_value(JsonParser *p, int32_t node, int depth) {
    p->j->node[node].begin = (int32_t)(p->at - p->text);
    bool good = json_value_by_kind(p, node, depth);
    p->j->node[node].end = (int32_t)(p->at - p->text);
    return good;
}

// Marks keys that occur twice in one object, with a hash table of all (object, key) of the text.
static inline void json_mark_twins(Json *j) {
    uint32_t room = 16;
    while (room < 2u * (uint32_t)j->count) room *= 2;
    int32_t *table = (int32_t *)host_alloc(room * sizeof *table); // node + 1; 0 = free
    uint64_t basis = 0xcbf29ce484222325ull ^ (uint64_t)(uintptr_t)table; // unknown to whoever wrote the file: no chosen collisions
    for (int32_t n = 0; n < j->count; n++) {
        if (j->node[n].key < 0) continue;
        const char *key = json_key(j, n);
        uint64_t h = basis;
        for (int32_t i = 0; i < j->node[n].key_length; i++) h = (h ^ (unsigned char)key[i]) * 0x100000001b3ull;
        uint32_t slot = (uint32_t)rng_mix(h ^ (uint64_t)j->node[n].parent << 32) & (room - 1);
        for (; table[slot]; slot = (slot + 1) & (room - 1)) {
            const JsonNode *other = &j->node[table[slot] - 1];
            if (other->parent != j->node[n].parent || other->key_length != j->node[n].key_length) continue;
            if (memcmp(j->pool + other->key, key, (size_t)other->key_length) != 0) continue;
            j->node[n].twin = table[slot] - 1;
            break;
        }
        if (!table[slot]) table[slot] = n + 1;
    }
    free(table);
}

// Reads text[0..length). On success the nodes are in *j (free them with json_free) and true is returned. Otherwise false, with
// j->error, line, column and offset; nothing to free then. The caller bounds the length.
static inline bool json_parse(Json *j, const char *text, int64_t length, JsonMode mode) {
    memset(j, 0, sizeof *j);
    JsonParser p = {j, text, text, text + length, text, 1, 0, 0, mode};
    char here[32];
    if (length > INT32_MAX - 16) return json_fail(&p, "the text has more than 2^31 bytes");
    int64_t bad = json_utf8_fault(text, length);
    if (bad >= 0) {
        for (p.at = text; p.at < text + bad; p.at++) if (*p.at == '\n') { p.line++; p.line_start = p.at + 1; }
        bool utf16 = bad == 0 && length > 1 && ((text[0] == '\xff' && text[1] == '\xfe') || (text[0] == '\xfe' && text[1] == '\xff'));
        return json_fail(&p, utf16 ? "the text is UTF-16; save it as UTF-8" : "byte \\x%02x is not valid UTF-8", (unsigned)(unsigned char)text[bad]);
    }
    if (length >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) { p.at += 3; p.line_start += 3; }
    // A string takes its bytes and a zero for its two quotes; a number or word its bytes and a zero for the delimiter after it.
    j->pool = (char *)host_alloc((size_t)length + 2);
    bool good = json_skip_blanks(&p);
    if (good && p.at == p.end) good = json_fail(&p, "there is nothing in it");
    if (good) good = json_value(&p, json_add_node(&p, -1), 0) && json_skip_blanks(&p);
    if (good && p.at < p.end) good = json_fail(&p, "expected the end of the text, found %s", json_here(&p, here));
    if (good) json_mark_twins(j);
    else {
        free(j->node);
        free(j->pool);
        j->node = NULL;
        j->pool = NULL;
        j->count = 0;
    }
    return good;
}

// Why a node carries a fault, and what to write instead. Returns dst.
static inline const char *json_fault_text(const Json *j, int n, char *dst, size_t room) {
    const JsonNode *node = &j->node[n];
    char shown[80], fixed[64];
    text_escape(shown, sizeof shown, json_text(j, n), node->type == JSON_BAD ? (size_t)node->length : 0);
    switch ((JsonFault)node->fault) {
    case JSON_FAULT_NONE: snprintf(dst, room, "%s", ""); break;
    case JSON_FAULT_WORD: snprintf(dst, room, "a word without quotes; quote this value: \"%s\"", shown); break;
    case JSON_FAULT_TEMPLATE: snprintf(dst, room, "looks like a template whose variables were not filled in; put the value itself here"); break;
    case JSON_FAULT_NOT_FINITE: snprintf(dst, room, "is not a finite number; give a finite one"); break;
    case JSON_FAULT_EQUALS: snprintf(dst, room, "'=' between key and value; use ':'"); break;
    case JSON_FAULT_KEY: snprintf(dst, room, "a key without quotes; write \"key\": value"); break;
    case JSON_FAULT_NUMBER: {
        const char *s = json_text(j, n);
        size_t f = 0;
        bool whole = true; // the correction has room
        if (*s == '-') fixed[f++] = *s;
        if (*s == '-' || *s == '+') s++;
        if (s[0] == '0' && (s[1] == 'x' || s[1] == 'X')) f += (size_t)snprintf(fixed + f, sizeof fixed - f, "%llu", strtoull(s, NULL, 16));
        else {
            while (s[0] == '0' && json_is_digit(s[1])) s++;
            if (*s == '.') fixed[f++] = '0';
            for (; *s && f < sizeof fixed - 1; s++) {
                bool idle_dot = *s == '.' && !json_is_digit(s[1]);
                if (*s != '_' && !idle_dot) fixed[f++] = *s;
            }
            whole = *s == 0;
        }
        fixed[f] = 0;
        if (whole && json_number_valid(fixed, (int64_t)f)) snprintf(dst, room, "is no number of JSON; write %s", fixed);
        else snprintf(dst, room, "is no number; write digits, such as 100, 0.5 or 5e8, or quote it if it is a text");
        break;
    }
    }
    return dst;
}
