/* Lock-free reads of blocks in an arena: arena.py has the layout, shared_reads.py the same block by block in Python,
 * whose overhead per block would be a third of the copy. */

enum { KEY_BYTES = 16, HEADER_BYTES = 128, BODY_BYTES = 112, NUM_READER_SLOTS = 64, WAYS = 8, COMMITTED = 2 };

typedef struct {
    uint8_t *map;
    uint64_t headers, directory, buckets, reader_slots, data, stride, slots;
} Arena;

typedef struct {
    uint64_t ticket, checksum;
    uint32_t slot, bytes, form, from_disk;
} SharedBlock;

static uint64_t mixed(const uint8_t *data, const uint8_t *secret) {
    return fold(word(data) ^ word(secret), word(data + 8) ^ word(secret + 8));
}

static uint64_t scattered(uint64_t h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9u;
    return h ^ h >> 32;
}

/* XXH3 of 9 to 16 bytes, and of 17 to 128: other formulas than for long inputs. */
static uint64_t hash_key(const uint8_t *data, uint64_t bytes) {
    const uint64_t low = word(data) ^ word(SECRET + 24) ^ word(SECRET + 32);
    const uint64_t high = word(data + bytes - 8) ^ word(SECRET + 40) ^ word(SECRET + 48);
    return scattered(bytes + __builtin_bswap64(low) + high + fold(low, high));
}

static uint64_t hash_few(const uint8_t *data, uint64_t bytes) {
    uint64_t h = bytes * P64_1;
    for (uint64_t pair = (bytes - 1) / 32 + 1; pair-- > 0;)
        h += mixed(data + 16 * pair, SECRET + 32 * pair) + mixed(data + bytes - 16 * (pair + 1), SECRET + 32 * pair + 16);
    return scattered(h);
}

/* For tests. */
API uint64_t tripool_hash(const uint8_t *data, uint64_t bytes) {
    return bytes <= 16 ? hash_key(data, bytes) : hash_few(data, bytes);
}

static uint8_t *header(const Arena *arena, uint64_t slot) { return arena->map + arena->headers + slot * HEADER_BYTES; }

static uint8_t *read_count(const Arena *arena, uint64_t slot, uint64_t reader_slot) {
    return arena->map + arena->reader_slots + slot * NUM_READER_SLOTS + reader_slot;
}

static void release(const Arena *arena, uint64_t slot, uint64_t reader_slot) {
    uint8_t *mine = read_count(arena, slot, reader_slot);
    if (*mine) (*mine)--; /* 0 already: cleared by the member */
}

static int acquire_at(const Arena *arena, uint64_t slot, uint64_t reader_slot, const uint8_t *key, const uint8_t *space,
                      SharedBlock *to) {
    uint8_t *mine = read_count(arena, slot, reader_slot), head[HEADER_BYTES];
    if (*mine == 255) return 0;
    (*mine)++;
    atomic_thread_fence(memory_order_seq_cst); /* count first, then read the header */
    memcpy(head, header(arena, slot), sizeof head);
    uint32_t few[2];
    memcpy(few, head + 52, sizeof few);
    *to = (SharedBlock){word(head + 32), word(head + 44), (uint32_t)slot, few[0], few[1], 0};
    if (word(head + BODY_BYTES + 8) == COMMITTED && !memcmp(head, key, KEY_BYTES) &&
        !memcmp(head + KEY_BYTES, space, KEY_BYTES) && word(head + BODY_BYTES) == hash_few(head, BODY_BYTES))
        return 1;
    release(arena, slot, reader_slot);
    return 0;
}

static int acquire(const Arena *arena, uint64_t reader_slot, const uint8_t *key, const uint8_t *space, SharedBlock *to) {
    const uint64_t bucket = hash_key(key, KEY_BYTES) % arena->buckets;
    uint32_t entries[WAYS];
    memcpy(entries, arena->map + arena->directory + bucket * sizeof entries, sizeof entries);
    for (int way = 0; way < WAYS; way++) {
        if (!entries[way] || entries[way] > arena->slots) continue;
        if (memcmp(header(arena, entries[way] - 1), key, KEY_BYTES)) continue;
        if (acquire_at(arena, entries[way] - 1, reader_slot, key, space, to)) return 1;
    }
    return 0;
}

API void tripool_release(const Arena *arena, uint64_t reader_slot, uint64_t count, const SharedBlock *found) {
    for (uint64_t i = 0; i < count; i++) release(arena, found[i].slot, reader_slot);
}

/* All blocks, or none: then 0. Last first: the missing block is usually at the end of a chain. */
API int tripool_acquire(const Arena *arena, uint64_t reader_slot, const uint8_t *space, uint64_t count,
                        const uint8_t *keys, SharedBlock *found) {
    for (uint64_t i = count; i-- > 0;)
        if (!acquire(arena, reader_slot, keys + i * KEY_BYTES, space, found + i)) {
            tripool_release(arena, reader_slot, count - 1 - i, found + i + 1);
            return 0;
        }
    return 1;
}

static int holds(const Arena *arena, uint64_t slot, const uint8_t *key) {
    const uint8_t *head = header(arena, slot);
    return word(head + BODY_BYTES + 8) == COMMITTED && !memcmp(head, key, KEY_BYTES);
}

/* Copies blocks of `bytes` each up to the first that is missing or damaged; returns how many are good. `damaged`:
 * the next block is the right one, but its checksum is wrong. */
API uint64_t tripool_read(const Arena *arena, uint64_t count, const SharedBlock *found, const uint8_t *keys,
                          uint8_t *const *to, uint64_t quarter, uint64_t bytes, int *damaged) {
    Together together = best();
    *damaged = 0;
    if (count > 1) tripool_copy_soon(); /* the earlier wake-up may have expired */
    const int ours = !atomic_exchange(&helper.busy, 1);
    uint64_t i = 0;
    for (; i < count && found[i].bytes == bytes && found[i].slot < arena->slots; i++) {
        uint64_t hashes[STREAMS];
        copy_block(together, ours, arena->map + arena->data + found[i].slot * arena->stride, to[i], quarter, bytes, hashes);
        if (!holds(arena, found[i].slot, keys + i * KEY_BYTES)) break; /* the lease expired and the slot was reused */
        *damaged = hash_few((const uint8_t *)hashes, sizeof hashes) != found[i].checksum;
        if (*damaged) break;
    }
    if (ours) atomic_store(&helper.busy, 0);
    return i;
}
