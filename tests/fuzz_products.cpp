// fuzz_products.cpp - libFuzzer target: the file of matrix products' algorithms is read from any bytes without a fault.
//
//   clang++ -std=gnu++17 -g -O1 -fsanitize=fuzzer,address,undefined tests/fuzz_products.cpp -o /tmp/fuzz_products && /tmp/fuzz_products -max_total_time=60
//
// The bytes are read as a line; as what follows a right checksum, since none is hit by chance; and what is accepted must be what is written for it.
#include "../runtime/product_cache.h"

static void fuzz_line(const char *text, size_t length) {
    ProductLine l;
    char again[PRODUCT_LINE_MAX];
    if (product_line_read(&l, text, length)) CHECK((size_t)product_line_write(again, &l) == length && memcmp(again, text, length) == 0, "%zu bytes", length);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char line[PRODUCT_LINE_MAX];
    fuzz_line((const char *)data, size);
    if (size > PRODUCT_LINE_MAX - 32) return 0;
    const int head = snprintf(line, sizeof line, "%d %08x ", PRODUCT_FORMAT, crc32c_extend(0, data, size));
    memcpy(line + head, data, size);
    line[head + (int)size] = '\n';
    fuzz_line(line, (size_t)head + size + 1);
    return 0;
}
