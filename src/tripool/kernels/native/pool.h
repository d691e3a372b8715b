/* A thread pool that shares the chunks of one phase after another.
 *
 * A phase is `count` independent chunks; an idle thread takes the next one. The caller takes chunks too and waits
 * only for chunks that other threads are computing, so a descheduled thread without a chunk delays nothing. Threads
 * spin for a short while before they sleep: a step is hundreds of phases a few microseconds apart. */
#ifndef TRIPOOL_POOL_H
#define TRIPOOL_POOL_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX _mm_pause()
#else
#define RELAX ((void)0)
#endif

#define MAX_THREADS 256
#define SPIN_NS 2000000 /* longer than the pause between two steps */
#define YIELD_AFTER 2000

typedef void (*Chunk)(void *arguments, int chunk, int thread);

/* Next chunk, number of chunks and phase in one word, so that a late thread cannot take a chunk of another phase. */
#define TICKET(phase, count) ((uint64_t)(phase) << 40 | (uint64_t)(count) << 20)
#define TICKET_NEXT(ticket) ((int)((ticket) & 0xfffff))
#define TICKET_COUNT(ticket) ((int)((ticket) >> 20 & 0xfffff))
#define MAX_CHUNKS 0xffff0

static struct {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic int done;
    _Alignas(64) _Atomic int sleepers;
    Chunk run;
    void *arguments;
    uint64_t phase;
    int threads, started;
    pthread_t ids[MAX_THREADS];
    _Atomic int leave;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_mutex_t owner;
    _Atomic int wanted; /* steps that wait for `owner` */
    _Atomic int64_t owned_ns; /* when the last step ended; INT64_MAX: one runs */
} pool = {.threads = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER,
          .owner = PTHREAD_MUTEX_INITIALIZER};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Takes and runs one chunk; 0 when none is left. */
static int run_one(int thread) {
    uint64_t ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    while (TICKET_NEXT(ticket) < TICKET_COUNT(ticket)) {
        if (atomic_compare_exchange_weak_explicit(&pool.ticket, &ticket, ticket + 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            pool.run(pool.arguments, TICKET_NEXT(ticket), thread);
            atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
            return 1;
        }
    }
    return 0;
}

static void sleep_until_work(void) {
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleepers, 1);
    uint64_t ticket = atomic_load(&pool.ticket);
    while (TICKET_NEXT(ticket) >= TICKET_COUNT(ticket) && !atomic_load(&pool.leave)) {
        pthread_cond_wait(&pool.wake, &pool.lock);
        ticket = atomic_load(&pool.ticket);
    }
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.lock);
}

static void *work(void *number) {
    const int thread = (int)(intptr_t)number;
    int64_t idle_since = now_ns();
    for (int i = 0; !atomic_load_explicit(&pool.leave, memory_order_relaxed);) {
        if (run_one(thread)) {
            while (run_one(thread)) {}
            i = 0;
        } else if (++i % 256) {
            RELAX;
        } else if (i == 256) {
            idle_since = now_ns();
        } else if (now_ns() - idle_since > SPIN_NS) {
            sleep_until_work();
            i = 0;
        } else {
            sched_yield(); /* let runnable threads on this core go first */
        }
    }
    return NULL;
}

static void set_threads(int threads) {
    if (threads < 1) threads = 1;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads == pool.threads) return;
    atomic_store(&pool.leave, 1);
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 1; i <= pool.started; i++) pthread_join(pool.ids[i], NULL);
    atomic_store(&pool.leave, 0);
    pool.started = 0;
    for (int i = 1; i < threads; i++) {
        if (pthread_create(&pool.ids[i], NULL, work, (void *)(intptr_t)i)) break;
        pool.started = i;
    }
    pool.threads = pool.started + 1;
}

/* Run all chunks and return when the last is done. */
static void in_parallel(int count, Chunk run, void *arguments) {
    if (count <= 0) return;
    if (pool.threads == 1 || count == 1) {
        for (int i = 0; i < count; i++) run(arguments, i, 0);
        return;
    }
    pool.run = run;
    pool.arguments = arguments;
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    atomic_store(&pool.ticket, TICKET(++pool.phase & 0xffffff, count));
    if (atomic_load(&pool.sleepers) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    while (run_one(0)) {}
    for (int i = 1; atomic_load_explicit(&pool.done, memory_order_acquire) < count; i++) {
        if (i % YIELD_AFTER) RELAX;
        else sched_yield();
    }
}

/* Scratch memory by purpose, grown when needed and kept. One caller at a time: see `owner`. */
#define SLOTS 24
static struct { void *data; size_t bytes; } scratch[SLOTS];

static void *room(int slot, size_t bytes) {
    if (scratch[slot].bytes < bytes) {
        free(scratch[slot].data);
        bytes = (bytes + bytes / 4 + 63) / 64 * 64;
        scratch[slot].data = aligned_alloc(64, bytes);
        if (!scratch[slot].data) abort();
        scratch[slot].bytes = bytes;
    }
    return scratch[slot].data;
}

#endif
