// fuzz_rendezvous.cpp - libFuzzer target: everything that the start without MPI reads from a network or from a launcher.
//
//     clang++ -std=gnu++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all tests/fuzz_rendezvous.cpp -o fuzz_rendezvous
//     ./fuzz_rendezvous -max_total_time=60 -max_len=1024 corpus/
//
// The first byte picks what the rest is: a Hello, an Answer, a Frame, a Slurm host list, or what a stranger says to rank 0's
// port, in pieces. The magic numbers are set right in half of the inputs, or no mutation would get past them. What is
// accepted must keep the promises of rendezvous.h: numbers in range, texts terminated and printable.
#include "../runtime/rendezvous.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define PROMISE(cond)                                                                                                  \
    do {                                                                                                               \
        if (!(cond)) { fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #cond); abort(); }                    \
    } while (0)

static void promise_printable(const char *text, size_t room) {
    PROMISE(memchr(text, 0, room));
    for (; *text; text++) PROMISE((unsigned char)*text >= 0x20 && *text != 0x7f);
}

static void promise_hello(const Hello *h) {
    PROMISE(h->world >= 2 && h->world <= LAUNCH_WORLD_MAX && h->rank >= 0 && h->rank < h->world);
    PROMISE(h->local_rank >= -1 && h->local_rank < h->world && h->pid >= 0);
    promise_printable(h->host, sizeof h->host);
}

// Up to `room` bytes of the input, the rest zero.
static void take(void *dst, size_t room, const uint8_t *data, size_t size) {
    memset(dst, 0, room);
    memcpy(dst, data, size < room ? size : room);
}

static void fuzz_hello(const uint8_t *data, size_t size, bool right) {
    unsigned char bytes[sizeof(Hello)];
    Hello h;
    take(bytes, sizeof bytes, data, size);
    if (right) memcpy(bytes, &HELLO_MAGIC, sizeof HELLO_MAGIC);
    if (hello_parse(bytes, &h)) promise_hello(&h);
}

static void fuzz_answer(const uint8_t *data, size_t size, bool right) {
    unsigned char bytes[sizeof(Answer)];
    Answer a;
    take(bytes, sizeof bytes, data, size);
    if (right) memcpy(bytes, &ANSWER_MAGIC, sizeof ANSWER_MAGIC);
    if (!answer_parse(bytes, &a)) return;
    promise_printable(a.text, sizeof a.text);
    PROMISE(a.code >= ANSWER_ACCEPTED && a.code <= ANSWER_REFUSED);
    PROMISE(a.code != ANSWER_REFUSED || (a.exit_code > 0 && a.exit_code < 126));
    PROMISE(a.code != ANSWER_GO || (a.local_rank >= 0 && a.local_rank < a.local_world && a.local_world <= LAUNCH_WORLD_MAX && a.n_hosts > 0));
}

static void fuzz_frame(const uint8_t *data, size_t size, bool right) {
    Frame got, want = {FRAME_MAGIC, FRAME_GATHER, 0x01010101, 1, 8};
    take(&got, sizeof got, data, size);
    if (right) got.magic = FRAME_MAGIC;
    FrameVerdict v = frame_check(&got, &want, 4);
    PROMISE((v == FRAME_EXPECTED) == (memcmp(&got, &want, sizeof got) == 0));
    if (v != FRAME_GARBAGE) PROMISE(got.magic == FRAME_MAGIC && got.rank >= 0 && got.rank < 4 && got.bytes >= 0);
}

static void fuzz_host_list(const uint8_t *data, size_t size) {
    char list[1025], host[16];
    take(list, sizeof list - 1, data, size);
    list[sizeof list - 1] = 0;
    if (!launch_first_host(list, host, sizeof host)) return;
    promise_printable(host, sizeof host);
    PROMISE(host[0] && !strpbrk(host, " ,[]/$\"'\\"));
}

// Rank 0 of four listens to a stranger who says the input in pieces and stays or goes. Ranks of this job that contradict
// rank 0 would end the program, so the job is one that no input names.
static void fuzz_stranger(const uint8_t *data, size_t size, bool right) {
    static Star star;
    static Start s;
    static Peer peer[4];
    static Hello hello[4];
    static bool left[4];
    int ends[2];
    unsigned char bytes[2 * sizeof(Hello)];
    if (size < 1 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) return;
    memset(&s, 0, sizeof s);
    star.world = 4;
    star.peer = peer;
    for (int r = 0; r < 4; r++) peer[r].fd = -1;
    s.star = &star;
    s.hello = hello;
    s.left = left;
    s.n_in = 1;
    size_t piece = 1 + data[0] % 64;
    take(bytes, sizeof bytes, data + 1, size - 1);
    size_t n = size - 1 < sizeof bytes ? size - 1 : sizeof bytes;
    if (right) memcpy(bytes, &HELLO_MAGIC, sizeof HELLO_MAGIC);
    Stranger x;
    memset(&x, 0, sizeof x);
    x.fd = ends[0];
    memcpy(&hello[0].job, "no input", 8);
    Hello said;
    bool names_job = hello_parse(bytes, &said) && said.job == hello[0].job, done = false;
    for (size_t at = 0; at < n && !done && !names_job; at += piece) {
        (void)!send(ends[1], bytes + at, piece < n - at ? piece : n - at, MSG_NOSIGNAL);
        done = start_listen_to(&s, &x);
        PROMISE(done || x.bytes < sizeof x.data);
    }
    close(ends[1]);
    if (!done && !names_job) PROMISE(start_listen_to(&s, &x)); // he left
    if (names_job) close(ends[0]);
    PROMISE(s.n_in == 1 && (names_job || s.n_dropped + s.n_other_jobs == 1));
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return 0;
    bool right = data[0] & 1;
    switch (data[0] / 2 % 5) {
        case 0: fuzz_hello(data + 1, size - 1, right); break;
        case 1: fuzz_answer(data + 1, size - 1, right); break;
        case 2: fuzz_frame(data + 1, size - 1, right); break;
        case 3: fuzz_host_list(data + 1, size - 1); break;
        case 4: fuzz_stranger(data + 1, size - 1, right); break;
    }
    return 0;
}
