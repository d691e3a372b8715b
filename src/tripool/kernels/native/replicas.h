/* Expert maps as a rank's steps read them, and the choice among the replicas of an expert. */
#ifndef TRIPOOL_REPLICAS_H
#define TRIPOOL_REPLICAS_H

#include "slabs.h"

/* With the lock held. */
static void drop_map(InstalledMap *map) {
    if (map && --map->holders == 0) free(map);
}

/* The newest map is this exchange's from now on. */
static void read_map(Exchange *x, Flight *f) {
    pthread_mutex_lock(&x->map_lock);
    drop_map(f->map);
    f->map = x->map;
    f->map->holders++;
    pthread_mutex_unlock(&x->map_lock);
}

/* table: [layers, experts, width]. */
static InstalledMap *make_map(const ExchangeMemory *at, uint32_t epoch, const int32_t *table, int width, const uint8_t *alive) {
    const size_t cells = (size_t)at->experts * (size_t)width, all = cells * (size_t)at->layers;
    InstalledMap *map = malloc(sizeof *map + 2 * sizeof(int32_t) * all + (size_t)at->ranks);
    if (!map) abort();
    *map = (InstalledMap){1, width, epoch & 0xffff, (int32_t *)(map + 1), (int32_t *)(map + 1) + all, NULL};
    map->alive = memcpy(map->order + all, alive, (size_t)at->ranks);
    memcpy(map->table, table, sizeof(int32_t) * all);
    for (int layer = 0; layer < at->layers; layer++, table += cells) {
        int32_t *order = map->order + (size_t)layer * cells, from[MAX_RANKS + 1] = {0};
        for (size_t i = 0; i < cells; i++)
            if (table[i] >= 0) from[table[i] + 1]++;
        for (int r = 0; r < at->ranks; r++) from[r + 1] += from[r];
        for (size_t i = (size_t)from[at->ranks]; i < cells; i++) order[i] = -1;
        for (size_t i = 0; i < cells; i++)
            if (table[i] >= 0) order[from[table[i]]++] = (int32_t)i;
    }
    return map;
}

static void exchange_map(Exchange *x, uint32_t epoch, const int32_t *table, int width, const uint8_t *alive) {
    InstalledMap *map = make_map(&x->at, epoch, table, width, alive);
    pthread_mutex_lock(&x->map_lock);
    drop_map(x->map);
    x->map = map;
    atomic_store(&x->epoch, map->epoch);
    pthread_mutex_unlock(&x->map_lock);
    wake(owner_signal(x, x->at.rank));
}

#define SPLIT_ROWS 16
#define MEMORY_ROWS 64

/* As `experts/levels.py`: taken[e * width + k] of the rows of expert e go to its replica k. */
static void choose_replicas(Exchange *x, const Flight *f, const int *rows, int *taken) {
    const int ranks = x->at.ranks, experts = f->moe->experts, width = f->map->width, layer = f->moe->layer;
    const int32_t *table = f->map->table + (size_t)layer * experts * width;
    _Atomic uint64_t *assigned = assigned_rows(x, layer);
    int64_t *forgotten = x->forgotten + (size_t)layer * ranks, level[MAX_RANKS], before[MAX_RANKS], sum = 0;
    for (int r = 0; r < ranks; r++) {
        level[r] = (int64_t)atomic_load_explicit(&assigned[r], memory_order_relaxed) - forgotten[r];
        sum += level[r];
    }
    int halvings = 0;
    for (; sum > (int64_t)MEMORY_ROWS * ranks; halvings++) {
        sum = 0;
        for (int r = 0; r < ranks; r++) sum += level[r] >> (halvings + 1);
    }
    for (int r = 0; r < ranks; r++) {
        const int64_t counts = level[r] >> halvings;
        forgotten[r] += level[r] - counts;
        before[r] = level[r] = counts;
    }
    for (int several = 0; several < 2; several++) /* first what has no choice */
        for (int e = 0; e < experts; e++) {
            const int32_t *holder = table + (size_t)e * width;
            if (!rows[e] || (width > 1 && holder[1] >= 0) != several) continue;
            memset(taken + (size_t)e * width, 0, sizeof(int) * (size_t)width);
            for (int left = rows[e], part; left; left -= part) {
                int best = 0;
                for (int k = 1; k < width && holder[k] >= 0; k++) {
                    const int64_t gap = level[holder[k]] - level[holder[best]];
                    const int near = (holder[k] - x->at.rank + ranks) % ranks < (holder[best] - x->at.rank + ranks) % ranks;
                    if (gap < 0 || (gap == 0 && near)) best = k;
                }
                part = left < SPLIT_ROWS ? left : SPLIT_ROWS;
                taken[(size_t)e * width + best] += part;
                level[holder[best]] += part;
            }
        }
    for (int r = 0; r < ranks; r++)
        if (level[r] > before[r])
            atomic_fetch_add_explicit(&assigned[r], (uint64_t)(level[r] - before[r]), memory_order_relaxed);
}

#endif
