/* Multi-head latent attention. Prompt rows: keys and values are expanded from the cached latents. Decode rows: the
 * query is projected into the latent space per head, attends to the cached latents directly, and the result is
 * projected back. */
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
    const float *const *query; /* [rows]: where each row of q is, if they are not consecutive; or NULL */
    float *latent_q; /* [decode rows, heads, rank + rope] */
    Rows latent;     /* attention results of decode rows, a row per head */
    float *out;      /* [rows, heads, v] */
    Rows decode_q;   /* non-rotary parts of decode rows' queries, a row per head */
    Rows context;            /* latents of the contexts of all prompt sequences */
    const size_t *context_start; /* by prompt sequence: its first row in `context` */
    size_t expanded_room;    /* floats of a thread's expanded keys and values */
    Rows queries;
    size_t down_stride, kv_width, score_stride, thread_room;
    int q_rank;
    const int32_t (*tasks)[3];
} MlaWork;

static void mla_write_kv_row(const MlaWork *w, int row, int thread) {
    const Mla *m = w->m;
    float *down = w->down + (size_t)row * w->down_stride, *latent = down + w->q_rank;
    if (w->q_rank) {
        float *normed = (float *)scratch[NORMED].data + (size_t)thread * ((w->q_rank + 15) / 16 * 16);
        normalise(down, &m->q_norm, normed);
        quantise(normed, w->q_rank, &w->queries, row);
    }
    normalise(latent, &m->kv_norm, latent);
    apply_rope(latent + m->rank, w->b->cos_sin + (size_t)row * m->rope, m->rope);
    memcpy(w->kv + (size_t)w->b->slot_mapping[row] * w->kv_width, latent, sizeof(float) * w->kv_width);
}

static void mla_write_kv_chunk(void *arguments, int chunk, int thread) {
    const MlaWork *w = arguments;
    for (int row = chunk * ROWS_PER_CHUNK; row < (chunk + 1) * ROWS_PER_CHUNK && row < w->b->rows; row++)
        mla_write_kv_row(w, row, thread);
}

/* Rotates a row's queries; for a decode row, quantises the other parts for the projection into the latent space. */
static void mla_rope_row(const MlaWork *w, int row) {
    const Mla *m = w->m;
    const size_t width = (size_t)(m->nope + m->rope), latent_width = (size_t)(m->rank + m->rope);
    const int decode = row - w->b->prompt_rows;
    for (int h = 0; h < m->heads; h++) {
        float *q = w->q + ((size_t)row * m->heads + h) * width;
        apply_rope(q + m->nope, w->b->cos_sin + (size_t)row * m->rope, m->rope);
        if (decode < 0) continue;
        const size_t at = (size_t)decode * m->heads + h;
        quantise(q, m->nope, &w->decode_q, (int)at);
        memcpy(w->latent_q + at * latent_width + m->rank, q + m->nope, sizeof(float) * (size_t)m->rope);
    }
}

static void mla_rope_chunk(void *arguments, int chunk, int thread) {
    (void)thread;
    const MlaWork *w = arguments;
    for (int row = chunk * ROWS_PER_CHUNK; row < (chunk + 1) * ROWS_PER_CHUNK && row < w->b->rows; row++)
        mla_rope_row(w, row);
}

/* One product per head over the decode rows: y [rows, heads, stride]. */
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

/* Stride of expanded keys and values: one line more than their width, because rows a power of two apart would map to
 * the same few cache sets. */
INLINE size_t expanded_width(const Mla *m) { return (size_t)(m->nope + m->v + LANES); }

/* One head of one sequence: expands keys and values into the thread's scratch memory and uses them while they are in
 * cache. */
static void mla_prompt_task(const MlaWork *w, int seq, int head, float *memory) {
    const Mla *m = w->m;
    const SequenceRows *s = &w->b->prompt[seq];
    const size_t wide = expanded_width(m), q_width = (size_t)(m->nope + m->rope), first = w->context_start[seq];
    Rows rows = w->context;
    rows.q += first * rows.groups * GROUP;
    rows.scale += first * rows.groups;
    rows.fix += first * rows.groups;
    const Product expand = {&m->expand[head], &rows, NULL, stop_of(s), memory, wide, 0, STORE, NULL, 0};
    multiply(&expand, 0, panels_of(expand.w->out));
    const Source keys = {memory, NULL, wide, m->nope}, values = {memory + m->nope, NULL, wide, m->v};
    const Source rotary = {w->kv + m->rank, s->block_table, w->kv_width, m->rope};
    for (int from = 0; from < s->count; from += MLA_TILE) {
        const int count = s->count - from < MLA_TILE ? s->count - from : MLA_TILE;
        const float *q[MLA_TILE];
        float *out[MLA_TILE];
        int position[MLA_TILE];
        for (int i = 0; i < count; i++) {
            const size_t row = (size_t)(s->row + from + i);
            q[i] = (w->query ? w->query[row] : w->q + row * m->heads * q_width) + head * q_width;
            out[i] = w->out + (row * m->heads + head) * m->v;
            position[i] = s->start + from + i;
        }
        const Tile tile_ = {q, out, position, count, {&keys, &rotary}, &values, s->first, stop_of(s), m->scale};
        attend_tile(&tile_, memory + w->expanded_room);
    }
}

static void mla_decode_task(const MlaWork *w, const SequenceRows *s, int h, int i, float *memory) {
    const Mla *m = w->m;
    const int heads = m->heads - h < DECODE_HEADS ? m->heads - h : DECODE_HEADS;
    const size_t row = (size_t)(s->row + i), width = (size_t)(m->rank + m->rope);
    const Source keys = {w->kv, s->block_table, w->kv_width, (int)width};
    const Source values = {w->kv, s->block_table, w->kv_width, m->rank};
    float *latent = memory + DECODE_HEADS * w->score_stride; /* [heads, rank] */
    attend_decode(heads, w->latent_q + (row * m->heads + h) * width, width, &keys, &values, s->first, s->start + i + 1,
                  m->scale, latent, (size_t)m->rank, memory, w->score_stride);
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

/* Quantises the latents of every prompt sequence's context; a chunk is one block of one sequence. */
static void mla_context_chunk(void *arguments, int chunk, int thread) {
    (void)thread;
    const MlaWork *w = arguments;
    const int32_t *task = w->tasks[chunk];
    const SequenceRows *s = &w->b->prompt[task[0]];
    const Source source = {w->kv, s->block_table, w->kv_width, w->m->rank};
    const int end = (task[2] + 1) * BLOCK < stop_of(s) ? (task[2] + 1) * BLOCK : stop_of(s);
    for (int p = task[2] * BLOCK; p < end; p++) {
        const float *latent = at(&source, p < s->first ? s->first : p); /* positions before `first` are never read */
        quantise(latent, w->m->rank, &w->context, (int)w->context_start[task[0]] + p);
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
    w->context_start = first_row;
    w->context = rows_room(LATENT, (int)rows, w->m->rank);
    w->tasks = (const int32_t (*)[3])task;
    in_parallel(n, mla_context_chunk, w);
}

/* Writes the latents of all rows into the KV; prepares low-rank queries for their second product. */
static MlaWork mla_write_kv(const Mla *m, const float *x, float *kv, const Batch *b) {
    const int hidden = m->norm.width, rows = b->rows, q_rank = m->q_norm.gain ? m->q_norm.width : 0;
    const Rows input = prepared(INPUT, x, hidden, rows, hidden, &m->norm);
    MlaWork w = {.m = m, .b = b, .kv = kv, .q_rank = q_rank, .kv_width = (size_t)(m->rank + m->rope)};
    w.down_stride = (size_t)m->down.out;
    w.down = room(INNER, sizeof(float) * rows * w.down_stride);
    product((Product){&m->down, &input, NULL, rows, w.down, w.down_stride, 0, STORE, NULL, 0});
    w.queries = q_rank ? rows_room(SHARED_ROWS, rows, q_rank) : input;
    if (q_rank) room(NORMED, sizeof(float) * (size_t)MAX_THREADS * ((q_rank + 15) / 16 * 16));
    if (rows < SMALL_ROWS)
        for (int row = 0; row < rows; row++) mla_write_kv_row(&w, row, 0);
    else
        in_parallel((rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, mla_write_kv_chunk, &w);
    return w;
}

/* Queries of all rows, rotated. */
static void mla_queries(MlaWork *w, const int32_t *row_index) {
    const Mla *m = w->m;
    const int rows = w->b->rows;
    const size_t width = (size_t)m->heads * (m->nope + m->rope);
    product((Product){&m->query, &w->queries, row_index, rows, w->q, width, 0, STORE, NULL, 0});
    if (rows < SMALL_ROWS)
        for (int row = 0; row < rows; row++) mla_rope_row(w, row);
    else
        in_parallel((rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, mla_rope_chunk, w);
}

/* Scratch memory of the threads that attend. */
static void mla_thread_room(MlaWork *w) {
    const Mla *m = w->m;
    w->score_stride = ((size_t)w->b->context + LANES) / LANES * LANES;
    size_t need = DECODE_HEADS * (w->score_stride + (size_t)m->rank);
    if (w->b->prompt_rows) {
        w->expanded_room = ((size_t)w->b->context + BLOCK) * expanded_width(m);
        const size_t tiles = w->expanded_room + tile_room(MLA_TILE, m->nope + m->rope, m->v);
        need = need > tiles ? need : tiles;
    }
    w->thread_room = (need + LANES - 1) / LANES * LANES;
    room(PER_THREAD, sizeof(float) * w->thread_room * (size_t)pool.threads);
}

/* Attends the rows of `b`, whose KV is written. `row_index`: their rows in `mla_write_kv`; NULL: all of them. */
static void mla_attend(MlaWork w, float *x, const Batch *b, const int32_t *row_index) {
    const Mla *m = w.m;
    const int hidden = m->norm.width, rows = b->rows, prompt = b->prompt_rows, decode = rows - prompt;
    const size_t heads = (size_t)m->heads, q_width = heads * (m->nope + m->rope), out_width = heads * m->v;
    w.b = b;
    w.q = room(QUERIES, sizeof(float) * rows * q_width);
    w.out = room(ATTENDED, sizeof(float) * rows * out_width);
    w.latent_q = room(LATENT_QUERIES, sizeof(float) * decode * heads * (m->rank + m->rope));
    w.latent = rows_room(MIDDLE, decode * m->heads, m->rank);
    w.decode_q = rows_room(SHARED, decode * m->heads, m->nope);
    mla_queries(&w, row_index);
    if (decode) mla_by_head(m, m->to_latent, &w.decode_q, decode, w.latent_q, (size_t)(m->rank + m->rope));

    if (prompt) mla_context(&w);
    mla_thread_room(&w);
    const int tasks = list_tasks(b, m->heads, INT32_MAX / 2);
    w.tasks = scratch[TASKS].data;
    in_parallel(tasks, mla_task, &w);

    if (decode) mla_by_head(m, m->from_latent, &w.latent, decode, w.out + prompt * out_width, (size_t)m->v);
    const Rows attended = prepared(MIDDLE, w.out, out_width, rows, (int)out_width, NULL);
    product((Product){&m->out, &attended, NULL, rows, x, (size_t)hidden, 0, ADD, NULL, 0});
}

static void mla(const Mla *m, float *x, float *kv, const Batch *b) { mla_attend(mla_write_kv(m, x, kv, b), x, b, NULL); }

#endif
