/* Units of a step whose prompts are computed by several ranks: some rows of everything between two attentions, or some
 * heads of an attention. Rows and heads do not depend on each other, so it does not matter who computes which.
 *
 * Rows: output projection and feed-forward part of the last layer, projections of this one. Experts run where the rows
 * are: so many rows need all of them, and every rank maps the packed weights. */
#ifndef TRIPOOL_PROMPT_UNITS_H
#define TRIPOOL_PROMPT_UNITS_H

#include "network.h"
#include "prompt_slabs.h"

/* A step of an owner, as one rank sees it. */
typedef struct {
    const PromptMemory *at;
    int owner;
    uint32_t first;
    Batch batch;             /* prompts only */
    SequenceRows sequence[MAX_PROMPTS];
    Workspace tables;        /* of the four below */
    float *cos_sin;          /* [rows, rope_width] */
    int64_t *consecutive;    /* [rows]: 0, 1, 2, ... */
    const float **query;     /* [rows]: where the queries of each row are */
    int32_t *block_tables;   /* of the copied context */
    Workspace context;       /* a helper's copy of the KV of one layer */
    float *kv;               /* of the layer that attends */
} PromptStep;

/* Tables that follow from the sequences. A helper's context is a copy, with block tables of its own. */
static void prompt_tables(PromptStep *t, const Stack *s) {
    const int rows = t->batch.rows, width = s->entry.rope_width, own = t->at->rank != t->owner;
    size_t blocks = 0;
    for (int i = 0; i < t->batch.prompts; i++) blocks += (size_t)(stop_of(&t->sequence[i]) + BLOCK - 1) / BLOCK;
    const size_t floats = lines(sizeof(float) * (size_t)rows * width), words = lines(sizeof(int64_t) * (size_t)rows);
    char *p = reserve(&t->tables, floats + 2 * words + sizeof(int32_t) * blocks);
    t->cos_sin = (float *)p;
    t->consecutive = (int64_t *)(p + floats);
    t->query = (const float **)(p + floats + words);
    t->block_tables = (int32_t *)(p + floats + 2 * words);
    if (own) reserve(&t->context, sizeof(float) * blocks * BLOCK * (size_t)t->at->kv_width);
    for (int row = 0; row < rows; row++) t->consecutive[row] = row;
    for (size_t block = 0; own && block < blocks; block++) t->block_tables[block] = (int32_t)block;
    t->batch.context = 0;
    for (int i = 0, block = 0; i < t->batch.prompts; i++) {
        SequenceRows *seq = &t->sequence[i];
        memcpy(t->cos_sin + (size_t)seq->row * width, s->entry.cos_sin + (size_t)seq->start * width,
               sizeof(float) * (size_t)seq->count * width);
        if (own) seq->block_table = t->block_tables + block;
        block += (stop_of(seq) + BLOCK - 1) / BLOCK;
        if (stop_of(seq) > t->batch.context) t->batch.context = stop_of(seq);
    }
    t->batch.prompt = t->sequence;
    t->batch.prompt_rows = rows;
}

/* The area whose results of a unit count. */
static PromptArea winner_of(const PromptStep *t, const uint8_t *winners, int unit) {
    const int rank = winners[unit];
    return prompt_area(t->at, rank < t->at->ranks ? rank : 0, t->owner);
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

INLINE int attention_heads(const Layer *l) { return l->mla ? l->mla->heads : l->gqa->kv_heads; }
INLINE int attention_tile(const Layer *l) { return l->mla ? INT32_MAX / 2 : PROMPT_TILE; }

/* Task i belongs to unit i % units. */
static int head_units(const PromptStep *t, int tasks) {
    const int most = 16 * t->at->ranks, units = most < MAX_UNITS ? most : MAX_UNITS;
    return tasks < units ? tasks : units;
}

/* Where the queries of each row are. */
static void find_queries(PromptStep *t, const PromptOwner *o, int k) {
    const PromptMemory *m = t->at;
    for (int unit = 0; unit < 2 * m->ranks; unit++) {
        int from, to;
        unit_rows(t->batch.rows, m->ranks, unit, &from, &to);
        const PromptArea area = winner_of(t, o->row_winner[k & 1], unit);
        for (int row = from; row < to; row++) t->query[row] = area.queries + (size_t)row * m->query_width;
    }
}

/* The KV of the step's rows, from whoever computed it. */
static void copy_new_kv(const PromptStep *t, const PromptOwner *o, int k, float *kv) {
    const PromptMemory *m = t->at;
    const size_t width = (size_t)m->kv_width;
    int unit = -1, to = 0;
    PromptArea area = {0};
    for (int i = 0; i < t->batch.prompts; i++) {
        const SequenceRows *seq = &t->sequence[i];
        for (int j = 0; j < seq->count; j++) {
            const int row = seq->row + j, p = seq->start + j;
            while (row >= to) {
                int from;
                unit_rows(t->batch.rows, m->ranks, ++unit, &from, &to);
                area = winner_of(t, o->row_winner[k & 1], unit);
            }
            memcpy(kv + ((size_t)seq->block_table[p / BLOCK] * BLOCK + p % BLOCK) * width, area.kv + row * width,
                   sizeof(float) * width);
        }
    }
}

/* The KV of positions before the step's: from the owner's memory into `prior`, or from there to a helper's context. */
static void copy_prior(const PromptStep *t, float *kv, float *prior, int into_prior) {
    const size_t width = (size_t)t->at->kv_width;
    for (int i = 0; i < t->batch.prompts; i++) {
        const SequenceRows *seq = &t->sequence[i];
        for (int p = 0, n; p < seq->start; p += n, prior += (size_t)n * width) {
            n = seq->start - p < BLOCK ? seq->start - p : BLOCK;
            float *block = kv + (size_t)seq->block_table[p / BLOCK] * BLOCK * width;
            memcpy(into_prior ? prior : block, into_prior ? block : prior, sizeof(float) * (size_t)n * width);
        }
    }
}

/* A helper's copy of the KV of a layer. */
static void copy_context(PromptStep *t, const PromptOwner *o, int k) {
    t->kv = (float *)t->context.data;
    copy_prior(t, t->kv, prompt_prior(t->at, t->owner), 0);
    copy_new_kv(t, o, k, t->kv);
}

/* An attention, once its context is prepared; valid while the caller owns the pool and runs nothing else. */
typedef struct {
    MlaWork latent;
    GqaWork grouped;
    Chunk run;
    void *work;
    int tasks, all; /* units */
    const int *units; /* whose tasks are wanted */
} HeadWork;

static void prepare_heads(const PromptStep *t, const Layer *l, HeadWork *w) {
    const PromptMemory *m = t->at;
    const PromptArea area = prompt_area(m, m->rank, t->owner);
    const size_t width = (size_t)m->kv_width;
    if (l->mla) {
        w->latent = (MlaWork){.m = l->mla, .b = &t->batch, .kv = t->kv, .kv_width = width, .query = t->query, .out = area.attended};
        mla_context(&w->latent);
        mla_thread_room(&w->latent);
    } else {
        w->grouped = (GqaWork){.g = l->gqa, .b = &t->batch, .kv = t->kv, .kv_width = width, .query = t->query, .out = area.attended,
                               .out_stride = (size_t)m->attended_width};
        gqa_thread_room(&w->grouped);
    }
    w->tasks = list_tasks(&t->batch, attention_heads(l), attention_tile(l));
    w->all = head_units(t, w->tasks);
    w->latent.tasks = w->grouped.tasks = scratch[TASKS].data;
    w->run = l->mla ? mla_task : gqa_task;
    w->work = l->mla ? (void *)&w->latent : (void *)&w->grouped;
}

static void head_task(void *arguments, int chunk, int thread) {
    const HeadWork *w = arguments;
    const int per = (w->tasks + w->all - 1) / w->all, task = w->units[chunk / per] + chunk % per * w->all;
    if (task < w->tasks) w->run(w->work, task, thread);
}

/* The heads of some units, into this rank's area. */
static void run_heads(HeadWork *w, const int *units, int count) {
    w->units = units;
    in_parallel(count * ((w->tasks + w->all - 1) / w->all), head_task, w);
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* What the heads gave for rows from .. to - 1: [rows, attended_width]. */
static float *gather_attended(const PromptStep *t, const PromptOwner *o, const Layer *l, int from, int to) {
    const PromptMemory *m = t->at;
    const int heads = attention_heads(l), tile = attention_tile(l), tasks = list_tasks(&t->batch, heads, tile);
    const int all = head_units(t, tasks);
    const int32_t (*task)[3] = scratch[TASKS].data;
    const size_t width = (size_t)m->attended_width, part = width / (size_t)heads;
    float *y = room(ATTENDED, sizeof(float) * (size_t)(to - from) * width);
    for (int i = 0; i < tasks; i++) {
        const SequenceRows *seq = &t->sequence[task[i][0]];
        const int start = seq->row + task[i][2], left = seq->count - task[i][2];
        const int stop = start + (left < tile ? left : tile);
        const size_t at = part * (size_t)task[i][1];
        const float *x = winner_of(t, o->head_winner, i % all).attended;
        for (int row = start > from ? start : from; row < stop && row < to; row++)
            memcpy(y + (size_t)(row - from) * width + at, x + (size_t)row * width + at, sizeof(float) * part);
    }
    return y;
}

/* Queries and KV of rows, into this rank's area. */
static void project_rows(const PromptStep *t, const Layer *l, const PromptArea *area, const float *x, int from, int rows,
                         int rope_width) {
    const PromptMemory *m = t->at;
    float *kv = area->kv + (size_t)from * m->kv_width, *q = area->queries + (size_t)from * m->query_width;
    const Batch b = {.rows = rows, .prompt_rows = rows, .slot_mapping = t->consecutive,
                     .cos_sin = t->cos_sin + (size_t)from * rope_width};
    if (l->mla) {
        MlaWork w = mla_write_kv(l->mla, x, kv, &b);
        w.q = q;
        mla_queries(&w, NULL);
    } else {
        const GqaWork w = gqa_write_kv(l->gqa, x, kv, &b);
        for (int row = 0; row < rows; row++)
            memcpy(q + (size_t)row * m->query_width, w.qkv + (size_t)row * w.qkv_stride, sizeof(float) * (size_t)m->query_width);
    }
}

/* Phase 2k of a step. After the last layer the stream holds normed final states. */
static void run_rows(const PromptStep *t, const Stack *s, const PromptOwner *o, int k, int unit) {
    const PromptMemory *m = t->at;
    const PromptArea area = prompt_area(m, m->rank, t->owner);
    const size_t hidden = (size_t)m->hidden;
    int from, to;
    unit_rows(t->batch.rows, m->ranks, unit, &from, &to);
    const int rows = to - from;
    if (!rows) return;
    float *x = area.stream[k & 1] + (size_t)from * hidden;
    if (k) {
        const Layer *l = &s->layer[k - 1];
        const Weight *out = l->mla ? &l->mla->out : &l->gqa->out;
        const PromptArea before = winner_of(t, o->row_winner[(k - 1) & 1], unit);
        memcpy(x, before.stream[(k - 1) & 1] + (size_t)from * hidden, sizeof(float) * (size_t)rows * hidden);
        const float *attended = gather_attended(t, o, l, from, to);
        const size_t width = (size_t)m->attended_width;
        const Rows input = prepared(MIDDLE, attended, width, rows, (int)width, NULL);
        product((Product){out, &input, NULL, rows, x, hidden, 0, ADD, NULL, 0});
        if (!l->moe) mlp(l->mlp, x, rows);
        else {
            moe(l->moe, x, rows);
            if (l->moe->exchange) /* the balancer counts these rows too */
                count_routed(l->moe->exchange, l->moe, scratch[ROUTE].data, (size_t)rows * l->moe->top_k);
        }
    } else {
        const int64_t *tokens = prompt_tokens(m, t->owner);
        for (int row = 0; row < rows; row++) { /* a rank that the owner has given up may read any bytes */
            const int64_t token = tokens[from + row];
            memcpy(x + (size_t)row * hidden, s->entry.embed + (token >= 0 && token < s->head.out ? (size_t)token : 0) * hidden,
                   sizeof(float) * hidden);
        }
    }
    if (k < s->layers) project_rows(t, &s->layer[k], &area, x, from, rows, s->entry.rope_width);
    else
        for (int row = 0; row < rows; row++) normalise(x + (size_t)row * hidden, &s->norm, x + (size_t)row * hidden);
}

#endif
