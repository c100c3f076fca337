// inspect.cu - train_gpt --inspect DIR: what the checkpoints of a folder hold, and whether they are whole; --inspect-config DIR: what wrote one.
//
// Reads every byte and compares every checksum, as loading does, but needs no model, no device and no other rank. DIR is a
// checkpoint, a folder of checkpoints, or the output folder of a run.
#pragma once
#include "checkpoint.cu"
#include "runtime/watch.h"

// One checkpoint, on standard output. called: the name that its folder has, where `name` is ".". Returns whether it is good.
static bool inspect_one(int folder, const char *name, const char *called, const char *shown) {
    Checkpoint c;
    bool good = checkpoint_read(&c, folder, name) && checkpoint_named(&c, called);
    if (good) {
        const TrainingState *s = &c.state;
        const ModelConfig *m = &c.model;
        int64_t parameters = 0, bytes = 0, least = INT64_MAX, most = 0, columns = 0;
        for (int i = 0; i < c.n_tensors; i++) parameters += c.tensor[i].numel;
        for (int64_t i = 0; i < c.n_runs; i++) columns += c.run[i].run->count > 1;
        for (int i = 0; i < c.n_shards; i++) {
            bytes += c.shard[i].file_bytes;
            least = min_i64(least, c.shard[i].file_bytes);
            most = max_i64(most, c.shard[i].file_bytes);
        }
        printf("%s\n", shown);
        printf("  step           %" PRId64 " (%" PRId64 " updates applied, %" PRId64 " skipped)\n", s->step, s->applied_updates, s->skipped);
        printf("  tokens         %" PRId64 ", %" PRId64 " samples of the data\n", s->tokens, s->data_samples);
        printf("  model          n_layer %" PRId64 ", n_head %" PRId64 ", n_embd %" PRId64 ", n_inner %" PRId64 ", vocab_size %" PRId64 ", n_positions %" PRId64 ", tie_word_embeddings %s\n", m->n_layer,
               m->n_head, m->n_embd, m->n_inner, m->vocab_size, m->n_positions, m->tie_word_embeddings ? "true" : "false");
        printf("  tensors        %d, %" PRId64 " parameters; of each:", c.n_tensors, parameters);
        for (int k = 0; k < c.n_kinds; k++) printf("%s %s", k ? "," : "", c.kind[k]);
        printf(" (fp32)\n  shards         %d, %" PRId64 " bytes", c.n_shards, bytes);
        if (c.n_shards > 1) printf(" (%" PRId64 " to %" PRId64 " each), %" PRId64 " runs of elements", least, most, c.n_runs);
        if (columns) printf(", %" PRId64 " of them columns of matrices", columns);
        printf("\n  loss scale     %g; seed %" PRIu64 "; data %016" PRIx64 "\n", s->loss_scale, s->seed, s->data_fingerprint);
        printf("  config         %s\n", s->config ? "here (--inspect-config prints it)" : "none: an earlier build wrote this checkpoint");
        output_flush(); // the rest takes as long as the disk
        good = values_check(&c, 0, 1);
    }
    if (good) printf("  checksums      all match (manifest %08x)\n", c.manifest_crc);
    output_flush();
    if (!good) fprintf(stderr, "error: checkpoint %s is damaged: %s\n", shown, c.why);
    checkpoint_free(&c);
    return good;
}

// Opens the folder that holds the checkpoints of DIR: itself, or `checkpoints` in it. called: its name, if DIR is a checkpoint, else "".
// option: what asked for it.
static CheckpointList inspect_open(const char *option, const char *dir, char called[CONFIG_NAME_MAX], char *shown, size_t room) {
    struct stat st;
    CheckpointList l;
    size_t length = strlen(dir);
    char path[PATH_MAX];
    memset(&l, 0, sizeof l);
    while (length > 1 && dir[length - 1] == '/') length--;
    text_escape(shown, room, dir, length);
    l.folder = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC); // a link here is the user's wish
    if (l.folder < 0 || !realpath(dir, path)) die(EXIT_CHECKPOINT, "%s %s: %s; name a checkpoint, a folder of checkpoints, or a run's output folder", option, shown, strerror(errno));
    snprintf(called, CONFIG_NAME_MAX, "%s", strrchr(path, '/') + 1);
    if (fstatat(l.folder, MANIFEST_FILE, &st, AT_SYMLINK_NOFOLLOW) == 0 || step_of_name(called) >= 0) return l;
    called[0] = 0;
    for (int level = 0; level < 2; level++) {
        if (!checkpoints_list(&l)) die(EXIT_CHECKPOINT, "%s %s: cannot be listed: %s", option, shown, strerror(errno));
        if (l.steps.n || l.n_named || level) break;
        int inner = openat(l.folder, "checkpoints", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (inner < 0) break;
        close(l.folder);
        l.folder = inner;
        size_t n = strlen(shown);
        snprintf(shown + n, room - n, "/checkpoints");
    }
    if (!l.steps.n && !l.n_named) die(EXIT_CHECKPOINT, "%s %s: there is no checkpoint in this folder; name a checkpoint, a folder of checkpoints, or a run's output folder", option, shown);
    return l;
}

// Prints what there is. EXIT_OK when all are good, else EXIT_CHECKPOINT after an error line for each that is not.
static int inspect_print(const char *dir) {
    char shown[512], one[640], name[CHECKPOINT_NAME_MAX], called[CONFIG_NAME_MAX];
    bool good = true;
    CheckpointList l = inspect_open("--inspect", dir, called, shown, sizeof shown);
    if (called[0]) good = inspect_one(l.folder, ".", called, shown);
    for (int i = 0; i < l.steps.n + l.n_named; i++) {
        checkpoints_name(&l, i, name);
        snprintf(one, sizeof one, "%s/%s", shown, name);
        good &= inspect_one(l.folder, name, name, one);
    }
    checkpoints_free(&l);
    close(l.folder);
    output_flush();
    return good ? EXIT_OK : EXIT_CHECKPOINT;
}

// Prints a configuration as a file that runs without a word on the defaults in it. What another build wrote, and this one refuses, is printed as it is.
static void inspect_config_text(const TrainingState *s) {
    Config *c = (Config *)host_alloc(sizeof *c);
    ConfigReport report = {};
    config_parse(s->config, (int64_t)strlen(s->config), "checkpoint", NULL, 0, s->config_ranks, false, c, &report);
    if (config_refusals(&report) > 0) puts(s->config);
    else {
        config_print_json(stdout, c, &report);
        putchar('\n');
    }
    config_report_free(&report);
    free(c);
}

// Prints the configuration of one checkpoint, of a folder's the newest, so that it can be given back with -c.
static int inspect_print_config(const char *dir) {
    char shown[512], name[CHECKPOINT_NAME_MAX] = ".", called[CONFIG_NAME_MAX];
    CheckpointList l = inspect_open("--inspect-config", dir, called, shown, sizeof shown);
    if (!called[0] && !l.steps.n) die(EXIT_CHECKPOINT, "--inspect-config %s: no checkpoint in this folder is named by its step; name the one that is meant, such as %s/%s", shown, shown, l.named[0]);
    if (!called[0]) {
        step_name(name, l.steps.step[0]);
        snprintf(shown + strlen(shown), sizeof shown - strlen(shown), "/%s", name);
    }
    Checkpoint c;
    bool good = checkpoint_read(&c, l.folder, name) && checkpoint_named(&c, called);
    checkpoints_free(&l);
    close(l.folder);
    if (!good) die(EXIT_CHECKPOINT, "checkpoint %s is damaged: %s", shown, c.why);
    if (!c.state.config) die(EXIT_CHECKPOINT, "checkpoint %s holds no configuration: an earlier build wrote it", shown);
    inspect_config_text(&c.state);
    checkpoint_free(&c);
    output_flush();
    return EXIT_OK;
}

// What is asked of folders alone needs no device and no other rank.
typedef int FolderPrint(const char *dir);
static FolderPrint *folder_print(int argc, char **argv) {
    if (argc != 3) return NULL;
    if (strcmp(argv[1], "--flight") == 0) return flight_print;
    if (strcmp(argv[1], "--inspect") == 0) return inspect_print;
    return strcmp(argv[1], "--inspect-config") == 0 ? inspect_print_config : NULL;
}
