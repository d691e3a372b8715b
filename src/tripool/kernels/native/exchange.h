/* Routed experts over the ranks of an instance: rows travel to the rank that holds the expert, answers come back.
 *
 * `experts/exchange.py` has the same protocol step by step. Rows are quantised once, into the source's slab, and every
 * destination reads them there; an expert's rows do not depend on each other, so any placement gives the bits of one
 * process. */
#ifndef TRIPOOL_EXCHANGE_H
#define TRIPOOL_EXCHANGE_H

#include "expert_server.h"
#include "replicas.h"

/* ---- owner ------------------------------------------------------------------------------------------------------ */

/* Writes entries from `offset` on, sorted by rank and expert, as segments that are not sent yet. */
static void place(Exchange *x, Flight *f, const RoutedEntry *from, int count, int offset) {
    RoutedEntry *entries = slab_of(x, x->at.rank, f->lane).entries;
    const int experts = f->moe->experts, width = f->map->width, cells = experts * width;
    const size_t layer = (size_t)f->moe->layer * (size_t)cells;
    const int32_t *table = f->map->table + layer, *order = f->map->order + layer;
    int *taken = (int *)reserve(&x->chosen, 2 * sizeof(int) * (size_t)cells), *next = taken + cells;
    int rows[MAX_EXPERTS] = {0}, rank = -1;
    for (int i = 0; i < count; i++) rows[from[i].expert]++;
    choose_replicas(x, f, rows, taken);
    for (int i = 0; i < cells && order[i] >= 0; i++) {
        const int cell = order[i];
        if (!rows[cell / width] || !taken[cell]) continue;
        if (table[cell] != rank) {
            rank = table[cell];
            f->segment[f->segments++] = (OwnSegment){rank, offset, 0, 0, 0};
        }
        f->segment[f->segments - 1].count += taken[cell];
        next[cell] = offset;
        offset += taken[cell];
    }
    for (int i = 0; i < count; i++) {
        int cell = (int)from[i].expert * width;
        while (!taken[cell]) cell++;
        taken[cell]--;
        entries[next[cell]++] = from[i];
    }
}

/* Sends the segments whose rank has no other request in this lane. */
static void ring_all(Exchange *x, Flight *f) {
    const DispatchSlab slab = slab_of(x, x->at.rank, f->lane);
    for (int i = 0; i < f->segments; i++) {
        OwnSegment *s = &f->segment[i];
        int busy = 0;
        if (s->bell || s->rank == x->at.rank) continue;
        for (int k = 0; k < f->segments; k++)
            busy |= f->segment[k].rank == s->rank && f->segment[k].bell && !f->segment[k].answered;
        if (busy) continue;
        s->bell = BELL(f->map->epoch, s->count, ++x->sequence[f->lane]);
        slab.segment[s->rank][0] = (uint32_t)s->offset;
        slab.segment[s->rank][1] = (uint32_t)s->count;
        atomic_store_explicit(&x->asked[s->rank * PARITIES + f->lane], s->bell, memory_order_relaxed);
        atomic_store_explicit(&x->asked_ns[s->rank * PARITIES + f->lane], now_ns(), memory_order_release);
        atomic_store_explicit(dispatch_bell(x, s->rank, x->at.rank, f->lane), s->bell, memory_order_release);
        wake(server_signal(x, s->rank));
    }
}

/* Notes answers; how many segments are open. */
static int poll_answers(Exchange *x, Flight *f) {
    int open = 0;
    for (int i = 0; i < f->segments; i++) {
        OwnSegment *s = &f->segment[i];
        if (s->answered) continue;
        const Doorbell *bell = combine_bell(x, x->at.rank, s->rank, f->lane);
        if (s->bell && atomic_load_explicit(bell, memory_order_acquire) == s->bell) {
            s->answered = 1;
            atomic_store_explicit(&x->asked_ns[s->rank * PARITIES + f->lane], 0, memory_order_relaxed);
        } else
            open++;
    }
    return open;
}

/* Entries for experts of this rank, and the shared expert once. */
static void run_own(Exchange *x, Flight *f, float *shared) {
    const int self = x->at.rank;
    const DispatchSlab slab = slab_of(x, self, f->lane);
    for (int i = 0; i < f->segments; i++) {
        OwnSegment *s = &f->segment[i];
        if (s->rank != self || s->answered) continue;
        float *y = answers_of(x, self, self, f->lane) + (size_t)s->offset * x->at.hidden;
        run_experts(&x->own, f->moe, &slab.input, slab.entries + s->offset, s->count, y, shared, f->rows, 1);
        s->answered = 1;
        shared = NULL;
    }
    if (shared) run_experts(&x->own, f->moe, &slab.input, NULL, 0, NULL, shared, f->rows, 1);
}

/* Under a new map: entries that lost ranks have not answered go to the ranks that now hold the experts. */
static void reassign(Exchange *x, Flight *f) {
    const DispatchSlab slab = slab_of(x, x->at.rank, f->lane);
    read_map(x, f);
    for (int i = f->segments - 1; i >= 0; i--) {
        const OwnSegment s = f->segment[i];
        if (s.answered || s.rank == x->at.rank || f->map->alive[s.rank]) continue;
        atomic_store_explicit(&x->asked_ns[s.rank * PARITIES + f->lane], 0, memory_order_relaxed);
        memmove(&f->segment[i], &f->segment[i + 1], sizeof(OwnSegment) * (size_t)(f->segments-- - i - 1));
        RoutedEntry *copy = (RoutedEntry *)reserve(&x->own, sizeof(RoutedEntry) * (size_t)s.count);
        memcpy(copy, slab.entries + s.offset, sizeof(RoutedEntry) * (size_t)s.count);
        place(x, f, copy, s.count, s.offset);
    }
}

#define ANSWER_SPIN_NS 200000
#define OWNER_SLEEP_NS 20000000

static void stop_polling(Exchange *x) {
    Signal *mine = server_signal(x, x->at.rank);
    atomic_store(&mine->polled, 0);
    atomic_thread_fence(memory_order_seq_cst);
    if (has_requests(x)) wake(mine);
}

/* Returns when every segment is answered; meanwhile answers other ranks' requests. Sets `exchange_failure` otherwise. */
static void wait_for_answers(Exchange *x, Flight *f) {
    Signal *mine = server_signal(x, x->at.rank), *answered = owner_signal(x, x->at.rank);
    int64_t idle_since = now_ns();
    const int64_t deadline = idle_since + x->at.deadline_ns;
    atomic_store(&mine->polled, 1);
    for (int i = 1; poll_answers(x, f); i++) {
        if (atomic_load_explicit(&x->epoch, memory_order_acquire) != f->map->epoch) {
            reassign(x, f);
            if (!f->map->alive[x->at.rank]) exchange_failure = FAILED_FENCED;
        }
        if (older(f->map->epoch, atomic_load_explicit(fence_of(x, x->at.rank), memory_order_relaxed)))
            exchange_failure = FAILED_FENCED;
        if (exchange_failure) break;
        run_own(x, f, NULL);
        ring_all(x, f);
        if (serve_one(x, 1)) idle_since = now_ns();
        else if (i % 64) RELAX;
        if (i % 64) continue;
        const int64_t now = now_ns();
        if (now > deadline) exchange_failure = FAILED_DEADLINE;
        if (now - idle_since < ANSWER_SPIN_NS) {
            sched_yield(); /* the thread that computes the answer may need this core */
            continue;
        }
        stop_polling(x); /* from here on the expert thread answers */
        const uint32_t word = prepare_sleep(answered);
        if (poll_answers(x, f)) sleep_on(answered, word, OWNER_SLEEP_NS);
        end_sleep(answered);
        atomic_store(&mine->polled, 1);
    }
    stop_polling(x);
}

/* The caller owns the pool: other processes read the counts, none else writes them. */
static void count_routed(const Exchange *x, const Moe *m, const int *experts, size_t count) {
    _Atomic uint64_t *routed = routed_rows(x, m->layer);
    for (size_t i = 0; i < count; i++) {
        _Atomic uint64_t *rows = &routed[experts[i]];
        atomic_store_explicit(rows, atomic_load_explicit(rows, memory_order_relaxed) + 1, memory_order_relaxed);
    }
}

/* Routes rows and sends them. */
static void begin_exchange(Exchange *x, Flight *f, const Moe *m, float *stream, int rows) {
    const size_t n = (size_t)rows * m->top_k;
    const DispatchSlab slab = slab_of(x, x->at.rank, f->lane);
    float *normed = room(HIDDEN, sizeof(float) * (size_t)rows * m->norm.width);
    int *experts = room(ROUTE, n * 8);
    RouteWork route = {m, normed, experts, (float *)(experts + n),
                       {stream, (size_t)m->norm.width, &m->norm, normed, slab.input, rows, m->norm.width, 0}};
    in_parallel(rows, route_chunk, &route);
    RoutedEntry *entries = room(PAIRS, sizeof(RoutedEntry) * n);
    count_routed(x, m, experts, n);
    for (size_t i = 0; i < n; i++)
        entries[i] = (RoutedEntry){(uint32_t)(i / (size_t)m->top_k), (uint32_t)(i % (size_t)m->top_k),
                                   (uint32_t)experts[i], route.weights[i]};
    f->moe = m;
    f->rows = rows;
    f->segments = 0;
    *slab.layer = (uint32_t)m->layer;
    *slab.rows = (uint32_t)rows;
    read_map(x, f);
    place(x, f, entries, (int)n, 0);
    ring_all(x, f);
}

/* Adds in order of choice, then the shared expert, to the residual stream. */
static void end_exchange(Exchange *x, Flight *f, float *stream, const float *shared) {
    const Moe *m = f->moe;
    const RoutedEntry *entries = slab_of(x, x->at.rank, f->lane).entries;
    const float **routed = room(GATHERED, sizeof(float *) * (size_t)f->rows * m->top_k);
    for (int i = 0; i < f->segments; i++) {
        const OwnSegment *s = &f->segment[i];
        const float *answers = answers_of(x, s->rank, x->at.rank, f->lane);
        for (int j = s->offset; j < s->offset + s->count; j++)
            routed[(size_t)entries[j].row * m->top_k + entries[j].choice] = answers + (size_t)j * x->at.hidden;
    }
    gather_all(m, routed, shared, stream, f->rows);
}

/* Own experts, answers of the others, sums. */
static void finish_exchange(Exchange *x, Flight *f, float *stream) {
    float *shared = NULL;
    if (f->moe->shared_down.out)
        shared = (float *)reserve(&f->shared, sizeof(float) * (size_t)f->rows * f->moe->norm.width);
    run_own(x, f, shared);
    wait_for_answers(x, f);
    if (!exchange_failure) end_exchange(x, f, stream, shared);
}

static void forget_requests(Exchange *x) {
    for (int i = 0; i < x->at.ranks * PARITIES; i++) atomic_store(&x->asked_ns[i], 0);
}

/* As `moe`, to the bit. Of a batch that needs several exchanges, one is sent before the last one is finished. */
static void moe_over_ranks(const Moe *m, float *stream, int rows) {
    Exchange *x = m->exchange;
    const size_t hidden = (size_t)m->norm.width;
    float *sent = NULL;
    for (int from = 0; from < rows && !exchange_failure; from += x->at.slab_rows) {
        float *part = stream + (size_t)from * hidden;
        x->parity ^= 1;
        begin_exchange(x, &x->flight[x->parity], m, part, rows - from < x->at.slab_rows ? rows - from : x->at.slab_rows);
        if (sent) finish_exchange(x, &x->flight[x->parity ^ 1], sent);
        sent = part;
    }
    if (sent && !exchange_failure) finish_exchange(x, &x->flight[x->parity], sent);
    if (exchange_failure) forget_requests(x);
}

/* For how long each rank has left a request unanswered. An answer counts when it is given, not when it is read: this
 * rank's step may be busy, or may have been stopped. */
static void exchange_silence(const Exchange *x, int64_t *ns) {
    const int64_t now = now_ns();
    memset(ns, 0, sizeof(int64_t) * (size_t)x->at.ranks);
    for (int i = 0; i < x->at.ranks * PARITIES; i++) {
        const int rank = i / PARITIES;
        const int64_t since = atomic_load_explicit(&x->asked_ns[i], memory_order_acquire);
        const uint64_t asked = atomic_load_explicit(&x->asked[i], memory_order_relaxed);
        if (!since || atomic_load(combine_bell(x, x->at.rank, rank, i % PARITIES)) == asked) continue;
        if (now - since > ns[rank]) ns[rank] = now - since;
    }
}

/* What other ranks have asked for by now. Between two sublayers this is sooner than waking the expert thread, which may
 * have to wait for a core. */
static void serve_others(const Moe *m) {
    if (!m || !m->exchange) return;
    for (int i = 0; i < m->exchange->at.ranks && serve_one(m->exchange, 1);) i++;
}

static void feed_experts(const Moe *m, float *x, int rows) {
    if (m->exchange) moe_over_ranks(m, x, rows);
    else moe(m, x, rows);
}

/* ---- beginning and end ------------------------------------------------------------------------------------------ */

/* Goes on with newer sequences than an earlier process of this rank used, and answers what that one did not. Sequences
 * begin again after 2^32 requests, so the newest is the one that none of the others follows. */
static void resume(Exchange *x) {
    const ExchangeMemory *at = &x->at;
    for (int lane = 0; lane < PARITIES; lane++) {
        uint64_t newest = 0; /* no request has this word: each has a count */
        for (int other = 0; other < at->ranks; other++) {
            const uint64_t used = atomic_load(dispatch_bell(x, other, at->rank, lane));
            if (used && (!newest || (int32_t)((uint32_t)used - (uint32_t)newest) > 0)) newest = used;
            atomic_store(&x->seen[other * PARITIES + lane], atomic_load(combine_bell(x, other, at->rank, lane)));
        }
        x->sequence[lane] = (uint32_t)newest;
    }
    Signal *signals[] = {server_signal(x, at->rank), owner_signal(x, at->rank)};
    for (int i = 0; i < 2; i++) {
        atomic_store(&signals[i]->asleep, 0);
        atomic_store(&signals[i]->polled, 0);
    }
}

static void exchange_free(Exchange *x) {
    for (int lane = 0; lane < PARITIES; lane++) {
        drop_map(x->flight[lane].map);
        free(x->flight[lane].shared.data);
        free(x->flight[lane].segment);
    }
    drop_map(x->map);
    void *blocks[] = {x->own.data, x->chosen.data, x->served.data, x->copied.data, x->seen, x->asked_ns, x->asked, x->forgotten};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
    pthread_mutex_destroy(&x->map_lock);
    free(x);
}

static Exchange *exchange_open(const ExchangeMemory *memory) {
    Exchange *x = HAVE_FUTEX ? calloc(1, sizeof *x) : NULL;
    if (!x) return NULL;
    x->at = *memory;
    const size_t ranks = (size_t)memory->ranks;
    pthread_mutex_init(&x->map_lock, NULL);
    x->seen = calloc(ranks * PARITIES, sizeof *x->seen);
    x->asked_ns = calloc(ranks * PARITIES, sizeof *x->asked_ns);
    x->asked = calloc(ranks * PARITIES, sizeof *x->asked);
    x->forgotten = calloc(ranks * (size_t)memory->layers, sizeof *x->forgotten);
    int enough = x->seen && x->asked_ns && x->asked && x->forgotten;
    for (int lane = 0; lane < PARITIES; lane++) {
        Flight *f = &x->flight[lane];
        f->lane = lane;
        f->segment = calloc((size_t)memory->slab_rows * (size_t)memory->top_k, sizeof *f->segment);
        enough = enough && f->segment;
    }
    if (enough) resume(x);
    if (enough && !pthread_create(&x->thread, NULL, serve, x)) return x;
    exchange_free(x);
    return NULL;
}

static void exchange_close(Exchange *x) {
    atomic_store(&x->leave, 1);
    wake(server_signal(x, x->at.rank));
    pthread_join(x->thread, NULL);
    exchange_free(x);
}

static void exchange_fence(Exchange *x, int rank, uint32_t epoch) {
    _Atomic uint32_t *fence = fence_of(x, rank);
    uint32_t now = atomic_load(fence);
    while (older(now, epoch) && !atomic_compare_exchange_weak(fence, &now, epoch & 0xffff)) {}
    wake(owner_signal(x, rank));
}

#endif
