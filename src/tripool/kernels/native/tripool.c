/* Functions called from Python. One caller at a time: scratch memory and threads belong to the process. Functions that
 * may run experts of other ranks return 0, or why the exchange with them failed; then their results are undefined. */
#include "draft.h"

#define API __attribute__((visibility("default")))
#define OWN own_pool()
#define DISOWN disown_pool()
#define OWN_EXCHANGE OWN; exchange_failure = 0
#define RETURN_FAILURE const int failure = exchange_failure; DISOWN; return failure

/* A thread that helps another rank gives the pool up soon (`prompt.h`). */
static void own_pool(void) {
    if (pthread_mutex_trylock(&pool.owner)) {
        atomic_fetch_add(&pool.wanted, 1);
        pthread_mutex_lock(&pool.owner);
        atomic_fetch_sub(&pool.wanted, 1);
    }
    atomic_store_explicit(&pool.owned_ns, INT64_MAX, memory_order_relaxed);
}

static void disown_pool(void) {
    atomic_store_explicit(&pool.owned_ns, now_ns(), memory_order_relaxed);
    pthread_mutex_unlock(&pool.owner);
}

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

API int tripool_draft(const Draft *d, const int64_t *tokens, const float *hidden, float *kv, const Batch *b,
                      const int32_t *wanted, int count, float *y) {
    OWN_EXCHANGE;
    draft(d, tokens, hidden, kv, b, wanted, count, y);
    RETURN_FAILURE;
}

API int tripool_draft_choose(const Draft *d, const int64_t *tokens, const float *hidden, float *kv, const Batch *b,
                             const Draws *draws) {
    OWN_EXCHANGE;
    float *logits = room(LOGITS, sizeof(float) * (size_t)draws->count * d->head.out);
    draft(d, tokens, hidden, kv, b, draws->row, (int)draws->count, logits);
    choose_all(draws, logits, d->head.out);
    RETURN_FAILURE;
}

API int tripool_step(const Stack *s, const int64_t *tokens, float *kv, int64_t layer_floats, const Batch *b,
                     const Draws *draws, float *hidden) {
    OWN_EXCHANGE;
    step(s, tokens, kv, (size_t)layer_floats, b, draws, hidden);
    RETURN_FAILURE;
}

API int tripool_step_guess(const Stack *s, const Draft *d, const int64_t *tokens, float *kv, int64_t layer_floats,
                           const Batch *b, const Draws *draws) {
    OWN_EXCHANGE;
    step_and_guess(s, d, tokens, kv, (size_t)layer_floats, b, draws);
    RETURN_FAILURE;
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

API int tripool_moe(const Moe *m, float *x, int rows) {
    OWN_EXCHANGE;
    feed_experts(m, x, rows);
    RETURN_FAILURE;
}

API void tripool_largest(const float *values, int rows, int count, int32_t *best) {
    for (int row = 0; row < rows; row++) best[row] = largest(values + (size_t)row * count, count);
}

API int tripool_draw(const float *logits, int count, float temperature, uint64_t key) {
    return draw(logits, count, temperature, key);
}

/* ---- ranks ------------------------------------------------------------------------------------------------------ */

/* Starts the expert thread; NULL where that is not possible. */
API Exchange *tripool_exchange_open(const ExchangeMemory *memory) { return exchange_open(memory); }

API void tripool_exchange_close(Exchange *x) { exchange_close(x); }

/* `table`: [layers, experts, width], the ranks with a replica, -1 after the last; `alive`: [ranks]. Any thread may call
 * this during a step. */
API void tripool_exchange_map(Exchange *x, uint32_t epoch, const int32_t *table, int width, const uint8_t *alive) {
    exchange_map(x, epoch, table, width, alive);
}

/* From now on requests of a rank count only from this epoch on. */
API void tripool_exchange_fence(Exchange *x, int rank, uint32_t epoch) { exchange_fence(x, rank, epoch); }

/* For how long each rank has left this one's requests unanswered; 0: it has answered all. */
API void tripool_exchange_silence(const Exchange *x, int64_t *ns) { exchange_silence(x, ns); }

/* Starts the thread that helps other ranks; NULL where that is not possible. */
API Prompts *tripool_prompts_open(const PromptMemory *memory) { return prompts_open(memory); }

API void tripool_prompts_close(Prompts *p) { prompts_close(p); }

/* One expert, one row: for the plain exchange and tests. */
API void tripool_expert(const Moe *m, int expert, int8_t *q, float *scale, int32_t *fix, float weight, float *y) {
    const Rows input = {q, scale, fix, groups_of(m->norm.width)};
    const RoutedEntry entry = {0, 0, (uint32_t)expert, weight};
    Workspace space = {0};
    run_experts(&space, m, &input, &entry, 1, y, NULL, 0, 0);
    free(space.data);
}
