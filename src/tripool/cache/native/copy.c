/* Copies a block and hashes the copy in one pass with non-temporal stores.
 *
 * The hash is 64-bit XXH3, here for pieces of more than 240 bytes. What is hashed is what was stored: if the source
 * changes meanwhile, the hash is still that of the copy. Targets may have any alignment.
 *
 * One stream of reads leaves a core waiting for memory most of the time. So a block is copied as four streams, its
 * quarters, each with its own hash: nearly twice as fast. A second core doubles that again: a helper thread is woken
 * some microseconds ahead (`tripool_copy_soon`), because waking takes as long as half a copy. The caller starts with
 * all four streams and hands two of them over, with their progress, once the helper is running; from then on the
 * helper copies half of every block. The caller never waits for a helper that has not started. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define STRIPE 64
#define STRIPES_PER_BLOCK 16
#define BLOCK (STRIPE * STRIPES_PER_BLOCK)
#define STREAMS 4
#define AHEAD 1024 /* prefetch distance in bytes */

static const uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
static const uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u,
                      P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u;

/* The algorithm's constant bytes. */
static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
#define LAST_SECRET (SECRET + sizeof SECRET - STRIPE)

typedef struct {
    uint64_t sum[8];
    const uint8_t *from;
    uint8_t *to;
    uint64_t bytes;
} Stream;

static uint64_t word(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static void add_stripe(uint64_t sum[8], const uint8_t *data, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        const uint64_t x = word(data + 8 * i), key = x ^ word(secret + 8 * i);
        sum[i ^ 1] += x;
        sum[i] += (key & 0xffffffff) * (key >> 32);
    }
}

static void scramble(uint64_t sum[8]) {
    for (int i = 0; i < 8; i++) sum[i] = ((sum[i] ^ sum[i] >> 47) ^ word(LAST_SECRET + 8 * i)) * P32_1;
}

static uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t finish(const uint64_t sum[8], uint64_t bytes) {
    uint64_t h = bytes * P64_1;
    for (int i = 0; i < 4; i++)
        h += fold(sum[2 * i] ^ word(SECRET + 11 + 16 * i), sum[2 * i + 1] ^ word(SECRET + 19 + 16 * i));
    h = (h ^ h >> 37) * 0x165667919E3779F9u;
    return h ^ h >> 32;
}

/* Copies `count` stripes of each of `n` streams, from byte `at` on, the start of an XXH3 block. */
typedef void (*Together)(Stream *streams, int n, size_t at, size_t count);

static void together_plain(Stream *streams, int n, size_t at, size_t count) {
    for (size_t i = 0; i < count; i++, at += STRIPE)
        for (int k = 0; k < n; k++) {
            uint8_t data[STRIPE];
            memcpy(data, streams[k].from + at, STRIPE);
            memcpy(streams[k].to + at, data, STRIPE);
            add_stripe(streams[k].sum, data, SECRET + 8 * (i % STRIPES_PER_BLOCK));
            if (i % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1) scramble(streams[k].sum);
        }
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
AVX2 INLINE void some_avx2(Stream *streams, const int n, size_t at, size_t count, const int aligned) {
    __m256i sum[STREAMS][2];
    const uint8_t *places[STREAMS]; /* local copies stay in registers: a store might alias `streams` */
    uint8_t *targets[STREAMS];
    for (int k = 0; k < n; k++) {
        memcpy(sum[k], streams[k].sum, sizeof sum[k]);
        places[k] = streams[k].from + at;
        targets[k] = streams[k].to + at;
    }
    for (size_t i = 0; i < count; i++) {
        const int last = i % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1;
        for (int k = 0; k < n; k++) {
            const uint8_t *from = places[k], *secret = SECRET + 8 * (i % STRIPES_PER_BLOCK);
            uint8_t *to = targets[k];
            places[k] += STRIPE;
            targets[k] += STRIPE;
            _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0);
            for (int half = 0; half < 2; half++) {
                const __m256i x = _mm256_loadu_si256((const __m256i *)(from + 32 * half));
                if (aligned) _mm256_stream_si256((__m256i *)(to + 32 * half), x);
                else _mm256_storeu_si256((__m256i *)(to + 32 * half), x);
                const __m256i key = _mm256_xor_si256(x, _mm256_loadu_si256((const __m256i *)(secret + 32 * half)));
                const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
                const __m256i crossed = _mm256_shuffle_epi32(x, 0x4e);
                sum[k][half] = _mm256_add_epi64(sum[k][half], _mm256_add_epi64(product, crossed));
            }
            if (!last) continue;
            memcpy(streams[k].sum, sum[k], sizeof sum[k]);
            scramble(streams[k].sum);
            memcpy(sum[k], streams[k].sum, sizeof sum[k]);
        }
    }
    for (int k = 0; k < n; k++) memcpy(streams[k].sum, sum[k], sizeof sum[k]);
    _mm_sfence();
}

#define AVX512 __attribute__((target("avx512f")))
AVX512 INLINE void some_avx512(Stream *streams, const int n, size_t at, size_t count, const int aligned) {
    __m512i sum[STREAMS];
    const uint8_t *from[STREAMS]; /* local copies stay in registers: a store might alias `streams` */
    uint8_t *to[STREAMS];
    for (int k = 0; k < n; k++) {
        sum[k] = _mm512_loadu_si512(streams[k].sum);
        from[k] = streams[k].from + at;
        to[k] = streams[k].to + at;
    }
    for (size_t i = 0; i < count; i++) {
        const int last = i % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1;
        const __m512i secret = _mm512_loadu_si512(SECRET + 8 * (i % STRIPES_PER_BLOCK));
        for (int k = 0; k < n; k++) {
            _mm_prefetch((const char *)from[k] + AHEAD, _MM_HINT_T0);
            const __m512i x = _mm512_loadu_si512(from[k]);
            if (aligned) _mm512_stream_si512((__m512i *)to[k], x);
            else _mm512_storeu_si512(to[k], x);
            from[k] += STRIPE;
            to[k] += STRIPE;
            const __m512i key = _mm512_xor_si512(x, secret);
            const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
            const __m512i crossed = _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0x4e);
            sum[k] = _mm512_add_epi64(sum[k], _mm512_add_epi64(product, crossed));
            if (!last) continue;
            _mm512_storeu_si512(streams[k].sum, sum[k]);
            scramble(streams[k].sum);
            sum[k] = _mm512_loadu_si512(streams[k].sum);
        }
    }
    for (int k = 0; k < n; k++) _mm512_storeu_si512(streams[k].sum, sum[k]);
    _mm_sfence();
}

/* The number of streams is a constant, so that their sums stay in registers. */
#define TOGETHER(target, name, some, width)                                                                            \
    target static void name(Stream *streams, int n, size_t at, size_t count) {                                         \
        int aligned = 1;                                                                                               \
        for (int k = 0; k < n; k++) aligned &= ((uintptr_t)(streams[k].to + at) & (width - 1)) == 0;                   \
        if (n == 4 && aligned) some(streams, 4, at, count, 1);                                                         \
        else if (n == 2 && aligned) some(streams, 2, at, count, 1);                                                    \
        else                                                                                                           \
            for (int k = 0; k < n; k++) {                                                                              \
                if (aligned) some(streams + k, 1, at, count, 1);                                                       \
                else some(streams + k, 1, at, count, 0);                                                               \
            }                                                                                                          \
    }
TOGETHER(AVX2, together_avx2, some_avx2, 32)
TOGETHER(AVX512, together_avx512, some_avx512, 64)
#endif

static Together best(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return together_avx512;
    if (__builtin_cpu_supports("avx2")) return together_avx2;
#endif
    return together_plain;
}

/* Starts streams of more than 240 bytes each (XXH3 treats shorter ones differently). Returns the number of XXH3
 * blocks that all streams have, which can be copied side by side. */
static size_t begin(Stream *streams, int n) {
    static const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    size_t common = SIZE_MAX;
    for (int k = 0; k < n; k++) {
        memcpy(streams[k].sum, start, sizeof start);
        /* A block is scrambled only once something follows it. */
        const size_t blocks = (size_t)(streams[k].bytes - 1) / BLOCK;
        common = blocks < common ? blocks : common;
    }
    return common;
}

/* Copies the rest of streams of which `done` blocks were copied and `common` can be side by side. */
static void copy_rest(Together together, Stream *streams, int n, size_t done, size_t common, uint64_t *hashes) {
    together(streams, n, done * BLOCK, (common - done) * STRIPES_PER_BLOCK);
    for (int k = 0; k < n; k++) {
        Stream *s = &streams[k];
        const size_t count = (size_t)(s->bytes - 1) / STRIPE;
        together(s, 1, common * BLOCK, count - common * STRIPES_PER_BLOCK);
        memcpy(s->to + count * STRIPE, s->from + count * STRIPE, (size_t)s->bytes - count * STRIPE);
        add_stripe(s->sum, s->to + s->bytes - STRIPE, LAST_SECRET - 7);
        hashes[k] = finish(s->sum, s->bytes);
    }
}

/* ---- two cores -------------------------------------------------------------------------------------------------- */

typedef struct {
    Stream *streams; /* half of them */
    size_t done, common;
    uint64_t *hashes;
} Offer;

#define HALF (STREAMS / 2)
#define STEP 16 /* blocks of each stream between two checks for the helper: about 5 microseconds */
#define LOOK_NS 300000
#define PATIENCE 4000 /* polls of the helper's result before yielding the core */

static struct {
    _Atomic(Offer *) offered; /* taken by exchanging it for NULL */
    _Atomic int done;
    _Atomic int64_t look_until_ns;
    _Atomic int asleep, looking, busy;
    sem_t wake;
    pthread_once_t once;
    pthread_t thread;
    int is_there;
#if defined(__linux__)
    cpu_set_t cores; /* allowed cores, and the one to avoid */
    _Atomic int avoided;
#endif
} helper = {.once = PTHREAD_ONCE_INIT};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

static void *help(void *nothing) {
    for (;;) {
        atomic_store(&helper.asleep, 1);
        while (atomic_load(&helper.asleep)) sem_wait(&helper.wake); /* signals may interrupt the wait */
        atomic_store(&helper.looking, 1);
        while (atomic_load(&helper.look_until_ns) >= now_ns()) {
            Offer *offer = atomic_load(&helper.offered) ? atomic_exchange(&helper.offered, NULL) : NULL;
            if (!offer) {
                relax();
                continue;
            }
            copy_rest(best(), offer->streams, HALF, offer->done, offer->common, offer->hashes);
            atomic_store(&helper.look_until_ns, now_ns() + LOOK_NS);
            atomic_store(&helper.done, 1);
        }
        atomic_store(&helper.looking, 0);
    }
    return nothing;
}

static void start_helper(void) {
    pthread_attr_t attributes;
#if defined(__linux__)
    helper.avoided = -1;
    if (sched_getaffinity(0, sizeof helper.cores, &helper.cores) || CPU_COUNT(&helper.cores) < 2) return;
#endif
    if (sem_init(&helper.wake, 0, 0) || pthread_attr_init(&attributes)) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    helper.is_there = !pthread_create(&helper.thread, &attributes, help, NULL);
    pthread_attr_destroy(&attributes);
}

/* The scheduler may put the woken helper on the waker's core, where one of them waits for the other. */
static void keep_away(void) {
#if defined(__linux__)
    const int here = sched_getcpu();
    if (here < 0 || here == atomic_exchange(&helper.avoided, here)) return;
    cpu_set_t others = helper.cores;
    CPU_CLR(here, &others);
    if (CPU_COUNT(&others)) pthread_setaffinity_np(helper.thread, sizeof others, &others);
#endif
}

/* Wakes the helper: copying is about to begin. */
API void tripool_copy_soon(void) {
    pthread_once(&helper.once, start_helper);
    if (!helper.is_there) return;
    atomic_store(&helper.look_until_ns, now_ns() + LOOK_NS);
    keep_away();
    if (atomic_exchange(&helper.asleep, 0)) sem_post(&helper.wake);
}

static void divide(const uint8_t *from, uint8_t *to, uint64_t quarter, uint64_t bytes, Stream streams[STREAMS]) {
    for (uint64_t k = 0; k < STREAMS; k++) {
        const uint64_t at = k * quarter;
        streams[k] = (Stream){.from = from + at, .to = to + at, .bytes = k < STREAMS - 1 ? quarter : bytes - at};
    }
}

static void copy_alone(Together together, Stream *streams, uint64_t *hashes) {
    const size_t common = begin(streams, STREAMS);
    copy_rest(together, streams, STREAMS, 0, common, hashes);
}

static void copy_helped(Together together, Stream *streams, uint64_t *hashes) {
    const size_t common = begin(streams, STREAMS);
    size_t done = 0;
    while (done < common && !atomic_load(&helper.looking)) {
        const size_t step = common - done < STEP ? common - done : STEP;
        together(streams, STREAMS, done * BLOCK, step * STRIPES_PER_BLOCK);
        done += step;
    }
    if (done == common) {
        copy_rest(together, streams, STREAMS, done, common, hashes);
        return;
    }
    Offer offer = {streams + HALF, done, common, hashes + HALF};
    atomic_store(&helper.done, 0);
    atomic_store(&helper.offered, &offer);
    copy_rest(together, streams, HALF, done, common, hashes);
    if (atomic_exchange(&helper.offered, NULL)) { /* the helper fell asleep before it took the offer */
        copy_rest(together, offer.streams, HALF, done, common, offer.hashes);
        return;
    }
    for (int looks = 0; !atomic_load(&helper.done); looks++) {
        if (looks < PATIENCE) relax();
        else sched_yield();
    }
}

/* Copies a block as four pieces of `quarter` bytes, the last one with the remainder; each of more than 240 bytes. */
static void copy_block(Together together, int helped, const uint8_t *from, uint8_t *to, uint64_t quarter, uint64_t bytes,
                       uint64_t hashes[STREAMS]) {
    Stream streams[STREAMS];
    divide(from, to, quarter, bytes, streams);
    if (helped && (atomic_load(&helper.looking) || atomic_load(&helper.look_until_ns) >= now_ns()))
        copy_helped(together, streams, hashes);
    else copy_alone(together, streams, hashes);
}

/* Copies a block and returns the four hashes. */
API void tripool_copy(const uint8_t *from, uint8_t *to, uint64_t quarter, uint64_t bytes, uint64_t *hashes) {
    const int ours = !atomic_exchange(&helper.busy, 1);
    copy_block(best(), ours, from, to, quarter, bytes, hashes);
    if (ours) atomic_store(&helper.busy, 0);
}

/* For tests: 0 plain, 1 AVX2, 2 AVX-512; returns 0 if this CPU does not support it. */
API int tripool_copy_by(int which, const uint8_t *from, uint8_t *to, uint64_t quarter, uint64_t bytes,
                        uint64_t hashes[STREAMS]) {
    Together together = together_plain;
#if defined(__x86_64__)
    if (which == 1 && __builtin_cpu_supports("avx2")) together = together_avx2;
    else if (which == 2 && __builtin_cpu_supports("avx512f")) together = together_avx512;
    else
#endif
    if (which) return 0;
    Stream streams[STREAMS];
    divide(from, to, quarter, bytes, streams);
    copy_alone(together, streams, hashes);
    return 1;
}

#include "shared_reads.h"
