// metrics.h - what a run says about itself: a line on the console, a record in <output_dir>/log.jsonl.
//
// The log is an interface: strict JSON, one record a line, appended and never rewritten. An update's record has `step`;
// an evaluation's has `val_loss`; the others have `event`. After a resume the file may hold two records of one step; the
// later one counts. A value that JSON cannot hold (NaN, infinity, unknown) is null.
#pragma once
#include "device.h"

typedef struct {
    int log_fd;               // -1 = no log
    char log_path[4200];
    int64_t steps;            // of the whole run
    int64_t steps_per_print;
    int ranks;                // that share the work
    double flops_per_token, peak_flops; // peak: of one rank's device, 0 = unknown
    double recent_step_ms;    // exponentially smoothed, for the ETA
} Metrics;

// One update, as logged. loss: mean over the global batch. grad_norm: before clipping.
typedef struct {
    int64_t step;
    double loss, grad_norm, clip_factor, lr, loss_scale;
    bool skipped;
    int64_t tokens;           // so far, this update included
    double step_ms, data_wait_ms;
    int64_t step_tokens;      // of this update
    double bubble;            // of the update before: the share of the time until all stages are through in which a stage, on average, did not compute; negative: there is one stage, or no update before
    bool has_phases;          // wall_clock_breakdown: those below are measured, on the device's clock
    double load_ms, forward_ms, backward_ms, update_ms, wait_ms; // the last: for other stages of the pipeline
} StepStats;

// Dense peak in FLOP/s of known GPUs for 16-bit inputs and fp32 sums, from the vendor's data sheets; 0 = unknown.
static double device_peak_flops(const char *name, DType t) {
    static const struct { const char *part; double tflops; } peaks[] = {
        {"GB200", 2250}, {"B200", 2250}, {"GH200", 989}, {"H200", 989}, {"H100 PCIe", 756}, {"H100 NVL", 835}, {"H100", 989},
        {"A100", 312}, {"A800", 312}, {"H800", 989}, {"H20", 148}, {"A40", 149.7}, {"A10", 125}, {"A6000", 154.8}, {"L40S", 362}, {"L40", 181},
        {"L4", 121}, {"RTX 4090", 165.2}, {"RTX 3090", 71},
    };
    if (t == DTYPE_FP32) return 0;
    for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++)
        if (strstr(name, peaks[i].part)) return peaks[i].tflops * 1e12;
    return 0;
}

// Creates a folder and its parents. Dies with EXIT_CANTCREAT naming the part that failed.
static void make_folders(const char *path, const char *key) {
    char part[4200], shown[512];
    size_t n = strlen(path);
    CHECK(n < sizeof part, "path of %zu bytes", n);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        memcpy(part, path, i);
        part[i] = 0;
        struct stat st;
        if (mkdir(part, 0777) == 0 || (errno == EEXIST && stat(part, &st) == 0 && S_ISDIR(st.st_mode))) continue;
        int reason = errno;
        die(EXIT_CANTCREAT, "%s: cannot create the folder %s: %s; choose another one or change its permissions", key,
            text_escape(shown, sizeof shown, part, strlen(part)), reason == EEXIST ? "a file of this name is in the way" : strerror(reason));
    }
}

// A record that a crash or a full disk has cut off goes, so that the next one begins on a line of its own.
static void log_drop_torn(int fd) {
    char c;
    off_t end = lseek(fd, 0, SEEK_END), keep = end;
    while (keep > 0 && pread(fd, &c, 1, keep - 1) == 1 && c != '\n') keep--;
    if (keep < end && ftruncate(fd, keep) != 0) note("the step log ends in half a record, which cannot be removed: %s", strerror(errno));
}

static void metrics_init(Metrics *m, const char *output_dir, int64_t steps, int64_t steps_per_print, int ranks, double flops_per_token, DType dtype) {
    char shown[512];
    memset(m, 0, sizeof *m);
    m->steps = steps;
    m->steps_per_print = steps_per_print;
    m->ranks = ranks;
    m->flops_per_token = flops_per_token;
    m->peak_flops = device_peak_flops(device_info().name, dtype);
    snprintf(m->log_path, sizeof m->log_path, "%s/log.jsonl", output_dir);
    m->log_fd = open(m->log_path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (m->log_fd < 0)
        die(EXIT_CANTCREAT, "train_gpt.run.output_dir: cannot write %s: %s; choose another folder or change its permissions",
            text_escape(shown, sizeof shown, m->log_path, strlen(m->log_path)), strerror(errno));
    log_drop_torn(m->log_fd);
}

static void metrics_free(Metrics *m) {
    if (m->log_fd >= 0) close(m->log_fd);
}

// A number as JSON: null if it has none.
static const char *json_number(char *room, size_t size, double x) {
    if (isfinite(x)) snprintf(room, size, "%.10g", x);
    else snprintf(room, size, "null");
    return room;
}

// Appends one record; a disk that is full must not end training, so a failure is said once and the log ends there.
PRINTF_LIKE(2, 3) static void metrics_log(Metrics *m, const char *format, ...) {
    char line[2048];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    CHECK(n > 0 && n < (int)sizeof line - 1, "log record of %d bytes", n);
    line[n] = '\n';
    if (m->log_fd < 0 || file_write_all(m->log_fd, line, n + 1)) return;
    note("%s: %s; training goes on without the log", m->log_path, strerror(errno));
    log_drop_torn(m->log_fd);
    close(m->log_fd);
    m->log_fd = -1;
}

// 3723 -> "1h 02m 03s"
static const char *duration_text(char *room, size_t size, double seconds) {
    int64_t s = (int64_t)(seconds + 0.5);
    if (s >= 3600) snprintf(room, size, "%" PRId64 "h %02" PRId64 "m %02" PRId64 "s", s / 3600, s / 60 % 60, s % 60);
    else if (s >= 60) snprintf(room, size, "%" PRId64 "m %02" PRId64 "s", s / 60, s % 60);
    else snprintf(room, size, "%" PRId64 "s", s);
    return room;
}

// After printing. What a full disk, or a reader that went away, loses of standard output ends no training: it is said once.
static void console_flush(void) {
    static bool said;
    int error = fflush(stdout) != 0 ? errno : 0;
    if (!error && !ferror(stdout)) return;
    clearerr(stdout);
    if (!said) note("standard output: %s: what is printed is lost, training goes on; the step log has every update", error ? strerror(error) : "a write failed");
    said = true;
}

static void metrics_step(Metrics *m, const StepStats *s) {
    char a[32], b[32], c[32], d[32], eta[32], phases[200] = "", bubble[64] = "";
    if (s->bubble >= 0) snprintf(phases, sizeof phases, ",\"bubble\":%.5f", s->bubble);
    if (s->has_phases)
        snprintf(phases + strlen(phases), sizeof phases - strlen(phases), ",\"load_ms\":%.4f,\"forward_ms\":%.4f,\"backward_ms\":%.4f,\"wait_ms\":%.4f,\"update_ms\":%.4f", s->load_ms, s->forward_ms, s->backward_ms, s->wait_ms, s->update_ms);
    double seconds = s->step_ms / 1e3, tokens_per_s = (double)s->step_tokens / seconds, flops = tokens_per_s * m->flops_per_token / m->ranks; // of one rank
    double mfu = m->peak_flops > 0 ? flops / m->peak_flops : NAN;
    // The first update is slower (plans, caches): it does not enter the estimate once there are others.
    m->recent_step_ms = m->recent_step_ms == 0 || s->step < 2 ? s->step_ms : 0.9 * m->recent_step_ms + 0.1 * s->step_ms;
    metrics_log(m, "{\"step\":%" PRId64 ",\"loss\":%s,\"grad_norm\":%s,\"clip_factor\":%.9g,\"lr\":%.12g,\"loss_scale\":%.10g,\"skipped\":%s,\"tokens\":%" PRId64
                ",\"step_ms\":%.4f,\"data_wait_ms\":%.3f,\"tokens_per_s\":%s,\"tflops\":%.6g,\"mfu\":%s,\"eta_s\":%.1f%s}",
                s->step, json_number(a, sizeof a, s->loss), json_number(b, sizeof b, s->grad_norm), s->clip_factor, s->lr, s->loss_scale, s->skipped ? "true" : "false",
                s->tokens, s->step_ms, s->data_wait_ms, json_number(c, sizeof c, tokens_per_s), flops / 1e12, json_number(d, sizeof d, mfu),
                m->recent_step_ms / 1e3 * (double)(m->steps - s->step - 1), phases);
    bool last = s->step + 1 == m->steps;
    if (m->steps_per_print <= 0 || (s->step % m->steps_per_print != 0 && !last)) return;
    if (isfinite(mfu)) snprintf(d, sizeof d, "%.1f %%", 100 * mfu);
    else snprintf(d, sizeof d, "n/a");
    if (s->bubble >= 0) snprintf(bubble, sizeof bubble, " | bubble %.1f %%", 100 * s->bubble);
    printf("step %6" PRId64 "/%" PRId64 " (%3.0f %%) | loss %8.5f | norm %7.4f | lr %.3e | %9.0f tok/s | %.4g TFLOP/s | MFU %s%s | ETA %s%s\n", s->step, m->steps,
           100.0 * (double)(s->step + 1) / (double)m->steps, s->loss, s->grad_norm, s->lr, tokens_per_s, flops / 1e12, d, bubble,
           duration_text(eta, sizeof eta, m->recent_step_ms / 1e3 * (double)(m->steps - s->step - 1)), s->skipped ? " | SKIPPED: overflow" : "");
    if (s->has_phases)
        printf("            wall clock: load %.2f ms, forward %.2f, backward %.2f, waiting for other stages %.2f, update %.2f\n", s->load_ms, s->forward_ms, s->backward_ms, s->wait_ms, s->update_ms);
    console_flush();
}
