/* Rows of 8-bit numbers times packed 8-bit weights.
 *
 * Both are divided into groups of 64 along the sum, each with a scale of its own. Within a group the sum is one of
 * integers, hence exact; groups are added in order, as floats, row by row: a row's result does not depend on its
 * neighbours. Weights are packed in panels of 32 outputs, in the order in which they are read:
 *
 *   panel: record of group 0, record of group 1, ...
 *   record: 16 times (4 inputs of 16 outputs, 4 inputs of the next 16), as bytes weight + 128; then 32 scales
 *
 * The unsigned weights suit the CPU's instruction (unsigned times signed); 128 times the sum of the row's group is
 * taken off again, which `fix` holds ready. */
#ifndef TRIPOOL_PRODUCT_H
#define TRIPOOL_PRODUCT_H

#include "pool.h"
#include "vec.h"

#define GROUP 64
#define PANEL 32
#define AHEAD_ROWS 4
#define AHEAD_BYTES 2048
#define RECORD (GROUP * PANEL + PANEL * (int)sizeof(float))

typedef struct {
    const uint8_t *panels;
    const float *bias; /* padded to whole panels, or NULL */
    int32_t out, in;
} Weight;

/* Quantised rows. */
typedef struct {
    int8_t *q;      /* [rows, groups * 64] */
    float *scale;   /* [rows, groups] */
    int32_t *fix;   /* [rows, groups] */
    int groups;
} Rows;

INLINE int groups_of(int width) { return (width + GROUP - 1) / GROUP; }
INLINE int panels_of(int out) { return (out + PANEL - 1) / PANEL; }

static Rows rows_room(int slot, int rows, int width) {
    Rows r;
    r.groups = groups_of(width);
    const size_t count = (size_t)rows * r.groups;
    char *p = room(slot, count * (GROUP + 8) + 64);
    r.q = (int8_t *)p;
    r.scale = (float *)(p + count * GROUP);
    r.fix = (int32_t *)(p + count * GROUP + count * 4);
    return r;
}

/* One row of floats into row `to`. */
static void quantise(const float *x, int width, const Rows *rows, int to) {
    const int groups = rows->groups;
    int8_t *q = rows->q + (size_t)to * groups * GROUP;
    for (int g = 0; g < groups; g++, q += GROUP) {
        const int left = width - g * GROUP;
        vf v[4], top = {0};
        UNROLL for (int i = 0; i < 4; i++) {
            const int n = left - i * LANES;
            v[i] = n >= LANES ? load(x + g * GROUP + i * LANES)
                 : n > 0      ? load_part(x + g * GROUP + i * LANES, n) : (vf){0};
            top = max_of(top, abs_of(v[i]));
        }
        const float largest = largest_of(top);
        const vf inverse = splat(largest > 1e-30f ? 127.0f / largest : 0.0f);
        vi sum = {0};
        UNROLL for (int i = 0; i < 4; i++) {
            const vi n = nearest(v[i] * inverse);
            sum += n;
            *(vb_any *)(q + i * LANES) = __builtin_convertvector(n, vb);
        }
        const int32_t total = total_of(sum);
        rows->scale[(size_t)to * groups + g] = largest > 1e-30f ? largest / 127.0f : 0.0f;
        rows->fix[(size_t)to * groups + g] = -128 * total;
    }
}

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#define TILE_ROWS 6
/* Sums of four neighbouring byte products, added to 16 integers. */
INLINE vi dot4(vi sum, const uint8_t *w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(w), _mm512_set1_epi32(four));
}
#elif defined(__AVX2__)
#include <immintrin.h>
#define TILE_ROWS 2
/* Pairs are added in 16 bits with saturation: |x| <= 127 and |w| <= 127 keep 2 * 127 * 127 below 32,768. */
INLINE __m256i dot4_half(__m256i sum, const uint8_t *w, __m256i x) {
    const __m256i weight = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)w), _mm256_set1_epi8((char)0x80));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(weight, x));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE vi dot4(vi sum, const uint8_t *w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    const __m256i both = _mm256_set1_epi32(four);
    __m256i half[2];
    memcpy(half, &sum, sizeof half);
    half[0] = dot4_half(half[0], w, both);
    half[1] = dot4_half(half[1], w + 32, both);
    memcpy(&sum, half, sizeof half);
    return sum;
}
#else
#define TILE_ROWS 2
typedef int16_t vh __attribute__((vector_size(64)));
/* In 16 bits, as above: each holds two neighbouring bytes, the first in its low half (all our CPUs are
 * little-endian). */
INLINE vi dot4(vi sum, const uint8_t *w, const int8_t *x) {
    vh weight;
    memcpy(&weight, w, sizeof weight);
    weight = (vh)((vi)weight ^ splat_int((int32_t)0x80808080u));
    const vh first = (vh)splat_int((int32_t)((uint16_t)x[0] | (uint32_t)x[2] << 16));
    const vh second = (vh)splat_int((int32_t)((uint16_t)x[1] | (uint32_t)x[3] << 16));
    const vh pairs = (weight << 8 >> 8) * first + (weight >> 8) * second;
    return sum + ((vi)pairs << 16 >> 16) + ((vi)pairs >> 16);
}
/* Few and narrow registers: one sum per output, and a short loop, which is faster here and compiles in a third of the
 * time. */
#define CHAINS(sums) 1
#define UNROLL_GROUP _Pragma("GCC unroll 1")
#endif
#if defined(__AVX512VNNI__)
#define FIX(rows, at) splat_int((rows)->fix[at])
#else
#define FIX(rows, at) ((vi){0}) /* signed weights need no correction */
#endif

/* Integers may be added in any order: where there are few, several sums per output keep the CPU from waiting for
 * itself. */
#ifndef CHAINS
#define CHAINS(sums) ((sums) == 1 ? 4 : (sums) == 2 ? 2 : 1)
#define UNROLL_GROUP UNROLL
#endif
#define MOST_OUT (TILE_ROWS > 4 ? TILE_ROWS : 4) /* rows times panels */

/* `count` rows times `panels` panels that lie `apart` bytes from each other; both numbers are constants after inlining.
 * `row`: which rows of x. With few rows memory takes the time, and several panels side by side are several places to
 * wait for at once: a third faster than one after the other. */
INLINE void tile(const int count, const int panels, const uint8_t *panel, size_t apart, const Rows *x, const int *row,
                 vf out[][2]) {
    const int groups = x->groups, both = count * panels, chains = CHAINS(both);
    UNROLL for (int i = 0; i < both; i++) out[i][0] = out[i][1] = (vf){0};
    for (int g = 0; g < groups; g++, panel += RECORD) {
        vi sum[MOST_OUT][2][4];
        const int8_t *q[TILE_ROWS];
        UNROLL for (int r = 0; r < count; r++) {
            const size_t at = (size_t)row[r] * groups + g;
            q[r] = x->q + at * GROUP;
            UNROLL for (int p = 0; p < panels; p++) {
                const int i = p * count + r;
                sum[i][0][0] = sum[i][1][0] = FIX(x, at);
                UNROLL for (int c = 1; c < chains; c++) sum[i][0][c] = sum[i][1][c] = (vi){0};
            }
        }
        UNROLL_GROUP for (int k = 0; k < GROUP / 4; k++)
            UNROLL for (int p = 0; p < panels; p++) {
                const uint8_t *w = panel + p * apart + 128 * k;
                if (count <= AHEAD_ROWS) {
                    __builtin_prefetch(w + AHEAD_BYTES);
                    __builtin_prefetch(w + AHEAD_BYTES + 64);
                }
                UNROLL for (int r = 0; r < count; r++) {
                    vi *low = &sum[p * count + r][0][k % chains], *high = &sum[p * count + r][1][k % chains];
                    *low = dot4(*low, w, q[r] + 4 * k);
                    *high = dot4(*high, w + 64, q[r] + 4 * k);
                }
            }
        UNROLL for (int p = 0; p < panels; p++) {
            const float *scales = (const float *)(panel + p * apart + GROUP * PANEL);
            const vf low = load(scales), high = load(scales + LANES);
            UNROLL for (int r = 0; r < count; r++) {
                const int i = p * count + r;
                const vf scale = splat(x->scale[(size_t)row[r] * groups + g]);
                UNROLL for (int c = 1; c < chains; c++) {
                    sum[i][0][0] += sum[i][0][c];
                    sum[i][1][0] += sum[i][1][c];
                }
                out[i][0] = out[i][0] + __builtin_convertvector(sum[i][0][0], vf) * (low * scale);
                out[i][1] = out[i][1] + __builtin_convertvector(sum[i][1][0], vf) * (high * scale);
            }
        }
    }
}

/* What to do with a product. */
typedef enum { STORE, ADD, GATE, SCALE } Then;

typedef struct {
    const Weight *w;
    const Rows *x;
    const int *row;      /* rows of x; NULL: 0, 1, 2, ... */
    int rows;
    float *y;            /* [.., stride] */
    size_t stride;
    int first;           /* row of y for the first row here */
    Then then;
    const float *weight; /* SCALE: by row */
    int per;             /* panels in a chunk; 0: not decided yet */
} Product;

INLINE void finish(const Product *p, int panel, int row, vf low, vf high) {
    const int out = p->w->out, from = panel * PANEL;
    float *y = p->y + (size_t)(p->first + row) * p->stride;
    if (p->w->bias) {
        low = low + load(p->w->bias + from);
        high = high + load(p->w->bias + from + LANES);
    }
    if (p->then == GATE) {
        /* A panel holds 16 gate outputs and the 16 matching up outputs. */
        store_upto(y + from / 2, silu(low) * high, (out - from) / 2 < LANES ? (out - from) / 2 : LANES);
        return;
    }
    if (p->then == SCALE) {
        low = low * splat(p->weight[row]);
        high = high * splat(p->weight[row]);
    }
    const int left = out - from;
    if (p->then == ADD) low = low + load_upto(y + from, left);
    store_upto(y + from, low, left);
    if (left <= LANES) return;
    if (p->then == ADD) high = high + load_upto(y + from + LANES, left - LANES);
    store_upto(y + from + LANES, high, left - LANES);
}

/* Panels from .. to - 1 for all rows. */
static void multiply(const Product *p, int from, int to) {
    const size_t panel_bytes = (size_t)p->x->groups * RECORD;
    for (int panel = from; panel < to;) {
        const uint8_t *w = p->w->panels + panel * panel_bytes;
        const int left = to - panel, wide = p->rows == 1 && left >= 4 ? 4 : p->rows <= 2 && left >= 2 ? 2 : 1;
        for (int r = 0; r < p->rows;) {
            const int count = p->rows - r < TILE_ROWS ? p->rows - r : TILE_ROWS;
            int row[TILE_ROWS];
            vf out[MOST_OUT][2];
            for (int i = 0; i < count; i++) row[i] = p->row ? p->row[r + i] : r + i;
            switch (10 * wide + count) {
            case 41: tile(1, 4, w, panel_bytes, p->x, row, out); break;
            case 21: tile(1, 2, w, panel_bytes, p->x, row, out); break;
            case 22: tile(2, 2, w, panel_bytes, p->x, row, out); break;
            case 11: tile(1, 1, w, panel_bytes, p->x, row, out); break;
            case 12: tile(2, 1, w, panel_bytes, p->x, row, out); break;
#if TILE_ROWS > 2
            case 13: tile(3, 1, w, panel_bytes, p->x, row, out); break;
            case 14: tile(4, 1, w, panel_bytes, p->x, row, out); break;
            case 15: tile(5, 1, w, panel_bytes, p->x, row, out); break;
            case 16: tile(6, 1, w, panel_bytes, p->x, row, out); break;
#endif
            }
            for (int i = 0; i < wide * count; i++) finish(p, panel + i / count, r + i % count, out[i][0], out[i][1]);
            r += count;
        }
        panel += wide;
    }
}

/* Panels per chunk: enough work to be worth a hand-over, few enough that every thread has some. */
static int panels_per_chunk(const Product *p) {
    const int panels = panels_of(p->w->out);
    const int64_t work = (int64_t)p->x->groups * (p->rows + 3);
    int per = (int)(96 / (work < 1 ? 1 : work)) + 1;
    const int most = panels / (3 * pool.threads) + 1;
    return per < most ? per : most;
}

static void product_chunk(void *arguments, int chunk, int thread) {
    (void)thread;
    const Product *p = arguments;
    const int panels = panels_of(p->w->out), from = chunk * p->per, left = panels - from;
    multiply(p, from, from + (left < p->per ? left : p->per));
}

static void product(Product p) {
    p.per = panels_per_chunk(&p);
    in_parallel((panels_of(p.w->out) + p.per - 1) / p.per, product_chunk, &p);
}

/* Several products in one phase: a chunk is some panels of one of them. */
typedef struct {
    Product *list;
    int *first; /* chunk number of each product's first chunk */
    int count, chunks;
} Products;

static void add_product(Products *s, Product p) { s->list[s->count++] = p; }

#define CHUNKS_PER_THREAD 4
#define CHUNK_WORK 4096 /* groups x panels x rows: more than this is divided further */

static void products_chunk(void *arguments, int chunk, int thread) {
    const Products *s = arguments;
    int low = 0, high = s->count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (s->first[middle] <= chunk) low = middle;
        else high = middle - 1;
    }
    product_chunk(&s->list[low], chunk - s->first[low], thread);
}

/* Divides each product into as few chunks as keep every thread busy: the prefetcher needs a kilobyte or two to get
 * going. */
static void multiply_all(Products *s) {
    if (!s->count) return;
    const int pieces = (CHUNKS_PER_THREAD * pool.threads + s->count - 1) / s->count;
    s->chunks = 0;
    for (int i = 0; i < s->count; i++) {
        Product *p = &s->list[i];
        const int panels = panels_of(p->w->out);
        const int64_t work = (int64_t)p->x->groups * p->rows;
        const int most = (int)(CHUNK_WORK / (work < 1 ? 1 : work)) + 1, share = (panels + pieces - 1) / pieces;
        p->per = share < most ? share : most;
        s->first[i] = s->chunks;
        s->chunks += (panels + p->per - 1) / p->per;
    }
    in_parallel(s->chunks, products_chunk, s);
}

#endif
