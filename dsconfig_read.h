// dsconfig_read.h - how a node of the JSON text becomes a field: values by type, unknown keys and what may have been meant, the walk.
//
// config_walk visits each node once and asks the table of dsconfig_keys.h what to do with it: store it, translate it from another name,
// note that it does nothing here, or refuse it. A value of the wrong type or outside its range is refused where it stands.
//
// A part of dsconfig.h, which includes it after the table and the report.
#pragma once

// ---------------------------------------------------------------------------------------------------------------
// Values

// A value as the file has it, shortened, for a message.
static const char *config_show_node(const Json *j, int node, char *dst, size_t room) {
    const JsonNode *n = &j->node[node];
    switch (n->type) {
    case JSON_OBJECT: snprintf(dst, room, "{...}"); break;
    case JSON_ARRAY: snprintf(dst, room, "[...]"); break;
    case JSON_STRING:
        text_escape(dst + 1, room - 2, json_text(j, node), (size_t)n->length);
        dst[0] = '"';
        memcpy(dst + strlen(dst), "\"", 2);
        break;
    default: text_escape(dst, room, json_text(j, node), (size_t)n->length);
    }
    return dst;
}

static void config_format_double(char *dst, size_t room, double x) { // the shortest decimal that reads back the same
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0), old = uselocale(c);
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(dst, room, "%.*g", digits, x);
        if (strtod(dst, NULL) == x) break;
    }
    uselocale(old);
    freelocale(c);
}

// Word number `index` of "a=b|c", its first spelling.
static void config_word_at(const char *words, int index, char *dst, size_t room) {
    for (; index > 0 && *words; index--) { words += strcspn(words, "|"); words += *words == '|'; }
    snprintf(dst, room, "%.*s", (int)strcspn(words, "=|"), words);
}

static int config_word_index(const char *words, const char *word) { // in any letter case and spelling; -1 = none of them
    size_t n = strlen(word);
    for (int index = 0; *words; index++) {
        for (;;) {
            size_t length = strcspn(words, "=|"), k = 0;
            while (k < length && k < n && config_lower(words[k]) == config_lower(word[k])) k++;
            if (k == length && k == n) return index;
            words += length;
            if (*words != '=') break;
            words++;
        }
        if (*words == '|') words++;
    }
    return -1;
}

enum { CONFIG_SHOWN_MAX = 6 * CONFIG_PATH_MAX + 16 }; // room for any value as text: a byte of a text may take six as an escape

// The value in force of a row with a field, in a form that config_parse reads back as an override.
static const char *config_show_field(const Config *config, const ConfigKey *k, char *dst, size_t room) {
    const char *p = (const char *)config + k->offset;
    char a[40], b[40];
    size_t used = 0;
    dst[0] = 0;
    switch (k->type) {
    case KEY_BOOL: snprintf(dst, room, "%s", *(const bool *)p ? "true" : "false"); break;
    case KEY_INT: snprintf(dst, room, "%" PRId64, *(const int64_t *)p); break;
    case KEY_FLOAT: config_format_double(dst, room, *(const double *)p); break;
    case KEY_PAIR:
        config_format_double(a, sizeof a, ((const double *)p)[0]);
        config_format_double(b, sizeof b, ((const double *)p)[1]);
        snprintf(dst, room, "[%s, %s]", a, b);
        break;
    case KEY_CHOICE: config_word_at(k->accepts, k->size == 1 ? *(const bool *)p : *(const int32_t *)p, dst, room); break;
    case KEY_WORDS:
        used = (size_t)snprintf(dst, room, "[");
        for (int i = 0; i < 32; i++) {
            if (!(*(const uint32_t *)p >> i & 1)) continue;
            config_word_at(k->accepts, i, a, sizeof a);
            used += (size_t)snprintf(dst + used, room - used, "%s\"%s\"", used > 1 ? ", " : "", a);
        }
        snprintf(dst + used, room - used, "]");
        break;
    case KEY_TEXT: // quotes and backslashes inside are escaped, the rest is what a terminal can show
        dst[used++] = '"';
        for (const char *s = p; *s && used + 8 < room; s++) {
            if (*s == '"' || *s == '\\') dst[used++] = '\\';
            bool c1 = *s == '\xc2' && (unsigned char)s[1] >= 0x80 && (unsigned char)s[1] < 0xa0; // control characters beyond ASCII
            if (c1) s++;
            if (c1 || (unsigned char)*s < 0x20 || *s == 0x7f)
                used += (size_t)snprintf(dst + used, room - used, "\\u%04x", (unsigned)(unsigned char)*s);
            else dst[used++] = *s;
        }
        dst[used++] = '"';
        dst[used] = 0;
        break;
    default: break;
    }
    return dst;
}

static const char *config_type_name(const ConfigKey *k) {
    switch (k->type) {
    case KEY_BOOL: return "true or false";
    case KEY_INT: return "a whole number";
    case KEY_FLOAT: return "a number";
    case KEY_TEXT: return "a text";
    case KEY_CHOICE: return "a word";
    case KEY_PAIR: return "a list of two numbers";
    case KEY_WORDS: return "a list of words";
    case KEY_OBJECT: return "an object {...}";
    default: return "any value";
    }
}

// Whether x is in a range such as "0<..", "0..3" or "0..<1"; `why` gets the rule otherwise.
static bool config_in_range(const char *range, double x, char *why, size_t room) {
    const char *dots = strstr(range, "..");
    if (!dots) return true;
    bool has_low = dots > range, has_high = dots[2] != 0, open_low = has_low && dots[-1] == '<', open_high = dots[2] == '<';
    double low = has_low ? strtod(range, NULL) : 0, high = has_high ? strtod(dots + 2 + open_high, NULL) : 0; // digits only: no locale matters
    bool good = (!has_low || (open_low ? x > low : x >= low)) && (!has_high || (open_high ? x < high : x <= high));
    if (good) return true;
    size_t n = (size_t)snprintf(why, room, "must be");
    if (has_low) n += (size_t)snprintf(why + n, room - n, open_low ? " above %g" : " at least %g", low);
    if (has_high) n += (size_t)snprintf(why + n, room - n, "%s%s%.10g", has_low ? " and" : "", open_high ? " below " : " at most ", high);
    snprintf(why + n, room - n, "; give such a number");
    return false;
}

#define CONFIG_VALUE_MAX CONFIG_PATH_MAX // bytes of the largest field

static bool config_number(const ConfigReader *r, int node, const char **text, const char **remark) { // a number, quoted or not
    const JsonNode *n = &r->json->node[node];
    *text = json_text(r->json, node);
    if (n->type == JSON_STRING && json_number_valid(*text, n->length)) { *remark = "a number in quotes"; return true; }
    return n->type == JSON_NUMBER;
}

// Reads a node as row k wants it into value[], in the form of the field. False with a reason in why. `remark` is set when the form
// was tolerated only.
static bool config_convert(const ConfigReader *r, const ConfigKey *k, int node, char *value, char *why, size_t room, const char **remark) {
    const Json *j = r->json;
    const JsonNode *n = &j->node[node];
    const char *text = json_text(j, node);
    char words[200];
    if (n->type == JSON_ARRAY && (k->flags & LIST1)) {
        if (n->count != 1) {
            snprintf(why, room, "is a list of %d numbers; there is one group of weights here: give one number", n->count);
            return false;
        }
        node = n->first;
        n = &j->node[node];
    }
    switch (k->type) {
    case KEY_BOOL: {
        bool yes = n->type == JSON_STRING && config_same_word(text, "true"), no = n->type == JSON_STRING && config_same_word(text, "false");
        int64_t number = -1;
        bool whole = n->type == JSON_NUMBER && json_to_i64(text, n->length, &number) == JSON_WHOLE;
        if (whole && (number == 0 || number == 1)) { yes = number == 1; no = !yes; }
        if (n->type != JSON_BOOL && !yes && !no) break;
        if (n->type != JSON_BOOL) *remark = n->type == JSON_STRING ? "a boolean in quotes" : "a number as a boolean";
        *(bool *)value = n->type == JSON_BOOL ? n->truth : yes;
        return true;
    }
    case KEY_INT: {
        int64_t whole;
        if (!config_number(r, node, &text, remark)) break;
        JsonWhole kind = json_to_i64(text, n->length, &whole);
        double x;
        bool finite = json_to_double(text, &x);
        if (kind == JSON_FRACTION) {
            if (fabs(x) < 1e15) snprintf(why, room, "is not a whole number; give %.0f or %.0f", floor(x), floor(x) + 1);
            else snprintf(why, room, "is not a whole number; give one");
            return false;
        }
        if (kind == JSON_TOO_LARGE || !finite) { snprintf(why, room, "does not fit into 64 bits; give a number below 9.2e18"); return false; }
        *(int64_t *)value = whole;
        return config_in_range(k->accepts, (double)whole, why, room);
    }
    case KEY_FLOAT:
        if (!config_number(r, node, &text, remark)) break;
        if (!json_to_double(text, (double *)value)) { snprintf(why, room, "is not finite as a 64-bit number; give a smaller one"); return false; }
        return config_in_range(k->accepts, *(double *)value, why, room);
    case KEY_PAIR: {
        if (n->type != JSON_ARRAY) break;
        if (n->count != 2) { snprintf(why, room, "is a list of %d; give a list of two numbers", n->count); return false; }
        int element = n->first;
        for (int i = 0; i < 2; i++, element = j->node[element].next) {
            double *x = (double *)value + i;
            if (!config_number(r, element, &text, remark)) {
                snprintf(why, room, "holds %s; give a list of two numbers", json_type_name(j->node[element].type));
                return false;
            }
            if (!json_to_double(text, x)) { snprintf(why, room, "holds a number that is not finite; give a smaller one"); return false; }
            if (!config_in_range(k->accepts, *x, why, room)) return false;
        }
        return true;
    }
    case KEY_TEXT: {
        uint32_t bytes = k->size ? k->size : CONFIG_PATH_MAX;
        if (n->type != JSON_STRING && !(r->command_line && (n->type == JSON_NUMBER || n->type == JSON_BOOL))) break; // there quotes are rare
        if (memchr(text, 0, (size_t)n->length)) { snprintf(why, room, "holds a zero byte; remove it"); return false; }
        if (n->length >= (int32_t)bytes) { snprintf(why, room, "is longer than %u bytes; shorten it", bytes - 1); return false; }
        memset(value, 0, bytes);
        memcpy(value, text, (size_t)n->length);
        return true;
    }
    case KEY_CHOICE: {
        if (n->type != JSON_STRING && !r->command_line) break;
        int index = memchr(text, 0, (size_t)n->length) ? -1 : config_word_index(k->accepts, text);
        if (index < 0) {
            size_t used = 0;
            for (const char *at = k->accepts; *at && used < sizeof words - 32; at += strcspn(at, "|"), at += *at == '|')
                used += (size_t)snprintf(words + used, sizeof words - used, "%s%.*s", used ? ", " : "", (int)strcspn(at, "=|"), at);
            snprintf(why, room, "is not one of the words of this key; give %s%s", strchr(k->accepts, '|') ? "one of " : "", words);
            return false;
        }
        if (k->size == 1) *(bool *)value = index;
        else *(int32_t *)value = index;
        return true;
    }
    case KEY_WORDS:
        if (n->type != JSON_ARRAY) break;
        *(uint32_t *)value = 0;
        for (int element = n->first; element >= 0; element = j->node[element].next) {
            int index = j->node[element].type == JSON_STRING ? config_word_index(k->accepts, json_text(j, element)) : -1;
            if (index < 0) { snprintf(why, room, "holds something else than %s; remove that", k->accepts); return false; }
            *(uint32_t *)value |= 1u << index;
        }
        return true;
    case KEY_OBJECT:
        if (n->type == JSON_OBJECT) return true;
        break;
    case KEY_ANY: return true;
    }
    bool quotes = (k->type == KEY_TEXT || k->type == KEY_CHOICE) && (n->type == JSON_NUMBER || n->type == JSON_BOOL);
    snprintf(why, room, "is %s, but this key takes %s; %s", json_type_name(n->type), config_type_name(k), quotes ? "put it in quotes" : "give that");
    return false;
}

// The value of a row's `initial`, in the form of the field.
static void config_initial(const ConfigKey *k, char *value) {
    char quoted[CONFIG_NAME_MAX], why[128];
    const char *remark = NULL;
    memset(value, 0, k->size ? k->size : sizeof(double));
    if (!k->initial[0]) return;
    snprintf(quoted, sizeof quoted, k->type == KEY_TEXT || k->type == KEY_CHOICE ? "\"%s\"" : "%s", k->initial);
    Json j;
    ConfigReader reader = {};
    reader.json = &j;
    CHECK(json_parse(&j, quoted, (int64_t)strlen(quoted), JSON_STRICT) && config_convert(&reader, k, 0, value, why, sizeof why, &remark),
          "default %s of %s", k->initial, k->path);
    json_free(&j);
}

static void config_set_initial(Config *config, const ConfigKey *k) {
    char value[CONFIG_VALUE_MAX];
    config_initial(k, value);
    memcpy((char *)config + k->offset, value, k->size);
}

static int config_index(const ConfigKey *k) { return (int)(k - config_keys); }

// Whether the user gave the key of this row ("auto" and null do not count).
static bool config_row_given(const Config *config, int row) {
    return config->key[row].origin == ORIGIN_FILE || config->key[row].origin == ORIGIN_COMMAND_LINE;
}

static bool config_given(const Config *config, const char *path) {
    int row = config_find_key(path);
    CHECK(row >= 0, "no row for %s", path);
    return config_row_given(config, row);
}

// Says something about a key that has a field, where the user gave it and with the value in force.
PRINTF_LIKE(4, 5) static void config_say_key(ConfigReader *r, ConfigMessageKind kind, const char *path, const char *format, ...) {
    int i = config_find_key(path);
    CHECK(i >= 0, "no row for %s", path);
    ConfigKeyState *state = &r->config->key[i];
    char value[CONFIG_PATH_MAX + 16], text[1200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const ConfigKey *k = &config_keys[i];
    bool has_value = k->size > 0 && (state->origin != ORIGIN_DEFAULT || k->initial[0]) && !(k->type == KEY_TEXT && !((const char *)r->config)[k->offset]);
    if (kind == CONFIG_PROBLEM) state->refused = true;
    r->report->about[i] = true;
    if (state->alias) path = config_keys[state->alias - 1].path; // as the user knows it
    config_say(r, kind, state->origin == ORIGIN_COMMAND_LINE ? -1 : state->line, path,
               has_value ? config_show_field(r->config, &config_keys[i], value, sizeof value) : "", "%s", text);
}

static void config_derive(ConfigReader *r, const char *path, ConfigOrigin origin) { // notes that config_resolve set the field
    int i = config_find_key(path);
    CHECK(i >= 0, "no row for %s", path);
    ConfigKeyState *state = &r->config->key[i];
    if (state->origin != ORIGIN_AUTO) state->origin = (uint8_t)origin;
}

// ---------------------------------------------------------------------------------------------------------------
// Unknown keys: what may have been meant

#define CONFIG_WORD_MAX 48

// Damerau-Levenshtein distance (insert, delete, replace, swap two neighbours), in its restricted form: no part is edited twice.
static int config_distance(const char *a, const char *b) {
    int row[3][CONFIG_WORD_MAX + 1], n = (int)strlen(a), m = (int)strlen(b);
    if (n > CONFIG_WORD_MAX || m > CONFIG_WORD_MAX) return CONFIG_WORD_MAX;
    for (int j = 0; j <= m; j++) row[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *now = row[i % 3], *last = row[(i + 2) % 3], *before = row[(i + 1) % 3];
        now[0] = i;
        for (int j = 1; j <= m; j++) {
            int best = last[j - 1] + (a[i - 1] != b[j - 1]);
            if (last[j] + 1 < best) best = last[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < best) best = before[j - 2] + 1;
            now[j] = best;
        }
    }
    return row[n % 3][m];
}

// Folds what people mix up: letter case, blanks at the ends, '-' for '_', plural, the stage3_ prefix.
static void config_fold(char *dst, const char *src) {
    while (*src == ' ') src++;
    size_t n = 0;
    for (; *src && n < CONFIG_WORD_MAX; src++) dst[n++] = *src == '-' || *src == ' ' ? '_' : config_lower(*src);
    while (n > 0 && dst[n - 1] == '_') n--;
    if (n > 3 && dst[n - 1] == 's') n--;
    dst[n] = 0;
    if (strncmp(dst, "stage3_", 7) == 0) memmove(dst, dst + 7, strlen(dst + 7) + 1);
}

// Up to three keys that resemble `word` in section `prefix` ("" or "a.b."), as a question; "" if there is none.
static void config_suggest(const char *prefix, const char *word, char *dst, size_t room) {
    const ConfigKey *best[3];
    int score[3], count = 0;
    char folded[CONFIG_WORD_MAX + 1], other[CONFIG_WORD_MAX + 1];
    size_t length = strlen(prefix), word_length = strlen(word);
    int limit = word_length / 3 > 2 ? (int)(word_length / 3) : 2;
    if (limit >= (int)word_length) limit = (int)word_length - 1;
    config_fold(folded, word);
    for (int i = 0; i < CONFIG_KEY_COUNT; i++) {
        const ConfigKey *k = &config_keys[i];
        if (k->treatment == TREAT_HEADING || k->treatment == TREAT_REFUSE || strchr(k->path, '*')) continue;
        const char *dot = strrchr(k->path, '.'), *last = dot ? dot + 1 : k->path;
        bool here = strncmp(k->path, prefix, length) == 0 && k->path + length == last;
        config_fold(other, last);
        int s = 1000;
        if (here && strcmp(folded, other) == 0) s = 0;
        else if (strcmp(last, word) == 0) s = 1;
        else if (here && config_distance(folded, other) <= limit) s = 2 + config_distance(folded, other);
        else if (strcmp(folded, other) == 0) s = 50;
        if (s == 1000) continue;
        int at = count < 3 ? count++ : 3;
        while (at > 0 && s < score[at - 1]) {
            if (at < 3) { best[at] = best[at - 1]; score[at] = score[at - 1]; }
            at--;
        }
        if (at < 3) { best[at] = k; score[at] = s; }
    }
    size_t n = 0;
    dst[0] = 0;
    for (int i = 0; i < count; i++) {
        if (i > 0 && score[i] == 50 && score[0] < 50) break; // much less alike than the first
        n += (size_t)snprintf(dst + n, room - n, "%s\"%s\"", i ? ", " : "did you mean ", best[i]->path);
    }
    if (count) snprintf(dst + n, room - n, "%s", "?");
}

// ---------------------------------------------------------------------------------------------------------------
// The walk over the nodes

static int config_compare_path(const void *a, const void *b) {
    return strcmp((*(const ConfigKey *const *)a)->path, (*(const ConfigKey *const *)b)->path);
}

static const ConfigKey *config_look_up(const ConfigReader *r, const char *path) {
    ConfigKey wanted = {};
    wanted.path = path;
    const ConfigKey *p = &wanted;
    const ConfigKey *const *found = (const ConfigKey *const *)bsearch(&p, r->sorted, CONFIG_KEY_COUNT, sizeof *r->sorted, config_compare_path);
    return found ? *found : NULL;
}

static int config_line(const ConfigReader *r, int node) { return r->command_line ? -1 : r->json->node[node].line; }

// The path of a node as the user wrote it.
static const char *config_node_path(const ConfigReader *r, int node, char *dst, size_t room) {
    int chain[JSON_DEPTH + 1], n = 0;
    for (int i = node; i > 0 && n <= JSON_DEPTH; i = r->json->node[i].parent) chain[n++] = i;
    size_t used = 0;
    dst[0] = 0;
    while (n > 0 && used + 1 < room) {
        int i = chain[--n];
        if (r->json->node[i].key < 0) continue; // an element of a list goes by the name of the list
        if (used) dst[used++] = '.';
        text_escape(dst + used, room - used, json_key(r->json, i), (size_t)r->json->node[i].key_length);
        used += strlen(dst + used);
        if (room - used < 8) break;
    }
    return dst;
}

PRINTF_LIKE(4, 5) static void config_say_node(ConfigReader *r, ConfigMessageKind kind, int node, const char *format, ...) {
    char path[300], value[100], text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    config_say(r, kind, config_line(r, node), config_node_path(r, node, path, sizeof path),
               config_show_node(r->json, node, value, sizeof value), "%s", text);
}

// Counts the visit of a node and reports what is wrong with its form. False: there is no value to be used.
static bool config_visit(ConfigReader *r, int node) {
    const JsonNode *n = &r->json->node[node];
    char text[256];
    r->visits[node]++;
    if (n->twin >= 0) {
        config_say_node(r, CONFIG_PROBLEM, node, "the key is already on line %d; keep one of them", r->json->node[n->twin].line);
        return false;
    }
    if (n->fault) config_say_node(r, CONFIG_PROBLEM, node, "%s", json_fault_text(r->json, node, text, sizeof text));
    if (n->type == JSON_BAD) return false;
    const char *dollar = n->type == JSON_STRING ? strstr(json_text(r->json, node), "${") : NULL;
    if (dollar && strchr(dollar, '}')) {
        config_say_node(r, CONFIG_PROBLEM, node, "looks like a template whose variables were not filled in, and variables of the environment "
                        "are not read; put the value itself here");
        return false;
    }
    if (r->command_line) return true;
    if (n->remark == JSON_REMARK_PYTHON && !r->said_python) {
        r->said_python = true;
        config_say_node(r, CONFIG_NOTICE, node, "Python's spelling; taken as the true, false or null of JSON here and in the rest of the file");
    }
    if (n->remark == JSON_REMARK_QUOTES && !r->said_quotes) {
        r->said_quotes = true;
        config_say_node(r, CONFIG_NOTICE, node, "single quotes; taken as the double quotes of JSON here and in the rest of the file");
    }
    return true;
}

static void config_swallow(ConfigReader *r, int node) { // a node whose contents have no rows
    if (!config_visit(r, node)) { // nothing below is worth a word either
        for (int i = node + 1; i < r->json->count && r->json->node[i].parent >= node; i++) r->visits[i]++;
        return;
    }
    for (int c = r->json->node[node].first; c >= 0; c = r->json->node[c].next) config_swallow(r, c);
}

static bool config_is_comment(const Json *j, int node) { return json_key(j, node)[0] == '_' || strcmp(json_key(j, node), "comment") == 0; }

static bool config_is_on(const Json *j, int node) { // of a switch
    const JsonNode *n = &j->node[node];
    if (n->type == JSON_BOOL) return n->truth;
    if (n->type == JSON_NULL) return false;
    const char *text = json_text(j, node);
    if (n->type == JSON_STRING) return !config_same_word(text, "false") && !config_same_word(text, "auto");
    int64_t number;
    return !(n->type == JSON_NUMBER && json_to_i64(text, n->length, &number) == JSON_WHOLE && number == 0);
}

static int config_any_enabled(const Json *j, int node) { // the first "enabled" below that is on, or -1
    for (int c = j->node[node].first; c >= 0; c = j->node[c].next) {
        if (strcmp(json_key(j, c), "enabled") == 0 && config_is_on(j, c)) return c;
        int found = config_any_enabled(j, c);
        if (found >= 0) return found;
    }
    return -1;
}

// A section that is refused as a whole when it is on.
static void config_feature(ConfigReader *r, const ConfigKey *k, int node) {
    const Json *j = r->json;
    const JsonNode *n = &j->node[node];
    int on = -1; // the node that switches it on
    bool off = n->type == JSON_NULL || (n->type == JSON_BOOL && !n->truth);
    if (off) on = -1;
    else if (n->type != JSON_OBJECT || k->accepts[0] == 0) on = node;
    else if (strcmp(k->accepts, "*") == 0) on = config_any_enabled(j, node);
    else {
        int child = json_find(j, node, k->accepts);
        if (strcmp(k->accepts, "mode") == 0)
            on = child < 0 ? node : strcmp(json_text(j, child), "dense") == 0 && j->node[child].type == JSON_STRING ? -1 : child;
        else if (child >= 0 && config_is_on(j, child)) on = child;
    }
    if (on < 0) config_say_node(r, CONFIG_NOTICE, node, "is off; nothing in it has an effect (%s)", k->text);
    else if (k->flags & NOT_YET) config_say_node(r, CONFIG_UNBUILT, on, "not built yet (%s); remove the section, or switch it off", k->text);
    else
        config_say_node(r, CONFIG_PROBLEM, on, "is not part of this program (%s); remove the section%s", k->text,
                        strcmp(k->accepts, "enabled") == 0 ? ", or set \"enabled\" to false" : "");
    for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
}

// Stores the value of a node in the field of row k. `alias`: the row of the spelling that was used, if it was another.
static void config_store(ConfigReader *r, const ConfigKey *k, const ConfigKey *alias, int node) {
    char value[CONFIG_VALUE_MAX] = {}, why[320];
    const char *remark = NULL;
    ConfigKeyState *state = &r->config->key[config_index(k)];
    const JsonNode *n = &r->json->node[node];
    if (alias && (alias->flags & ZERO_ABSENT) && n->type == JSON_NUMBER && !config_is_on(r->json, node)) return;
    if (!config_convert(r, k, node, value, why, sizeof why, &remark)) {
        state->refused = true;
        config_say_node(r, CONFIG_PROBLEM, node, "%s", why);
        return;
    }
    if (remark && !r->command_line) config_say_node(r, CONFIG_NOTICE, node, "%s; accepted", remark);
    if (k->treatment == TREAT_REFUSE_ON) {
        char inert[CONFIG_VALUE_MAX];
        config_initial(k, inert);
        if (memcmp(value, inert, k->type == KEY_BOOL ? 1 : 8) != 0) config_say_node(r, CONFIG_PROBLEM, node, "%s", k->text);
        else config_say_node(r, CONFIG_NOTICE, node, "has no effect: it is off here in any case");
    }
    if (k->treatment == TREAT_NOTE) config_say_node(r, CONFIG_NOTICE, node, "has no effect: %s", k->text);
    if (!k->size) return;
    char *field = (char *)r->config + k->offset;
    ConfigOrigin origin = r->command_line ? ORIGIN_COMMAND_LINE : ORIGIN_FILE;
    if (state->origin == origin && !r->command_line) { // the same key under another spelling
        if (memcmp(field, value, k->size) != 0)
            config_say_node(r, CONFIG_PROBLEM, node, "differs from the same setting on line %d (%s); keep one of them", state->line, k->path);
        else config_say_node(r, CONFIG_NOTICE, node, "repeats the setting on line %d (%s)", state->line, k->path);
        return;
    }
    if (state->origin == origin) config_say_node(r, CONFIG_INFO, node, "given more than once; the last one counts");
    memcpy(field, value, k->size);
    *state = {(uint8_t)origin, false, (int16_t)(alias ? config_index(alias) + 1 : 0), r->command_line ? 0 : n->line};
    if (alias && (alias->flags & SAY)) config_say_node(r, CONFIG_NOTICE, node, "taken as %s (%s)", k->path, alias->text);
    if (k->flags & (SAY | TELL)) {
        r->report->about[config_index(k)] = true;
        config_say_node(r, k->flags & SAY ? CONFIG_NOTICE : CONFIG_INFO, node, "%s", k->text);
    }
}

static void config_walk(ConfigReader *r, int object, const char *section);

static void config_section(ConfigReader *r, const ConfigKey *k, int node) {
    const Json *j = r->json;
    const JsonNode *n = &j->node[node];
    if (n->type == JSON_BOOL && (k->flags & BOOL_OK)) { // the old form of zero_optimization
        ConfigKeyState *stage = &r->config->key[config_find_key("zero_optimization.stage")];
        r->config->zero.stage = n->truth;
        stage->origin = r->command_line ? ORIGIN_COMMAND_LINE : ORIGIN_FILE;
        stage->alias = (int16_t)(config_index(k) + 1);
        stage->line = r->command_line ? 0 : n->line;
        config_say_node(r, CONFIG_NOTICE, node, "the old form; taken as {\"stage\": %d}", n->truth);
        return;
    }
    if (n->type == JSON_NULL) {
        if (!(k->flags & NULL_OK)) config_say_node(r, CONFIG_NOTICE, node, "null counts as not given");
        return;
    }
    if (n->type != JSON_OBJECT) {
        config_say_node(r, CONFIG_PROBLEM, node, "is %s, but this section is an object; write {...}", json_type_name(n->type));
        for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
        return;
    }
    if (k->flags & SAY) config_say_node(r, CONFIG_NOTICE, node, "taken as %s (%s)", k->path, k->text);
    if (k->accepts[0] && !r->command_line) {
        int on = json_find(j, node, k->accepts);
        if ((on < 0 || !config_is_on(j, on)) && n->count > (on >= 0))
            config_say_node(r, CONFIG_NOTICE, node, "is off; its other keys have no effect (%s)", k->text);
    }
    config_walk(r, node, k->path);
}

// One member of an object. `path` is its key in the words of the table.
static void config_member(ConfigReader *r, int node, const char *path, const char *prefix) {
    const Json *j = r->json;
    const JsonNode *n = &j->node[node];
    const ConfigKey *k = config_look_up(r, path), *alias = NULL;
    char wildcard[260];
    if (!k) {
        snprintf(wildcard, sizeof wildcard, "%s*", prefix);
        k = config_look_up(r, wildcard);
    }
    if (r->foreign && prefix[0] == 0 && (!k || (k->treatment == TREAT_REFUSE && strchr(k->path, '-')))) { // already said for all of them
        config_swallow(r, node);
        return;
    }
    if (!k) {
        char help[600] = "";
        if (r->suggestions_left-- > 0) config_suggest(prefix, json_key(j, node), help, sizeof help);
        config_say_node(r, CONFIG_PROBLEM, node, "is no key%s; %s", prefix[0] ? " of this section" : "",
                        help[0] ? help : "remove it (--help-config lists all keys)");
        config_swallow(r, node);
        return;
    }
    if (k->treatment == TREAT_REFUSE) {
        config_say_node(r, CONFIG_PROBLEM, node, "%s", k->text);
        config_swallow(r, node);
        return;
    }
    if (!config_visit(r, node)) {
        for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
        if (k->size) r->config->key[config_index(k)].refused = true;
        return;
    }
    if (k->flags & V19) r->report->about[config_index(k)] = true;
    if ((k->flags & V19) && !r->said_version) {
        r->said_version = true;
        config_say_node(r, CONFIG_INFO, node, "a key of DeepSpeed 0.19, which older versions do not know");
    }
    if (k->treatment == TREAT_ALIAS) {
        const char *dot = strrchr(k->accepts, '.');
        int both = (k->flags & EXCLUSIVE) ? json_find(j, n->parent, dot ? dot + 1 : k->accepts) : -1;
        if (both >= 0) {
            config_say_node(r, CONFIG_PROBLEM, node, "is another spelling of %s on line %d; keep one of them", k->accepts, j->node[both].line);
            for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
            return;
        }
        alias = k;
        k = config_look_up(r, k->accepts);
        CHECK(k, "alias %s has no target", alias->path);
    }
    int flags = k->flags | (alias ? alias->flags : 0);
    if (k->treatment == TREAT_FEATURE) config_feature(r, k, node);
    else if (k->treatment == TREAT_SECTION) {
        if (alias && (alias->flags & SAY)) config_say_node(r, CONFIG_NOTICE, node, "taken as %s (%s)", k->path, alias->text);
        config_section(r, k, node);
    } else if (n->type == JSON_NULL || ((flags & FALSE_OK) && n->type == JSON_BOOL && !n->truth)) {
        if (r->command_line && k->size) { // takes back what the file says
            config_set_initial(r->config, k);
            r->config->key[config_index(k)] = {};
        }
        if (!(flags & NULL_OK)) config_say_node(r, CONFIG_NOTICE, node, "null counts as not given");
        else if (k->treatment == TREAT_NOTE) config_say_node(r, CONFIG_NOTICE, node, "has no effect: %s", k->text);
    } else if (n->type == JSON_STRING && strcmp(json_text(j, node), "auto") == 0 && k->type != KEY_ANY && !(flags & WORD_AUTO)) {
        if (!(flags & AUTO)) {
            config_say_node(r, CONFIG_PROBLEM, node, "\"auto\" has no meaning for this key; give a value, or remove the key");
            r->config->key[config_index(k)].refused = true;
        } else if (k->treatment == TREAT_NOTE) config_say_node(r, CONFIG_NOTICE, node, "has no effect: %s", k->text);
        else if (k->size && !(alias && r->config->key[config_index(k)].origin == ORIGIN_FILE)) {
            config_set_initial(r->config, k);
            r->config->key[config_index(k)] = {ORIGIN_AUTO, false, 0, r->command_line ? 0 : n->line};
        }
    } else if (k->treatment == TREAT_NOTE && k->type == KEY_ANY) {
        int enabled = json_find(j, node, "enabled");
        char place[100];
        bool off = enabled >= 0 && !config_is_on(j, enabled);
        const char *said = off ? "it is off" : k->text;
        if (flags & SECRET)
            config_say(r, CONFIG_NOTICE, config_line(r, node), config_node_path(r, node, place, sizeof place), "", "has no effect: %s", said);
        else config_say_node(r, CONFIG_NOTICE, node, "has no effect: %s", said);
        for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
        return;
    } else config_store(r, k, alias, node);
    if (k->treatment != TREAT_SECTION && k->treatment != TREAT_FEATURE) for (int c = n->first; c >= 0; c = j->node[c].next) config_swallow(r, c);
}

static void config_walk(ConfigReader *r, int object, const char *section) {
    const Json *j = r->json;
    char prefix[256], path[256];
    snprintf(prefix, sizeof prefix, "%s%s", section, section[0] ? "." : "");
    for (int c = j->node[object].first; c >= 0; c = j->node[c].next) {
        const JsonNode *n = &j->node[c];
        if (config_is_comment(j, c)) {
            r->visits[c]++;
            for (int i = c + 1; i < j->count && j->node[i].parent >= c; i++) r->visits[i]++;
            continue;
        }
        if (n->key_length == 0) {
            config_say_node(r, CONFIG_PROBLEM, c, "an empty name is no key; remove it");
            config_swallow(r, c);
            continue;
        }
        int length = snprintf(path, sizeof path, "%s%.*s", prefix, n->key_length, json_key(j, c));
        bool plain = strlen(json_key(j, c)) == (size_t)n->key_length && !strpbrk(json_key(j, c), ".*"); // else it could pass for a path
        config_member(r, c, plain && length < (int)sizeof path ? path : "?", prefix);
    }
}
