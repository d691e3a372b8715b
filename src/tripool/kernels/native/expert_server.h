/* A rank's experts, for its own rows and for those of other ranks.
 *
 * Requests are answered by the expert thread, outside the interpreter, or by the thread that runs the rank's step while
 * that waits for answers itself. */
#ifndef TRIPOOL_EXPERT_SERVER_H
#define TRIPOOL_EXPERT_SERVER_H

#include "slabs.h"

/* ---- experts ---------------------------------------------------------------------------------------------------- */

static char *reserve(Workspace *w, size_t bytes) {
    if (w->bytes < bytes) {
        free(w->data);
        w->bytes = (bytes + bytes / 4 + 63) / 64 * 64;
        w->data = aligned_alloc(64, w->bytes);
        if (!w->data) abort();
    }
    return w->data;
}

INLINE size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }
INLINE size_t rows_bytes(int rows, int width) { return lines((size_t)rows * groups_of(width) * (GROUP + 8)); }
static Rows rows_at(char *p, int rows, int width) {
    const size_t count = (size_t)rows * groups_of(width);
    return (Rows){(int8_t *)p, (float *)(p + count * GROUP), (int32_t *)(p + count * (GROUP + 4)), groups_of(width)};
}

/* `parallel`: in the thread pool, which belongs to the step's thread. */
static void quantise_all(const float *x, int rows, int width, Rows to, int parallel) {
    if (parallel) prepare((Prepare){x, (size_t)width, NULL, NULL, to, rows, width, 0});
    else
        for (int row = 0; row < rows; row++) quantise(x + (size_t)row * width, width, &to, row);
}

static void run_products(Products *all, int parallel) {
    if (parallel) multiply_all(all);
    else
        for (int i = 0; i < all->count; i++) multiply(&all->list[i], 0, panels_of(all->list[i].w->out));
    all->count = 0;
}

/* The experts of `count` entries, which are sorted by expert: entry i's row, times its weight, goes to y[i]. With
 * `shared`, the shared expert also runs over the first `rows` rows. */
static void run_experts(Workspace *space, const Moe *m, const Rows *input, const RoutedEntry *entry, int count, float *y,
                        float *shared, int rows, int parallel) {
    const int hidden = m->norm.width, width = m->down[0].in, shared_width = shared ? m->shared_down.in : 0;
    const size_t few = lines(sizeof(int) * (size_t)(count + 1)), most = (size_t)count + 1;
    const size_t inner_bytes = lines(sizeof(float) * (size_t)count * width);
    const size_t shared_bytes = lines(sizeof(float) * (size_t)rows * shared_width);
    char *p = reserve(space, 3 * few + lines((sizeof(Product) + sizeof(int)) * most) + inner_bytes + shared_bytes +
                                 rows_bytes(count, width) + rows_bytes(rows, shared_width));
    int *row = (int *)p, *order = (int *)(p + few);
    float *weight = (float *)(p + 2 * few);
    Product *list = (Product *)(p += 3 * few);
    float *inner = (float *)(p += lines((sizeof(Product) + sizeof(int)) * most)), *shared_inner = (float *)(p += inner_bytes);
    const Rows middle = rows_at(p += shared_bytes, count, width);
    const Rows shared_middle = rows_at(p + rows_bytes(count, width), rows, shared_width);
    Products all = {list, (int *)(list + most), 0, 0};
    for (int i = 0; i < count; i++) row[i] = (int)entry[i].row, order[i] = i, weight[i] = entry[i].weight;

    if (shared_width)
        add_product(&all, (Product){&m->shared_gate_up, input, NULL, rows, shared_inner, shared_width, 0, GATE, NULL, 0});
    for (int i = 0, n; i < count; i += n) {
        for (n = 1; i + n < count && entry[i + n].expert == entry[i].expert;) n++;
        add_product(&all, (Product){&m->gate_up[entry[i].expert], input, row + i, n, inner, width, i, GATE, NULL, 0});
    }
    run_products(&all, parallel);
    quantise_all(inner, count, width, middle, parallel);
    if (shared_width) {
        quantise_all(shared_inner, rows, shared_width, shared_middle, parallel);
        add_product(&all, (Product){&m->shared_down, &shared_middle, NULL, rows, shared, hidden, 0, STORE, NULL, 0});
    }
    for (int i = 0, n; i < count; i += n) {
        for (n = 1; i + n < count && entry[i + n].expert == entry[i].expert;) n++;
        add_product(&all, (Product){&m->down[entry[i].expert], &middle, order + i, n, y, hidden, i, SCALE, weight + i, 0});
    }
    run_products(&all, parallel);
}

/* ---- expert server ---------------------------------------------------------------------------------------------- */

static int is_request(const Exchange *x, int number, uint64_t *bell) {
    const int source = number / PARITIES;
    *bell = atomic_load_explicit(dispatch_bell(x, x->at.rank, source, number % PARITIES), memory_order_acquire);
    return *bell != atomic_load_explicit(&x->seen[number], memory_order_relaxed) &&
           !older(BELL_EPOCH(*bell), atomic_load_explicit(fence_of(x, source), memory_order_relaxed));
}

static int has_requests(const Exchange *x) {
    uint64_t bell;
    for (int i = 0; i < x->at.ranks * PARITIES; i++)
        if (is_request(x, i, &bell)) return 1;
    return 0;
}

/* 0 if the slab no longer holds the request: its source may give this rank up and write the lane again at any time, so
 * what is checked, and used, is a copy. Rows are read in place: any bytes are rows. */
static int answer(Exchange *x, int source, int lane, uint64_t bell, int parallel) {
    const ExchangeMemory *at = &x->at;
    const DispatchSlab slab = slab_of(x, source, lane);
    const volatile uint32_t *segment = slab.segment[at->rank];
    const uint32_t layer = *(const volatile uint32_t *)slab.layer, offset = segment[0], count = segment[1];
    const uint32_t most = (uint32_t)at->slab_rows * (uint32_t)at->top_k;
    if (count != BELL_COUNT(bell) || count > most || offset > most - count || layer >= (uint32_t)at->layers) return 0;
    RoutedEntry *entries = (RoutedEntry *)reserve(&x->copied, sizeof(RoutedEntry) * ((size_t)count + 1));
    memcpy(entries, slab.entries + offset, sizeof(RoutedEntry) * count);
    const Moe *m = at->moe[layer];
    for (uint32_t i = 0; i < count; i++)
        if (entries[i].row >= (uint32_t)at->slab_rows || entries[i].expert >= (uint32_t)m->experts) return 0;
    float *y = answers_of(x, at->rank, source, lane) + (size_t)offset * at->hidden;
    run_experts(&x->served, m, &slab.input, entries, (int)count, y, NULL, 0, parallel);
    return 1;
}

/* Answers one request; 0 if there is none, or another thread is answering. */
static int serve_one(Exchange *x, int parallel) {
    if (atomic_load_explicit(&x->serving, memory_order_relaxed) || !has_requests(x)) return 0;
    if (atomic_exchange_explicit(&x->serving, 1, memory_order_acquire)) return 0;
    const int numbers = x->at.ranks * PARITIES;
    int found = 0;
    for (int i = 0; i < numbers && !found; i++) {
        const int number = (x->next + i) % numbers, source = number / PARITIES, lane = number % PARITIES;
        uint64_t bell;
        if (!is_request(x, number, &bell)) continue;
        found = 1;
        x->next = number + 1;
        if (answer(x, source, lane, bell, parallel)) {
            atomic_store_explicit(combine_bell(x, source, x->at.rank, lane), bell, memory_order_release);
            wake(owner_signal(x, source));
        }
        atomic_store_explicit(&x->seen[number], bell, memory_order_relaxed);
    }
    atomic_store_explicit(&x->serving, 0, memory_order_release);
    return found;
}

#define SERVER_SLEEP_NS 50000000
#define SERVER_SPIN_NS 50000
#define STEPLESS_NS 20000000

/* A source has a request for each of its layers, and waking up takes as long as some rows. Only on a rank that has no
 * steps of its own: a step would take the core of a thread that spins, and a thread that waits for a core and does not
 * sleep is not put before others when it is woken. */
static int spin_for_request(const Exchange *x, const Signal *signal) {
    const int64_t began = now_ns();
    for (int i = 1; began - atomic_load_explicit(&pool.owned_ns, memory_order_relaxed) > STEPLESS_NS; i++) {
        if (has_requests(x)) return 1;
        RELAX;
        if (i % 64) continue;
        if (atomic_load(&signal->polled) || atomic_load(&x->leave) || now_ns() - began > SERVER_SPIN_NS) return 0;
    }
    return 0;
}

static void *serve(void *argument) {
    Exchange *x = argument;
    Signal *signal = server_signal(x, x->at.rank);
    while (!atomic_load_explicit(&x->leave, memory_order_acquire)) {
        int served = 0;
        while (!atomic_load_explicit(&signal->polled, memory_order_relaxed) && serve_one(x, 0)) served = 1;
        if (served && spin_for_request(x, signal)) continue;
        const uint32_t word = prepare_sleep(signal);
        if (!atomic_load(&x->leave) && (atomic_load(&signal->polled) || !has_requests(x)))
            sleep_on(signal, word, SERVER_SLEEP_NS);
        end_sleep(signal);
    }
    return NULL;
}

#endif
