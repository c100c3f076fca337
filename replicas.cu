// replicas.cu - are the weights that several ranks hold really the same? train_gpt.run.replica_check_every compares their hashes.
//
// Under ZeRO stages 0 to 2 every rank holds all weights, at stage 3 those units that stay whole (the embedding, the head, small
// ones; the blocks exist only while they compute and have no replica). Nothing in training looks whether these copies are
// equal: a bit that flips in one rank's memory, or a gather that arrives wrong, bends its gradients from then on. So each unit's copy
// is hashed on the device (hash_words: any one or two flipped bits change it) between the backward pass, when all copies are
// there, and the update, which changes each rank's part of them. The ranks compare the largest and the smallest hash; where they
// differ the unit's tensors are hashed one by one, and the ranks in the minority are named. No update is made from weights
// that differ.
//
// With tensor or pipeline parallelism there are several parts of the model, each with replicas of its own: all are compared at once, in
// one list of hashes in which a rank fills the places of its part.
#pragma once
#include "zero.cu"
#include "runtime/agree.h"

typedef struct {
    uint64_t *hash, *host_hash; // (n_units) in the backend's memory, and a pinned copy; made when first needed
} Replicas;

// What the check allocates on the device.
static int64_t replicas_bytes(const Model *m, int ranks) { return ranks > 1 ? m->table.n_units * (int64_t)sizeof(uint64_t) : 0; }

static void replicas_free(Replicas *r) {
    device_free(r->hash);
    pinned_free(r->host_hash);
}

// Has unit u a copy on every rank?
static bool replicas_held(const Zero *z, int u) { return z->unit[u].dedicated && zero_is_current(z, u); }

// Halves of 64 bits as two doubles, which hold them exactly.
static void replicas_halves(double *half, const uint64_t *hash, int n) {
    for (int i = 0; i < n; i++) half[2 * i] = (double)(uint32_t)hash[i], half[2 * i + 1] = (double)(hash[i] >> 32);
}

// Which part of the model this rank holds, out of how many.
static int replicas_part(const Zero *z) { return z->grid.coord.pp * z->grid.size.tp + z->grid.coord.tp; }
static int replicas_parts(const Zero *z) { return z->grid.size.pp * z->grid.size.tp; }

// The ranks whose hash is not that of the majority, as "rank 2 from the other 3"; without a majority all of them. all: halves of the
// hashes of the n replicas, first all first halves; rank: who they are.
static void replicas_name(char *text, const double *all, const int *rank, int world) {
    size_t length = 0;
    int best = 0, best_same = 0;
    text[0] = 0;
    for (int r = 0; r < world; r++) {
        int same = 0;
        for (int q = 0; q < world; q++) same += all[q] == all[r] && all[world + q] == all[world + r];
        if (same > best_same) best = r, best_same = same;
    }
    int differ = world - best_same, told = 0;
    bool majority = 2 * best_same > world;
    agree_put(text, &length, !majority ? "ranks " : differ == 1 ? "rank " : "ranks ");
    for (int r = 0; r < world && told < 16; r++) {
        if (majority && all[r] == all[best] && all[world + r] == all[world + best]) continue;
        agree_put(text, &length, "%s%d", told++ ? ", " : "", rank[r]);
    }
    if (majority && differ > told) agree_put(text, &length, ", ...");
    agree_put(text, &length, majority ? " from the other %d" : " (no majority among %d)", majority ? best_same : world);
}

// Largest and smallest of the ranks' n hashes of each part: do they all agree? The first that does not, as part * n + place, or -1.
// hash: this rank's, of its part; null if it has none to give.
static int replicas_first_difference(const Zero *z, const uint64_t *hash, int n) {
    int all = n * replicas_parts(z), found = -1;
    double *least = (double *)host_alloc(sizeof(double) * 4 * (size_t)all), *most = least + 2 * all;
    for (int i = 0; i < 2 * all; i++) least[i] = INFINITY, most[i] = -INFINITY;
    if (hash) {
        replicas_halves(least + 2 * n * replicas_part(z), hash, n);
        replicas_halves(most + 2 * n * replicas_part(z), hash, n);
    }
    comm_host_all_reduce(least, 2 * all, COMM_MIN);
    comm_host_all_reduce(most, 2 * all, COMM_MAX);
    for (int i = all - 1; i >= 0; i--) if (least[2 * i] < most[2 * i] || least[2 * i + 1] < most[2 * i + 1]) found = i;
    free(least);
    return found;
}

// Says who differs in a hash of a part: all ranks come here, those of other parts with no matter what.
static void replicas_tell(const Zero *z, char who[AGREE_TEXT], int part, uint64_t hash) {
    const int world = z->grid.world, n = z->grid.zero_size;
    int *rank = (int *)host_alloc(sizeof(int) * (size_t)n), members = 0;
    double half[2], *mine = (double *)host_alloc(sizeof(double) * 2 * (size_t)n);
    replicas_halves(half, &hash, 1);
    double *all = agree_gather(half, 2, z->grid.rank, world);
    for (int r = 0; r < world; r++) {
        GridAxes c = grid_coords(r, z->grid.size);
        if (c.pp * z->grid.size.tp + c.tp != part) continue;
        mine[members] = all[r], mine[n + members] = all[world + r];
        rank[members++] = r;
    }
    replicas_name(who, mine, rank, n);
    free(rank);
    free(mine);
    free(all);
}

// Ends the program: the ranks that hold a part of the model have different weights in unit u. Names ranks and tensor.
__attribute__((noreturn)) static void replicas_differ(Replicas *r, Zero *z, int part, int u, int64_t step) {
    const ParamTable *table = &z->model->table;
    const bool member = replicas_part(z) == part;
    const char *tensor = "the space between its tensors";
    uint64_t hash = r->host_hash[u];
    for (int i = table->unit[u].first_row; i < table->unit[u].first_row + table->unit[u].n_rows; i++) {
        const ParamDesc *row = &table->row[i];
        const bool gives = member && row->numel > 0;
        if (gives) {
            int64_t element = dtype_bytes(z->model->dtype), first = row->offset * element / 4;
            int64_t n = min_i64(round_up(row->numel, ROW_ALIGN), z->unit[u].whole - row->offset);
            hash_words(&r->hash[0], tensor1((char *)z->unit[u].param + row->offset * element, z->model->dtype, n), first, false, z->stream);
            device_copy(r->host_hash, r->hash, 8, COPY_TO_HOST, z->stream);
            stream_sync(z->stream);
        }
        if (replicas_first_difference(z, gives ? r->host_hash : NULL, 1) < 0) continue;
        hash = r->host_hash[0];
        tensor = row->name;
        break;
    }
    char who[AGREE_TEXT];
    replicas_tell(z, who, part, hash);
    die_alike(EXIT_NUMERICS, "step %" PRId64 ": the ranks hold different weights: %s (unit %d) differs on %s; a fault of memory, a GPU or a link; " AGREE_ADVICE, step, tensor, u, who);
}

// Compares all replicas; waits for the stream. On all ranks.
static void replicas_check(Replicas *r, Zero *z, int64_t step) {
    int n = z->model->table.n_units;
    if (z->gather_group.size == 1) return;
    if (!r->hash) {
        r->hash = (uint64_t *)device_malloc(replicas_bytes(z->model, z->gather_group.size));
        r->host_hash = (uint64_t *)pinned_malloc(n * 8);
    }
    device_memset(r->hash, 0, n * 8, z->stream);
    for (int u = 0; u < n; u++)
        if (replicas_held(z, u)) hash_words(&r->hash[u], tensor1(z->unit[u].param, z->model->dtype, z->unit[u].whole), 0, false, z->stream);
    device_copy(r->host_hash, r->hash, n * 8, COPY_TO_HOST, z->stream);
    stream_sync(z->stream);
    int found = replicas_first_difference(z, r->host_hash, n);
    if (found >= 0) replicas_differ(r, z, found / n, found % n, step);
}
