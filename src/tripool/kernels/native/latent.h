/* Latent attention. Prompt rows: queries, keys and values expanded from the cached latents. Decode rows: the way from a
 * query to the latent space, and back, is folded into the weights, so the context is read once, as it is. */
#ifndef TRIPOOL_LATENT_H
#define TRIPOOL_LATENT_H

#include "layers.h"

typedef struct {
    Norm norm;
    Weight down;            /* [q rank +] latent + rope, from hidden */
    Norm q_norm;            /* gain NULL: queries come from the layer's input */
    Norm kv_norm;
    Weight query, query_folded, expand, out, out_folded;
    int32_t heads, rank, rope, nope, v;
    float scale;
} Mla;

typedef struct {
    const Mla *m;
    const Batch *b;
    float *down, *kv, *prompt_q, *decode_q, *prompt_out, *decode_out;
    const float *expanded;
    const size_t *expanded_at; /* by prompt span: its first row in `expanded` */
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

/* Rotary parts of a row's queries. */
static void mla_turn_row(const MlaWork *w, int row) {
    const Mla *m = w->m;
    const int prompt = row < w->b->prompt_rows;
    const int still = prompt ? m->nope : m->rank;
    const size_t width = (size_t)(still + m->rope);
    float *q = prompt ? w->prompt_q + (size_t)row * m->heads * width
                      : w->decode_q + (size_t)(row - w->b->prompt_rows) * m->heads * width;
    for (int h = 0; h < m->heads; h++)
        turn(q + h * width + still, w->b->turns + (size_t)row * m->rope, m->rope);
}

static void mla_prompt_task(const MlaWork *w, int span, int head, int from, float *memory) {
    const Mla *m = w->m;
    const Span *s = &w->b->prompt[span];
    const int count = s->count - from < MLA_TILE ? s->count - from : MLA_TILE;
    const size_t wide = (size_t)(m->nope + m->v), q_width = (size_t)(m->nope + m->rope);
    const float *mine = w->expanded + (w->expanded_at[span] * m->heads + head) * wide;
    const Source keys = {mine, NULL, m->heads * wide, m->nope}, values = {mine + m->nope, NULL, m->heads * wide, m->v};
    const Source rotary = {w->kv + m->rank, s->table, w->kv_width, m->rope};
    const float *q[MLA_TILE];
    float *out[MLA_TILE];
    int position[MLA_TILE];
    for (int i = 0; i < count; i++) {
        const size_t row = (size_t)(s->row + from + i);
        q[i] = w->prompt_q + (row * m->heads + head) * q_width;
        out[i] = w->prompt_out + (row * m->heads + head) * m->v;
        position[i] = s->start + from + i;
    }
    const Tile tile_ = {q, out, position, count, {&keys, &rotary}, &values, s->first, stop_of(s), m->scale};
    attend_tile(&tile_, memory);
}

static void mla_decode_task(const MlaWork *w, const Span *s, int h, int i, float *memory) {
    const Mla *m = w->m;
    const int heads = m->heads - h < DECODE_HEADS ? m->heads - h : DECODE_HEADS;
    const size_t row = (size_t)(s->row + i), width = (size_t)(m->rank + m->rope);
    const Source keys = {w->kv, s->table, w->kv_width, (int)width}, values = {w->kv, s->table, w->kv_width, m->rank};
    attend_decode(heads, w->decode_q + (row * m->heads + h) * width, width, &keys, &values, s->first, s->start + i + 1,
                  m->scale, w->decode_out + (row * m->heads + h) * m->rank, (size_t)m->rank, memory, w->score_room);
}

static void mla_task(void *arguments, int chunk, int thread) {
    const MlaWork *w = arguments;
    const int32_t *task = w->tasks[chunk];
    float *memory = (float *)scratch[PER_THREAD].data + (size_t)thread * w->thread_room;
    if (task[0] < w->b->prompts) mla_prompt_task(w, task[0], task[1], task[2], memory);
    else if (task[1] % DECODE_HEADS == 0)
        mla_decode_task(w, &w->b->decode[task[0] - w->b->prompts], task[1], task[2], memory);
}

/* Keys and values of every prompt span's context. */
static const float *mla_expand(const Mla *m, const Batch *b, const float *kv, size_t kv_width, size_t *first_row) {
    size_t rows = 0;
    for (int i = 0; i < b->prompts; i++) {
        first_row[i] = rows;
        rows += (size_t)stop_of(&b->prompt[i]);
    }
    float *latent = room(HIDDEN, sizeof(float) * rows * (size_t)m->rank);
    for (int i = 0; i < b->prompts; i++) {
        const Source source = {kv, b->prompt[i].table, kv_width, m->rank};
        for (int p = 0; p < stop_of(&b->prompt[i]); p++) {
            float *to = latent + (first_row[i] + p) * (size_t)m->rank;
            if (p < b->prompt[i].first) memset(to, 0, sizeof(float) * (size_t)m->rank);
            else memcpy(to, at(&source, p), sizeof(float) * (size_t)m->rank);
        }
    }
    const Rows quantised = prepared(LATENT, latent, (size_t)m->rank, (int)rows, m->rank, NULL);
    float *expanded = room(EXPANDED, sizeof(float) * rows * (size_t)m->expand.out);
    product((Product){&m->expand, &quantised, NULL, (int)rows, expanded, (size_t)m->expand.out, 0, STORE, NULL});
    return expanded;
}

static void mla(const Mla *m, float *x, float *kv, const Batch *b) {
    const int hidden = m->norm.width, rows = b->rows, prompt = b->prompt_rows, decode = rows - prompt;
    const int q_rank = m->q_norm.gain ? m->q_norm.width : 0;
    const size_t latent_q = (size_t)m->heads * (m->rank + m->rope), plain_q = (size_t)m->heads * (m->nope + m->rope);
    const Rows input = prepared(INPUT, x, hidden, rows, hidden, &m->norm);
    MlaWork w = {.m = m, .b = b, .kv = kv, .q_rank = q_rank, .kv_width = (size_t)(m->rank + m->rope)};
    w.down_stride = (size_t)m->down.out;
    w.down = room(INNER, sizeof(float) * rows * w.down_stride);
    product((Product){&m->down, &input, NULL, rows, w.down, w.down_stride, 0, STORE, NULL});
    w.queries = q_rank ? rows_room(SHARED_ROWS, rows, q_rank) : input;
    if (q_rank) room(NORMED, sizeof(float) * (size_t)MAX_THREADS * ((q_rank + 15) / 16 * 16));
    if (rows < SMALL_ROWS)
        for (int row = 0; row < rows; row++) mla_place_row(&w, row, 0);
    else
        in_parallel((rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, mla_place_chunk, &w);

    float *q = room(QUERIES, sizeof(float) * (prompt * plain_q + decode * latent_q));
    w.prompt_q = q;
    w.decode_q = q + prompt * plain_q;
    if (prompt) product((Product){&m->query, &w.queries, NULL, prompt, w.prompt_q, plain_q, 0, STORE, NULL});
    int *decode_rows = NULL;
    if (decode) {
        decode_rows = room(ROUTE, sizeof(int) * (size_t)decode);
        for (int i = 0; i < decode; i++) decode_rows[i] = prompt + i;
        product((Product){&m->query_folded, &w.queries, decode_rows, decode, w.decode_q, latent_q, 0, STORE, NULL});
    }
    for (int row = 0; row < rows; row++) mla_turn_row(&w, row);

    const size_t plain_out = (size_t)m->heads * m->v, latent_out = (size_t)m->heads * m->rank;
    float *out = room(ATTENDED, sizeof(float) * (prompt * plain_out + decode * latent_out));
    w.prompt_out = out;
    w.decode_out = out + prompt * plain_out;
    size_t *first_row = room(PAIRS, sizeof(size_t) * (size_t)(b->prompts + 1));
    if (prompt) w.expanded = mla_expand(m, b, kv, w.kv_width, first_row);
    w.expanded_at = first_row;
    w.score_room = ((size_t)b->context + LANES) / LANES * LANES;
    size_t need = DECODE_HEADS * w.score_room;
    if (prompt) {
        const size_t tiles = tile_room(MLA_TILE, m->nope + m->rope, m->v);
        need = need > tiles ? need : tiles;
    }
    w.thread_room = (need + LANES - 1) / LANES * LANES;
    room(PER_THREAD, sizeof(float) * w.thread_room * (size_t)pool.threads);
    const int tasks = list_tasks(b, m->heads, MLA_TILE);
    w.tasks = scratch[TASKS].data;
    in_parallel(tasks, mla_task, &w);

    if (prompt) {
        const Rows attended = prepared(MIDDLE, w.prompt_out, plain_out, prompt, (int)plain_out, NULL);
        product((Product){&m->out, &attended, NULL, prompt, x, (size_t)hidden, 0, ADD, NULL});
    }
    if (decode) {
        const Rows attended = prepared(MIDDLE, w.decode_out, latent_out, decode, (int)latent_out, NULL);
        product((Product){&m->out_folded, &attended, NULL, decode, x, (size_t)hidden, prompt, ADD, NULL});
    }
}

#endif
