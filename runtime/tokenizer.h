// tokenizer.h - between text and tokens, for prompts and samples: bytes, or the strings of a tokenizer file.
//
// Training needs none of this; its data are tokens already. The file is llm.c's (data/prepare.py writes it): 256 int32 of
// header, [0] = 20240328, [1] = version 1 or 2, [2] = number of tokens n, [3] = end-of-text token (version 2), then n
// strings, each a length byte and that many bytes.
//
// Encoding is byte-level BPE (Sennrich et al. 2016; bytes: Radford et al. 2019): the text is cut into words, a word begins as
// bytes, and the adjacent pair that forms the token of lowest number is joined until no pair forms one. The file holds
// no merge rules, and needs none when tokens are numbered in the order of their merges, as in GPT-2's vocabulary and
// its relatives. The words are GPT-2's: for GPT-2's vocabulary the result is exact. For a vocabulary that was made with
// other words (Llama 3) or by another method the tokens may differ from its own tokenizer's, but always decode to the text.
//
// Without a file, a model of up to 256 tokens speaks bytes; a larger one prints token numbers.
#pragma once
#include "unicode.h"

enum {
    TOKENIZER_MAGIC = 20240328,
    TOKENIZER_HEADER_BYTES = 1024,
    TOKENIZER_MAX_BYTES = 1 << 30,  // far beyond 16 M tokens
    TOKENIZER_WHY_BYTES = 512,
};

typedef struct {
    int64_t vocab_size;      // of the model
    int64_t n_tokens;        // with a string: those of the file, or 256 for bytes, or 0
    int32_t end_of_text;     // token between documents, -1 = unknown
    uint8_t *file;           // contents; null for bytes
    uint32_t *offset;        // (n_tokens): offset of the length byte in the file
    int32_t *slot;           // open hash table from strings to tokens, -1 = free
    int64_t n_slots;         // power of two, at least twice n_tokens
    int64_t longest;         // bytes of the longest string
} Tokenizer;

// A growing run of bytes; begins as {NULL, 0, 0}, ends with free(data).
typedef struct {
    char *data;
    int64_t length, room;
} TokenText;

// ---------------------------------------------------------------------------------------------------------------
// Strings of tokens, and tokens of strings

// The bytes of a token; null when it has no string here.
static const uint8_t *tokenizer_string(const Tokenizer *k, int64_t token, int64_t *length) {
    *length = 0;
    if (token < 0 || token >= k->n_tokens || !k->file) return NULL;
    *length = k->file[k->offset[token]];
    return k->file + k->offset[token] + 1;
}

static uint64_t tokenizer_hash(const uint8_t *s, int64_t length) {
    uint64_t h = 0xcbf29ce484222325ull; // FNV-1a, then mixed: its low bits alone are poor
    for (int64_t i = 0; i < length; i++) h = (h ^ s[i]) * 0x100000001b3ull;
    return rng_mix(h);
}

// The token with this string, or -1; the lowest one when several have it. The end-of-text token is never found: a text
// that spells its name does not end a document.
static int32_t tokenizer_find(const Tokenizer *k, const uint8_t *s, int64_t length) {
    if (length > k->longest) return -1;
    for (uint64_t i = tokenizer_hash(s, length);; i++) {
        int32_t token = k->slot[i & (uint64_t)(k->n_slots - 1)];
        if (token < 0) return -1;
        int64_t n;
        const uint8_t *string = tokenizer_string(k, token, &n);
        if (n == length && memcmp(string, s, (size_t)n) == 0) return token;
    }
}

// Takes over `file` (size bytes, on the heap) as a tokenizer; false with a reason, and the file is freed, when it is not one.
static bool tokenizer_load(Tokenizer *k, uint8_t *file, int64_t size, int64_t vocab_size, char *why) {
    int32_t word[4] = {};
    int64_t at = TOKENIZER_HEADER_BYTES, n = 0;
    memset(k, 0, sizeof *k);
    k->vocab_size = vocab_size;
    bool ok = false;
    if (size >= TOKENIZER_HEADER_BYTES) { memcpy(word, file, sizeof word); n = word[2]; }
    if (size < TOKENIZER_HEADER_BYTES) snprintf(why, TOKENIZER_WHY_BYTES, "has %" PRId64 " bytes, fewer than the %d of a tokenizer file's header", size, TOKENIZER_HEADER_BYTES);
    else if (word[0] != TOKENIZER_MAGIC) snprintf(why, TOKENIZER_WHY_BYTES, "first word is %d, but a tokenizer file begins with %d; data/prepare.py writes one beside its shards", word[0], TOKENIZER_MAGIC);
    else if (word[1] != 1 && word[1] != 2) snprintf(why, TOKENIZER_WHY_BYTES, "version %d of the tokenizer format, but only 1 and 2 are known", word[1]);
    else if (n < 1 || n > size - TOKENIZER_HEADER_BYTES) snprintf(why, TOKENIZER_WHY_BYTES, "header counts %" PRId64 " tokens, but %" PRId64 " bytes follow", n, size - TOKENIZER_HEADER_BYTES);
    else if (vocab_size < n || vocab_size > round_up(n, 128)) // a model may pad its vocabulary to a multiple of 128
        snprintf(why, TOKENIZER_WHY_BYTES, "has %" PRId64 " tokens, but the model's vocabulary has %" PRId64 "; use the tokenizer that the data were made with", n, vocab_size);
    else if (word[1] == 2 && (word[3] < -1 || word[3] >= n)) snprintf(why, TOKENIZER_WHY_BYTES, "its end-of-text token is %d of %" PRId64 " tokens", word[3], n);
    else ok = true;
    if (!ok) { free(file); return false; }
    k->file = file;
    k->n_tokens = n;
    k->end_of_text = word[1] == 2 ? word[3] : n == 50257 ? 50256 : -1; // version 1 was written for GPT-2 alone
    k->offset = (uint32_t *)host_alloc((size_t)n * sizeof(uint32_t));
    for (int64_t i = 0; i < n; i++) {
        if (at >= size || file[at] > size - at - 1) {
            snprintf(why, TOKENIZER_WHY_BYTES, "ends at byte %" PRId64 " within token %" PRId64 " of %" PRId64 "; it was cut, make it again", size, i, n);
            free(file); free(k->offset);
            return false;
        }
        k->offset[i] = (uint32_t)at;
        k->longest = max_i64(k->longest, file[at]);
        at += 1 + file[at];
    }
    if (at != size) {
        snprintf(why, TOKENIZER_WHY_BYTES, "has %" PRId64 " bytes behind its last token %" PRId64 "; it is damaged, make it again", size - at, n - 1);
        free(file); free(k->offset);
        return false;
    }
    for (k->n_slots = 4; k->n_slots < 2 * n; k->n_slots *= 2) {}
    k->slot = (int32_t *)host_alloc((size_t)k->n_slots * sizeof(int32_t));
    for (int64_t i = 0; i < k->n_slots; i++) k->slot[i] = -1;
    for (int32_t token = 0; token < n; token++) {
        int64_t length;
        const uint8_t *string = tokenizer_string(k, token, &length);
        if (length == 0 || token == k->end_of_text || tokenizer_find(k, string, length) >= 0) continue;
        uint64_t i = tokenizer_hash(string, length);
        while (k->slot[i & (uint64_t)(k->n_slots - 1)] >= 0) i++;
        k->slot[i & (uint64_t)(k->n_slots - 1)] = token;
    }
    return true;
}

// Opens a tokenizer file, or none when path is "". Dies with EXIT_DATA when the file is no tokenizer of this vocabulary.
static void tokenizer_open(Tokenizer *k, const char *path, int64_t vocab_size) {
    if (path[0] == 0) {
        memset(k, 0, sizeof *k);
        k->vocab_size = vocab_size;
        k->n_tokens = vocab_size <= 256 ? vocab_size : 0;
        k->end_of_text = -1;
        return;
    }
    char shown[1024], why[TOKENIZER_WHY_BYTES];
    int64_t size = 0;
    uint8_t *file = (uint8_t *)file_read_all(path, true, TOKENIZER_MAX_BYTES, &size, why, sizeof why);
    if (!file || !tokenizer_load(k, file, size, vocab_size, why)) die(EXIT_DATA, "train_gpt.data.tokenizer: %s: %s", text_escape(shown, sizeof shown, path, strlen(path)), why);
}

static void tokenizer_close(Tokenizer *k) {
    free(k->file);
    free(k->offset);
    free(k->slot);
    memset(k, 0, sizeof *k);
}

// ---------------------------------------------------------------------------------------------------------------
// Tokens to text

static void token_text_append(TokenText *text, const void *bytes, int64_t n) {
    if (text->length + n > text->room) {
        text->room = max_i64(2 * text->room, text->length + n + 64);
        text->data = (char *)realloc(text->data, (size_t)text->room);
        if (!text->data) die(EXIT_INTERNAL, "out of host memory: %" PRId64 " bytes of text", text->room);
    }
    if (n) memcpy(text->data + text->length, bytes, (size_t)n);
    text->length += n;
}

// Appends what a token stands for: its raw bytes (not always whole characters), or "<|N|>" for a token without a string.
static void tokenizer_decode_append(const Tokenizer *k, int32_t token, TokenText *text) {
    int64_t length;
    const uint8_t *string = tokenizer_string(k, token, &length);
    char number[24];
    uint8_t byte = (uint8_t)token;
    if (string) token_text_append(text, string, length);
    else if (token >= 0 && token < k->n_tokens) token_text_append(text, &byte, 1);
    else token_text_append(text, number, snprintf(number, sizeof number, "<|%d|>", token));
}

// Prints bytes for a terminal: lines and tabs stay, all else passes text_escape. Returns how many bytes were printed: with
// `more` to come, a character whose end is missing is left for the next call, so that samples can be shown token by token.
static int64_t tokenizer_print(FILE *out, const char *text, int64_t length, bool more) {
    int64_t at = 0;
    while (at < length) {
        uint32_t code;
        int64_t n = unicode_decode(text + at, length - at, &code);
        unsigned char c = (unsigned char)text[at];
        int64_t wants = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 1;
        if (more && n == 1 && wants > length - at) {
            bool begins = true; // all that is there continues the character
            for (int64_t i = at + 1; i < length; i++) begins &= ((unsigned char)text[i] & 0xc0) == 0x80;
            if (begins) break;
        }
        char shown[16];
        if (c == '\n' || c == '\t') fputc(c, out);
        else fputs(text_escape(shown, sizeof shown, text + at, (size_t)n), out);
        at += n;
    }
    return at;
}

// ---------------------------------------------------------------------------------------------------------------
// Text to tokens

// Bytes of the word that begins at text[0]: GPT-2's pattern '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// as the steps that its alternatives take.
static int64_t tokenizer_word(const char *text, int64_t length) {
    uint32_t code;
    if (text[0] == '\'' && length > 1) {
        char a = text[1], b = length > 2 ? text[2] : 0;
        if (a == 's' || a == 'd' || a == 'm' || a == 't') return 2;
        if ((a == 'l' && b == 'l') || (a == 'v' && b == 'e') || (a == 'r' && b == 'e')) return 3;
    }
    int64_t at = 0;
    if (text[0] == ' ' && length > 1) { // a word takes one blank in front of it
        unicode_decode(text + 1, length - 1, &code);
        if (unicode_class(code) != UNICODE_SPACE) at = 1;
    }
    int64_t last = at; // where the last character of the run begins
    UnicodeClass run = UNICODE_OTHER;
    for (bool first = true; at < length; first = false) {
        int64_t n = unicode_decode(text + at, length - at, &code);
        UnicodeClass class_here = unicode_class(code);
        if (first) run = class_here;
        if (class_here != run) break;
        last = at;
        at += n;
    }
    if (run == UNICODE_SPACE && at < length && last > 0) return last; // white space leaves its last one to the word behind it
    return at;
}

// BPE of one word into tokens (room for length). Returns the number of tokens, or -1 when a byte has no token.
static int64_t tokenizer_encode_word(const Tokenizer *k, const uint8_t *word, int64_t length, int32_t *tokens) {
    int32_t whole = tokenizer_find(k, word, length);
    if (whole >= 0) { tokens[0] = whole; return 1; }
    // parts[i]: where part i begins; joined[i]: token of parts i and i+1 together, INT32_MAX = none
    int64_t *parts = (int64_t *)host_alloc((size_t)(length + 1) * sizeof(int64_t)), n = length;
    int32_t *joined = (int32_t *)host_alloc((size_t)length * sizeof(int32_t));
    for (int64_t i = 0; i <= length; i++) parts[i] = i;
    for (int64_t i = 0; i + 1 < n; i++) {
        int32_t token = tokenizer_find(k, word + i, 2);
        joined[i] = token < 0 ? INT32_MAX : token;
    }
    while (n > 1) {
        int64_t best = 0;
        for (int64_t i = 1; i + 1 < n; i++) if (joined[i] < joined[best]) best = i;
        if (joined[best] == INT32_MAX) break;
        memmove(parts + best + 1, parts + best + 2, (size_t)(n - best - 1) * sizeof(int64_t));
        memmove(joined + best, joined + best + 1, (size_t)(n - best - 2) * sizeof(int32_t));
        n--;
        for (int64_t i = max_i64(best - 1, 0); i <= best && i + 1 < n; i++) {
            int32_t token = tokenizer_find(k, word + parts[i], parts[i + 2] - parts[i]);
            joined[i] = token < 0 ? INT32_MAX : token;
        }
    }
    bool ok = true;
    for (int64_t i = 0; i < n; i++) {
        tokens[i] = tokenizer_find(k, word + parts[i], parts[i + 1] - parts[i]);
        ok &= tokens[i] >= 0;
    }
    free(parts);
    free(joined);
    return ok ? n : -1;
}

// Cuts a word greedily into the longest tokens, for vocabularies whose characters are not made of byte tokens. Returns the
// number of tokens, or -1 when some place begins no token.
static int64_t tokenizer_encode_longest(const Tokenizer *k, const uint8_t *word, int64_t length, int32_t *tokens) {
    int64_t n = 0;
    for (int64_t at = 0; at < length;) {
        int64_t take = min_i64(length - at, k->longest);
        while (take > 0 && (tokens[n] = tokenizer_find(k, word + at, take)) < 0) take--;
        if (take == 0) return -1;
        at += take;
        n++;
    }
    return n;
}

// Tokens of a text, at most `length` of them (the room of `tokens`). Returns their number, or -1 - offset when the text at
// this offset cannot be said in this vocabulary.
static int64_t tokenizer_encode(const Tokenizer *k, const char *text, int64_t length, int32_t *tokens) {
    if (!k->file) {
        for (int64_t i = 0; i < length; i++) {
            tokens[i] = (unsigned char)text[i];
            if (tokens[i] >= k->n_tokens) return -1 - i;
        }
        return length;
    }
    int64_t n = 0;
    for (int64_t at = 0; at < length;) {
        int64_t bytes = tokenizer_word(text + at, length - at);
        const uint8_t *word = (const uint8_t *)text + at;
        int64_t more = tokenizer_encode_word(k, word, bytes, tokens + n);
        if (more < 0) more = tokenizer_encode_longest(k, word, bytes, tokens + n);
        if (more < 0) return -1 - at;
        n += more;
        at += bytes;
    }
    return n;
}
