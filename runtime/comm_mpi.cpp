// comm_mpi.cpp - comm.h over MPI, for the CPU backend.
//
// A collective starts when it is enqueued (MPI's non-blocking calls) and its result is put in place when the stream's order
// asks for it: by stream_sync, event_sync, stream_wait_event, a kernel or a copy on the same stream, or another collective on
// that stream which touches the same memory. Starting late, at the wait, would deadlock as soon as two groups overlap and
// their ranks wait in different orders.
//
// Sums: MPI only moves pieces; the adding is done here, in the order of the ranks, in fp32, rounded once. Hence results depend
// neither on message sizes nor on which algorithm MPI chooses.
//     reduce-scatter    every rank sends piece r to rank r (all-to-all); rank r adds what it receives
//     all-reduce        small: gather everything everywhere, add. Large: reduce-scatter, then gather the sums
//
// Invariants:
//  1. Every wait goes through collective_wait, which moves all collectives in flight along: the second half of a large
//     all-reduce must start even while its rank waits for something else, because other ranks may be waiting for it.
//  2. Second halves run on a communicator of their own and start there in the order in which they were enqueued, which is the
//     same on all ranks of the group. MPI matches collectives of one communicator by that order alone.
//  3. In DEBUG, between enqueueing and finishing, what will be written reads as NaN, and writing to any argument is noticed:
//     results land in memory of ours first, and what is sent is a copy.
//
// One difference from a GPU remains: stream_wait_event holds up the host here. Ranks that enqueue A, wait for A, enqueue B
// on one side, and B, wait for B, A on the other, would pass on a GPU and stand still here; enqueue both first.
#include "comm.h"
#include "device_cpu.h"
#include "launch.h"
#include "watch.h"
#include <mpi.h>
#include <sched.h>

// The largest count of one MPI call; a test may lower it. Longer pieces travel as one element of a made-up type.
#ifndef COMM_COUNT_MAX
#define COMM_COUNT_MAX INT_MAX
#endif
// All-reduces of up to this many bytes, over all ranks, gather everything everywhere: one exchange instead of two.
enum { SMALL_ALL_REDUCE_BYTES = 256 << 10, CHANNELS_MAX = 64 };

// What MPI reports is the fault of a rank that is gone, or of the network between: there is nothing to repair here. Unless it is the
// call itself, or a size that the ranks differ in: a fault of this program, which no other start mends.
#define MPI_TRY(call) mpi_try(call, #call)
static CommWorld comm_world = {0, 1, 0, 1};
static bool crowded; // this host has more ranks than cores
static double timeout_s = 1800;
// How long a wait looks without a pause: most end within it. Then it sleeps, for others want the cores, too. sched_yield alone does not give
// them one: on Linux 6.18 two ranks that yielded all the time kept every other program waiting for tens of seconds.
static const double SPIN_S = 1e-4;

static bool mpi_misused(int code) {
    int error = code;
    MPI_Error_class(code, &error);
    return error == MPI_ERR_TRUNCATE || error == MPI_ERR_BUFFER || error == MPI_ERR_COUNT || error == MPI_ERR_TYPE || error == MPI_ERR_ARG;
}

static void mpi_try(int code, const char *call) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING], shown[512];
    int length = 0;
    MPI_Error_string(code, text, &length);
    text_escape(shown, sizeof shown, text, (size_t)length);
    if (mpi_misused(code))
        die(EXIT_INTERNAL, "rank %d of %d: %.*s failed: %s; the ranks differ in a size, or the call is wrong: this is a bug in train_gpt, please report it with this line",
            comm_world.rank, comm_world.world, (int)strcspn(call, "("), call, shown);
    die(EXIT_PEER, "rank %d of %d: %.*s failed: %s; another rank is probably gone: its own message says why. Start again from the last checkpoint",
        comm_world.rank, comm_world.world, (int)strcspn(call, "("), call, shown);
}

// ---------------------------------------------------------------------------------------------------------------
// Communicators. Channel 0 is the world's and carries the exchanges between hosts; groups have the others.

typedef struct {
    MPI_Comm comm;         // MPI_COMM_NULL: free
    MPI_Comm second;       // for the second halves of large all-reduces
    int64_t turns, turn;   // second halves enqueued, and started
    int pending;           // collectives that are enqueued and not finished
    Stream stream;         // of the last one
    int watch;             // its number in watch.h, which counts what is entered and done
} Channel;

static Channel channels[CHANNELS_MAX];
static bool mpi_runs;
static int groups_made; // tells apart group creations that are under way at the same time on overlapping ranks

// group: a number that the members alone give
static void channel_open(Channel *c, MPI_Comm comm, uint32_t group) {
    memset(c, 0, sizeof *c);
    c->comm = comm;
    c->watch = watch_channel_open(group, NULL);
    MPI_TRY(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN));
    MPI_TRY(MPI_Comm_dup(comm, &c->second)); // the copy inherits the handler
}

static void channel_close(Channel *c) {
    watch_channel_close(c->watch);
    MPI_TRY(MPI_Comm_free(&c->second));
    MPI_TRY(MPI_Comm_free(&c->comm));
    c->comm = MPI_COMM_NULL;
}

CommWorld comm_start(void) {
    for (int i = 0; i < CHANNELS_MAX; i++) channels[i].comm = MPI_COMM_NULL;
    // Does MPI find its peers? mpirun; Hydra (MPICH, Intel MPI) and srun --mpi=pmi2; srun --mpi=pmix.
    const char *mpi_size = launch_variable("OMPI_COMM_WORLD_SIZE") ? "OMPI_COMM_WORLD_SIZE" : "PMI_SIZE";
    int announced = 1; // read before MPI_Init, which may set such variables itself
    if (!launch_int(mpi_size, 1, LAUNCH_WORLD_MAX, &announced) && !launch_variable("PMI_RANK") && !launch_variable("PMIX_RANK")) {
        const char *other = launch_variable("WORLD_SIZE") ? "WORLD_SIZE" : "SLURM_STEP_NUM_TASKS"; // torchrun and its like; srun
        if (launch_int(other, 1, LAUNCH_WORLD_MAX, &announced) && announced > 1)
            die(EXIT_CONFIG, "%s = %d is set, but ranks on the CPU talk through MPI, and no MPI launcher started this one: use "
                "\"mpirun -n %d ./train_gpt ...\" (under Slurm: srun --mpi=pmix), or unset %s to train with one rank", other, announced, announced, other);
        return comm_world;
    }
    int provided;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS) die(EXIT_PEER, "MPI_Init_thread failed");
    mpi_runs = true;
    MPI_TRY(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    MPI_TRY(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN));
    MPI_TRY(MPI_Comm_rank(MPI_COMM_WORLD, &comm_world.rank));
    MPI_TRY(MPI_Comm_size(MPI_COMM_WORLD, &comm_world.world));
    if (announced > 1 && announced != comm_world.world) { // else each rank would train alone, all into the same folders
        char version[MPI_MAX_LIBRARY_VERSION_STRING], shown[128];
        int length = 0;
        MPI_Get_library_version(version, &length);
        die(EXIT_CONFIG, "the launcher started %d ranks, but MPI sees %d: this mpirun belongs to another MPI than the one that this program "
            "was built with (%s); use the mpirun of that one", announced, comm_world.world, text_escape(shown, sizeof shown, version, strcspn(version, ",\n")));
    }
    MPI_Comm host, world;
    MPI_TRY(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, comm_world.rank, MPI_INFO_NULL, &host));
    MPI_TRY(MPI_Comm_rank(host, &comm_world.local_rank));
    MPI_TRY(MPI_Comm_size(host, &comm_world.local_world));
    crowded = comm_world.local_world > sysconf(_SC_NPROCESSORS_ONLN);
    MPI_TRY(MPI_Comm_free(&host));
    MPI_TRY(MPI_Comm_dup(MPI_COMM_WORLD, &world));
    channel_open(&channels[0], world, 1);
    return comm_world;
}

void comm_finish(void) {
    if (!mpi_runs) return;
    for (int i = 0; i < CHANNELS_MAX; i++) {
        if (channels[i].comm == MPI_COMM_NULL) continue;
        CHECK(channels[i].pending == 0, "%d collectives of channel %d were never waited for", channels[i].pending, i);
        channel_close(&channels[i]);
    }
    MPI_TRY(MPI_Finalize());
    mpi_runs = false;
}

void comm_set_timeout(double seconds) { timeout_s = seconds; }

Group comm_group_create(const int *rank, int n, bool direct) {
    Group g = {n, 0, -1, false}; // a group of one needs no channel
    g.direct = direct && n > 1 && comm_world.local_world == comm_world.world; // as the GPUs of one host are
    const int tag = ++groups_made & 0x7fff;
    for (int i = 0; i < n; i++) {
        CHECK(rank[i] >= 0 && rank[i] < comm_world.world && (i == 0 || rank[i] > rank[i - 1]), "rank %d at place %d of a group", rank[i], i);
        if (rank[i] == comm_world.rank) g.rank = i;
    }
    CHECK(n == 0 || rank[g.rank] == comm_world.rank, "rank %d makes a group that it does not belong to", comm_world.rank);
    if (n <= 1) return g;
    g.channel = 1;
    while (g.channel < CHANNELS_MAX && channels[g.channel].comm != MPI_COMM_NULL) g.channel++;
    CHECK(g.channel < CHANNELS_MAX, "more than %d groups", CHANNELS_MAX - 1);
    MPI_Group world, members;
    MPI_Comm comm;
    MPI_TRY(MPI_Comm_group(MPI_COMM_WORLD, &world));
    MPI_TRY(MPI_Group_incl(world, n, rank, &members));
    MPI_TRY(MPI_Comm_create_group(MPI_COMM_WORLD, members, tag, &comm));
    MPI_TRY(MPI_Group_free(&members));
    MPI_TRY(MPI_Group_free(&world));
    channel_open(&channels[g.channel], comm, (uint32_t)tag << 16 | (uint32_t)rank[0]); // one call may make several groups, with no rank in common
    return g;
}

void comm_group_free(Group *g) {
    if (g->size > 1) {
        CHECK(channels[g->channel].pending == 0, "%d collectives of a group that ends were never waited for", channels[g->channel].pending);
        channel_close(&channels[g->channel]);
    }
    g->size = 0;
}

void *comm_malloc(Group, int64_t bytes) { return device_malloc(bytes); }
void comm_free(Group, void *p) { device_free(p); }

// ---------------------------------------------------------------------------------------------------------------
// Elements and their sums

typedef enum { ELEMENT_FP32 = DTYPE_FP32, ELEMENT_BF16 = DTYPE_BF16, ELEMENT_FP16 = DTYPE_FP16, ELEMENT_DOUBLE } Element;

static int64_t element_bytes(Element e) { return e == ELEMENT_DOUBLE ? 8 : dtype_bytes((DType)e); }

static void floats_from(float *__restrict to, const char *from, Element e, int64_t at, int64_t n) {
    if (e == ELEMENT_FP32) memcpy(to, (const float *)from + at, (size_t)n * 4);
    else if (e == ELEMENT_BF16) for (int64_t i = 0; i < n; i++) to[i] = bf16_to_float(((const uint16_t *)from)[at + i]);
    else for (int64_t i = 0; i < n; i++) to[i] = fp16_to_float(((const uint16_t *)from)[at + i]);
}

static void floats_to(char *to, const float *__restrict from, Element e, int64_t at, int64_t n) {
    if (e == ELEMENT_FP32) memcpy((float *)to + at, from, (size_t)n * 4);
    else if (e == ELEMENT_BF16) for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[at + i] = float_to_bf16(from[i]);
    else for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[at + i] = float_to_fp16(from[i]);
}

static double fold(double a, double b, CommOp op) {
    if (op == COMM_SUM) return a + b;
    if (isnan(a) || isnan(b)) return NAN; // whatever the order of the ranks
    return op == COMM_MAX ? (a > b ? a : b) : (a < b ? a : b);
}

// result[i] = piece of rank 0 [i] + piece of rank 1 [i] + ..., n elements each, one piece after the other.
static void add_pieces(char *result, const char *pieces, int ranks, int64_t n, Element e, CommOp op) {
    if (e == ELEMENT_DOUBLE) {
        const double *x = (const double *)pieces;
        for (int64_t i = 0; i < n; i++) {
            double sum = x[i];
            for (int r = 1; r < ranks; r++) sum = fold(sum, x[r * n + i], op);
            ((double *)result)[i] = sum;
        }
        return;
    }
    enum { BLOCK = 1024 };
    float sum[BLOCK], next[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t m = min_i64(BLOCK, n - at);
        floats_from(sum, pieces, e, at, m);
        for (int r = 1; r < ranks; r++) {
            floats_from(next, pieces, e, r * n + at, m);
            for (int64_t i = 0; i < m; i++) sum[i] += next[i];
        }
        floats_to(result, sum, e, at, m);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// A collective from its start to its end

typedef enum { KIND_ALL_GATHER, KIND_REDUCE_SCATTER, KIND_ALL_TO_ALL, KIND_ALL_REDUCE, KIND_BROADCAST, KIND_SEND, KIND_RECEIVE } Kind;

typedef struct Collective {
    DeviceWork work;          // first: streams hold this
    Kind kind;
    Group group;
    Element element;
    CommOp op;
    int root;                 // of a broadcast; of a send or receive, the other rank
    char *target;             // where the result belongs
    int64_t target_bytes;     // 0 if this rank gets none
    const char *source;       // what this rank gives
    int64_t source_bytes;     // 0 if nothing
    int64_t n, bytes;         // elements and bytes of a piece: what MPI moves from one rank to another
    char *sent, *received;    // what MPI reads and writes: source and target themselves, or memory of ours
    char *own[2];             // memory of ours
    char *image[2];           // DEBUG: what source and target look like until the end
    bool adds;                // what was received is a piece of each rank; their sum is the result
    bool two_halves;          // an all-reduce whose gather has not started
    int64_t turn;             // of its gather on the second communicator
    MPI_Request request;
    MPI_Datatype type;        // of a piece that is too long for a count
    bool arrived;             // MPI is done
    struct Collective *next;  // in flight
    uint64_t watched;         // its number on the watch's channel
} Collective;

static Collective *in_flight; // started and not arrived, oldest first

static const char *kind_name(Kind k) {
    static const char *const name[] = {"all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send", "receive"};
    return name[k];
}

static WatchOp watch_op(Kind k) {
    static const WatchOp op[] = {WATCH_ALL_GATHER, WATCH_REDUCE_SCATTER, WATCH_ALL_TO_ALL, WATCH_ALL_REDUCE, WATCH_BROADCAST, WATCH_SEND, WATCH_RECEIVE};
    return op[k];
}

static char *own_memory(Collective *c, int64_t bytes) { // contents undefined: zeroing it would take as long as the exchange
    char **place = &c->own[c->own[0] != NULL];
    *place = (char *)malloc((size_t)bytes);
    if (!*place)
        die(EXIT_INTERNAL, "out of host memory: %" PRId64 " bytes asked for by %s; lower the bucket sizes of zero_optimization, or the model",
            bytes, kind_name(c->kind));
    return *place;
}

// How MPI is told of a piece: so many elements of *type.
static int piece_count(Collective *c, MPI_Datatype *type) {
    *type = MPI_BYTE;
    if (c->bytes <= COMM_COUNT_MAX) return (int)c->bytes;
    if (c->type == MPI_DATATYPE_NULL) { // `parts` parts and a rest
        const int64_t part = COMM_COUNT_MAX / 2, parts = c->bytes / part;
        const int lengths[2] = {1, (int)(c->bytes % part)};
        const MPI_Aint places[2] = {0, (MPI_Aint)(parts * part)};
        MPI_Datatype one, types[2] = {MPI_DATATYPE_NULL, MPI_BYTE};
        CHECK(parts <= INT_MAX, "a piece of %" PRId64 " bytes", c->bytes);
        MPI_TRY(MPI_Type_contiguous((int)part, MPI_BYTE, &one));
        MPI_TRY(MPI_Type_contiguous((int)parts, one, &types[0]));
        MPI_TRY(MPI_Type_create_struct(2, lengths, places, types, &c->type));
        MPI_TRY(MPI_Type_commit(&c->type));
        MPI_TRY(MPI_Type_free(&types[0]));
        MPI_TRY(MPI_Type_free(&one));
    }
    *type = c->type;
    return 1;
}

static void gather_start(Collective *c, MPI_Comm comm) {
    MPI_Datatype type;
    const int count = piece_count(c, &type);
    const bool in_place = c->sent == c->received + c->group.rank * c->bytes;
    MPI_TRY(MPI_Iallgather(in_place ? MPI_IN_PLACE : c->sent, count, type, c->received, count, type, comm, &c->request));
}

// A send of MPI may end before its receive has begun, one of NCCL does not. In DEBUG, and with COMM_SYNCHRONOUS in the environment, none
// here does: what would stand still on GPUs stands still.
static bool sends_wait(void) { return DEVICE_STRICT || getenv("COMM_SYNCHRONOUS"); }

static void collective_start(Collective *c) {
    Channel *channel = &channels[c->group.channel];
    MPI_Datatype type;
    const int count = piece_count(c, &type);
    if (c->kind == KIND_SEND) MPI_TRY((sends_wait() ? MPI_Issend : MPI_Isend)(c->sent, count, type, c->root, 0, channel->comm, &c->request));
    else if (c->kind == KIND_RECEIVE) MPI_TRY(MPI_Irecv(c->received, count, type, c->root, 0, channel->comm, &c->request));
    else if (c->kind == KIND_BROADCAST)
        MPI_TRY(MPI_Ibcast(c->group.rank == c->root ? c->sent : c->received, count, type, c->root, channel->comm, &c->request));
    else if (c->kind == KIND_REDUCE_SCATTER || c->kind == KIND_ALL_TO_ALL || c->two_halves)
        MPI_TRY(MPI_Ialltoall(c->sent, count, type, c->received, count, type, channel->comm, &c->request));
    else gather_start(c, channel->comm);
    c->watched = watch_collective_enter(channel->watch, watch_op(c->kind), c->bytes); // now: a rank that hangs in the call above has not entered
    if (c->two_halves) c->turn = channel->turns++;
    Collective **last = &in_flight;
    while (*last) last = &(*last)->next;
    *last = c;
}

// Asks MPI once about each collective in flight; starts the second halves whose turn it is.
static void collectives_progress(void) {
    for (Collective **link = &in_flight; *link;) {
        Collective *c = *link;
        int done = 0;
        MPI_TRY(MPI_Test(&c->request, &done, MPI_STATUS_IGNORE)); // done, too, for a first half that has been done for a while
        if (done && c->two_halves) {
            Channel *channel = &channels[c->group.channel];
            if (channel->turn == c->turn) {
                char *sums = c->sent; // the copy that was sent is of no use any more: the sums of all ranks gather there
                c->sent += c->group.rank * c->bytes;
                add_pieces(c->sent, c->received, c->group.size, c->n, c->element, c->op);
                c->received = sums;
                c->two_halves = c->adds = false;
                channel->turn++;
                gather_start(c, channel->second);
            }
        } else if (done) {
            c->arrived = true;
            *link = c->next;
            continue;
        }
        link = &c->next;
    }
}

static void collective_wait(Collective *c) {
    const double start = clock_seconds();
    const struct timespec pause = {0, 20000};
    while (!c->arrived) {
        collectives_progress();
        if (c->arrived) return;
        const double waited = clock_seconds() - start;
        if (waited > timeout_s)
            die(EXIT_PEER, "rank %d of %d: %s (place %d in a group of %d) did not end within %g s (zero_optimization.timeout): another rank hangs, or is "
                "slower than that", comm_world.rank, comm_world.world, kind_name(c->kind), c->group.rank, c->group.size, timeout_s);
        if (waited > SPIN_S) nanosleep(&pause, NULL);
        else if (crowded) sched_yield();
    }
}

// The source is copied, what will be written becomes NaN, and what that looks like is kept.
static void collective_hide(Collective *c) {
    if (c->sent == c->source && c->source_bytes > 0) {
        c->sent = own_memory(c, c->source_bytes);
        memcpy(c->sent, c->source, (size_t)c->source_bytes);
    }
    if (c->received == c->target && c->target_bytes > 0) c->received = own_memory(c, c->target_bytes);
    if (c->target_bytes > 0) memset(c->target, 0xff, (size_t)c->target_bytes);
    if (c->kind == KIND_ALL_GATHER) memcpy((char *)c->source, c->sent, (size_t)c->source_bytes); // in place, this rank's part stays
    for (int i = 0; i < 2; i++) {
        c->image[i] = (char *)host_alloc((size_t)c->work.range[i].bytes);
        if (c->work.range[i].bytes > 0) memcpy(c->image[i], c->work.range[i].at, (size_t)c->work.range[i].bytes);
    }
}

// Nobody has written to what belongs to the collective since collective_hide.
static void collective_check_hidden(const Collective *c) {
    for (int i = 0; i < 2; i++)
        CHECK(c->work.range[i].bytes == 0 || memcmp(c->work.range[i].at, c->image[i], (size_t)c->work.range[i].bytes) == 0,
              "%s on a group of %d: its %s was written before the collective was waited for", kind_name(c->kind), c->group.size,
              i == 0 ? "argument" : "result");
}

static void collective_finish(DeviceWork *w) {
    Collective *c = (Collective *)w;
    const double start = clock_seconds();
    collective_wait(c);
    watch_waited(clock_seconds() - start);
    if (DEVICE_STRICT) collective_check_hidden(c);
    if (c->adds) add_pieces(c->target, c->received, c->group.size, c->n, c->element, c->op);
    else if (c->target_bytes > 0 && c->received != c->target) memcpy(c->target, c->received, (size_t)c->target_bytes);
    channels[c->group.channel].pending--;
    watch_collective_done(channels[c->group.channel].watch, c->watched);
    if (c->type != MPI_DATATYPE_NULL) MPI_TRY(MPI_Type_free(&c->type));
    free(c->own[0]);
    free(c->own[1]);
    free(c->image[0]);
    free(c->image[1]);
    free(c);
}

// A collective of this kind that moves pieces of n elements; the caller fills in what else it needs.
static Collective *collective_new(Kind kind, Group g, Element element, int64_t n) {
    CHECK(g.rank >= 0 && g.rank < g.size && g.channel >= 0 && g.channel < CHANNELS_MAX && channels[g.channel].comm != MPI_COMM_NULL,
          "%s on a group that is not there: rank %d of %d, channel %d", kind_name(kind), g.rank, g.size, g.channel);
    Collective *c = (Collective *)host_alloc(sizeof *c);
    c->kind = kind;
    c->group = g;
    c->element = element;
    c->n = n;
    c->bytes = n * element_bytes(element);
    c->request = MPI_REQUEST_NULL;
    c->type = MPI_DATATYPE_NULL;
    channels[g.channel].pending++;
    return c;
}

static void collective_give(Collective *c, const void *source, int64_t bytes) {
    c->source = (const char *)source;
    c->sent = (char *)source;
    c->source_bytes = bytes;
}

static void collective_take(Collective *c, void *target, int64_t bytes) {
    c->target = c->received = (char *)target;
    c->target_bytes = bytes;
}

// Starts c as work of s.
static void collective_enqueue(Collective *c, Stream s) {
    Channel *channel = &channels[c->group.channel];
    CHECK(s != NULL, "%s on no stream", kind_name(c->kind));
    CHECK(channel->pending == 1 || channel->stream == s, "%s on a group that has a collective in flight on another stream", kind_name(c->kind));
    channel->stream = s;
    const DeviceRange source = {c->source, c->source_bytes, false}, target = {c->target, c->target_bytes, true};
    c->work.range[0] = source;
    c->work.range[1] = target;
    c->work.finish = collective_finish;
    device_cpu_order(kind_name(c->kind), s, c->work.range, 2);
    if (c->two_halves) { // equal pieces: the last ones end in zeros
        memcpy(c->sent, c->source, (size_t)c->source_bytes);
        memset(c->sent + c->source_bytes, 0, (size_t)(c->group.size * c->bytes - c->source_bytes));
    }
    if (DEVICE_STRICT) collective_hide(c);
    collective_start(c);
    device_cpu_enqueue(s, &c->work);
}

// ---------------------------------------------------------------------------------------------------------------
// The collectives of comm.h

// A shard lies in its own place of the whole, or apart.
static void check_part(const char *name, Group g, const void *full, const void *part, int64_t bytes) {
    const char *f = (const char *)full, *p = (const char *)part;
    CHECK(p == f + g.rank * bytes || p + bytes <= f || p >= f + g.size * bytes, "%s: the shard lies across the whole, %" PRId64 " bytes from its place", name,
          (int64_t)(p - (f + g.rank * bytes)));
}

void comm_all_gather(Group g, void *full, const void *shard, int64_t n, DType t, Stream s) {
    const int64_t bytes = n * dtype_bytes(t);
    if (n == 0) return;
    check_part("all_gather", g, full, shard, bytes);
    if (g.size == 1) {
        if (full != shard) device_copy(full, shard, bytes, COPY_ON_DEVICE, s);
        return;
    }
    Collective *c = collective_new(KIND_ALL_GATHER, g, (Element)t, n);
    collective_give(c, device_cpu_address(shard), bytes);
    collective_take(c, device_cpu_address(full), g.size * bytes);
    collective_enqueue(c, s);
}

void comm_reduce_scatter(Group g, void *shard, void *full, int64_t n, DType t, Stream s) {
    const int64_t bytes = n * dtype_bytes(t);
    if (n == 0) return;
    check_part("reduce_scatter", g, full, shard, bytes);
    if (g.size == 1) {
        if (full != shard) device_copy(shard, full, bytes, COPY_ON_DEVICE, s);
        return;
    }
    Collective *c = collective_new(KIND_REDUCE_SCATTER, g, (Element)t, n);
    c->adds = true;
    collective_give(c, device_cpu_address(full), g.size * bytes);
    collective_take(c, device_cpu_address(shard), bytes);
    c->received = own_memory(c, g.size * bytes);
    collective_enqueue(c, s);
}

void comm_all_to_all(Group g, void *parts, const void *full, int64_t n, DType t, Stream s) {
    const int64_t bytes = g.size * n * dtype_bytes(t);
    if (n == 0) return;
    CHECK((char *)parts + bytes <= (const char *)full || (char *)parts >= (const char *)full + bytes, "all_to_all: the parts lie across the whole");
    if (g.size == 1) {
        device_copy(parts, full, bytes, COPY_ON_DEVICE, s);
        return;
    }
    Collective *c = collective_new(KIND_ALL_TO_ALL, g, (Element)t, n);
    collective_give(c, device_cpu_address(full), bytes);
    collective_take(c, device_cpu_address(parts), bytes);
    collective_enqueue(c, s);
}

static void all_reduce(Group g, void *x, int64_t n, Element e, CommOp op, Stream s) {
    if (n == 0 || g.size == 1) return;
    const int64_t bytes = n * element_bytes(e);
    const bool large = g.size * bytes > SMALL_ALL_REDUCE_BYTES;
    Collective *c = collective_new(KIND_ALL_REDUCE, g, e, large ? ceil_div(n, g.size) : n);
    c->op = op;
    c->adds = true;
    c->two_halves = large;
    collective_give(c, device_cpu_address(x), bytes);
    collective_take(c, device_cpu_address(x), bytes);
    if (large) c->sent = own_memory(c, g.size * c->bytes);
    c->received = own_memory(c, g.size * c->bytes);
    collective_enqueue(c, s);
}

void comm_all_reduce(Group g, void *x, int64_t n, DType t, Stream s) { all_reduce(g, x, n, (Element)t, COMM_SUM, s); }
void comm_all_reduce_double(Group g, double *x, int64_t n, CommOp op, Stream s) { all_reduce(g, x, n, ELEMENT_DOUBLE, op, s); }

void comm_broadcast(Group g, void *x, int64_t bytes, int root, Stream s) {
    CHECK(root >= 0 && root < g.size, "broadcast from rank %d of %d", root, g.size);
    if (bytes == 0 || g.size == 1) return;
    Collective *c = collective_new(KIND_BROADCAST, g, ELEMENT_FP32, 0);
    c->bytes = bytes;
    c->root = root;
    if (g.rank == root) collective_give(c, device_cpu_address(x), bytes);
    else collective_take(c, device_cpu_address(x), bytes);
    collective_enqueue(c, s);
}

static Collective *message_new(Kind kind, Group g, int64_t bytes, int peer) {
    CHECK(peer >= 0 && peer < g.size && peer != g.rank, "%s between ranks %d and %d of %d", kind_name(kind), g.rank, peer, g.size);
    Collective *c = collective_new(kind, g, ELEMENT_FP32, 0);
    c->bytes = bytes;
    c->root = peer;
    return c;
}

void comm_send(Group g, const void *x, int64_t bytes, int peer, Stream s) {
    if (bytes == 0) return;
    Collective *c = message_new(KIND_SEND, g, bytes, peer);
    collective_give(c, device_cpu_address(x), bytes);
    collective_enqueue(c, s);
}

void comm_receive(Group g, void *x, int64_t bytes, int peer, Stream s) {
    if (bytes == 0) return;
    Collective *c = message_new(KIND_RECEIVE, g, bytes, peer);
    collective_take(c, device_cpu_address(x), bytes);
    collective_enqueue(c, s);
}

// MPI's collectives do not wait for each other when they start, so that there is nothing to collect.
void comm_batch_begin(void) {}
void comm_batch_end(void) {}

static Group host_group(void) {
    Group g = {comm_world.world, comm_world.rank, 0, false};
    return g;
}

void comm_host_broadcast(void *x, int64_t bytes, int root) {
    CHECK(root >= 0 && root < comm_world.world, "broadcast from rank %d of %d", root, comm_world.world);
    if (bytes == 0 || comm_world.world == 1) return;
    Collective *c = collective_new(KIND_BROADCAST, host_group(), ELEMENT_FP32, 0);
    c->bytes = bytes;
    c->root = root;
    if (comm_world.rank == root) collective_give(c, x, bytes);
    else collective_take(c, x, bytes);
    collective_start(c);
    collective_finish(&c->work);
}

void comm_host_all_reduce(double *x, int n, CommOp op) {
    if (n == 0 || comm_world.world == 1) return;
    Collective *c = collective_new(KIND_ALL_REDUCE, host_group(), ELEMENT_DOUBLE, n);
    c->op = op;
    c->adds = true;
    collective_give(c, x, c->bytes);
    collective_take(c, x, c->bytes);
    c->received = own_memory(c, c->group.size * c->bytes);
    collective_start(c);
    collective_finish(&c->work);
}
