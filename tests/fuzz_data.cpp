// fuzz_data.cpp - libFuzzer target: headers of token shards and tokenizer files are read from any bytes without a fault.
//
//   clang++ -std=gnu++17 -g -O1 -fsanitize=fuzzer,address,undefined tests/fuzz_data.cpp -o /tmp/fuzz_data && /tmp/fuzz_data -max_total_time=60
//
// What is accepted must also be consistent: a shard's tokens fill its file; a tokenizer's tokens decode to their strings, and a
// text that it encodes decodes to itself.
#include "../runtime/dataloader.h"
#include "../runtime/tokenizer.h"

static void fuzz_header(const uint8_t *data, size_t size) {
    if (size < DATA_HEADER_BYTES) return;
    char path[] = "fuzz.bin", why[DATA_WHY_BYTES];
    Shard shard = {path, 0, 0, 0, 0, 0};
    int32_t count;
    memcpy(&count, data + 8, 4);
    const int64_t sizes[] = {(int64_t)size, DATA_HEADER_BYTES + 2 * (int64_t)count, DATA_HEADER_BYTES + 4 * (int64_t)count};
    for (int i = 0; i < 3; i++) {
        if (sizes[i] < DATA_HEADER_BYTES || !data_header_read(&shard, data, sizes[i], 50304, why)) continue;
        CHECK(shard.n_tokens > 0 && shard.body_bytes + shard.n_tokens * shard.token_bytes == sizes[i], "%" PRId64 " tokens of %d bytes in %" PRId64, shard.n_tokens, shard.token_bytes, sizes[i]);
        if (i == 0) { // the body is there
            int64_t n = min_i64(shard.n_tokens, 4096);
            int32_t token[4096];
            int64_t good = data_widen(token, data + shard.body_bytes, n, shard.token_bytes, 50304);
            for (int64_t k = 0; k < good; k++) CHECK(token[k] >= 0 && token[k] < 50304, "token %d", token[k]);
        }
    }
}

static void fuzz_tokenizer(const uint8_t *data, size_t size) {
    char why[TOKENIZER_WHY_BYTES];
    int32_t n = 0;
    if (size >= 12) memcpy(&n, data + 8, 4);
    uint8_t *file = (uint8_t *)host_alloc(size);
    memcpy(file, data, size);
    Tokenizer k;
    if (!tokenizer_load(&k, file, (int64_t)size, max_i64(n, 1), why)) return;
    CHECK(k.n_tokens == n, "%" PRId64 " tokens", k.n_tokens);
    TokenText text = {}, again = {};
    for (int32_t token = -1; token <= min_i64(n, 300); token++) tokenizer_decode_append(&k, token, &text);
    int32_t *token = (int32_t *)host_alloc((size_t)text.length * 4);
    int64_t tokens = tokenizer_encode(&k, text.data, min_i64(text.length, 2000), token);
    for (int64_t i = 0; i < tokens; i++) tokenizer_decode_append(&k, token[i], &again);
    if (tokens >= 0) CHECK(again.length == min_i64(text.length, 2000) && memcmp(again.data ? again.data : "", text.data, (size_t)again.length) == 0, "%" PRId64 " bytes became %" PRId64, text.length, again.length);
    free(token);
    free(text.data);
    free(again.data);
    tokenizer_close(&k);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_header(data, size);
    fuzz_tokenizer(data, size);
    return 0;
}
