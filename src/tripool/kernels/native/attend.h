/* Attention over the paged cache, one sequence at a time, keys in the order of their positions.
 *
 * Decode: one query position, all the heads that share a key. Prompt: many positions; keys come in blocks of 64 that
 * start at multiples of 64, with a running maximum and sum per query, so a row's result depends on its position and
 * not on the chunking of the prompt. A masked key gets weight exactly 0. */
#ifndef TRIPOOL_ATTEND_H
#define TRIPOOL_ATTEND_H

#include "pool.h"
#include "vec.h"

#define BLOCK 64

/* (Python fills this in as 64-bit words: see native_batch.py.)
 * Consecutive rows of one sequence: row `row` + i is at position `start` + i and attends to `first` .. itself. */
typedef struct {
    int32_t row, count, start, first;
    const int32_t *block_table;
} SequenceRows;

INLINE int stop_of(const SequenceRows *s) { return s->start + s->count; }

/* Location of a sequence's keys or values: position p is at block_of(p / 64) + (p % 64) * stride. */
typedef struct {
    const float *data;
    const int32_t *block_table; /* NULL: consecutive */
    size_t stride;
    int width;
} Source;

INLINE const float *block_of(const Source *s, int block) {
    return s->data + (size_t)(s->block_table ? s->block_table[block] : block) * BLOCK * s->stride;
}
INLINE const float *at(const Source *s, int position) {
    return block_of(s, position / BLOCK) + (size_t)(position % BLOCK) * s->stride;
}

#define DECODE_HEADS 4
#define DECODE_KEYS 4

/* Computes scores[h][t] for `heads` (constant) queries and keys first + t. */
INLINE void decode_scores(const int heads, const float *q, size_t q_stride, const Source *keys, int first, int stop,
                          float scale, float *scores, size_t score_stride) {
    const int width = keys->width;
    for (int p = first; p < stop; p += DECODE_KEYS) {
        const float *key[DECODE_KEYS];
        const int n = stop - p < DECODE_KEYS ? stop - p : DECODE_KEYS;
        UNROLL for (int i = 0; i < DECODE_KEYS; i++) key[i] = at(keys, i < n ? p + i : p);
        vf sum[DECODE_HEADS][DECODE_KEYS];
        UNROLL for (int h = 0; h < heads; h++)
            UNROLL for (int i = 0; i < DECODE_KEYS; i++) sum[h][i] = (vf){0};
        int d = 0;
        for (; d + LANES <= width; d += LANES) {
            vf k[DECODE_KEYS];
            UNROLL for (int i = 0; i < DECODE_KEYS; i++) k[i] = load(key[i] + d);
            UNROLL for (int h = 0; h < heads; h++) {
                const vf query = load(q + h * q_stride + d);
                UNROLL for (int i = 0; i < DECODE_KEYS; i++) sum[h][i] = sum[h][i] + query * k[i];
            }
        }
        if (d < width)
            for (int h = 0; h < heads; h++) {
                const vf query = load_part(q + h * q_stride + d, width - d);
                UNROLL for (int i = 0; i < DECODE_KEYS; i++)
                    sum[h][i] = sum[h][i] + query * load_part(key[i] + d, width - d);
            }
        vf all[16];
        UNROLL for (int h = 0; h < DECODE_HEADS; h++)
            UNROLL for (int i = 0; i < DECODE_KEYS; i++) all[h * DECODE_KEYS + i] = h < heads ? sum[h][i] : (vf){0};
        float four[DECODE_HEADS][DECODE_KEYS];
        store(four[0], sums_of(all) * splat(scale));
        UNROLL for (int h = 0; h < heads; h++) /* the buffer has room for four; the padding is overwritten below */
            memcpy(scores + h * score_stride + (p - first), four[h], sizeof four[h]);
    }
}

/* Replaces scores by e^(score - largest), padded with zeros to whole vectors; returns their sum. */
static float weigh(float *scores, int count) {
    const int padded = (count + LANES - 1) / LANES * LANES;
    for (int t = count; t < padded; t++) scores[t] = -INFINITY;
    vf top = splat(-INFINITY);
    for (int t = 0; t < padded; t += LANES) top = max_of(top, load(scores + t));
    const vf largest = splat(largest_of(top));
    vf sum = {0};
    for (int t = 0; t < padded; t += LANES) {
        const vf w = exp_of(load(scores + t) - largest);
        store(scores + t, w);
        sum = sum + w;
    }
    return sum_of(sum);
}

/* Loads four vectors of a value; `whole`: none of them is partial. */
INLINE void load_value(const int whole, const float *value, int left, vf v[4]) {
    UNROLL for (int i = 0; i < 4; i++) {
        const int n = left - i * LANES;
        v[i] = whole || n >= LANES ? load(value + i * LANES) : n > 0 ? load_part(value + i * LANES, n) : (vf){0};
    }
}

INLINE void decode_values_at(const int heads, const int whole, int d, const float *weights, size_t score_stride,
                             const float *sums, const Source *values, int first, int stop, float *out,
                             size_t out_stride) {
    const int left = values->width - d;
    vf sum[DECODE_HEADS][4];
    UNROLL for (int h = 0; h < heads; h++) UNROLL for (int i = 0; i < 4; i++) sum[h][i] = (vf){0};
    for (int p = first; p < stop;) {
        const float *value = at(values, p) + d;
        const int end = (p / BLOCK + 1) * BLOCK < stop ? (p / BLOCK + 1) * BLOCK : stop;
        for (; p < end; p++, value += values->stride) {
            vf v[4];
            load_value(whole, value, left, v);
            UNROLL for (int h = 0; h < heads; h++) {
                const vf w = splat(weights[h * score_stride + (p - first)]);
                UNROLL for (int i = 0; i < 4; i++) sum[h][i] = sum[h][i] + w * v[i];
            }
        }
    }
    UNROLL for (int h = 0; h < heads; h++) {
        const vf inverse = splat(1.0f / sums[h]);
        UNROLL for (int i = 0; i < 4; i++) {
            const int n = left - i * LANES;
            float *to = out + h * out_stride + d + i * LANES;
            if (whole || n >= LANES) store(to, sum[h][i] * inverse);
            else if (n > 0) store_part(to, sum[h][i] * inverse, n);
        }
    }
}

INLINE void decode_values(const int heads, const float *weights, size_t score_stride, const float *sums,
                          const Source *values, int first, int stop, float *out, size_t out_stride) {
    int d = 0;
    for (; d + 4 * LANES <= values->width; d += 4 * LANES)
        decode_values_at(heads, 1, d, weights, score_stride, sums, values, first, stop, out, out_stride);
    if (d < values->width) decode_values_at(heads, 0, d, weights, score_stride, sums, values, first, stop, out, out_stride);
}

/* Up to DECODE_HEADS heads of one query position. `scores`: [DECODE_HEADS, room]. */
static void attend_decode(int heads, const float *q, size_t q_stride, const Source *keys, const Source *values,
                          int first, int stop, float scale, float *out, size_t out_stride, float *scores,
                          size_t score_stride) {
    float sums[DECODE_HEADS];
#define FOR_HEADS(n)                                                                                                   \
    case n:                                                                                                            \
        decode_scores(n, q, q_stride, keys, first, stop, scale, scores, score_stride);                                 \
        for (int h = 0; h < n; h++) sums[h] = weigh(scores + h * score_stride, stop - first);                          \
        decode_values(n, scores, score_stride, sums, values, first, stop, out, out_stride);                            \
        break;
    switch (heads) { FOR_HEADS(1) FOR_HEADS(2) FOR_HEADS(3) FOR_HEADS(4) }
#undef FOR_HEADS
}

#if defined(__AVX512F__)
#define PROMPT_ROWS 6
#else
#define PROMPT_ROWS 2
#endif

/* A tile of queries of one sequence that share their keys: several positions of one head, or of a group of heads. */
typedef struct {
    const float **q;    /* queries, each `key width` floats */
    float **out;        /* where their results go */
    const int *position;
    int count;
    const Source *keys[2]; /* the key is their concatenation; the second may be NULL */
    const Source *values;
    int first, stop;    /* positions that exist; first < 64 */
    float scale;
} Tile;

/* Floats of scratch that a tile needs. */
static size_t tile_room(int count, int key_width, int value_width) {
    return (size_t)BLOCK * key_width + (size_t)count * (value_width + 4 * LANES + 2) + PROMPT_ROWS * BLOCK + 64;
}

/* Transposes the keys of a block: kt[d][0 .. 63]; zero where there is no position. */
static void transpose_keys(const Tile *t, int block, int present, float *kt) {
    int d0 = 0;
    for (int part = 0; part < 2 && t->keys[part]; part++) {
        const Source *s = t->keys[part];
        const float *rows = block_of(s, block);
        for (int d = 0; d < s->width; d += LANES) {
            const int n = s->width - d < LANES ? s->width - d : LANES;
            for (int p0 = 0; p0 < BLOCK; p0 += LANES) {
                vf patch[LANES];
                UNROLL for (int i = 0; i < LANES; i++)
                    patch[i] = p0 + i < present ? load_upto(rows + (size_t)(p0 + i) * s->stride + d, n) : (vf){0};
                transpose(patch);
                for (int j = 0; j < n; j++) store(kt + (size_t)(d0 + d + j) * BLOCK + p0, patch[j]);
            }
        }
        d0 += s->width;
    }
}

INLINE void tile_values(const int rows, const int whole, int d, const Tile *t, int from, int block, int present,
                        const float *p, const float *shrink, float *acc, int acc_width) {
    const Source *values = t->values;
    const int left = values->width - d, start = block == 0 ? t->first : 0;
    vf o[PROMPT_ROWS][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < 4; i++)
            o[r][i] = load(acc + (size_t)(from + r) * acc_width + d + i * LANES) * splat(shrink[r]);
    const float *value = block_of(values, block) + (size_t)start * values->stride + d;
    for (int key = start; key < present; key++, value += values->stride) {
        vf v[4];
        load_value(whole, value, left, v);
        UNROLL for (int r = 0; r < rows; r++) {
            const vf w = splat(p[r * BLOCK + key]);
            UNROLL for (int i = 0; i < 4; i++) o[r][i] = o[r][i] + w * v[i];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < 4; i++) store(acc + (size_t)(from + r) * acc_width + d + i * LANES, o[r][i]);
}

INLINE void tile_block(const int rows, const Tile *t, int from, int block, int present, int key_width, const float *kt,
                       float *p, float *top, float *sum, float *acc, int acc_width) {
    vf s[PROMPT_ROWS][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int i = 0; i < 4; i++) s[r][i] = (vf){0};
    for (int d = 0; d < key_width; d++) {
        const float *k = kt + (size_t)d * BLOCK;
        const vf k0 = load(k), k1 = load(k + 16), k2 = load(k + 32), k3 = load(k + 48);
        UNROLL for (int r = 0; r < rows; r++) {
            const vf q = splat(t->q[from + r][d]);
            s[r][0] = s[r][0] + q * k0;
            s[r][1] = s[r][1] + q * k1;
            s[r][2] = s[r][2] + q * k2;
            s[r][3] = s[r][3] + q * k3;
        }
    }
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vf scale = splat(t->scale);
    float shrink[PROMPT_ROWS];
    UNROLL for (int r = 0; r < rows; r++) {
        vf high = splat(-INFINITY);
        UNROLL for (int i = 0; i < 4; i++) {
            const vi position = lane + splat_int(block * BLOCK + i * LANES);
            const vi hidden = (position > splat_int(t->position[from + r])) | (position < splat_int(t->first));
            s[r][i] = choose(hidden, splat(-INFINITY), s[r][i] * scale);
            high = max_of(high, s[r][i]);
        }
        const float before = top[from + r], here = largest_of(high);
        const float now = before > here ? before : here;
        vf total = {0};
        UNROLL for (int i = 0; i < 4; i++) {
            const vf w = exp_of(s[r][i] - splat(now));
            store(p + r * BLOCK + i * LANES, w);
            total = total + w;
        }
        shrink[r] = exp_of(splat(before - now))[0];
        sum[from + r] = sum[from + r] * shrink[r] + sum_of(total);
        top[from + r] = now;
    }
    int d = 0;
    for (; d + 4 * LANES <= t->values->width; d += 4 * LANES)
        tile_values(rows, 1, d, t, from, block, present, p, shrink, acc, acc_width);
    if (d < t->values->width) tile_values(rows, 0, d, t, from, block, present, p, shrink, acc, acc_width);
}

static void attend_tile(const Tile *t, float *scratch_) {
    int key_width = t->keys[0]->width + (t->keys[1] ? t->keys[1]->width : 0);
    const int acc_width = (t->values->width + 4 * LANES - 1) / (4 * LANES) * (4 * LANES);
    float *kt = scratch_, *p = kt + (size_t)BLOCK * key_width, *top = p + PROMPT_ROWS * BLOCK, *sum = top + t->count;
    float *acc = sum + t->count;
    int last = 0;
    for (int i = 0; i < t->count; i++) {
        top[i] = -INFINITY;
        sum[i] = 0.0f;
        if (t->position[i] > last) last = t->position[i];
    }
    memset(acc, 0, sizeof(float) * (size_t)t->count * acc_width);
    for (int block = 0; block <= last / BLOCK; block++) {
        const int present = t->stop - block * BLOCK < BLOCK ? t->stop - block * BLOCK : BLOCK;
        transpose_keys(t, block, present, kt);
        for (int from = 0; from < t->count; from += PROMPT_ROWS) {
            const int rows = t->count - from < PROMPT_ROWS ? t->count - from : PROMPT_ROWS;
#define FOR_ROWS(n)                                                                                                    \
    case n: tile_block(n, t, from, block, present, key_width, kt, p, top, sum, acc, acc_width); break;
            switch (rows) {
                FOR_ROWS(1) FOR_ROWS(2)
#if PROMPT_ROWS > 2
                FOR_ROWS(3) FOR_ROWS(4) FOR_ROWS(5) FOR_ROWS(6)
#endif
            }
#undef FOR_ROWS
        }
    }
    for (int i = 0; i < t->count; i++) {
        const vf inverse = splat(1.0f / sum[i]);
        for (int d = 0; d < t->values->width; d += LANES)
            store_upto(t->out[i] + d, load(acc + (size_t)i * acc_width + d) * inverse, t->values->width - d);
    }
}

#endif
