/* Long prompts over ranks. The owner of a step opens phase after phase: rows, heads, rows, heads, ..., rows. In each, it
 * and every rank that is not busy claim units until none is left.
 *
 * A rank writes to memory of its own only, and the owner names whose results count before it opens the next phase. So it
 * may give up a rank at any moment, dead or slow, and compute that rank's units itself: nothing waits for a new map.
 * `experts/prompt_split.py` has the same protocol step by step. */
#ifndef TRIPOOL_PROMPT_H
#define TRIPOOL_PROMPT_H

#include "prompt_units.h"

#define PROMPT_ROWS_LEAST 32 /* per rank: below, a phase is too short to share */
#define HELPER_SPIN_NS 200000
#define HELPER_SLEEP_NS 50000000
#define PATIENCE_NS 1000000

typedef struct Prompts {
    PromptMemory at;
    PromptStep own, helped;
    pthread_t thread;
    _Atomic int leave;
} Prompts;

/* Layer of a phase; rows come first. */
INLINE int phase_layer(uint32_t index) { return (int)(index / 2); }
INLINE int phase_has_heads(uint32_t index) { return index % 2; }

/* Some units of a phase. The context of an attention is prepared once. */
typedef struct {
    PromptStep *step;
    const Stack *stack;
    PromptOwner *owner;
    uint32_t phase;
    int is_prepared;
    HeadWork heads;
} PhaseWork;

static PhaseWork phase_work(PromptStep *t, const Stack *s, PromptOwner *o, uint64_t state) {
    return (PhaseWork){.step = t, .stack = s, .owner = o, .phase = STATE_PHASE(state)};
}

static void run_some(PhaseWork *w, const int *units, int count) {
    PromptStep *t = w->step;
    const int k = phase_layer(w->phase - t->first);
    if (!phase_has_heads(w->phase - t->first)) {
        for (int i = 0; i < count; i++) run_rows(t, w->stack, w->owner, k, units[i]);
        return;
    }
    if (!w->is_prepared) {
        if (t->at->rank != t->owner) copy_context(t, w->owner, k);
        find_queries(t, w->owner, k);
        prepare_heads(t, &w->stack->layer[k], &w->heads);
        w->is_prepared = 1;
    }
    run_heads(&w->heads, units, count);
}

/* Claims and computes units until none is left, or a helper's own step wants the pool. The caller owns the pool. */
static void run_units(PhaseWork *w, uint64_t state) {
    const PromptMemory *m = w->step->at;
    const PromptArea area = prompt_area(m, m->rank, w->step->owner);
    const int helps = m->rank != w->step->owner, most = phase_has_heads(w->phase - w->step->first) ? pool.threads : 1;
    while (!(helps && atomic_load(&pool.wanted))) {
        int units[MAX_THREADS], count = 0;
        while (count < most && (units[count] = claim_unit(w->owner, state, m->rank)) >= 0) count++;
        if (!count) return;
        run_some(w, units, count);
        for (int i = 0; i < count; i++) atomic_store_explicit(&area.done[units[i]], w->phase, memory_order_release);
    }
}

/* ---- owner ------------------------------------------------------------------------------------------------------ */

static int is_done(const Prompts *p, int rank, int unit, uint32_t phase) {
    return atomic_load_explicit(&prompt_area(&p->at, rank, p->at.rank).done[unit], memory_order_acquire) == phase;
}

/* Waits for units that others have claimed, for as long as the phase has taken so far; then computes them here. */
static void settle_units(Prompts *p, const Stack *s, PromptOwner *o, uint64_t state, int64_t began_ns, uint8_t *winners) {
    const int64_t until_ns = 2 * now_ns() - began_ns + PATIENCE_NS;
    const uint32_t phase = STATE_PHASE(state);
    PhaseWork again = phase_work(&p->own, s, o, state);
    for (int unit = 0; unit < STATE_UNITS(state); unit++) {
        const uint32_t claimed = (uint32_t)atomic_load(&o->claim[unit]);
        int rank = claimed < (uint32_t)p->at.ranks ? (int)claimed : p->at.rank;
        for (int i = 1; !is_done(p, rank, unit, phase); i++) {
            if (i % 64) RELAX;
            else if (rank != p->at.rank && now_ns() < until_ns) sched_yield();
            else {
                rank = p->at.rank;
                run_some(&again, &unit, 1);
                break;
            }
        }
        winners[unit] = (uint8_t)rank;
    }
}

static void run_phase(Prompts *p, const Stack *s, int units, uint8_t *winners) {
    PromptOwner *o = prompt_owner(&p->at, p->at.rank);
    const int64_t began_ns = now_ns();
    const uint64_t state = STATE(units, STATE_PHASE(atomic_load(&o->state)) + 1);
    atomic_store_explicit(&o->state, state, memory_order_release);
    for (int rank = 0; rank < p->at.ranks; rank++)
        if (rank != p->at.rank) wake(&prompt_owner(&p->at, rank)->helper);
    PhaseWork work = phase_work(&p->own, s, o, state);
    run_units(&work, state);
    settle_units(p, s, o, state, began_ns, winners);
}

static void begin_step(Prompts *p, const Stack *s, const int64_t *tokens, const Batch *batch) {
    PromptOwner *o = prompt_owner(&p->at, p->at.rank);
    PromptStep *t = &p->own;
    t->at = &p->at;
    t->owner = p->at.rank;
    t->batch = (Batch){.rows = batch->rows, .prompts = batch->prompts};
    o->first = t->first = STATE_PHASE(atomic_load(&o->state)) + 1;
    o->rows = (uint32_t)batch->rows;
    o->prompts = (uint32_t)batch->prompts;
    o->layers = (uint32_t)s->layers;
    for (int i = 0; i < batch->prompts; i++) {
        const SequenceRows *q = &batch->prompt[i];
        const int32_t said[4] = {q->row, q->count, q->start, q->first};
        t->sequence[i] = *q;
        memcpy(o->sequence[i], said, sizeof said);
    }
    memcpy(prompt_tokens(&p->at, p->at.rank), tokens, sizeof(int64_t) * (size_t)batch->rows);
    prompt_tables(t, s);
}

/* Of a batch: whether ranks share it. Positions before the step's are copied for the others, layer by layer. */
static int prompts_pay(const Stack *s, const Batch *b) {
    if (!s->prompts || b->decodes || b->prompts > MAX_PROMPTS) return 0;
    const PromptMemory *m = &s->prompts->at;
    int64_t prior = 0;
    for (int i = 0; i < b->prompts; i++) prior += b->prompt[i].start;
    return b->rows >= PROMPT_ROWS_LEAST * m->ranks && b->rows <= m->rows && prior <= m->context;
}

/* Every rank computes some of the units; the bits are those of `all_layers`. */
static void prompts_step(const Stack *s, const int64_t *tokens, float *kv, size_t layer_floats, const Batch *batch,
                         float *hidden) {
    Prompts *p = s->prompts;
    PromptOwner *o = prompt_owner(&p->at, p->at.rank);
    PromptStep *t = &p->own;
    const int rows_units = 2 * p->at.ranks;
    begin_step(p, s, tokens, batch);
    for (int k = 0;; k++) {
        run_phase(p, s, rows_units, o->row_winner[k & 1]);
        if (k == s->layers) break;
        t->kv = kv + (size_t)k * layer_floats;
        copy_new_kv(t, o, k, t->kv);
        copy_prior(t, t->kv, prompt_prior(&p->at, p->at.rank), 1);
        const Layer *l = &s->layer[k];
        run_phase(p, s, head_units(t, list_tasks(&t->batch, attention_heads(l), attention_tile(l))), o->head_winner);
    }
    const size_t width = (size_t)p->at.hidden;
    for (int unit = 0; unit < rows_units; unit++) {
        int from, to;
        unit_rows(batch->rows, p->at.ranks, unit, &from, &to);
        const float *x = winner_of(t, o->row_winner[s->layers & 1], unit).stream[s->layers & 1];
        memcpy(hidden + (size_t)from * width, x + (size_t)from * width, sizeof(float) * (size_t)(to - from) * width);
    }
    atomic_store_explicit(&o->state, STATE(0, STATE_PHASE(atomic_load(&o->state))), memory_order_release);
}

/* ---- helper ----------------------------------------------------------------------------------------------------- */

/* Copies what the owner says of its step and checks it: the owner may have gone on. */
static int read_step(Prompts *p, const Stack *s, int owner, uint64_t state) {
    const PromptOwner *o = prompt_owner(&p->at, owner);
    PromptStep *t = &p->helped;
    if (t->owner == owner && t->first == o->first && t->batch.rows) return 1;
    const uint32_t first = o->first, rows = o->rows, prompts = o->prompts, layers = o->layers;
    if (rows > (uint32_t)p->at.rows || prompts > MAX_PROMPTS || layers != s->layers) return 0;
    t->batch = (Batch){0};
    int64_t prior = 0;
    uint32_t row = 0;
    for (uint32_t i = 0; i < prompts; i++) {
        int32_t said[4];
        memcpy(said, o->sequence[i], sizeof said);
        if ((uint32_t)said[0] != row || said[1] < 1 || (uint32_t)said[1] > rows - row || said[2] < 0 || said[3]) return 0;
        prior += said[2];
        if (prior > p->at.context || said[2] + said[1] > s->entry.positions) return 0;
        t->sequence[i] = (SequenceRows){said[0], said[1], said[2], said[3], NULL};
        row += (uint32_t)said[1];
    }
    atomic_thread_fence(memory_order_acquire);
    if (row != rows || atomic_load_explicit(&o->state, memory_order_relaxed) != state) return 0;
    t->at = &p->at;
    t->owner = owner;
    t->first = first;
    t->batch = (Batch){.rows = (int)rows, .prompts = (int)prompts};
    prompt_tables(t, s);
    return 1;
}

/* Whether this rank computed something for the owner. */
static int help_owner(Prompts *p, int owner) {
    PromptOwner *o = prompt_owner(&p->at, owner);
    const Stack *s = p->at.stack;
    const uint64_t state = atomic_load_explicit(&o->state, memory_order_acquire);
    if (!has_free_unit(o, state) || STATE_UNITS(state) > MAX_UNITS || atomic_load(&pool.wanted)) return 0;
    if (pthread_mutex_trylock(&pool.owner)) return 0; /* a step of this rank is running */
    const int can = read_step(p, s, owner, state) && STATE_PHASE(state) - p->helped.first <= 2 * (uint64_t)s->layers;
    PhaseWork work = phase_work(&p->helped, s, o, state);
    if (can) run_units(&work, state);
    pthread_mutex_unlock(&pool.owner);
    return can;
}

static int help_all(Prompts *p, int *is_open) {
    int helped = 0;
    *is_open = 0;
    for (int owner = 0; owner < p->at.ranks; owner++) {
        if (owner == p->at.rank) continue;
        helped |= help_owner(p, owner);
        *is_open |= STATE_UNITS(atomic_load_explicit(&prompt_owner(&p->at, owner)->state, memory_order_relaxed)) > 0;
    }
    return helped;
}

static void *help(void *argument) {
    Prompts *p = argument;
    Signal *signal = &prompt_owner(&p->at, p->at.rank)->helper;
    int64_t idle_since = 0;
    for (int i = 1, is_open; !atomic_load_explicit(&p->leave, memory_order_acquire); i++) {
        if (help_all(p, &is_open)) idle_since = now_ns();
        else if (is_open && (i % 64 || now_ns() - idle_since < HELPER_SPIN_NS)) {
            if (i % 64) RELAX;
            else sched_yield();
        } else {
            const uint32_t word = prepare_sleep(signal);
            if (!atomic_load(&p->leave) && !help_all(p, &is_open)) sleep_on(signal, word, HELPER_SLEEP_NS);
            end_sleep(signal);
            idle_since = now_ns();
        }
    }
    return NULL;
}

/* ---- beginning and end ------------------------------------------------------------------------------------------ */

static void prompts_free(Prompts *p) {
    char *blocks[] = {p->own.tables.data, p->own.context.data, p->helped.tables.data, p->helped.context.data};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
    free(p);
}

static Prompts *prompts_open(const PromptMemory *memory) {
    Prompts *p = HAVE_FUTEX ? calloc(1, sizeof *p) : NULL;
    if (!p) return NULL;
    p->at = *memory;
    PromptOwner *o = prompt_owner(&p->at, p->at.rank);
    atomic_store(&o->state, STATE(0, STATE_PHASE(atomic_load(&o->state)))); /* an earlier process may have left it open */
    atomic_store(&o->helper.asleep, 0);
    if (!pthread_create(&p->thread, NULL, help, p)) return p;
    prompts_free(p);
    return NULL;
}

static void prompts_close(Prompts *p) {
    atomic_store(&p->leave, 1);
    wake(&prompt_owner(&p->at, p->at.rank)->helper);
    pthread_join(p->thread, NULL);
    prompts_free(p);
}

#endif
