/* What Python calls. One caller at a time: scratch memory and threads are the process's own. */
#include "layers.h"
#include "latent.h"
#include "experts.h"

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
    product((Product){w, &input, NULL, rows, y, (size_t)w->out, 0, STORE, NULL});
    DISOWN;
}

typedef struct {
    Norm left, right;
    Weight weight;
} Join;

API void tripool_join(const Join *j, const float *left, const float *right, float *y, int rows) {
    OWN;
    const size_t a = (size_t)j->left.width, b = (size_t)j->right.width;
    float *both = room(HIDDEN, sizeof(float) * (size_t)rows * (a + b));
    for (int row = 0; row < rows; row++) {
        normalise(left + row * a, &j->left, both + row * (a + b));
        normalise(right + row * b, &j->right, both + row * (a + b) + a);
    }
    const Rows input = prepared(INPUT, both, a + b, rows, (int)(a + b), NULL);
    product((Product){&j->weight, &input, NULL, rows, y, (size_t)j->weight.out, 0, STORE, NULL});
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
