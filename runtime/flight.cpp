// flight.cpp - opening a rank's flight recorder, and printing the recorders of a job (flight.h says what they hold).
//
// What is printed comes from files and is treated so: sizes and marks are checked first, every number that becomes an
// index is bounded, texts are escaped. A ring may be written to while it is read; a record whose sequence changes
// meanwhile is left out.
#include "flight.h"

#include <dirent.h>
#include <sys/mman.h>

enum { MAX_PRINTED_RANKS = 65536, LAST_RECORDS = 48 };

static int64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// A new file of the right size with its blocks allocated, mapped; null with a reason otherwise.
static Flight *map_file(const char *path, char *why, size_t room) {
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) { snprintf(why, room, "%s", strerror(errno)); return NULL; }
    int error = posix_fallocate(fd, 0, sizeof(Flight));
    void *map = error ? MAP_FAILED : mmap(NULL, sizeof(Flight), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (map == MAP_FAILED) {
        snprintf(why, room, "%s", strerror(error ? error : errno));
        unlink(path);
    }
    close(fd);
    return map == MAP_FAILED ? NULL : (Flight *)map;
}

Flight *flight_open(const char *dir, int rank, int world, uint64_t job, const char *host) {
    Flight *f = NULL;
    if (dir) {
        char path[4096 + 64], old[4096 + 64], shown[4096], why[128] = "";
        text_escape(shown, sizeof shown, dir, strlen(dir));
        if (mkdir(dir, 0777) != 0 && errno != EEXIST) snprintf(why, sizeof why, "%s", strerror(errno));
        // Rings of a larger job before this one are no part of it. Verdicts are in the rings, too.
        if (rank == 0 && !why[0]) {
            DIR *d = opendir(dir);
            for (struct dirent *e; d && (e = readdir(d));) {
                char *end = NULL;
                long r = strncmp(e->d_name, "rank-", 5) == 0 ? strtol(e->d_name + 5, &end, 10) : -1;
                bool ring = r >= world && end && *end == 0, verdict = strncmp(e->d_name, "verdict-0x", 10) == 0;
                snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
                snprintf(old, sizeof old, "%s/%s.old", dir, e->d_name);
                if (ring) rename(path, old);
                if (verdict) unlink(path);
            }
            if (d) closedir(d);
        }
        snprintf(path, sizeof path, "%s/rank-%d", dir, rank);
        snprintf(old, sizeof old, "%s/rank-%d.old", dir, rank);
        if (!why[0] && rename(path, old) != 0 && errno != ENOENT) snprintf(why, sizeof why, "%s", strerror(errno));
        if (!why[0]) f = map_file(path, why, sizeof why);
        if (!f) note("%s/rank-%d: no flight recorder there (%s); it lives in memory, and is lost with the process", shown, rank, why);
    }
    if (!f) f = (Flight *)host_alloc(sizeof *f);
    FlightHeader *h = &f->h;
    memcpy(h->magic, FLIGHT_MAGIC, sizeof h->magic);
    h->version = FLIGHT_VERSION;
    h->records = FLIGHT_RECORDS;
    h->rank = rank;
    h->world = world;
    h->pid = getpid();
    h->job = job;
    h->start_wall_ns = clock_ns(CLOCK_REALTIME);
    h->start_ns = h->progress_ns = clock_ns(CLOCK_MONOTONIC);
    snprintf(h->host, sizeof h->host, "%s", host);
    h->culprit = -1;
    return f;
}

const FlightHeader *flight_watch(const char *dir, int rank, uint64_t job, const char *host) {
    char path[4096 + 64];
    struct stat st;
    snprintf(path, sizeof path, "%s/rank-%d", dir, rank);
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return NULL;
    bool good = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == (off_t)sizeof(Flight);
    void *map = good ? mmap(NULL, FLIGHT_HEADER_BYTES, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0) : MAP_FAILED;
    close(fd);
    if (map == MAP_FAILED) return NULL;
    const FlightHeader *h = (const FlightHeader *)map;
    if (memcmp(h->magic, FLIGHT_MAGIC, sizeof h->magic) == 0 && h->job == job && h->rank == rank && strncmp(h->host, host, sizeof h->host) == 0) return h;
    munmap(map, FLIGHT_HEADER_BYTES);
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------
// Printing

static int64_t wall_ns(const Flight *f, int64_t time_ns) { return f->h.start_wall_ns + (time_ns - f->h.start_ns); }

static const char *time_text(char *room, size_t size, int64_t wall) {
    time_t seconds = (time_t)(wall / 1000000000);
    struct tm tm;
    if (wall < 0 || !gmtime_r(&seconds, &tm)) snprintf(room, size, "?");
    else snprintf(room, size, "%02d:%02d:%02d.%06d", tm.tm_hour, tm.tm_min, tm.tm_sec, (int)(wall / 1000 % 1000000));
    return room;
}

static bool process_lives(const Flight *f) {
    char host[FLIGHT_HOST] = "";
    gethostname(host, sizeof host - 1);
    if (strncmp(host, f->h.host, sizeof host) != 0) return false; // unknown: said as such by the caller
    char path[64];
    snprintf(path, sizeof path, "/proc/%d", f->h.pid);
    return access(path, F_OK) == 0;
}

static Flight *read_ring(const char *dir, int rank, const char *suffix) {
    char path[4096 + 64], shown[4096 + 64], why[128];
    snprintf(path, sizeof path, "%s/rank-%d%s", dir, rank, suffix);
    text_escape(shown, sizeof shown, path, strlen(path));
    int64_t size = 0;
    if (access(path, F_OK) != 0) return NULL;
    int fd = file_open_read(path, false, &size, why, sizeof why);
    if (fd < 0) { note("%s: %s; left out", shown, why); return NULL; }
    Flight *f = (Flight *)host_alloc(sizeof *f);
    bool good = size == (int64_t)sizeof *f && file_read_at(fd, f, sizeof *f, 0);
    close(fd);
    good = good && memcmp(f->h.magic, FLIGHT_MAGIC, sizeof f->h.magic) == 0 && f->h.version == FLIGHT_VERSION && f->h.records == FLIGHT_RECORDS && f->h.rank == rank &&
           f->h.world > rank && f->h.world <= MAX_PRINTED_RANKS;
    if (!good) {
        note("%s: no flight recorder of this version; left out", shown);
        free(f);
        return NULL;
    }
    f->h.host[FLIGHT_HOST - 1] = f->h.text[FLIGHT_TEXT - 1] = 0;
    return f;
}

// The newest record of the collective `number` of a group in a ring; null when it is no longer there.
static const FlightRecord *find_collective(const Flight *f, uint32_t group, uint64_t number) {
    const FlightRecord *found = NULL;
    for (int i = 0; i < FLIGHT_RECORDS; i++) {
        const FlightRecord *r = &f->record[i];
        if (r->sequence && r->event == FLIGHT_ENTER && r->group == group && r->number == number && (!found || r->sequence > found->sequence)) found = r;
    }
    return found;
}

static void print_collective(const FlightRecord *r) {
    printf("%s", watch_op_name(r->op));
    if (r->unit >= 0) printf(" of unit %d", r->unit);
    printf(", %" PRId64 " bytes", r->bytes);
}

static void print_ranks(Flight *const *ring, int n) {
    static const char *const end[FLIGHT_ENDS] = {"", "ended normally", "left by a verdict", "crashed"};
    char shown[4 * FLIGHT_TEXT], at[32];
    const char *verdict = NULL;
    for (int i = 0; i < n; i++) {
        const FlightHeader *h = &ring[i]->h;
        uint32_t e = h->end < FLIGHT_ENDS ? h->end : (uint32_t)FLIGHT_RUNNING;
        printf("rank %d on %s (pid %d): step %" PRId64 ", micro-batch %d, %s, last progress at %s; %s", h->rank, text_escape(shown, sizeof shown, h->host, strlen(h->host)), h->pid, h->step,
               h->micro_batch, watch_phase_name(h->phase), time_text(at, sizeof at, wall_ns(ring[i], h->progress_ns)), e != FLIGHT_RUNNING ? end[e] : process_lives(ring[i]) ? "runs" : "runs elsewhere, or was killed");
        if (e == FLIGHT_CRASHED) printf(": %s", text_escape(shown, sizeof shown, h->text, strlen(h->text)));
        putchar('\n');
        if (e == FLIGHT_VERDICT && !verdict) verdict = h->text;
    }
    if (verdict) printf("verdict: %s\n", text_escape(shown, sizeof shown, verdict, strlen(verdict)));
}

// For each group: what its members entered last, and who is behind.
static void print_groups(Flight *const *ring, int n) {
    for (int i = 0; i < n; i++)
        for (int c = 0; c < WATCH_CHANNELS; c++) {
            const FlightChannel *first = &ring[i]->h.channel[c];
            bool seen = !first->open || first->queued == 0;
            for (int j = 0; j < i && !seen; j++)
                for (int d = 0; d < WATCH_CHANNELS; d++) seen = seen || (ring[j]->h.channel[d].open && ring[j]->h.channel[d].group == first->group);
            for (int d = 0; d < c && !seen; d++) seen = ring[i]->h.channel[d].open && ring[i]->h.channel[d].group == first->group;
            if (seen) continue;
            uint64_t most = 0;
            for (int j = i; j < n; j++)
                for (int d = 0; d < WATCH_CHANNELS; d++) {
                    const FlightChannel *ch = &ring[j]->h.channel[d];
                    if (ch->open && ch->group == first->group && ch->started > most) most = ch->started;
                }
            printf("group %u\n", first->group);
            for (int j = i; j < n; j++)
                for (int d = 0; d < WATCH_CHANNELS; d++) {
                    const FlightChannel *ch = &ring[j]->h.channel[d];
                    if (!ch->open || ch->group != first->group) continue;
                    printf("  rank %d: queued %" PRIu64 ", started %" PRIu64 ", done %" PRIu64, ring[j]->h.rank, ch->queued, ch->started, ch->done);
                    const FlightRecord *r = find_collective(ring[j], ch->group, ch->started);
                    char at[32];
                    if (r) {
                        printf("; last: ");
                        print_collective(r);
                        printf(", entered at %s", time_text(at, sizeof at, wall_ns(ring[j], r->time_ns)));
                    }
                    printf("%s\n", ch->started < most ? "  <- behind" : "");
                }
        }
}

typedef struct {
    int64_t wall_ns;
    int rank;
    const FlightRecord *r;
} Merged;

static int by_time(const void *a, const void *b) {
    const Merged *x = (const Merged *)a, *y = (const Merged *)b;
    return x->wall_ns < y->wall_ns ? -1 : x->wall_ns > y->wall_ns;
}

static void print_last(Flight *const *ring, int n) {
    Merged *all = (Merged *)host_alloc(sizeof(Merged) * (size_t)n * LAST_RECORDS);
    int64_t count = 0;
    for (int i = 0; i < n; i++) {
        uint64_t newest = 0;
        for (int k = 0; k < FLIGHT_RECORDS; k++) if (ring[i]->record[k].sequence > newest) newest = ring[i]->record[k].sequence;
        for (int k = 0; k < FLIGHT_RECORDS; k++) {
            const FlightRecord *r = &ring[i]->record[k];
            if (r->sequence == 0 || newest - r->sequence >= LAST_RECORDS || r->event >= FLIGHT_EVENTS || (r->sequence - 1) % FLIGHT_RECORDS != (uint64_t)k) continue;
            all[count].wall_ns = wall_ns(ring[i], r->time_ns);
            all[count].rank = ring[i]->h.rank;
            all[count++].r = r;
        }
    }
    qsort(all, (size_t)count, sizeof *all, by_time);
    int64_t from = max_i64(0, count - LAST_RECORDS);
    if (count) printf("the last %" PRId64 " records (UTC)\n", count - from);
    for (int64_t i = from; i < count; i++) {
        const FlightRecord *r = all[i].r;
        char at[32];
        printf("  %s rank %d step %" PRId64 ".%d %-10s ", time_text(at, sizeof at, all[i].wall_ns), all[i].rank, r->step, r->micro_batch, watch_phase_name(r->phase));
        switch (r->event) {
        case FLIGHT_PROGRESS: printf("begins"); break;
        case FLIGHT_ANNOUNCE: printf("begins, up to %.0f s", (double)r->seconds); break;
        case FLIGHT_GOODBYE: printf("goodbye"); break;
        case FLIGHT_ENTER:
        case FLIGHT_DONE:
            printf("%s %" PRIu64 " of group %u: ", r->event == FLIGHT_ENTER ? "enters" : "leaves", r->number, r->group);
            print_collective(r);
            break;
        }
        putchar('\n');
    }
    free(all);
}

// The rings rank-R<suffix>, if any. Returns how many.
static int print_job(const char *dir, const char *suffix, const char *title) {
    Flight *first = NULL;
    int at = 0;
    for (; at < 1024 && !first; at++) first = read_ring(dir, at, suffix); // rank 0's, unless it is lost
    if (!first) return 0;
    int world = first->h.world, n = 0;
    Flight **ring = (Flight **)host_alloc(sizeof *ring * (size_t)world);
    ring[n++] = first;
    int strange = 0;
    for (int r = at; r < world; r++) {
        Flight *f = read_ring(dir, r, suffix);
        if (f && f->h.job != first->h.job) { strange++; free(f); }
        else if (f) ring[n++] = f;
    }
    printf("%s: %d of %d ranks\n", title, n, world);
    if (strange) printf("(%d recorders of another start are left out)\n", strange);
    print_ranks(ring, n);
    print_groups(ring, n);
    print_last(ring, n);
    for (int i = 0; i < n; i++) free(ring[i]);
    free(ring);
    return n;
}

int flight_print(const char *dir) {
    char shown[4096], title[4096 + 64];
    text_escape(shown, sizeof shown, dir, strlen(dir));
    snprintf(title, sizeof title, "flight recorders in %s", shown);
    int n = print_job(dir, "", title);
    if (n) putchar('\n');
    int old = print_job(dir, ".old", "the start before");
    output_flush();
    if (n + old == 0) {
        note("%s: no flight recorder here; they are in <output_dir>/flight", shown);
        return EXIT_DATA;
    }
    return EXIT_OK;
}
