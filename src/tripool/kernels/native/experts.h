/* Routed experts: each token runs through its chosen experts, each expert computes only its own tokens, and a token's
 * results are added in the order of its choices. A shared expert, if there is one, runs on every token. */
#ifndef TRIPOOL_EXPERTS_H
#define TRIPOOL_EXPERTS_H

#include "layers.h"

typedef struct {
    Norm norm;
    const float *gate;      /* [ceil(experts / 16), hidden, 16]: float32, because it selects experts */
    const float *bias;      /* [experts]: affects the choice, not the weight; or NULL */
    const Weight *gate_up;  /* [experts] */
    const Weight *down;
    Weight shared_gate_up, shared_down; /* out 0: none */
    int32_t experts, top_k, softmax, groups, top_groups, group_top, normalise;
    float scaling;
    struct Exchange *exchange; /* with the ranks that hold the experts; NULL: this process holds all */
    int32_t layer;             /* number among the layers of the exchange */
} Moe;

/* Router scores of one token, 16 experts at a time; four sums, added in a fixed order. */
static void gate_row(const Moe *m, const float *x, float *logits) {
    const int hidden = m->norm.width;
    for (int e = 0; e < m->experts; e += LANES) {
        const float *w = m->gate + (size_t)(e / LANES) * hidden * LANES;
        vf sum[4] = {{0}, {0}, {0}, {0}};
        int d = 0;
        for (; d + 4 <= hidden; d += 4)
            UNROLL for (int i = 0; i < 4; i++) sum[i] = sum[i] + splat(x[d + i]) * load(w + (size_t)(d + i) * LANES);
        for (; d < hidden; d++) sum[0] = sum[0] + splat(x[d]) * load(w + (size_t)d * LANES);
        store_upto(logits + e, (sum[0] + sum[1]) + (sum[2] + sum[3]), m->experts - e);
    }
}

/* Indices of the `count` largest values in falling order, the first of equals first. */
static void pick(const float *values, int n, int count, int *best) {
    for (int k = 0; k < count; k++) {
        int top = -1;
        for (int i = 0; i < n; i++) {
            int taken = 0;
            for (int j = 0; j < k; j++) taken |= best[j] == i;
            if (!taken && (top < 0 || values[i] > values[top])) top = i;
        }
        best[k] = top;
    }
}

#define MAX_EXPERTS 1024
#define MAX_CHOICES 64

static void route_row(const Moe *m, float *scores, int *experts, float *weights) {
    const int n = m->experts;
    float rank[MAX_EXPERTS];
    if (m->softmax) {
        float top = scores[0], sum = 0.0f;
        for (int i = 1; i < n; i++) top = scores[i] > top ? scores[i] : top;
        for (int i = 0; i < n; i++) sum += scores[i] = expf(scores[i] - top);
        for (int i = 0; i < n; i++) scores[i] /= sum;
    } else
        for (int i = 0; i < n; i++) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
    for (int i = 0; i < n; i++) rank[i] = m->bias ? scores[i] + m->bias[i] : scores[i];
    if (m->groups > 1) {
        const int size = n / m->groups;
        float worth[MAX_EXPERTS];
        int best[MAX_CHOICES], chosen[MAX_CHOICES];
        for (int g = 0; g < m->groups; g++) {
            pick(rank + g * size, size, m->group_top, best);
            worth[g] = 0.0f;
            for (int k = 0; k < m->group_top; k++) worth[g] += rank[g * size + best[k]];
        }
        pick(worth, m->groups, m->top_groups, chosen);
        for (int g = 0; g < m->groups; g++) {
            int in = 0;
            for (int k = 0; k < m->top_groups; k++) in |= chosen[k] == g;
            if (!in)
                for (int i = 0; i < size; i++) rank[g * size + i] = -INFINITY;
        }
    }
    pick(rank, n, m->top_k, experts);
    float sum = 0.0f;
    for (int k = 0; k < m->top_k; k++) sum += weights[k] = scores[experts[k]];
    for (int k = 0; k < m->top_k; k++) weights[k] = (m->normalise ? weights[k] / (sum + 1e-20f) : weights[k]) * m->scaling;
}

typedef struct {
    const Moe *m;
    const float *normed;
    int *experts;
    float *weights;
    Prepare prepare;
} RouteWork;

static void route_chunk(void *arguments, int chunk, int thread) {
    const RouteWork *w = arguments;
    for (int row = chunk; row < w->prepare.rows && row < chunk + 1; row++) {
        float scores[MAX_EXPERTS];
        prepare_row(&w->prepare, row, thread);
        gate_row(w->m, w->normed + (size_t)row * w->m->norm.width, scores);
        route_row(w->m, scores, w->experts + (size_t)row * w->m->top_k, w->weights + (size_t)row * w->m->top_k);
    }
}

/* Pairs (token, choice) sorted by expert; `pair_of` maps each pair to its sorted index. */
typedef struct {
    int *row, *pair_of, *start; /* start: [experts + 1] */
    float *weight;
} Pairs;

static Pairs sort_pairs(const Moe *m, int rows, const int *experts, const float *weights) {
    const size_t n = (size_t)rows * m->top_k;
    char *p = room(PAIRS, n * 12 + sizeof(int) * ((size_t)m->experts + 1));
    Pairs s = {(int *)p, (int *)(p + n * 4), (int *)(p + n * 12), (float *)(p + n * 8)};
    memset(s.start, 0, sizeof(int) * ((size_t)m->experts + 1));
    for (size_t i = 0; i < n; i++) s.start[experts[i] + 1]++;
    for (int e = 0; e < m->experts; e++) s.start[e + 1] += s.start[e];
    int next[MAX_EXPERTS];
    memcpy(next, s.start, sizeof(int) * (size_t)m->experts);
    for (size_t i = 0; i < n; i++) {
        const int to = next[experts[i]]++;
        s.row[to] = (int)(i / (size_t)m->top_k);
        s.pair_of[i] = to;
        s.weight[to] = weights[i];
    }
    return s;
}

typedef struct {
    const Moe *m;
    const float *const *routed; /* [rows, top_k]: what the experts gave */
    const float *shared;
    float *x;
} Gather;

static void gather_row(const Gather *g, int row) {
    const int hidden = g->m->norm.width, top_k = g->m->top_k;
    float *x = g->x + (size_t)row * hidden;
    const float *const *routed = g->routed + (size_t)row * top_k;
    for (int d = 0; d < hidden; d += LANES) {
        const int left = hidden - d;
        vf sum = {0};
        for (int k = 0; k < top_k; k++) sum = sum + load_upto(routed[k] + d, left);
        if (g->shared) sum = sum + load_upto(g->shared + (size_t)row * hidden + d, left);
        store_upto(x + d, load_upto(x + d, left) + sum, left);
    }
}

static void gather_chunk(void *arguments, int chunk, int thread) {
    (void)thread;
    gather_row(arguments, chunk);
}

/* Adds to x in order of choice, then the shared expert's rows, if any. */
static void gather_all(const Moe *m, const float *const *routed, const float *shared, float *x, int rows) {
    Gather gather = {m, routed, shared, x};
    if (rows < SMALL_ROWS)
        for (int row = 0; row < rows; row++) gather_row(&gather, row);
    else
        in_parallel(rows, gather_chunk, &gather);
}

static void moe(const Moe *m, float *x, int rows) {
    const int hidden = m->norm.width, width = m->down[0].in, shared_width = m->shared_down.out ? m->shared_down.in : 0;
    const size_t n = (size_t)rows * m->top_k;
    float *normed = room(HIDDEN, sizeof(float) * (size_t)rows * hidden);
    int *experts = room(ROUTE, n * 8);
    const Rows input = rows_room(INPUT, rows, hidden);
    RouteWork route = {m, normed, experts, (float *)(experts + n), {x, hidden, &m->norm, normed, input, rows, hidden, 0}};
    in_parallel(rows, route_chunk, &route);
    const Pairs pairs = sort_pairs(m, rows, experts, route.weights);

    float *inner = room(INNER, sizeof(float) * (n * width + (size_t)rows * shared_width));
    float *shared_inner = inner + n * width;
    Product *list = room(PRODUCTS, (sizeof(Product) + sizeof(int)) * ((size_t)m->experts + 1));
    Products all = {list, (int *)(list + m->experts + 1), 0, 0};
    if (shared_width)
        add_product(&all, (Product){&m->shared_gate_up, &input, NULL, rows, shared_inner, shared_width, 0, GATE, NULL, 0});
    for (int e = 0; e < m->experts; e++) {
        const int from = pairs.start[e], count = pairs.start[e + 1] - from;
        if (count)
            add_product(&all, (Product){&m->gate_up[e], &input, pairs.row + from, count, inner, width, from, GATE, NULL, 0});
    }
    multiply_all(&all);

    const Rows middle = prepared(MIDDLE, inner, width, (int)n, width, NULL);
    Rows shared_middle = {0};
    if (shared_width) shared_middle = prepared(SHARED_ROWS, shared_inner, shared_width, rows, shared_width, NULL);
    float *routed = room(OUTPUT, sizeof(float) * (n + (size_t)rows) * hidden), *shared = routed + n * hidden;
    int *order = room(LATENT, sizeof(int) * n);
    for (size_t i = 0; i < n; i++) order[i] = (int)i;
    all.count = 0;
    if (shared_width)
        add_product(&all, (Product){&m->shared_down, &shared_middle, NULL, rows, shared, hidden, 0, STORE, NULL, 0});
    for (int e = 0; e < m->experts; e++) {
        const int from = pairs.start[e], count = pairs.start[e + 1] - from;
        if (count)
            add_product(&all, (Product){&m->down[e], &middle, order + from, count, routed, hidden, from, SCALE,
                                        pairs.weight + from, 0});
    }
    multiply_all(&all);
    const float **parts = room(GATHERED, sizeof(float *) * n);
    for (size_t i = 0; i < n; i++) parts[i] = routed + (size_t)pairs.pair_of[i] * hidden;
    gather_all(m, parts, shared_width ? shared : NULL, x, rows);
}

#endif
