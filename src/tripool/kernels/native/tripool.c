/* What Python calls. One caller at a time: scratch memory and threads are the process's own. */
#include "draft.h"
#include "draw.h"

#define API __attribute__((visibility("default")))
#define OWN pthread_mutex_lock(&pool.owner)
#define DISOWN pthread_mutex_unlock(&pool.owner)

API int tripool_threads(int threads) {
    OWN;
    set_threads(threads);
    const int have = pool.threads;
    DISOWN;
    return have;
}

API void tripool_norm(const Norm *n, const float *x, float *y, int rows) {
    for (int row = 0; row < rows; row++) normalise(x + (size_t)row * n->width, n, y + (size_t)row * n->width);
}

API void tripool_linear(const Weight *w, const float *x, float *y, int rows) {
    OWN;
    const Rows input = prepared(INPUT, x, (size_t)w->in, rows, w->in, NULL);
    product((Product){w, &input, NULL, rows, y, (size_t)w->out, 0, STORE, NULL, 0});
    DISOWN;
}

API void tripool_join(const Join *j, const float *left, const float *right, float *y, int rows) {
    OWN;
    join(j, left, right, y, rows);
    DISOWN;
}

API void tripool_draft(const Draft *d, const int64_t *tokens, const float *hidden, float *kv, const Batch *b,
                       const int32_t *wanted, int count, float *y) {
    OWN;
    draft(d, tokens, hidden, kv, b, wanted, count, y);
    DISOWN;
}

typedef struct {
    const float *logits, *temperatures;
    const uint64_t *keys;
    int32_t *chosen;
    int count;
} Choose;

static void choose_chunk(void *arguments, int row, int thread) {
    (void)thread;
    const Choose *c = arguments;
    const float *logits = c->logits + (size_t)row * c->count, temperature = c->temperatures[row];
    c->chosen[row] = temperature == 0.0f ? largest(logits, c->count) : draw(logits, c->count, temperature, c->keys[row]);
}

API void tripool_draft_choose(const Draft *d, const int64_t *tokens, const float *hidden, float *kv, const Batch *b,
                              const int32_t *wanted, int count, const float *temperatures, const uint64_t *keys,
                              int32_t *chosen) {
    OWN;
    float *logits = room(LOGITS, sizeof(float) * (size_t)count * d->head.out);
    draft(d, tokens, hidden, kv, b, wanted, count, logits);
    in_parallel(count, choose_chunk, &(Choose){logits, temperatures, keys, chosen, d->head.out});
    DISOWN;
}

API void tripool_mlp(const Mlp *m, float *x, int rows) {
    OWN;
    mlp(m, x, rows);
    DISOWN;
}

API void tripool_gqa(const Gqa *g, float *x, float *kv, const Batch *b) {
    OWN;
    gqa(g, x, kv, b);
    DISOWN;
}

API void tripool_mla(const Mla *m, float *x, float *kv, const Batch *b) {
    OWN;
    mla(m, x, kv, b);
    DISOWN;
}

API void tripool_moe(const Moe *m, float *x, int rows) {
    OWN;
    moe(m, x, rows);
    DISOWN;
}

API void tripool_largest(const float *values, int rows, int count, int32_t *best) {
    for (int row = 0; row < rows; row++) best[row] = largest(values + (size_t)row * count, count);
}

API int tripool_draw(const float *logits, int count, float temperature, uint64_t key) {
    return draw(logits, count, temperature, key);
}
