// test_pipeline.h - tests of pipeline.cu: programs of all stages against closed formulas, and programs with planted faults.
#pragma once

// The programs of all stages.
typedef struct {
    PipelineSchedule schedule;
    int p, v, n; // stages, chunks on each, micro-batches
    Pipeline *stage;
    ChunkCost *cost; // by chunk of the model; those of a stage's chunks together are 1, 1, 1 unless a test says otherwise
} Programs;

static Programs programs_make(PipelineSchedule schedule, int p, int n_virtual, int n) {
    Programs g = {schedule, p, pipeline_n_chunks(schedule, p, n_virtual), n, NULL, NULL};
    g.stage = (Pipeline *)host_alloc(sizeof(Pipeline) * (size_t)p);
    g.cost = (ChunkCost *)host_alloc(sizeof(ChunkCost) * (size_t)(p * g.v));
    for (int s = 0; s < p; s++) pipeline_make(&g.stage[s], schedule, p, g.v, s, n);
    for (int c = 0; c < p * g.v; c++) g.cost[c] = {1.0 / g.v, 1.0 / g.v, 1.0 / g.v};
    return g;
}

static void programs_free(Programs *g) {
    for (int s = 0; s < g->p; s++) pipeline_free(&g->stage[s]);
    free(g->stage);
    free(g->cost);
}

static const char *programs_name(const Programs *g) {
    static char text[100];
    snprintf(text, sizeof text, "%s with %d stages, %d chunks on each, %d micro-batches", pipeline_names[g->schedule], g->p, g->v, g->n);
    return text;
}

// Every schedule with every number of stages, chunks and micro-batches up to these.
static void programs_each(Test *t, int most_stages, int most_micro_batches, void (*fn)(Test *t, Programs *g)) {
    for (int schedule = PIPELINE_1F1B; schedule <= PIPELINE_ZB_V; schedule++)
        for (int p = 1; p <= most_stages; p++)
            for (int v = 1; v <= (schedule == PIPELINE_INTERLEAVED && p > 1 ? 4 : 1); v++)
                for (int n = 1; n <= most_micro_batches; n++) {
                    if (schedule == PIPELINE_INTERLEAVED && n % p) continue;
                    Programs g = programs_make((PipelineSchedule)schedule, p, v, n);
                    fn(t, &g);
                    programs_free(&g);
                }
}

// With one stage, whatever the schedule: load, forward, backward, one micro-batch after the other.
static void test_one_stage(Test *t) {
    static const Op ops[] = {OP_LOAD, OP_FWD, OP_BWD};
    for (int schedule = PIPELINE_1F1B; schedule <= PIPELINE_ZB_V; schedule++)
        for (int n = 1; n <= 9; n++) {
            Programs g = programs_make((PipelineSchedule)schedule, 1, 3, n);
            const Pipeline *p = &g.stage[0];
            expect_true(t, p->n == 3 * n && p->n_chunks == 1 && p->n_slots[0] == 1 && !p->split_w, "%d instructions, %d chunks, %d slots", p->n, p->n_chunks, p->n_slots[0]);
            for (int i = 0; i < p->n; i++) expect_true(t, p->prog[i].op == ops[i % 3] && p->prog[i].mb == i / 3 && p->prog[i].peer == 0, "instruction %d is %s of micro-batch %d", i, op_names[p->prog[i].op], p->prog[i].mb);
            programs_free(&g);
        }
}

// ---------------------------------------------------------------------------------------------------------------
// Bubbles: what an update takes beyond the work of one stage, 3n

static double bubble_formula(const Programs *g) {
    int p = g->p, n = g->n;
    switch (g->schedule) {
    case PIPELINE_INTERLEAVED: return 3.0 * (p - 1) / g->v;
    case PIPELINE_ZB_H1: return p == 1 ? 0 : fmax(p - 1, 2 * p - 1 - n); // with fewer than p micro-batches there is too little to fill it with
    case PIPELINE_ZB_V: return p == 1 ? 0 : fmax((p - 1) / 2.0, 2 * p - 1 - n);
    default: return 3.0 * (p - 1);
    }
}

static void case_bubble(Test *t, Programs *g) {
    PipelineReport r = pipeline_simulate(g->stage, g->cost, pipeline_channels);
    double bubble = bubble_formula(g);
    expect_true(t, !r.wrong[0], "%s: %s", programs_name(g), r.wrong);
    expect_near(t, programs_name(g), r.time - 3 * g->n, bubble, 1e-9);
    expect_near(t, programs_name(g), r.bubble, bubble / (3 * g->n + bubble), 1e-9);
    if (g->schedule == PIPELINE_ZB_H1 || g->schedule == PIPELINE_ZB_V) return;
    // Without a choice of what fills the gaps, the bubble is that of one micro-batch for any costs.
    for (int c = 0; c < g->p * g->v; c++) g->cost[c] = {1.5 / g->v, 2.25 / g->v, 0.75 / g->v};
    r = pipeline_simulate(g->stage, g->cost, pipeline_channels);
    expect_near(t, programs_name(g), r.time - 4.5 * g->n, 4.5 * (g->p - 1) / g->v, 1e-9);
}
static void test_bubbles(Test *t) { programs_each(t, 9, 40, case_bubble); }

// The figures that the README's table and the start-up line are about: two stages, eight micro-batches.
static void test_two_stages(Test *t) {
    static const struct { PipelineSchedule schedule; double bubble; } known[] = {
        {PIPELINE_1F1B, 1.0 / 9}, {PIPELINE_GPIPE, 1.0 / 9}, {PIPELINE_INTERLEAVED, 1.0 / 17}, {PIPELINE_ZB_H1, 1.0 / 25}, {PIPELINE_ZB_V, 1.0 / 49}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        Programs g = programs_make(known[i].schedule, 2, 2, 8);
        Pipeline mine;
        expect_near(t, programs_name(&g), pipeline_init(&mine, known[i].schedule, 2, g.v, 1, 8, g.stage[0].first, g.cost), known[i].bubble, 1e-12);
        expect_true(t, mine.stage == 1 && mine.n == g.stage[1].n && memcmp(mine.prog, g.stage[1].prog, sizeof(Instr) * (size_t)mine.n) == 0, "another program for stage 1");
        pipeline_free(&mine);
        programs_free(&g);
    }
    // A last stage that is heavier than the first keeps that one waiting: 1 + 8 (2 + 4) + 2 is what its work and one micro-batch of the first take.
    Programs g = programs_make(PIPELINE_GPIPE, 2, 1, 8);
    g.cost[1] = {2, 2, 2};
    PipelineReport r = pipeline_simulate(g.stage, g.cost, pipeline_channels);
    expect_near(t, "time with a heavy head", r.time, 51, 1e-12);
    expect_near(t, "bubble with a heavy head", r.bubble, 1 - (24 + 48) / (2 * 51.0), 1e-12);
    programs_free(&g);
}

// Messages that take time: GPipe waits for those of one micro-batch's way there and back. With 1F1B each micro-batch of two stages is waited for, since the last
// stage has room for one.
static void test_stage_messages(Test *t) {
    for (int p = 2; p <= 6; p++)
        for (int n = 1; n <= 12; n++)
            for (int schedule = PIPELINE_1F1B; schedule <= PIPELINE_GPIPE; schedule++) {
                if (schedule == PIPELINE_1F1B && p > 2) continue;
                Programs g = programs_make((PipelineSchedule)schedule, p, 1, n);
                const double message = 0.25;
                for (int c = 0; c < p; c++) g.cost[c].message = message;
                PipelineReport r = pipeline_simulate(g.stage, g.cost, pipeline_channels);
                expect_true(t, !r.wrong[0], "%s: %s", programs_name(&g), r.wrong);
                expect_near(t, programs_name(&g), r.time, 3 * (n + p - 1) + 2 * message * (schedule == PIPELINE_GPIPE ? p - 1 : 0.5 * (n + 1)), 1e-9);
                programs_free(&g);
            }
    // Messages longer than what they are of: one after the other through the first link, and back.
    Programs g = programs_make(PIPELINE_GPIPE, 2, 1, 8);
    g.cost[0].message = 10;
    PipelineReport r = pipeline_simulate(g.stage, g.cost, pipeline_channels);
    expect_near(t, "time with long messages", r.time, 1 + 8 * 10 + 1 + 2 + 8 * 10 + 2, 1e-9);
    programs_free(&g);
}

// ---------------------------------------------------------------------------------------------------------------
// Drawings, read back

// The column at which each F, B and w of the model's chunks and micro-batches is drawn.
typedef struct {
    int at[3][8 * DRAWING_DIGITS][DRAWING_DIGITS];
    int columns, idle; // dots of all stages
} Drawing;

static int drawn_digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? 10 + c - 'a' : 16; }

static void drawing_read(Test *t, const Programs *g, const char *text, Drawing *d) {
    static const char kinds[] = "FBw";
    const int rows = g->v > 1 ? 3 : 2;
    const char *line[3] = {text};
    memset(d, 0, sizeof *d);
    for (int s = 0; s < g->p; s++) {
        for (int k = 1; k < rows; k++) line[k] = strchr(line[k - 1], '\n') + 1;
        d->columns = (int)(line[1] - line[0]) - 1 - DRAWING_LABEL;
        for (int i = 0; i < d->columns; i++) {
            const char *cell = line[0] + DRAWING_LABEL + i, *kind = strchr(kinds, *cell);
            if (*cell == '.') d->idle++;
            if (*cell == '.') continue;
            const int mb = drawn_digit(cell[line[1] - line[0]]), chunk = rows > 2 ? drawn_digit(cell[line[2] - line[0]]) : 0;
            expect_true(t, kind && mb < g->n && chunk < g->v, "%s: stage %d shows %c, %d and %d", programs_name(g), s, *cell, mb, chunk);
            if (!kind || mb >= g->n || chunk >= g->v) return;
            int *at = &d->at[kind - kinds][pipeline_whole(&g->stage[s], s, chunk)][mb];
            expect_true(t, *at == 0, "%s: %c of micro-batch %d, chunk %d, is drawn twice", programs_name(g), *cell, mb, chunk);
            *at = 1 + i;
        }
        line[0] = strchr(line[rows - 1], '\n') + 1;
    }
    expect_true(t, *line[0] == 0, "%s: text behind the drawing", programs_name(g));
}

// All there, none before what it needs, and as long as the formulas say.
static void case_drawing(Test *t, Programs *g) {
    if (g->p == 1) return;
    char *text = pipeline_drawing(g->schedule, g->p, g->v, g->n);
    Drawing d;
    drawing_read(t, g, text, &d);
    expect_near(t, programs_name(g), d.columns, g->v * (3 * g->n + bubble_formula(g)), 1e-9);
    expect_equal_i64(t, programs_name(g), d.idle, g->p * (d.columns - 3 * g->n * g->v));
    const int last = g->p * g->v - 1, whole_backward = g->stage[0].split_w ? 1 : 2; // what the stage before waits for
    for (int c = 0; c <= last; c++)
        for (int mb = 0; mb < g->n; mb++) {
            const int f = d.at[0][c][mb], b = d.at[1][c][mb], w = d.at[2][c][mb];
            expect_true(t, f > (c > 0 ? d.at[0][c - 1][mb] : 0), "%s: F of micro-batch %d, chunk %d", programs_name(g), mb, c);
            expect_true(t, b > f && (c == last || b >= d.at[1][c + 1][mb] + whole_backward), "%s: B of micro-batch %d, chunk %d", programs_name(g), mb, c);
            expect_true(t, g->stage[0].split_w ? w > b : w == b + 1, "%s: w of micro-batch %d, chunk %d", programs_name(g), mb, c);
        }
    free(text);
}

static void test_drawings(Test *t) {
    programs_each(t, DRAWING_STAGES, DRAWING_DIGITS, case_drawing);
    char *text = pipeline_drawing(PIPELINE_1F1B, 2, 1, 3);
    expect_equal_text(t, "1F1B", text, "stage 0        FF..BwFBw.Bw\n  micro-batch  01  00211 22\nstage 1        .FBwFBwFBw..\n  micro-batch   000111222\n");
    free(text);
}

// ---------------------------------------------------------------------------------------------------------------
// Memory

// Micro-batches of all chunks that a stage has begun and not ended, at most.
static int most_at_once(const Pipeline *p) {
    int most = 0, now = 0;
    for (int i = 0; i < p->n; i++) {
        if (p->prog[i].op == OP_FWD) most = (int)max_i64(most, ++now);
        if (p->prog[i].op == pipeline_last_op(p)) now--;
    }
    return most;
}

static void case_slots(Test *t, Programs *g) {
    for (int s = 0; s < g->p && g->p > 1; s++) {
        const Pipeline *p = &g->stage[s];
        int most = most_at_once(p), n = g->n, want = n; // GPipe
        if (g->schedule == PIPELINE_1F1B) want = (int)min_i64(n, g->p - s);
        if (g->schedule == PIPELINE_ZB_H1) want = (int)min_i64(n, g->p);
        if (g->schedule == PIPELINE_INTERLEAVED) want = (int)min_i64(n * g->v, 2 * (g->p - s - 1) + (g->v - 1) * g->p + 1);
        if (g->schedule == PIPELINE_ZB_V) expect_true(t, most <= 2 * g->p && (n < 2 * g->p || most == 2 * g->p), "%s: stage %d keeps %d", programs_name(g), s, most);
        else expect_true(t, most == want, "%s: stage %d keeps %d, expected %d", programs_name(g), s, most, want);
        for (int c = 0; c < g->v; c++) { // none of the slots can be spared
            if (p->n_slots[c] == 1) continue;
            p->n_slots[c]--;
            PipelineReport r = pipeline_simulate(g->stage, g->cost, pipeline_channels);
            expect_contains(t, programs_name(g), r.wrong, "its slot is still that of micro-batch");
            p->n_slots[c]++;
        }
    }
}
static void test_slots(Test *t) { programs_each(t, 5, 12, case_slots); }

// ---------------------------------------------------------------------------------------------------------------
// Order, places

// Gradients of a weight are added in the order of the micro-batches, whatever the schedule; so are losses.
static void case_order(Test *t, Programs *g) {
    for (int s = 0; s < g->p; s++)
        for (int c = 0; c < g->v; c++) {
            int next[OP_COUNT] = {0};
            for (int i = 0; i < g->stage[s].n; i++) {
                Instr in = g->stage[s].prog[i];
                if (in.chunk == c) expect_true(t, in.mb == next[in.op]++, "%s: stage %d has %s of micro-batch %d where %d is due", programs_name(g), s, op_names[in.op], in.mb, next[in.op] - 1);
            }
            expect_true(t, next[OP_FWD] == g->n && next[OP_BWD] == g->n && next[OP_WGRAD] == (g->stage[s].split_w ? g->n : 0), "%s: stage %d", programs_name(g), s);
        }
}
static void test_order(Test *t) { programs_each(t, 6, 14, case_order); }

static void case_places(Test *t, Programs *g) {
    bool seen[64] = {false};
    int handed = 0;
    for (int s = 0; s < g->p; s++)
        for (int c = 0; c < g->v; c++) {
            const Pipeline *p = &g->stage[s];
            int whole = pipeline_whole(p, s, c);
            expect_true(t, whole >= 0 && whole < g->p * g->v && !seen[whole], "%s: chunk %d of stage %d is chunk %d of the model", programs_name(g), c, s, whole);
            seen[whole] = true;
            expect_true(t, pipeline_stage_of(p, whole) == s && pipeline_chunk_of(p, whole) == c, "%s: chunk %d of the model", programs_name(g), whole);
            handed += pipeline_hands_over(p, c);
            if (g->schedule == PIPELINE_ZB_V && g->p > 1) expect_equal_i64(t, "the stage of a chunk", pipeline_stage_of(p, whole), whole < g->p ? whole : 2 * g->p - 1 - whole);
        }
    expect_equal_i64(t, "chunks that hand their output to the same stage", handed, g->schedule == PIPELINE_ZB_V && g->p > 1);
}
static void test_places(Test *t) { programs_each(t, 9, 9, case_places); }

// ---------------------------------------------------------------------------------------------------------------
// What the simulation must notice

// How many channels a schedule needs: all run with the eight of the trainer.
static void test_channels(Test *t) {
    static const ChannelMap one = {{-1, 0, -1, 0, 0, -1, 0, -1}, {-1, 0, -1, 0, 0, -1, 0, -1}}, by_direction = {{-1, 0, -1, 0, 1, -1, 1, -1}, {-1, 0, -1, 0, 1, -1, 1, -1}},
                            by_kind = {{-1, 0, -1, 1, 2, -1, 3, -1}, {-1, 0, -1, 1, 2, -1, 3, -1}};
    for (int schedule = PIPELINE_1F1B; schedule <= PIPELINE_ZB_V; schedule++)
        for (int p = 2; p <= 6; p++) {
            Programs g = programs_make((PipelineSchedule)schedule, p, 2, 4 * p);
            bool stands[] = {schedule != PIPELINE_GPIPE, schedule == PIPELINE_INTERLEAVED || schedule == PIPELINE_ZB_V, schedule == PIPELINE_ZB_V && p > 3, false};
            const ChannelMap *map[] = {&one, &by_direction, &by_kind, &pipeline_channels};
            for (int m = 0; m < 4; m++) {
                PipelineReport r = pipeline_simulate(g.stage, g.cost, *map[m]);
                expect_true(t, stands[m] ? strstr(r.wrong, "waits for ever") != NULL : !r.wrong[0], "%s with channel map %d: \"%s\"", programs_name(&g), m, r.wrong);
            }
            programs_free(&g);
        }
}

// Stages that follow different schedules: one waits for a backward pass that the other does only after more forward passes.
static void test_deadlock(Test *t) {
    Programs g = programs_make(PIPELINE_1F1B, 2, 1, 4), other = programs_make(PIPELINE_GPIPE, 2, 1, 4);
    Pipeline last = g.stage[1];
    g.stage[1] = other.stage[1];
    PipelineReport r = pipeline_simulate(g.stage, g.cost, pipeline_channels);
    expect_equal_text(t, "what is wrong", r.wrong, "stage 0, instruction 7 (BWD of micro-batch 0, chunk 0): waits for ever");
    g.stage[1] = last;
    programs_free(&g);
    programs_free(&other);
}

// The last stage of two turns back a micro-batch before it takes the next; the first one wants the second micro-batch's turn before it asks
// for what came back of the first. With one slot for what is still being sent they block each other, with two they do not.
static void test_slot_in_flight(Test *t) {
    Programs g = programs_make(PIPELINE_ZB_V, 2, 1, 2);
    for (int s = 0; s < 2; s++) {
        Pipeline *p = &g.stage[s];
        p->n = 0;
        memset(p->n_slots, 0, sizeof(int) * 2);
        for (int mb = 0; mb < 2; mb++) {
            for (int chunk = 0; chunk < 2; chunk++) pipeline_compute(p, OP_FWD, chunk, mb);
            for (int chunk = 1; chunk >= 1 - s; chunk--) pipeline_compute(p, OP_BWD, chunk, mb), pipeline_compute(p, OP_WGRAD, chunk, mb);
        }
        for (int mb = 0; mb < 2 && s == 0; mb++) pipeline_compute(p, OP_BWD, 0, mb), pipeline_compute(p, OP_WGRAD, 0, mb);
        pipeline_count_slots(p);
    }
    expect_true(t, g.stage[0].n_slots[0] == 2 && g.stage[0].n_slots[1] == 1 && g.stage[1].n_slots[0] == 1 && g.stage[1].n_slots[1] == 1, "other slots");
    PipelineReport r = pipeline_simulate(g.stage, g.cost, pipeline_channels);
    expect_contains(t, "what is wrong", r.wrong, "waits for ever");
    g.stage[1].n_slots[0] = 2;
    r = pipeline_simulate(g.stage, g.cost, pipeline_channels);
    expect_true(t, !r.wrong[0], "with two slots: %s", r.wrong);
    programs_free(&g);
}

static void expect_noticed(Test *t, const Programs *g, const char *fault, int s, int i) {
    PipelineReport r = pipeline_simulate(g->stage, g->cost, pipeline_channels);
    expect_true(t, r.wrong[0], "%s: stage %d with %s at instruction %d passes", programs_name(g), s, fault, i);
}

// Does b, the next instruction, need a's result?
static bool follows(Instr a, Instr b) {
    if (a.mb != b.mb || a.chunk != b.chunk) return false;
    return b.op == OP_FWD || a.op == OP_FWD || b.op == OP_BWD || a.op == OP_BWD;
}

static void case_planted(Test *t, Programs *g) {
    for (int s = 0; s < g->p; s++) {
        Pipeline *p = &g->stage[s], good = *p;
        p->prog = (Instr *)host_alloc(sizeof(Instr) * (size_t)(p->n + 1));
        for (int i = 0; i < good.n; i++) {
            memcpy(p->prog, good.prog, sizeof(Instr) * (size_t)good.n);
            memmove(&p->prog[i], &p->prog[i + 1], sizeof(Instr) * (size_t)(good.n - i - 1));
            p->n = good.n - 1;
            expect_noticed(t, g, "a gap", s, i);
            memcpy(p->prog + i + 1, good.prog + i, sizeof(Instr) * (size_t)(good.n - i));
            p->prog[i] = good.prog[i];
            p->n = good.n + 1;
            expect_noticed(t, g, "a second time", s, i);
            p->n = good.n;
            memcpy(p->prog, good.prog, sizeof(Instr) * (size_t)good.n);
            p->prog[i].mb = (p->prog[i].mb + 1) % (g->n + 1);
            expect_noticed(t, g, "another micro-batch", s, i);
            p->prog[i] = good.prog[i];
            p->prog[i].peer = (p->prog[i].peer + 1) % (g->p + 1);
            expect_noticed(t, g, "another peer", s, i);
            p->prog[i] = good.prog[i];
            p->prog[i].chunk = (p->prog[i].chunk + 1) % (g->v + 1);
            expect_noticed(t, g, "another chunk", s, i);
            p->prog[i] = good.prog[i];
            p->prog[i].op = (Op)((p->prog[i].op + 1) % (OP_COUNT + 1));
            expect_noticed(t, g, "another operation", s, i);
            p->prog[i] = good.prog[i];
            if (i + 1 == good.n || !follows(good.prog[i], good.prog[i + 1])) continue;
            p->prog[i] = good.prog[i + 1];
            p->prog[i + 1] = good.prog[i];
            expect_noticed(t, g, "two in the wrong order", s, i);
        }
        free(p->prog);
        *p = good;
    }
}
static void test_planted(Test *t) { programs_each(t, 4, 8, case_planted); }

// ---------------------------------------------------------------------------------------------------------------
// Cutting the model

// The lightest "heaviest chunk" of all ways to cut blocks block..L into n_chunks, by trying them.
static int64_t cut_by_trying(const int64_t *weight, int n_units, int block, int n_chunks) {
    int64_t sum = 0, best = INT64_MAX;
    for (int end = block; end < n_units - 1; end++) {
        sum += cut_weight(weight, n_units, end);
        bool all = end == n_units - 2;
        if (all != (n_chunks == 1) || n_units - 2 - end < n_chunks - 1) continue;
        int64_t rest = all ? 0 : cut_by_trying(weight, n_units, end + 1, n_chunks - 1);
        if (max_i64(sum, rest) < best) best = max_i64(sum, rest);
    }
    return best;
}

static void test_cut(Test *t) {
    int first[40];
    int64_t weight[100];
    for (int blocks = 1; blocks <= 11; blocks++)
        for (int chunks = 1; chunks <= blocks; chunks++)
            for (int kind = 0; kind < 6; kind++) {
                int n = blocks + 2;
                for (int u = 0; u < n; u++) weight[u] = kind == 0 ? u > 0 && u < n - 1 : (int64_t)(rng_bits(7, (uint64_t)(kind * 100 + blocks), (uint64_t)u) % (kind % 2 ? 9 : 1000000));
                pipeline_cut(weight, n, chunks, first);
                int64_t most = 0;
                int least_blocks = blocks, most_blocks = 0;
                expect_true(t, first[0] == 0 && first[chunks] == n, "chunks begin at unit %d and end at %d of %d", first[0], first[chunks], n);
                for (int c = 0; c < chunks; c++) {
                    int64_t sum = 0;
                    int in_chunk = first[c + 1] - first[c] - (c == 0) - (c == chunks - 1);
                    for (int u = first[c]; u < first[c + 1]; u++) sum += weight[u];
                    most = max_i64(most, sum);
                    least_blocks = (int)min_i64(least_blocks, in_chunk);
                    most_blocks = (int)max_i64(most_blocks, in_chunk);
                }
                expect_true(t, least_blocks >= 1, "a chunk of %d blocks", least_blocks);
                expect_equal_i64(t, "the heaviest chunk", most, cut_by_trying(weight, n, 1, chunks));
                if (kind == 0) expect_true(t, most_blocks - least_blocks <= 1, "chunks of %d to %d blocks", least_blocks, most_blocks);
            }
    // GPT-2 124M, tied: wte and wpe (39.4 M), twelve blocks of 7.1 M, a head that holds wte, too (38.6 M). The ends get few blocks.
    weight[0] = 39383808;
    for (int b = 1; b <= 12; b++) weight[b] = 7087872;
    weight[13] = 38598144;
    pipeline_cut(weight, 14, 4, first);
    expect_true(t, first[1] == 2 && first[2] == 7 && first[3] == 12, "cuts at %d, %d and %d", first[1], first[2], first[3]);
}

static const TestRow pipeline_tests[] = {
    {"one stage", test_one_stage}, {"bubbles", test_bubbles}, {"two stages", test_two_stages}, {"messages", test_stage_messages}, {"drawings", test_drawings}, {"slots", test_slots}, {"order", test_order}, {"places", test_places},
    {"channels", test_channels}, {"deadlock", test_deadlock}, {"a slot that is being sent", test_slot_in_flight}, {"planted faults", test_planted}, {"cutting the model", test_cut}, {NULL, NULL},
};
