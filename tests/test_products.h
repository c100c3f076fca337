// test_products.h - tests of runtime/product_cache.h: lines, files, damage, several writers. No GPU takes part: an algorithm is 64 bytes.
#pragma once
#include "../runtime/product_cache.h"
#include "test_data.h"

static void products_key(int64_t key[PRODUCT_KEY], int64_t i) {
    for (int k = 0; k < PRODUCT_KEY; k++) key[k] = k == 0 ? i : 1 << k;
}

static void products_algo(uint64_t algo[PRODUCT_ALGO], uint64_t i) {
    for (int k = 0; k < PRODUCT_ALGO; k++) algo[k] = rng_bits(i, 1, (uint64_t)k);
}

static void products_store(ProductCache *c, int64_t product, uint64_t algorithm) {
    int64_t key[PRODUCT_KEY];
    uint64_t algo[PRODUCT_ALGO];
    products_key(key, product);
    products_algo(algo, algorithm);
    product_cache_store(c, key, algo);
}

// Whether the cache names this algorithm for this product.
static bool products_has(const ProductCache *c, int64_t product, uint64_t algorithm) {
    int64_t key[PRODUCT_KEY];
    uint64_t algo[PRODUCT_ALGO];
    products_key(key, product);
    products_algo(algo, algorithm);
    const uint64_t *found = product_cache_find(c, key);
    return found && memcmp(found, algo, sizeof algo) == 0;
}

static ProductCache *products_open(const char *path, ProductMachine machine) {
    ProductCache *c = (ProductCache *)host_alloc(sizeof *c);
    product_cache_open(c, path, machine);
    return c;
}

static void products_close(ProductCache *c) {
    free(c->line);
    free(c);
}

static const ProductMachine products_here(void) { return product_machine("NVIDIA H200", 13000, 130100); }

// A line is read back as it was written, for extreme numbers as well, and any other byte in it makes it no line.
static void test_products_lines(Test *t) {
    ProductLine l = {products_here(), {}, {}}, got;
    char text[PRODUCT_LINE_MAX], bad[PRODUCT_LINE_MAX];
    products_key(l.key, INT64_MIN);
    l.key[3] = INT64_MAX;
    products_algo(l.algo, 1);
    l.algo[2] = UINT64_MAX;
    l.algo[3] = 0;
    const int length = product_line_write(text, &l);
    expect_true(t, product_line_read(&got, text, (size_t)length) && memcmp(&got, &l, sizeof l) == 0, "a line is not what was written: %s", text);
    for (int i = 0; i < length; i++) {
        for (int change = 1; change < 256; change++) {
            memcpy(bad, text, (size_t)length);
            bad[i] = (char)(bad[i] ^ change);
            expect_true(t, !product_line_read(&got, bad, (size_t)length), "byte %d changed by %d passes", i, change);
        }
        expect_true(t, !product_line_read(&got, text, (size_t)i), "the first %d bytes pass", i);
    }
    memset(l.machine.gpu, 'x', sizeof l.machine.gpu - 1); // the longest line there is
    for (int k = 0; k < PRODUCT_KEY; k++) l.key[k] = INT64_MIN;
    l.machine.driver = l.machine.library = INT64_MIN;
    expect_true(t, product_line_read(&got, text, (size_t)product_line_write(text, &l)) && memcmp(&got, &l, sizeof l) == 0, "the longest line fails");
    expect_equal_text(t, "a hostile name", product_machine("a\nb", 1, 1).gpu, "a\\x0ab");
}

// What was stored is found, by this machine alone, for this product alone, by another process too; another's lines stay.
static void test_products_find(Test *t) {
    TestFolder folder = folder_make();
    char path[1024];
    folder_file(&folder, path, "products");
    ProductCache *a = products_open(path, products_here()), *b = products_open(path, products_here());
    products_store(a, 1, 10);
    products_store(b, 2, 20); // b has not seen the first
    products_store(a, 3, 30);
    products_store(a, 3, 31); // a later search
    ProductCache *c = products_open(path, products_here());
    expect_true(t, products_has(c, 1, 10) && products_has(c, 2, 20) && products_has(c, 3, 31), "stored algorithms are not found");
    expect_equal_i64(t, "lines", c->n, 3);
    int64_t key[PRODUCT_KEY];
    for (int k = 0; k < PRODUCT_KEY; k++) {
        products_key(key, 1);
        key[k] += k == 0 ? 100 : 1;
        expect_true(t, !product_cache_find(c, key), "number %d of the key is not looked at", k);
    }
    const ProductMachine others[] = {product_machine("NVIDIA H100", 13000, 130100), product_machine("NVIDIA H200", 13010, 130100), product_machine("NVIDIA H200", 13000, 130101)};
    for (int i = 0; i < 3; i++) {
        ProductCache *other = products_open(path, others[i]);
        expect_true(t, !products_has(other, 1, 10), "machine %d takes another's algorithm", i);
        products_store(other, 1, 50 + (uint64_t)i);
        expect_true(t, products_has(other, 1, 50 + (uint64_t)i), "machine %d does not find its own", i);
        products_close(other);
    }
    product_cache_read(c);
    expect_equal_i64(t, "lines of all machines", c->n, 6);
    expect_true(t, products_has(c, 1, 10), "another machine's line took the place of ours");
    products_close(a);
    products_close(b);
    products_close(c);
    folder_remove(&folder);
}

// The oldest line makes room for the newest.
static void test_products_limit(Test *t) {
    TestFolder folder = folder_make();
    char path[1024];
    folder_file(&folder, path, "products");
    ProductCache *c = products_open(path, products_here());
    c->line = c->line ? c->line : (ProductLine *)host_alloc(sizeof(ProductLine) * PRODUCT_LINES_MAX);
    for (int i = 0; i < PRODUCT_LINES_MAX; i++) {
        c->line[i].machine = c->machine;
        products_key(c->line[i].key, i);
        products_algo(c->line[i].algo, (uint64_t)i);
    }
    c->n = PRODUCT_LINES_MAX;
    expect_true(t, product_cache_write(c), "%s: %s", path, strerror(errno));
    products_store(c, PRODUCT_LINES_MAX, 7);
    expect_equal_i64(t, "lines", c->n, PRODUCT_LINES_MAX);
    product_cache_read(c);
    expect_equal_i64(t, "lines read", c->n, PRODUCT_LINES_MAX);
    expect_true(t, !products_has(c, 0, 0) && products_has(c, 1, 1) && products_has(c, PRODUCT_LINES_MAX, 7), "the wrong line went");
    products_close(c);
    folder_remove(&folder);
}

typedef struct {
    const char *path;
    int64_t first;
    int n;
} ProductsCase;

static void products_in_child(void *arg) {
    const ProductsCase *x = (const ProductsCase *)arg;
    ProductCache *c = products_open(x->path, products_here());
    for (int i = 0; i < x->n; i++) products_store(c, x->first + i, (uint64_t)(x->first + i));
    fprintf(stderr, "%d lines, product 1 %s, path \"%s\"\n", c->n, products_has(c, 1, 1) ? "found" : "lost", c->path[0] ? "kept" : "given up");
    products_close(c);
}

// Damaged lines are left out with a note that says which, good ones beside them are found, and the next write leaves only good ones.
static void test_products_damage(Test *t) {
    TestFolder folder = folder_make();
    char path[1024], text[DIES_TEXT_BYTES], why[256];
    folder_file(&folder, path, "products");
    ProductCache *c = products_open(path, products_here());
    for (int i = 0; i < 3; i++) products_store(c, i, (uint64_t)i);
    int64_t bytes = 0;
    char *file = file_read_all(path, false, 1 << 20, &bytes, why, sizeof why);
    CHECK(file, "%s: %s", path, why);
    const int64_t line = bytes / 3;
    file[line / 2] ^= 1; // in the first line; the third loses its end
    file_put(path, file, bytes - 5);
    ProductsCase none = {path, 0, 0}, one = {path, 9, 1};
    expect_equal_i64(t, "exit", run_in_child(products_in_child, &none, text), -1);
    expect_contains(t, "the note", text, "2 lines, the first in line 1, damaged or of another program: left out");
    expect_contains(t, "what is left", text, "1 lines, product 1 found");
    run_in_child(products_in_child, &one, text);
    expect_contains(t, "after a write", text, "2 lines, product 1 found");
    run_in_child(products_in_child, &none, text);
    expect_equal_text(t, "no note any more", text, "2 lines, product 1 found, path \"kept\"\n");
    file_put(path, "\x7f" "ELF\0\0\n\n\0", 9); // a file of another kind
    run_in_child(products_in_child, &one, text);
    expect_contains(t, "another file", text, "3 lines, the first in line 1, damaged");
    expect_contains(t, "another file", text, "1 lines, product 1 lost, path \"kept\"");
    file_put(path, "", 0);
    run_in_child(products_in_child, &one, text);
    expect_equal_text(t, "an empty file", text, "1 lines, product 1 lost, path \"kept\"\n");
    free(file);
    products_close(c);
    folder_remove(&folder);
}

// Where nothing can be written the run goes on, after one note.
static void test_products_unwritable(Test *t) {
    TestFolder folder = folder_make();
    char file[1024], path[2048], text[DIES_TEXT_BYTES];
    file_put(folder_file(&folder, file, "file"), "x", 1);
    snprintf(path, sizeof path, "%s/below/products", file); // a file where a folder should be
    ProductsCase x = {path, 1, 3};
    expect_equal_i64(t, "exit", run_in_child(products_in_child, &x, text), -1);
    expect_contains(t, "the note", text, "cannot be written: Not a directory");
    expect_contains(t, "the end", text, "product 1 found, path \"given up\"");
    const char *first = strstr(text, "note:");
    expect_true(t, first && !strstr(first + 1, "note:"), "more than one note: %s", text);
    ProductsCase folder_itself = {folder.path, 1, 1};
    expect_equal_i64(t, "exit", run_in_child(products_in_child, &folder_itself, text), -1);
    expect_contains(t, "a folder in place of the file", text, "is a folder, not a file");
    expect_contains(t, "a folder in place of the file", text, "given up");
    ProductsCase nowhere = {"", 1, 1};
    run_in_child(products_in_child, &nowhere, text);
    expect_equal_text(t, "no file", text, "0 lines, product 1 lost, path \"given up\"\n");
    folder_remove(&folder);
}

// Four writers at once: whoever reads meanwhile sees good lines only, the last state is complete, and no temporary file stays.
static void test_products_writers(Test *t) {
    enum { WRITERS = 4, EACH = 40 };
    TestFolder folder = folder_make();
    char path[1024], why[256];
    folder_file(&folder, path, "products");
    pid_t child[WRITERS];
    for (int w = 0; w < WRITERS; w++) {
        child[w] = fork();
        CHECK(child[w] >= 0, "fork: %s", strerror(errno));
        if (child[w] > 0) continue;
        alarm(DIES_SECONDS);
        ProductCache *c = products_open(path, products_here());
        for (int i = 0; i < EACH; i++) products_store(c, w * EACH + i, (uint64_t)i);
        _exit(c->path[0] && products_has(c, w * EACH + EACH - 1, EACH - 1) ? 0 : 1); // its own last one it has in any case
    }
    int left = WRITERS, ended = 0;
    int64_t most = 0;
    while (left > 0) {
        int status = 0;
        while (left > 0 && waitpid(-1, &status, WNOHANG) > 0) {
            left--;
            ended += WIFEXITED(status) && WEXITSTATUS(status) == 0;
        }
        int64_t bytes = 0, lines = 0;
        char *file = file_read_all(path, false, 1 << 20, &bytes, why, sizeof why);
        if (!file) continue; // nobody has written yet
        for (const char *at = file; at < file + bytes; lines++) {
            const char *newline = (const char *)memchr(at, '\n', (size_t)(file + bytes - at));
            ProductLine l;
            expect_true(t, newline && product_line_read(&l, at, (size_t)(newline + 1 - at)), "line %" PRId64 " is not whole", lines + 1);
            if (!newline) break;
            at = newline + 1;
        }
        most = max_i64(most, lines);
        free(file);
    }
    expect_equal_i64(t, "writers that ended well", ended, WRITERS);
    expect_true(t, most >= EACH && most <= WRITERS * EACH, "%" PRId64 " lines", most);
    glob_t found = {};
    char all[1024];
    glob(folder_file(&folder, all, "*"), GLOB_NOSORT, NULL, &found);
    expect_equal_i64(t, "files", (int64_t)found.gl_pathc, 1);
    globfree(&found);
    folder_remove(&folder);
}

typedef struct {
    const char *setting, *caches, *home, *want;
} ProductsPath;

static void products_path_in_child(void *arg) { // the environment is the child's own
    const ProductsPath *x = (const ProductsPath *)arg;
    char path[64];
    x->caches ? setenv("XDG_CACHE_HOME", x->caches, 1) : unsetenv("XDG_CACHE_HOME");
    x->home ? setenv("HOME", x->home, 1) : unsetenv("HOME");
    fprintf(stderr, "%s", product_cache_path(path, sizeof path, x->setting));
}

static void test_products_path(Test *t) {
    static const ProductsPath cases[] = {
        {"auto", "/c", "/h", "/c/train_gpt/products"}, {"auto", NULL, "/h", "/h/.cache/train_gpt/products"}, {"auto", "", "/h", "/h/.cache/train_gpt/products"},
        {"auto", "relative", "/h", "/h/.cache/train_gpt/products"}, {"auto", NULL, NULL, ""}, {"auto", NULL, "relative", ""}, {"none", "/c", "/h", ""},
        {"a/file", "/c", "/h", "a/file"}, {"", "/c", "/h", ""}, {"auto", NULL, "/a home whose path is longer than the room that is there for it", ""},
    };
    char text[DIES_TEXT_BYTES];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_in_child(products_path_in_child, (void *)&cases[i], text);
        expect_equal_text(t, cases[i].setting, text, cases[i].want);
    }
    // Folders on the way are made.
    TestFolder folder = folder_make();
    char path[1024], name[1024];
    folder_file(&folder, path, "a/b/products");
    ProductsCase x = {path, 1, 1};
    run_in_child(products_in_child, &x, text);
    expect_equal_text(t, "new folders", text, "1 lines, product 1 found, path \"kept\"\n");
    unlink(path);
    rmdir(folder_file(&folder, name, "a/b"));
    folder_remove(&folder);
}

// On a GPU: the product with the search off, with it, and with the algorithm that the file then holds has the same bits; by itself, and with the
// bias and the residual that make it one of our own. The address of the result makes each of them a kind of product of its own, since
// plans are kept for the whole program.
static void products_search(Test *t, bool finish) {
    enum { ROWS = 2048, C = 1024, OC = 3072, ALIGN_C = 11, ALIGN_D = 12 };
    const int64_t n[4] = {ROWS * C, OC * C, OC, ROWS * OC};
    TestFolder folder = folder_make();
    char path[1024];
    folder_file(&folder, path, "products");
    Stream s = stream_create();
    void *operand[4];
    for (int k = 0; k < 4; k++) {
        uint16_t *host = (uint16_t *)host_alloc((size_t)n[k] * 2);
        for (int64_t i = 0; i < n[k]; i++) host[i] = float_to_bf16((float)rng_normal(3, (uint64_t)k, (uint64_t)i));
        operand[k] = device_malloc(n[k] * 2);
        device_copy(operand[k], host, n[k] * 2, COPY_TO_DEVICE, s);
        stream_sync(s);
        free(host);
    }
    const int64_t bytes = ROWS * OC * 2;
    char *out = (char *)device_malloc(bytes + 256), *got[3] = {};
    const int shift[3] = {0, 128, 64};
    struct stat before = {}, after = {};
    ProductCache *c = (ProductCache *)host_alloc(sizeof *c);
    for (int run = 0; run < 3; run++) {
        if (run == 2) { // what the search has found stands for the next kind, too
            product_cache_open(c, path, product_machine("", 0, 0));
            expect_equal_i64(t, "lines after the search", c->n, 1);
            if (c->n != 1) break;
            ProductLine l = c->line[0];
            expect_equal_i64(t, "alignment in the key", l.key[ALIGN_D], 128);
            l.key[ALIGN_D] = 64;
            if (!finish) l.key[ALIGN_C] = 64; // where there is no C it is D's
            c->machine = l.machine;
            product_cache_store(c, l.key, l.algo);
            stat(path, &before);
        }
        matmul_search(run > 0, run > 0 ? path : "");
        linear_forward(tensor2(out + shift[run], DTYPE_BF16, ROWS, OC), tensor2(operand[0], DTYPE_BF16, ROWS, C), tensor2(operand[1], DTYPE_BF16, OC, C),
                       finish ? tensor1(operand[2], DTYPE_BF16, OC) : tensor_none(), finish ? tensor2(operand[3], DTYPE_BF16, ROWS, OC) : tensor_none(), tensor_none(), s);
        got[run] = (char *)host_alloc((size_t)bytes);
        device_copy(got[run], out + shift[run], bytes, COPY_TO_HOST, s);
        stream_sync(s);
        expect_true(t, memcmp(got[run], got[0], (size_t)bytes) == 0, "way %d gives other bits than the search left off", run);
    }
    stat(path, &after);
    expect_true(t, before.st_ino == after.st_ino && before.st_mtim.tv_nsec == after.st_mtim.tv_nsec, "the last was searched for, though the file has it");
    matmul_search(true, "");
    for (int k = 0; k < 4; k++) device_free(operand[k]);
    for (int k = 0; k < 3; k++) free(got[k]);
    device_free(out);
    products_close(c);
    stream_destroy(s);
    folder_remove(&folder);
}

static void test_products_search(Test *t) {
    if (!KERNELS_ON_GPU) { test_skip(t, "the CPU has no algorithms to choose from"); return; }
    products_search(t, false);
    products_search(t, true);
}

static const TestRow product_tests[] = {
    {"lines", test_products_lines}, {"find", test_products_find}, {"limit", test_products_limit}, {"damage", test_products_damage},
    {"unwritable", test_products_unwritable}, {"writers", test_products_writers}, {"path", test_products_path}, {"search", test_products_search},
    {NULL, NULL},
};
