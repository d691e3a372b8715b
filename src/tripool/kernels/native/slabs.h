/* What the ranks of an instance share: doorbells and slabs. `experts/layout.py` describes them. */
#ifndef TRIPOOL_SLABS_H
#define TRIPOOL_SLABS_H

#include "experts.h"
#include "futex.h"

#define PARITIES 2 /* lanes of a source */
#define MAX_RANKS 1024

typedef struct {
    uint32_t row, choice, expert;
    float weight;
} RoutedEntry;

/* As Python gives it: `kernels/cpu8/exchange.py`. */
typedef struct {
    uint8_t *map;
    uint64_t control, dispatch_bells, combine_bells, routed, routed_bytes, assigned, assigned_bytes, dispatch, combine;
    uint64_t dispatch_bytes, combine_bytes;
    uint64_t segment_list, entry_list, scales, fixes, values;
    int32_t ranks, rank, layers, experts, top_k, hidden, slab_rows;
    const Moe *const *moe; /* [layers] */
    int64_t deadline_ns;   /* of a wait for one answer */
    int64_t microbatch_rows; /* least rows of a microbatch */
} ExchangeMemory;

/* Memory of one caller of `run_experts`, grown when needed. */
typedef struct {
    char *data;
    size_t bytes;
} Workspace;

/* Consecutive entries for one rank. `bell`: the request, 0 until it is sent. */
typedef struct {
    int rank, offset, count, answered;
    uint64_t bell;
} OwnSegment;

/* An expert map as it was installed; never changed. */
typedef struct {
    int holders; /* that may read it: the exchange while it is the newest, and exchanges in flight */
    int width;   /* most replicas of an expert */
    uint32_t epoch;
    int32_t *table; /* [layers, experts, width]: the ranks with a replica, -1 after the last */
    int32_t *order; /* [layers, experts * width]: places in the layer's table, by rank, then expert; -1 after the last */
    uint8_t *alive; /* [ranks] */
} InstalledMap;

/* An exchange of one lane, seen by its owner. Segments have no entry in common. */
typedef struct {
    int rows, lane, segments;
    InstalledMap *map;
    const Moe *moe;
    Workspace shared;
    OwnSegment *segment; /* [slab_rows * top_k] */
} Flight;

typedef struct Exchange {
    ExchangeMemory at;
    Workspace own, chosen;    /* of the step's thread */
    Workspace served, copied; /* of the holder of `serving` */
    Flight flight[PARITIES];
    uint32_t sequence[PARITIES];
    int parity, next;
    _Atomic int serving, leave;
    _Atomic uint64_t *seen;     /* [ranks, lanes]: the newest request that was handled. With its epoch: the ranks of a
                                 * host that comes again count their requests from 0 */
    _Atomic int64_t *asked_ns;  /* [ranks, lanes]: when the newest request was sent; 0: none is open */
    _Atomic uint64_t *asked;    /* [ranks, lanes]: that request */
    pthread_t thread;
    int64_t *forgotten;         /* [layers, ranks]: of the rows assigned to each rank, those that no longer count */
    pthread_mutex_t map_lock;   /* of `map`, and of the holders of all maps */
    InstalledMap *map;
    _Atomic uint32_t epoch;     /* of `map` */
} Exchange;

enum { FAILED_DEADLINE = 1, FAILED_FENCED };
static int exchange_failure; /* of the step that runs; guarded by the pool's owner lock */

/* ---- shared memory ---------------------------------------------------------------------------------------------- */

typedef _Atomic uint64_t Doorbell;
#define BELL(epoch, count, sequence) ((uint64_t)((epoch) & 0xffff) << 48 | (uint64_t)(count) << 32 | (uint32_t)(sequence))
#define BELL_EPOCH(bell) ((uint32_t)((bell) >> 48))
#define BELL_COUNT(bell) ((uint32_t)((bell) >> 32) & 0xffff)

INLINE int older(uint32_t epoch, uint32_t than) { return ((epoch - than) & 0xffff) >= 0x8000; }

INLINE size_t pair_number(const Exchange *x, int first, int second, int lane) {
    return ((size_t)first * x->at.ranks + second) * PARITIES + lane;
}
static Doorbell *dispatch_bell(const Exchange *x, int destination, int source, int lane) {
    return (Doorbell *)(x->at.map + x->at.dispatch_bells + 64 * pair_number(x, destination, source, lane));
}
static Doorbell *combine_bell(const Exchange *x, int source, int destination, int lane) {
    return (Doorbell *)(x->at.map + x->at.combine_bells + 64 * pair_number(x, source, destination, lane));
}
static float *answers_of(const Exchange *x, int destination, int source, int lane) {
    return (float *)(x->at.map + x->at.combine + x->at.combine_bytes * pair_number(x, destination, source, lane));
}
/* [experts]: rows that this rank has routed to each expert of a layer. Written by this rank's steps only. */
static _Atomic uint64_t *routed_rows(const Exchange *x, int layer) {
    uint8_t *own = x->at.map + x->at.routed + x->at.routed_bytes * (size_t)x->at.rank;
    return (_Atomic uint64_t *)own + (size_t)layer * x->at.experts;
}
/* [ranks]: rows of a layer that all sources have sent to each rank. */
static _Atomic uint64_t *assigned_rows(const Exchange *x, int layer) {
    return (_Atomic uint64_t *)(x->at.map + x->at.assigned + x->at.assigned_bytes * (size_t)layer);
}
static uint8_t *control_of(const Exchange *x, int rank) { return x->at.map + x->at.control + 192 * (size_t)rank; }
static _Atomic uint32_t *fence_of(const Exchange *x, int rank) { return (_Atomic uint32_t *)control_of(x, rank); }
/* 0, or 1 + the rank whose signal is the one of the thread that forwards for this rank, which is on another host. */
static _Atomic uint32_t *forwarded_by(const Exchange *x, int rank) { return (_Atomic uint32_t *)(control_of(x, rank) + 4); }
static Signal *signal_of(const Exchange *x, int rank, size_t line) {
    const uint32_t forwarded = atomic_load_explicit(forwarded_by(x, rank), memory_order_relaxed);
    return (Signal *)(forwarded ? control_of(x, (int)forwarded - 1) + 64 : control_of(x, rank) + line);
}
static Signal *server_signal(const Exchange *x, int rank) { return signal_of(x, rank, 64); }
static Signal *owner_signal(const Exchange *x, int rank) { return signal_of(x, rank, 128); }

typedef struct {
    uint32_t *layer, *rows;
    uint32_t (*segment)[2]; /* [ranks]: offset, count */
    RoutedEntry *entries;
    Rows input;
} DispatchSlab;

static DispatchSlab slab_of(const Exchange *x, int source, int lane) {
    const ExchangeMemory *m = &x->at;
    uint8_t *p = m->map + m->dispatch + m->dispatch_bytes * ((size_t)source * PARITIES + lane);
    const Rows input = {(int8_t *)(p + m->values), (float *)(p + m->scales), (int32_t *)(p + m->fixes), groups_of(m->hidden)};
    return (DispatchSlab){(uint32_t *)p, (uint32_t *)p + 1, (uint32_t (*)[2])(p + m->segment_list),
                          (RoutedEntry *)(p + m->entry_list), input};
}

#endif
