// watch_progress.h - what the trainer calls while it works: progress, phases, collectives, each also a record of the flight
// recorder. Part of watch.cpp. A call costs a reading of the clock and some tens of bytes of stores.
#pragma once
#include "watch_state.h"

static void record(FlightEvent event, int channel, uint32_t op, int64_t bytes, uint64_t number, double seconds, int64_t time_ns) {
    Flight *f = LOAD(w.flight);
    if (!f) return;
    uint64_t i = __atomic_fetch_add(&f->h.head, 1, __ATOMIC_RELAXED);
    FlightRecord *r = &f->record[i % FLIGHT_RECORDS];
    STORE(r->sequence, 0);
    r->time_ns = time_ns;
    r->step = w.step;
    r->bytes = bytes;
    r->number = number;
    r->micro_batch = w.micro_batch;
    r->unit = w.unit;
    r->group = channel >= 0 ? w.channel[channel].group : 0;
    r->channel = (uint8_t)(channel >= 0 ? channel : 255);
    r->op = (uint8_t)op;
    r->phase = (uint8_t)w.phase;
    r->event = (uint8_t)event;
    r->seconds = (float)seconds;
    STORE(r->sequence, i + 1);
}

static void publish_progress(int64_t time_ns) {
    STORE(w.progress_ns, time_ns);
    Flight *f = w.flight;
    if (!f) return;
    f->h.step = w.step;
    f->h.micro_batch = w.micro_batch;
    f->h.phase = (uint32_t)w.phase;
    f->h.unit = w.unit;
    f->h.progress_ns = time_ns;
    for (int c = 0; c < WATCH_CHANNELS; c++) { // a GPU's counters are elsewhere; this is the copy that a kill leaves
        const WatchCounter *counter = w.channel[c].counter;
        if (!w.channel[c].open || !counter) continue;
        f->h.channel[c].started = counter->started;
        f->h.channel[c].done = counter->done;
    }
}

// Time since the last call belongs to the step, unless a phase of another scale was announced.
static void measure(int64_t time_ns) {
    if (w.in_step && w.announced_ms == 0) w.step_s += 1e-9 * (double)(time_ns - w.last_call_ns);
    w.last_call_ns = time_ns;
}

// Maps what this rank may have to judge others by. After a step, whose collectives nobody finishes before all are there.
static void look_at_recorders(void) {
    for (int r = 0; w.flight_dir[0] && r < w.job.world; r++)
        if (is_hub() || r == 0) STORE(w.peer[r].left, flight_watch(w.flight_dir, r, w.address.job, w.host));
}

void watch_progress(int64_t step, int micro_batch, WatchPhase phase) {
    if (w.stage == STAGE_OFF) return;
    int64_t t = now_ns();
    measure(t);
    if (step != w.step || !w.in_step) {
        if (w.in_step) {
            if (w.steps == 0) look_at_recorders();
            double busy = fmax(0, w.step_s - w.waited_s);
            STORE(w.step_us[w.steps % LONG_STEPS], (uint32_t)fmin(1e6 * w.step_s, 4e9));
            STORE(w.busy_us[w.steps % BUSY_STEPS], (uint32_t)fmin(1e6 * busy, 4e9));
            STORE(w.steps, w.steps + 1);
        }
        w.in_step = true;
        w.step_s = w.waited_s = 0;
    }
    STORE(w.step, step);
    STORE(w.micro_batch, micro_batch);
    STORE(w.phase, (int32_t)phase);
    STORE(w.announced_ms, 0);
    publish_progress(t);
    record(FLIGHT_PROGRESS, -1, 0, 0, 0, 0, t);
}

void watch_announce(WatchPhase phase, double seconds) {
    if (w.stage == STAGE_OFF) return;
    int64_t t = now_ns();
    measure(t);
    STORE(w.phase, (int32_t)phase);
    STORE(w.announced_ms, max_i64(1, (int64_t)(1e3 * fmin(seconds, 1e9))));
    publish_progress(t);
    record(FLIGHT_ANNOUNCE, -1, 0, 0, 0, seconds, t);
}

void watch_tick(void) {
    if (w.stage != STAGE_OFF) STORE(w.progress_ns, now_ns());
}
void watch_unit(int unit) { STORE(w.unit, unit); }
void watch_waited(double seconds) { w.waited_s += seconds; }

int watch_channel_open(uint32_t group, const WatchCounter *counter) {
    for (int c = 0; c < WATCH_CHANNELS; c++) {
        Channel *ch = &w.channel[c];
        if (ch->open) continue;
        ch->group = group ? group : 1;
        ch->queued = ch->done = 0;
        ch->counter = counter;
        memset(ch->recent, 0, sizeof ch->recent);
        STORE(ch->open, 1);
        return c;
    }
    return -1;
}
void watch_channel_close(int channel) {
    if (channel >= 0) STORE(w.channel[channel].open, 0);
}

uint32_t watch_channel_group(int channel) { return LOAD(w.channel[channel].open) ? w.channel[channel].group : 0; }

uint64_t watch_collective_enter(int channel, WatchOp op, int64_t bytes) {
    if (channel < 0) return 0;
    Channel *ch = &w.channel[channel];
    int64_t t = now_ns();
    uint64_t number = ch->queued + 1;
    Recent *e = &ch->recent[number % RECENT];
    STORE(e->number, 0);
    e->bytes = bytes;
    e->time_ns = t;
    e->unit = w.unit;
    e->op = op;
    STORE(e->number, number);
    STORE(ch->queued, number);
    STORE(w.progress_ns, t);
    Flight *f = LOAD(w.flight);
    if (f) {
        FlightChannel *c = &f->h.channel[channel];
        c->group = ch->group;
        c->open = 1;
        c->on_gpu = ch->counter != NULL;
        c->op = (uint16_t)op;
        c->unit = w.unit;
        c->bytes = bytes;
        STORE(c->queued, number);
        if (!ch->counter) STORE(c->started, number);
    }
    record(FLIGHT_ENTER, channel, op, bytes, number, 0, t);
    return number;
}

void watch_collective_done(int channel, uint64_t number) {
    if (channel < 0) return;
    Channel *ch = &w.channel[channel];
    int64_t t = now_ns();
    uint64_t done = ch->done + 1; // so many: they need not end in the order in which they began
    STORE(ch->done, done);
    STORE(w.progress_ns, t);
    Flight *f = LOAD(w.flight);
    if (f) STORE(f->h.channel[channel].done, done);
    const Recent *e = &ch->recent[number % RECENT];
    record(FLIGHT_DONE, channel, e->op, e->bytes, number, 0, t);
}
