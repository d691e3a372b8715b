/* Requests and answers of an exchange between two hosts: out of one host's shared memory into a buffer, and from the
 * buffer into the other's. `experts/forward.py` has the same step by step, and describes the records.
 *
 * Loaded by processes without torch, hence a library of its own. */
#include "../../kernels/native/slabs.h"

#define API __attribute__((visibility("default")))
#define MAX_DESTINATIONS 1024

enum { REQUEST = 1, ANSWER, ROUTED };

typedef struct {
    uint32_t kind, bytes, source, lane;
    uint32_t layer, destinations, rows, unused; /* of an answer: destination, offset, count */
} Head;

typedef struct {
    uint64_t bell;
    uint32_t destination, offset;
} Target;

typedef struct {
    Exchange x;
    const uint8_t *here, *there; /* [ranks]: whether it is a rank of this host, of the other one */
    uint64_t *sent, *returned;   /* [ranks, ranks, lanes]: newest request and answer that were forwarded */
    uint8_t *row_sent;           /* [ranks, lanes, slab_rows]: whether the other host has this row of the exchange */
    Signal *signal;
} Forwarder;

static size_t eight(size_t bytes) { return (bytes + 7) / 8 * 8; }
static uint32_t entries_of(const Forwarder *f) { return (uint32_t)f->x.at.slab_rows * (uint32_t)f->x.at.top_k; }
static size_t row_bytes(const Forwarder *f) { return (size_t)groups_of(f->x.at.hidden) * (GROUP + 8); }
static size_t request_bytes(const Forwarder *f, size_t targets, size_t entries, size_t rows) {
    return sizeof(Head) + sizeof(Target) * targets + sizeof(RoutedEntry) * entries + eight(4 * rows) + rows * row_bytes(f);
}

/* ---- out of shared memory --------------------------------------------------------------------------------------- */

/* Whether the rows that were sent of this lane are those of its exchange now: an earlier request under the same epoch is
 * open, so the lane was not written again. */
static int same_exchange(const Forwarder *f, int source, int lane, uint32_t epoch) {
    for (int d = 0; d < f->x.at.ranks; d++) {
        const uint64_t bell = f->there[d] ? f->sent[pair_number(&f->x, source, d, lane)] : 0;
        if (bell && BELL_EPOCH(bell) == epoch && atomic_load(combine_bell(&f->x, source, d, lane)) != bell) return 1;
    }
    return 0;
}

/* One record with all open requests of a lane to the other host; its size, 0 if there are none. */
static size_t take_requests(Forwarder *f, int source, int lane, uint8_t *to) {
    const Exchange *x = &f->x;
    const DispatchSlab slab = slab_of(x, source, lane);
    const uint32_t most = entries_of(f);
    uint8_t *sent_rows = f->row_sent + ((size_t)source * PARITIES + lane) * x->at.slab_rows;
    Target *targets = (Target *)(to + sizeof(Head));
    uint32_t count = 0, entries = 0, rows = 0, epoch = 0;
    int mixed = 0;
    for (int d = 0; d < x->at.ranks; d++) {
        if (!f->there[d]) continue;
        const uint64_t bell = atomic_load_explicit(dispatch_bell(x, d, source, lane), memory_order_acquire);
        uint64_t *sent = &f->sent[pair_number(x, source, d, lane)];
        if (!bell || bell == *sent || bell == atomic_load(combine_bell(x, source, d, lane))) continue;
        const volatile uint32_t *segment = slab.segment[d];
        const uint32_t offset = segment[0], n = segment[1];
        if (n != BELL_COUNT(bell) || n > most || offset > most - n || n > most - entries || count == MAX_DESTINATIONS) {
            *sent = bell; /* given up: the lane is being written again */
            continue;
        }
        mixed |= count && epoch != BELL_EPOCH(bell);
        epoch = BELL_EPOCH(bell);
        targets[count++] = (Target){bell, (uint32_t)d, offset};
        entries += n;
    }
    if (!count) return 0;
    if (mixed || !same_exchange(f, source, lane, epoch)) memset(sent_rows, 0, (size_t)x->at.slab_rows);
    RoutedEntry *entry = (RoutedEntry *)(targets + count);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t n = BELL_COUNT(targets[i].bell);
        memcpy(entry, slab.entries + targets[i].offset, sizeof(RoutedEntry) * n);
        entry += n;
        f->sent[pair_number(x, source, (int)targets[i].destination, lane)] = targets[i].bell;
    }
    uint32_t *numbers = (uint32_t *)entry;
    for (const RoutedEntry *e = (RoutedEntry *)(targets + count); e < entry; e++)
        if (e->row < (uint32_t)x->at.slab_rows && !sent_rows[e->row]) {
            sent_rows[e->row] = 1;
            numbers[rows++] = e->row;
        }
    if (rows % 2) numbers[rows] = 0;
    uint8_t *data = (uint8_t *)numbers + eight(4 * (size_t)rows);
    const size_t groups = (size_t)slab.input.groups;
    for (uint32_t i = 0; i < rows; i++, data += row_bytes(f)) {
        const size_t first = numbers[i] * groups;
        memcpy(data, slab.input.scale + first, 4 * groups);
        memcpy(data + 4 * groups, slab.input.fix + first, 4 * groups);
        memcpy(data + 8 * groups, slab.input.q + first * GROUP, GROUP * groups);
    }
    const size_t bytes = (size_t)(data - to);
    *(Head *)to = (Head){REQUEST, (uint32_t)bytes, (uint32_t)source, (uint32_t)lane, *slab.layer, count, rows, 0};
    return bytes;
}

static size_t answer_bytes(const Forwarder *f, size_t count) {
    return sizeof(Head) + 8 + eight(4 * count * (size_t)f->x.at.hidden);
}

/* The newest answer of a rank here to one there, if it was not sent yet. */
static size_t take_answer(Forwarder *f, int source, int destination, int lane, uint8_t *to) {
    const Exchange *x = &f->x;
    uint64_t *returned = &f->returned[pair_number(x, source, destination, lane)];
    const uint64_t bell = atomic_load_explicit(combine_bell(x, source, destination, lane), memory_order_acquire);
    if (!bell || bell == *returned) return 0;
    *returned = bell;
    const volatile uint32_t *segment = slab_of(x, source, lane).segment[destination];
    const uint32_t offset = segment[0], count = segment[1], most = entries_of(f);
    if (count != BELL_COUNT(bell) || count > most || offset > most - count) return 0; /* nobody waits for it any more */
    const size_t bytes = answer_bytes(f, count), floats = (size_t)count * (size_t)x->at.hidden;
    *(Head *)to = (Head){ANSWER, (uint32_t)bytes, (uint32_t)source, (uint32_t)lane, (uint32_t)destination, offset, count, 0};
    memcpy(to + sizeof(Head), &bell, 8);
    float *rows = (float *)(to + sizeof(Head) + 8);
    memcpy(rows, answers_of(x, destination, source, lane) + (size_t)offset * x->at.hidden, 4 * floats);
    if (floats % 2) rows[floats] = 0;
    return bytes;
}

static size_t take_all(Forwarder *f, uint8_t *to, size_t room) {
    const int ranks = f->x.at.ranks;
    const size_t most = request_bytes(f, (size_t)ranks, entries_of(f), (size_t)f->x.at.slab_rows);
    size_t n = 0;
    for (int s = 0; s < ranks; s++)
        for (int lane = 0; lane < PARITIES; lane++) {
            if (f->here[s] && n + most <= room) n += take_requests(f, s, lane, to + n);
            for (int d = 0; d < ranks && f->there[s]; d++)
                if (f->here[d] && n + answer_bytes(f, entries_of(f)) <= room) n += take_answer(f, s, d, lane, to + n);
        }
    return n;
}

/* ---- into shared memory ----------------------------------------------------------------------------------------- */

static int put_requests(Forwarder *f, const Head *head, const uint8_t *from) {
    const Exchange *x = &f->x;
    const uint32_t ranks = (uint32_t)x->at.ranks, most = entries_of(f), slab_rows = (uint32_t)x->at.slab_rows;
    if (head->source >= ranks || !f->there[head->source] || head->lane >= PARITIES || head->layer >= (uint32_t)x->at.layers ||
        head->destinations > ranks || head->rows > slab_rows)
        return 1;
    const Target *targets = (const Target *)(from + sizeof(Head));
    size_t entries = 0;
    if (head->bytes < sizeof(Head) + sizeof(Target) * head->destinations) return 1;
    for (uint32_t i = 0; i < head->destinations; i++) {
        const uint32_t n = BELL_COUNT(targets[i].bell);
        if (targets[i].destination >= ranks || !f->here[targets[i].destination] || n > most || targets[i].offset > most - n)
            return 1;
        entries += n;
    }
    if (entries > most || head->bytes != request_bytes(f, head->destinations, entries, head->rows)) return 1;
    const RoutedEntry *entry = (const RoutedEntry *)(targets + head->destinations);
    const uint32_t *numbers = (const uint32_t *)(entry + entries);
    for (uint32_t i = 0; i < head->rows; i++)
        if (numbers[i] >= slab_rows) return 1;

    const DispatchSlab slab = slab_of(x, (int)head->source, (int)head->lane);
    const size_t groups = (size_t)slab.input.groups;
    const uint8_t *data = (const uint8_t *)numbers + eight(4 * (size_t)head->rows);
    for (uint32_t i = 0; i < head->rows; i++, data += row_bytes(f)) {
        const size_t first = numbers[i] * groups;
        memcpy(slab.input.scale + first, data, 4 * groups);
        memcpy(slab.input.fix + first, data + 4 * groups, 4 * groups);
        memcpy(slab.input.q + first * GROUP, data + 8 * groups, GROUP * groups);
    }
    *slab.layer = head->layer;
    for (uint32_t i = 0; i < head->destinations; i++) {
        const uint32_t n = BELL_COUNT(targets[i].bell), d = targets[i].destination;
        memcpy(slab.entries + targets[i].offset, entry, sizeof(RoutedEntry) * n);
        entry += n;
        slab.segment[d][0] = targets[i].offset;
        slab.segment[d][1] = n;
    }
    for (uint32_t i = 0; i < head->destinations; i++) {
        const int d = (int)targets[i].destination;
        atomic_store_explicit(dispatch_bell(x, d, (int)head->source, (int)head->lane), targets[i].bell, memory_order_release);
        wake(server_signal(x, d));
    }
    return 0;
}

static int put_answer(Forwarder *f, const Head *head, const uint8_t *from) {
    const Exchange *x = &f->x;
    const uint32_t ranks = (uint32_t)x->at.ranks, most = entries_of(f);
    const uint32_t source = head->source, destination = head->layer, offset = head->destinations, count = head->rows;
    if (source >= ranks || !f->here[source] || head->lane >= PARITIES || destination >= ranks || !f->there[destination] ||
        count > most || offset > most - count || head->bytes != answer_bytes(f, count))
        return 1;
    uint64_t bell;
    memcpy(&bell, from + sizeof(Head), 8);
    if (BELL_COUNT(bell) != count) return 1;
    float *rows = answers_of(x, (int)destination, (int)source, (int)head->lane) + (size_t)offset * x->at.hidden;
    memcpy(rows, from + sizeof(Head) + 8, 4 * (size_t)count * (size_t)x->at.hidden);
    atomic_store_explicit(combine_bell(x, (int)source, (int)destination, (int)head->lane), bell, memory_order_release);
    wake(owner_signal(x, (int)source));
    return 0;
}

static int put_routed(Forwarder *f, const Head *head, const uint8_t *from) {
    const ExchangeMemory *at = &f->x.at;
    if (head->source >= (uint32_t)at->ranks || !f->there[head->source] || head->bytes != sizeof(Head) + at->routed_bytes)
        return 1;
    memcpy(at->map + at->routed + at->routed_bytes * head->source, from + sizeof(Head), at->routed_bytes);
    return 0;
}

/* ---- for Python ------------------------------------------------------------------------------------------------- */

/* Largest record. */
API int64_t tripool_forward_room(const Forwarder *f) {
    const size_t request = request_bytes(f, (size_t)f->x.at.ranks, entries_of(f), (size_t)f->x.at.slab_rows);
    const size_t answer = answer_bytes(f, entries_of(f));
    return (int64_t)(request > answer ? request : answer);
}

/* The ranks there are woken for, from now on, by one signal: `here` and `there` must outlive the forwarder. */
API Forwarder *tripool_forward_open(const ExchangeMemory *memory, const uint8_t *here, const uint8_t *there) {
    Forwarder *f = HAVE_FUTEX ? calloc(1, sizeof *f) : NULL;
    if (!f) return NULL;
    f->x.at = *memory;
    f->here = here;
    f->there = there;
    const size_t pairs = (size_t)memory->ranks * (size_t)memory->ranks * PARITIES;
    f->sent = calloc(pairs, sizeof *f->sent);
    f->returned = calloc(pairs, sizeof *f->returned);
    f->row_sent = calloc((size_t)memory->ranks * PARITIES, (size_t)memory->slab_rows);
    int first = -1;
    for (int rank = 0; rank < memory->ranks; rank++) {
        if (here[rank]) atomic_store(forwarded_by(&f->x, rank), 0);
        if (!there[rank]) continue;
        if (first < 0) first = rank;
        atomic_store(forwarded_by(&f->x, rank), (uint32_t)first + 1);
    }
    if (first >= 0) f->signal = server_signal(&f->x, first);
    if (f->sent && f->returned && f->row_sent && f->signal) return f;
    free(f->sent), free(f->returned), free(f->row_sent), free(f);
    return NULL;
}

API void tripool_forward_close(Forwarder *f) { free(f->sent), free(f->returned), free(f->row_sent), free(f); }

/* A new connection: what is open is sent again. */
API void tripool_forward_restart(Forwarder *f) {
    const size_t pairs = (size_t)f->x.at.ranks * (size_t)f->x.at.ranks * PARITIES;
    memset(f->sent, 0, pairs * sizeof *f->sent);
    memset(f->returned, 0, pairs * sizeof *f->returned);
}

/* Bytes of records that were written; 0 after `wait_ns` without any. */
API int64_t tripool_forward_take(Forwarder *f, uint8_t *to, int64_t room, int64_t wait_ns) {
    size_t n = take_all(f, to, (size_t)room);
    if (n || !wait_ns) return (int64_t)n;
    const uint32_t word = prepare_sleep(f->signal);
    n = take_all(f, to, (size_t)room);
    if (!n) sleep_on(f->signal, word, wait_ns);
    end_sleep(f->signal);
    return (int64_t)(n ? n : take_all(f, to, (size_t)room));
}

/* 0, or 1: these are no records of this exchange. What comes before a wrong one counts. */
API int tripool_forward_put(Forwarder *f, const uint8_t *from, int64_t bytes) {
    const uint8_t *end = from + bytes;
    while (from < end) {
        const Head *head = (const Head *)from;
        if ((size_t)(end - from) < sizeof(Head) || head->bytes < sizeof(Head) || head->bytes % 8 ||
            head->bytes > (size_t)(end - from))
            return 1;
        const int wrong = head->kind == REQUEST  ? put_requests(f, head, from)
                          : head->kind == ANSWER ? put_answer(f, head, from)
                          : head->kind == ROUTED ? put_routed(f, head, from)
                                                 : 1;
        if (wrong) return 1;
        from += head->bytes;
    }
    return 0;
}
