/* Functions called from Python. One caller at a time: scratch memory and threads belong to the process. */
#include "draft.h"

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

API void tripool_draft_choose(const Draft *d, const int64_t *tokens, const float *hidden, float *kv, const Batch *b,
                              const Draws *draws) {
    OWN;
    float *logits = room(LOGITS, sizeof(float) * (size_t)draws->count * d->head.out);
    draft(d, tokens, hidden, kv, b, draws->row, (int)draws->count, logits);
    choose_all(draws, logits, d->head.out);
    DISOWN;
}

API void tripool_step(const Stack *s, const int64_t *tokens, float *kv, int64_t layer_floats, const Batch *b,
                      const Draws *draws, float *hidden) {
    OWN;
    step(s, tokens, kv, (size_t)layer_floats, b, draws, hidden);
    DISOWN;
}

API void tripool_step_guess(const Stack *s, const Draft *d, const int64_t *tokens, float *kv, int64_t layer_floats,
                            const Batch *b, const Draws *draws) {
    OWN;
    step_and_guess(s, d, tokens, kv, (size_t)layer_floats, b, draws);
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
