/* Sublayers of a layer, each one call that adds to the residual stream `x` [rows, hidden].
 *
 * A sublayer is a few phases, each divided among the threads of the pool: normalise and quantise rows; multiply;
 * attend. */
#ifndef TRIPOOL_LAYERS_H
#define TRIPOOL_LAYERS_H

#include "attend.h"
#include "product.h"

typedef struct {
    const float *gain;
    float eps;
    int32_t width;
} Norm;

/* Rows of one step: prompt-form rows first. */
typedef struct {
    int32_t rows, prompt_rows;
    const int64_t *slot_mapping; /* [rows]: KV slot of each row */
    const float *cos_sin;   /* [rows, rope]: cosine and sine interleaved */
    int32_t prompts, decodes;
    const SequenceRows *prompt, *decode; /* rows of a decode sequence are counted from prompt_rows */
    int32_t context;      /* largest number of positions of any sequence */
} Batch;

/* Purposes of scratch memory. */
enum { NORMED, INPUT, INNER, HIDDEN, MIDDLE, ATTENDED, QUERIES, STREAM, SOME, LATENT, PER_THREAD, TASKS, ROUTE, PAIRS,
       SHARED, SHARED_ROWS, OUTPUT, PRODUCTS, LATENT_QUERIES, LOGITS, SLOT_MAPPING, FINAL, GATHERED };

#define SMALL_ROWS 4 /* below this a phase over rows runs on one thread */
#define SMALL_GROUPS 32 /* likewise for groups to quantise */

static void normalise(const float *x, const Norm *n, float *y) {
    vf sum = {0};
    const int width = n->width;
    for (int d = 0; d < width; d += LANES) {
        const vf v = load_upto(x + d, width - d);
        sum = sum + v * v;
    }
    const vf inverse = splat(1.0f / sqrtf(sum_of(sum) / (float)width + n->eps));
    for (int d = 0; d < width; d += LANES) {
        const vf v = load_upto(x + d, width - d), gain = load_upto(n->gain + d, width - d);
        store_upto(y + d, v * inverse * gain, width - d);
    }
}

/* Norm (if any), then 8 bits, row by row. */
typedef struct {
    const float *x;
    size_t stride;
    const Norm *norm;
    float *normed; /* [rows, width] where the caller wants it or NULL */
    Rows to;
    int rows, width, first;
} Prepare;

static void prepare_row(const Prepare *p, int row, int thread) {
    const float *x = p->x + (size_t)row * p->stride;
    if (p->norm) {
        float *y = p->normed ? p->normed + (size_t)row * p->width
                             : (float *)scratch[NORMED].data + (size_t)thread * ((p->width + 15) / 16 * 16);
        normalise(x, p->norm, y);
        x = y;
    }
    quantise(x, p->width, &p->to, p->first + row);
}

#define ROWS_PER_CHUNK 4
static void prepare_chunk(void *arguments, int chunk, int thread) {
    const Prepare *p = arguments;
    const int from = chunk * ROWS_PER_CHUNK, to = from + ROWS_PER_CHUNK;
    for (int row = from; row < to && row < p->rows; row++) prepare_row(p, row, thread);
}

static void prepare(Prepare p) {
    if (p.norm && !p.normed) room(NORMED, sizeof(float) * (size_t)MAX_THREADS * ((p.width + 15) / 16 * 16));
    if (p.rows < SMALL_ROWS || p.rows * p.to.groups < SMALL_GROUPS)
        for (int row = 0; row < p.rows; row++) prepare_row(&p, row, 0);
    else
        in_parallel((p.rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, prepare_chunk, &p);
}

static Rows prepared(int slot, const float *x, size_t stride, int rows, int width, const Norm *norm) {
    const Rows to = rows_room(slot, rows, width);
    prepare((Prepare){x, stride, norm, NULL, to, rows, width, 0});
    return to;
}

/* Rotary embedding: elements 2j and 2j + 1 are one complex number. */
static void apply_rope(float *x, const float *cos_sin, int width) {
    for (int j = 0; j + 1 < width; j += 2) {
        const float a = x[j], b = x[j + 1], c = cos_sin[j], s = cos_sin[j + 1];
        x[j] = a * c - b * s;
        x[j + 1] = b * c + a * s;
    }
}

/* ---- feed-forward ---------------------------------------------------------------------------------------------- */

typedef struct {
    Norm norm;
    Weight gate_up, down;
} Mlp;

static void mlp_rows(const Weight *gate_up, const Weight *down, const Rows *x, int rows, float *y, size_t stride,
                     Then then, int inner_slot, int middle_slot) {
    const int width = down->in;
    float *inner = room(inner_slot, sizeof(float) * (size_t)rows * width);
    product((Product){gate_up, x, NULL, rows, inner, width, 0, GATE, NULL, 0});
    const Rows middle = prepared(middle_slot, inner, width, rows, width, NULL);
    product((Product){down, &middle, NULL, rows, y, stride, 0, then, NULL, 0});
}

static void mlp(const Mlp *m, float *x, int rows) {
    const Rows input = prepared(INPUT, x, m->norm.width, rows, m->norm.width, &m->norm);
    mlp_rows(&m->gate_up, &m->down, &input, rows, x, m->norm.width, ADD, INNER, MIDDLE);
}

/* ---- grouped-query attention ----------------------------------------------------------------------------------- */

typedef struct {
    Norm norm;
    Weight qkv, out;
    int32_t heads, kv_heads, dim;
    float scale;
    Norm q_norm, k_norm; /* gain NULL: none */
} Gqa;

typedef struct {
    const Gqa *g;
    const Batch *b;
    float *qkv, *kv, *out;
    const float *const *query; /* [rows]: where the queries of each row are, if not in qkv; or NULL */
    size_t qkv_stride, kv_width, out_stride, score_stride, thread_room;
    const int32_t (*tasks)[3];
} GqaWork;

static void gqa_write_kv_row(const GqaWork *w, int row) {
    const Gqa *g = w->g;
    float *qkv = w->qkv + (size_t)row * w->qkv_stride;
    const float *cos_sin = w->b->cos_sin + (size_t)row * g->dim;
    for (int head = 0; head < g->heads + g->kv_heads; head++) {
        const Norm *norm = head < g->heads ? &g->q_norm : &g->k_norm;
        float *x = qkv + (size_t)head * g->dim;
        if (norm->gain) normalise(x, norm, x);
        apply_rope(x, cos_sin, g->dim);
    }
    memcpy(w->kv + (size_t)w->b->slot_mapping[row] * w->kv_width, qkv + (size_t)g->heads * g->dim, sizeof(float) * w->kv_width);
}

static void gqa_write_kv_chunk(void *arguments, int chunk, int thread) {
    (void)thread;
    const GqaWork *w = arguments;
    for (int row = chunk * ROWS_PER_CHUNK; row < (chunk + 1) * ROWS_PER_CHUNK && row < w->b->rows; row++)
        gqa_write_kv_row(w, row);
}

#define PROMPT_TILE 48 /* positions */
#define MLA_TILE 192

static void gqa_prompt_task(const GqaWork *w, const SequenceRows *s, int kv_head, int from, float *memory) {
    const Gqa *g = w->g;
    const int group = g->heads / g->kv_heads;
    const int count = s->count - from < PROMPT_TILE ? s->count - from : PROMPT_TILE;
    const Source keys = {w->kv + (size_t)kv_head * g->dim, s->block_table, w->kv_width, g->dim};
    const Source values = {w->kv + (size_t)(g->kv_heads + kv_head) * g->dim, s->block_table, w->kv_width, g->dim};
    const float *q[PROMPT_TILE * 16];
    float *out[PROMPT_TILE * 16];
    int position[PROMPT_TILE * 16];
    for (int h0 = 0; h0 < group; h0 += 16) { /* 16 heads at most at a time */
        const int heads = group - h0 < 16 ? group - h0 : 16;
        int n = 0;
        for (int i = 0; i < count; i++)
            for (int h = h0; h < h0 + heads; h++, n++) {
                const size_t row = (size_t)(s->row + from + i), head = (size_t)(kv_head * group + h);
                q[n] = (w->query ? w->query[row] : w->qkv + row * w->qkv_stride) + head * g->dim;
                out[n] = w->out + row * w->out_stride + head * g->dim;
                position[n] = s->start + from + i;
            }
        const Tile tile_ = {q, out, position, n, {&keys, NULL}, &values, s->first, stop_of(s), g->scale};
        attend_tile(&tile_, memory);
    }
}

static void gqa_decode_task(const GqaWork *w, const SequenceRows *s, int kv_head, int i, float *memory) {
    const Gqa *g = w->g;
    const int group = g->heads / g->kv_heads;
    const Source keys = {w->kv + (size_t)kv_head * g->dim, s->block_table, w->kv_width, g->dim};
    const Source values = {w->kv + (size_t)(g->kv_heads + kv_head) * g->dim, s->block_table, w->kv_width, g->dim};
    const size_t row = (size_t)(w->b->prompt_rows + s->row + i);
    for (int h = 0; h < group; h += DECODE_HEADS) {
        const int heads = group - h < DECODE_HEADS ? group - h : DECODE_HEADS;
        const size_t head = (size_t)(kv_head * group + h);
        attend_decode(heads, w->qkv + row * w->qkv_stride + head * g->dim, g->dim, &keys, &values, s->first,
                      s->start + i + 1, g->scale, w->out + row * w->out_stride + head * g->dim, g->dim, memory,
                      w->score_stride);
    }
}

/* A task: {sequence (prompts first), head, first row within the sequence}. */
static void gqa_task(void *arguments, int chunk, int thread) {
    const GqaWork *w = arguments;
    const int32_t *task = w->tasks[chunk];
    float *memory = (float *)scratch[PER_THREAD].data + (size_t)thread * w->thread_room;
    if (task[0] < w->b->prompts) gqa_prompt_task(w, &w->b->prompt[task[0]], task[1], task[2], memory);
    else gqa_decode_task(w, &w->b->decode[task[0] - w->b->prompts], task[1], task[2], memory);
}

/* Lists the tasks, long ones first. Returns their number. */
static int list_tasks(const Batch *b, int heads, int positions) {
    size_t most = 0;
    for (int i = 0; i < b->prompts; i++) most += (size_t)((b->prompt[i].count + positions - 1) / positions);
    for (int i = 0; i < b->decodes; i++) most += (size_t)b->decode[i].count;
    int32_t (*task)[3] = room(TASKS, sizeof(int32_t[3]) * most * (size_t)heads);
    int n = 0;
    for (int i = 0; i < b->prompts; i++)
        for (int from = (b->prompt[i].count - 1) / positions * positions; from >= 0; from -= positions)
            for (int h = 0; h < heads; h++, n++) task[n][0] = i, task[n][1] = h, task[n][2] = from;
    for (int i = 0; i < b->decodes; i++)
        for (int from = 0; from < b->decode[i].count; from++)
            for (int h = 0; h < heads; h++, n++) task[n][0] = b->prompts + i, task[n][1] = h, task[n][2] = from;
    return n;
}

/* Keys and values of all rows into the KV. */
static GqaWork gqa_write_kv(const Gqa *g, const float *x, float *kv, const Batch *b) {
    const int hidden = g->norm.width, rows = b->rows;
    const size_t width = (size_t)g->qkv.out;
    const Rows input = prepared(INPUT, x, hidden, rows, hidden, &g->norm);
    GqaWork w = {.g = g, .b = b, .kv = kv, .qkv_stride = width, .kv_width = 2 * (size_t)g->kv_heads * g->dim};
    w.qkv = room(QUERIES, sizeof(float) * rows * width);
    product((Product){&g->qkv, &input, NULL, rows, w.qkv, width, 0, STORE, NULL, 0});
    if (rows < SMALL_ROWS)
        for (int row = 0; row < rows; row++) gqa_write_kv_row(&w, row);
    else
        in_parallel((rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, gqa_write_kv_chunk, &w);
    return w;
}

/* Scratch memory of the threads that attend. */
static void gqa_thread_room(GqaWork *w) {
    const Gqa *g = w->g;
    const int group = g->heads / g->kv_heads;
    w->score_stride = ((size_t)w->b->context + LANES) / LANES * LANES;
    size_t need = DECODE_HEADS * w->score_stride;
    if (w->b->prompts) {
        const size_t tiles = tile_room(PROMPT_TILE * (group < 16 ? group : 16), g->dim, g->dim);
        need = need > tiles ? need : tiles;
    }
    w->thread_room = (need + LANES - 1) / LANES * LANES;
    room(PER_THREAD, sizeof(float) * w->thread_room * (size_t)pool.threads);
}

static void gqa(const Gqa *g, float *x, float *kv, const Batch *b) {
    const int hidden = g->norm.width, rows = b->rows;
    const size_t out_width = (size_t)g->heads * g->dim;
    GqaWork w = gqa_write_kv(g, x, kv, b);
    w.out_stride = out_width;
    w.out = room(ATTENDED, sizeof(float) * rows * out_width);
    gqa_thread_room(&w);
    const int tasks = list_tasks(b, g->kv_heads, PROMPT_TILE);
    w.tasks = scratch[TASKS].data;
    in_parallel(tasks, gqa_task, &w);
    const Rows attended = prepared(MIDDLE, w.out, out_width, rows, (int)out_width, NULL);
    product((Product){&g->out, &attended, NULL, rows, x, (size_t)hidden, 0, ADD, NULL, 0});
}

#endif
