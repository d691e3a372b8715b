/* What ranks share to compute prompts together. `experts/prompt_layout.py` describes it. */
#ifndef TRIPOOL_PROMPT_SLABS_H
#define TRIPOOL_PROMPT_SLABS_H

#include "attend.h"
#include "futex.h"

#define MAX_UNITS 256   /* of a phase */
#define MAX_PROMPTS 64  /* sequences of a step */

/* As Python gives it: `kernels/cpu8/prompts.py`. */
typedef struct {
    uint8_t *map;
    uint64_t owners, owner_bytes, tokens, prior, areas, area_bytes, stream, queries, kv, attended;
    int32_t ranks, rank, rows, context, hidden, query_width, kv_width, attended_width;
    const struct Stack *stack;
} PromptMemory;

/* Of an owner. It alone writes to it, apart from claims and its signal. */
typedef struct {
    _Alignas(64) Signal helper;           /* of the thread of this rank that helps others */
    _Alignas(64) _Atomic uint64_t state;  /* units of the phase << 32 | its number; no units: closed */
    _Alignas(64) uint32_t first, rows, prompts, layers; /* `first`: the step's first phase */
    int32_t sequence[MAX_PROMPTS][4];     /* row, count, start, first */
    uint8_t row_winner[2][MAX_UNITS], head_winner[MAX_UNITS]; /* rank whose results count */
    _Alignas(64) _Atomic uint64_t claim[MAX_UNITS];           /* phase << 32 | rank; another phase: free */
} PromptOwner;

/* What one rank has computed for an owner: one writer. */
typedef struct {
    _Atomic uint32_t *done; /* [MAX_UNITS]: phase */
    float *stream[2], *queries, *kv, *attended;
} PromptArea;

#define STATE(units, phase) ((uint64_t)(units) << 32 | (uint32_t)(phase))
#define STATE_UNITS(state) ((int)((state) >> 32))
#define STATE_PHASE(state) ((uint32_t)(state))

static PromptOwner *prompt_owner(const PromptMemory *m, int rank) {
    return (PromptOwner *)(m->map + m->owners + m->owner_bytes * (size_t)rank);
}
static int64_t *prompt_tokens(const PromptMemory *m, int owner) {
    return (int64_t *)((uint8_t *)prompt_owner(m, owner) + m->tokens);
}
/* [context, kv_width]: KV of positions before the step's, of the layer that attends, sequence after sequence. */
static float *prompt_prior(const PromptMemory *m, int owner) {
    return (float *)((uint8_t *)prompt_owner(m, owner) + m->prior);
}

static PromptArea prompt_area(const PromptMemory *m, int rank, int owner) {
    uint8_t *p = m->map + m->areas + m->area_bytes * ((size_t)rank * m->ranks + owner);
    float *stream = (float *)(p + m->stream);
    return (PromptArea){(_Atomic uint32_t *)p,
                        {stream, stream + (size_t)m->rows * m->hidden},
                        (float *)(p + m->queries), (float *)(p + m->kv), (float *)(p + m->attended)};
}

/* Rows of a unit: one large part for each rank, then one small part each, so that ranks end together. */
static void unit_rows(int rows, int ranks, int unit, int *from, int *to) {
    const int large = rows * 3 / 4 / ranks, rest = rows - large * ranks, small = unit - ranks;
    if (small < 0) {
        *from = large * unit;
        *to = *from + large;
    } else {
        *from = large * ranks + rest * small / ranks;
        *to = large * ranks + rest * (small + 1) / ranks;
    }
}

/* A free unit of the phase, which is then this rank's; -1: none is left, or the phase is over. */
static int claim_unit(PromptOwner *o, uint64_t state, int rank) {
    const uint64_t mine = (uint64_t)STATE_PHASE(state) << 32 | (uint32_t)rank;
    for (int unit = 0; unit < STATE_UNITS(state); unit++) {
        uint64_t found = atomic_load_explicit(&o->claim[unit], memory_order_relaxed);
        if (found >> 32 == STATE_PHASE(state) || atomic_load_explicit(&o->state, memory_order_relaxed) != state) continue;
        if (atomic_compare_exchange_strong_explicit(&o->claim[unit], &found, mine, memory_order_acq_rel,
                                                    memory_order_relaxed))
            return unit;
    }
    return -1;
}

static int has_free_unit(const PromptOwner *o, uint64_t state) {
    for (int unit = 0; unit < STATE_UNITS(state); unit++)
        if (atomic_load_explicit(&o->claim[unit], memory_order_relaxed) >> 32 != STATE_PHASE(state)) return 1;
    return 0;
}

#endif
