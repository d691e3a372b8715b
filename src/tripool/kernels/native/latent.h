/* Latent attention. Prompt rows: keys and values are expanded from the cached latents. Decode rows: the query is taken
 * into the latent space instead, head by head, attends to the context as it is, and its result is taken back. */
#ifndef TRIPOOL_LATENT_H
#define TRIPOOL_LATENT_H

#include "layers.h"

typedef struct {
    Norm norm;
    Weight down;            /* [q rank +] latent + rope, from hidden */
    Norm q_norm;            /* gain NULL: queries come from the layer's input */
    Norm kv_norm;
    Weight query, out;
    const Weight *expand, *to_latent, *from_latent; /* [heads]: nope + v from rank, rank from nope, v from rank */
    int32_t heads, rank, rope, nope, v;
    float scale;
} Mla;

typedef struct {
    const Mla *m;
    const Batch *b;
    float *down, *kv;
    float *q;        /* [rows, heads, nope + rope] */
    float *latent_q; /* [decode rows, heads, rank + rope] */
    Rows latent;     /* what decode rows attended to, a row per head */
    float *out;      /* [rows, heads, v] */
    Rows decode_q;   /* the still parts of decode rows' queries, a row per head */
    Rows context;            /* latents of all prompt spans' contexts */
    const size_t *context_at; /* by prompt span: its first row there */
    size_t expanded_room;    /* floats of a thread's own keys and values */
    Rows queries;
    size_t down_stride, kv_width, score_room, thread_room;
    int q_rank;
    const int32_t (*tasks)[3];
} MlaWork;

static void mla_place_row(const MlaWork *w, int row, int thread) {
    const Mla *m = w->m;
    float *down = w->down + (size_t)row * w->down_stride, *latent = down + w->q_rank;
    if (w->q_rank) {
        float *normed = (float *)scratch[NORMED].data + (size_t)thread * ((w->q_rank + 15) / 16 * 16);
        normalise(down, &m->q_norm, normed);
        quantise(normed, w->q_rank, &w->queries, row);
    }
    normalise(latent, &m->kv_norm, latent);
    turn(latent + m->rank, w->b->turns + (size_t)row * m->rope, m->rope);
    memcpy(w->kv + (size_t)w->b->slots[row] * w->kv_width, latent, sizeof(float) * w->kv_width);
}

static void mla_place_chunk(void *arguments, int chunk, int thread) {
    const MlaWork *w = arguments;
    for (int row = chunk * ROWS_PER_CHUNK; row < (chunk + 1) * ROWS_PER_CHUNK && row < w->b->rows; row++)
        mla_place_row(w, row, thread);
}

/* A row's queries: the rotary parts turn; a decode row's other parts get ready for their way to the latent space. */
static void mla_turn_row(const MlaWork *w, int row) {
    const Mla *m = w->m;
    const size_t width = (size_t)(m->nope + m->rope), latent_width = (size_t)(m->rank + m->rope);
    const int decode = row - w->b->prompt_rows;
    for (int h = 0; h < m->heads; h++) {
        float *q = w->q + ((size_t)row * m->heads + h) * width;
        turn(q + m->nope, w->b->turns + (size_t)row * m->rope, m->rope);
        if (decode < 0) continue;
        const size_t at = (size_t)decode * m->heads + h;
        quantise(q, m->nope, &w->decode_q, (int)at);
        memcpy(w->latent_q + at * latent_width + m->rank, q + m->nope, sizeof(float) * (size_t)m->rope);
    }
}

static void mla_turn_chunk(void *arguments, int chunk, int thread) {
    (void)thread;
    const MlaWork *w = arguments;
    for (int row = chunk * ROWS_PER_CHUNK; row < (chunk + 1) * ROWS_PER_CHUNK && row < w->b->rows; row++)
        mla_turn_row(w, row);
}

/* Each head's own product over the decode rows: y [rows, heads, stride]. */
static void mla_by_head(const Mla *m, const Weight *weights, const Rows *x, int rows, float *y, size_t stride) {
    int *row = room(ROUTE, sizeof(int) * (size_t)rows * m->heads);
    Product *list = room(PRODUCTS, (sizeof(Product) + sizeof(int)) * (size_t)m->heads);
    Products all = {list, (int *)(list + m->heads), 0, 0};
    for (int h = 0; h < m->heads; h++) {
        int *mine = row + (size_t)h * rows;
        for (int i = 0; i < rows; i++) mine[i] = i * m->heads + h;
        add_product(&all, (Product){&weights[h], x, mine, rows, y + h * stride, m->heads * stride, 0, STORE, NULL, 0});
    }
    multiply_all(&all);
}

/* Floats from one position's keys and values to the next's: a line more than they are, because rows a power of two apart
 * would all want the same few places of the cache. */
INLINE size_t expanded_width(const Mla *m) { return (size_t)(m->nope + m->v + LANES); }

/* One head over one span: its keys and values are expanded into the thread's own memory, and used while they are near. */
static void mla_prompt_task(const MlaWork *w, int span, int head, float *memory) {
    const Mla *m = w->m;
    const Span *s = &w->b->prompt[span];
    const size_t wide = expanded_width(m), q_width = (size_t)(m->nope + m->rope), first = w->context_at[span];
    Rows rows = w->context;
    rows.q += first * rows.groups * GROUP;
    rows.scale += first * rows.groups;
    rows.fix += first * rows.groups;
    const Product expand = {&m->expand[head], &rows, NULL, stop_of(s), memory, wide, 0, STORE, NULL, 0};
    multiply(&expand, 0, panels_of(expand.w->out));
    const Source keys = {memory, NULL, wide, m->nope}, values = {memory + m->nope, NULL, wide, m->v};
    const Source rotary = {w->kv + m->rank, s->table, w->kv_width, m->rope};
    for (int from = 0; from < s->count; from += MLA_TILE) {
        const int count = s->count - from < MLA_TILE ? s->count - from : MLA_TILE;
        const float *q[MLA_TILE];
        float *out[MLA_TILE];
        int position[MLA_TILE];
        for (int i = 0; i < count; i++) {
            const size_t row = (size_t)(s->row + from + i);
            q[i] = w->q + (row * m->heads + head) * q_width;
            out[i] = w->out + (row * m->heads + head) * m->v;
            position[i] = s->start + from + i;
        }
        const Tile tile_ = {q, out, position, count, {&keys, &rotary}, &values, s->first, stop_of(s), m->scale};
        attend_tile(&tile_, memory + w->expanded_room);
    }
}

static void mla_decode_task(const MlaWork *w, const Span *s, int h, int i, float *memory) {
    const Mla *m = w->m;
    const int heads = m->heads - h < DECODE_HEADS ? m->heads - h : DECODE_HEADS;
    const size_t row = (size_t)(s->row + i), width = (size_t)(m->rank + m->rope);
    const Source keys = {w->kv, s->table, w->kv_width, (int)width}, values = {w->kv, s->table, w->kv_width, m->rank};
    float *latent = memory + DECODE_HEADS * w->score_room; /* [heads, rank] */
    attend_decode(heads, w->latent_q + (row * m->heads + h) * width, width, &keys, &values, s->first, s->start + i + 1,
                  m->scale, latent, (size_t)m->rank, memory, w->score_room);
    for (int j = 0; j < heads; j++) quantise(latent + (size_t)j * m->rank, m->rank, &w->latent, (int)row * m->heads + h + j);
}

static void mla_task(void *arguments, int chunk, int thread) {
    const MlaWork *w = arguments;
    const int32_t *task = w->tasks[chunk];
    float *memory = (float *)scratch[PER_THREAD].data + (size_t)thread * w->thread_room;
    if (task[0] < w->b->prompts) mla_prompt_task(w, task[0], task[1], memory);
    else if (task[1] % DECODE_HEADS == 0)
        mla_decode_task(w, &w->b->decode[task[0] - w->b->prompts], task[1], task[2], memory);
}

/* The latents of every prompt span's context, in 8 bits; a chunk is one block of one span. */
static void mla_context_chunk(void *arguments, int chunk, int thread) {
    (void)thread;
    const MlaWork *w = arguments;
    const int32_t *task = w->tasks[chunk];
    const Span *s = &w->b->prompt[task[0]];
    const Source source = {w->kv, s->table, w->kv_width, w->m->rank};
    const int end = (task[2] + 1) * BLOCK < stop_of(s) ? (task[2] + 1) * BLOCK : stop_of(s);
    for (int p = task[2] * BLOCK; p < end; p++) {
        const float *latent = at(&source, p < s->first ? s->first : p); /* nobody looks at what is before the first */
        quantise(latent, w->m->rank, &w->context, (int)w->context_at[task[0]] + p);
    }
}

static void mla_context(MlaWork *w) {
    const Batch *b = w->b;
    size_t *first_row = room(PAIRS, sizeof(size_t) * (size_t)(b->prompts + 1)), rows = 0, blocks = 0;
    for (int i = 0; i < b->prompts; i++) {
        first_row[i] = rows;
        rows += (size_t)stop_of(&b->prompt[i]);
        blocks += (size_t)(stop_of(&b->prompt[i]) + BLOCK - 1) / BLOCK;
    }
    int32_t (*task)[3] = room(TASKS, sizeof(int32_t[3]) * blocks);
    int n = 0;
    for (int i = 0; i < b->prompts; i++)
        for (int block = 0; block * BLOCK < stop_of(&b->prompt[i]); block++, n++) task[n][0] = i, task[n][2] = block;
    w->context_at = first_row;
    w->context = rows_room(LATENT, (int)rows, w->m->rank);
    w->tasks = (const int32_t (*)[3])task;
    in_parallel(n, mla_context_chunk, w);
}

/* Latents of all rows into the KV; queries, if they have a low rank, ready for their second product. */
static MlaWork mla_place(const Mla *m, const float *x, float *kv, const Batch *b) {
    const int hidden = m->norm.width, rows = b->rows, q_rank = m->q_norm.gain ? m->q_norm.width : 0;
    const Rows input = prepared(INPUT, x, hidden, rows, hidden, &m->norm);
    MlaWork w = {.m = m, .b = b, .kv = kv, .q_rank = q_rank, .kv_width = (size_t)(m->rank + m->rope)};
    w.down_stride = (size_t)m->down.out;
    w.down = room(INNER, sizeof(float) * rows * w.down_stride);
    product((Product){&m->down, &input, NULL, rows, w.down, w.down_stride, 0, STORE, NULL, 0});
    w.queries = q_rank ? rows_room(SHARED_ROWS, rows, q_rank) : input;
    if (q_rank) room(NORMED, sizeof(float) * (size_t)MAX_THREADS * ((q_rank + 15) / 16 * 16));
    if (rows < SMALL_ROWS)
        for (int row = 0; row < rows; row++) mla_place_row(&w, row, 0);
    else
        in_parallel((rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, mla_place_chunk, &w);
    return w;
}

/* What is left to do for the rows of `b`, which are placed. `placed_as`: which of `mla_place`'s rows they are; NULL: all
 * of them. */
static void mla_attend(MlaWork w, float *x, const Batch *b, const int32_t *placed_as) {
    const Mla *m = w.m;
    const int hidden = m->norm.width, rows = b->rows, prompt = b->prompt_rows, decode = rows - prompt;
    const size_t heads = (size_t)m->heads, q_width = heads * (m->nope + m->rope), out_width = heads * m->v;
    w.b = b;
    w.q = room(QUERIES, sizeof(float) * rows * q_width);
    w.out = room(ATTENDED, sizeof(float) * rows * out_width);
    w.latent_q = room(LATENT_QUERIES, sizeof(float) * decode * heads * (m->rank + m->rope));
    w.latent = rows_room(MIDDLE, decode * m->heads, m->rank);
    w.decode_q = rows_room(SHARED, decode * m->heads, m->nope);
    product((Product){&m->query, &w.queries, placed_as, rows, w.q, q_width, 0, STORE, NULL, 0});
    if (rows < SMALL_ROWS)
        for (int row = 0; row < rows; row++) mla_turn_row(&w, row);
    else
        in_parallel((rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, mla_turn_chunk, &w);
    if (decode) mla_by_head(m, m->to_latent, &w.decode_q, decode, w.latent_q, (size_t)(m->rank + m->rope));

    if (prompt) mla_context(&w);
    w.score_room = ((size_t)b->context + LANES) / LANES * LANES;
    size_t need = DECODE_HEADS * (w.score_room + (size_t)m->rank);
    if (prompt) {
        w.expanded_room = ((size_t)b->context + BLOCK) * expanded_width(m);
        const size_t tiles = w.expanded_room + tile_room(MLA_TILE, m->nope + m->rope, m->v);
        need = need > tiles ? need : tiles;
    }
    w.thread_room = (need + LANES - 1) / LANES * LANES;
    room(PER_THREAD, sizeof(float) * w.thread_room * (size_t)pool.threads);
    const int tasks = list_tasks(b, m->heads, INT32_MAX / 2);
    w.tasks = scratch[TASKS].data;
    in_parallel(tasks, mla_task, &w);

    if (decode) mla_by_head(m, m->from_latent, &w.latent, decode, w.out + prompt * out_width, (size_t)m->v);
    const Rows attended = prepared(MIDDLE, w.out, out_width, rows, (int)out_width, NULL);
    product((Product){&m->out, &attended, NULL, rows, x, (size_t)hidden, 0, ADD, NULL, 0});
}

static void mla(const Mla *m, float *x, float *kv, const Batch *b) { mla_attend(mla_place(m, x, kv, b), x, b, NULL); }

#endif
