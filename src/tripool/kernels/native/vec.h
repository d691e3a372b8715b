/* Sixteen floats at a time, written with the compiler's vector extension: one source for every CPU.
 *
 * A vector wider than the machine's is split by the compiler, so the order of additions, and with it every bit of a
 * result, is the same with AVX2 and with AVX-512. Nothing here may depend on how many rows are computed together. */
#ifndef TRIPOOL_VEC_H
#define TRIPOOL_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef int8_t vb __attribute__((vector_size(16)));
typedef float vf_any __attribute__((vector_size(64), aligned(4)));
typedef int8_t vb_any __attribute__((vector_size(16), aligned(1)));

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf v) { *(vf_any *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_int(int32_t x) { return x - (vi){0}; }

/* The first n lanes, zero in the others. */
INLINE vf load_part(const float *p, int n) {
    vf v = {0};
    memcpy(&v, p, sizeof(float) * (size_t)n);
    return v;
}
INLINE void store_part(float *p, vf v, int n) { memcpy(p, &v, sizeof(float) * (size_t)n); }
INLINE vf load_upto(const float *p, int left) { return left >= LANES ? load(p) : load_part(p, left); }
INLINE void store_upto(float *p, vf v, int left) {
    if (left >= LANES) store(p, v);
    else store_part(p, v, left);
}

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf max_of(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf abs_of(vf a) { return (vf)((vi)a & splat_int(0x7fffffff)); }

/* Always the same tree. */
INLINE float sum_of(vf v) {
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return v[0];
}

INLINE int32_t total_of(vi v) {
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

/* The sums of sixteen vectors at once; each is added up in the order of `sum_of`. */
#define FOLD(a, b, low, high) (__builtin_shufflevector(a, b, low) + __builtin_shufflevector(a, b, high))
#define FOLD8(a, b) FOLD(a, b, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), \
                         LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD4(a, b) FOLD(a, b, LIST(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27), \
                         LIST(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define FOLD2(a, b) FOLD(a, b, LIST(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29), \
                         LIST(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
#define FOLD1(a, b) FOLD(a, b, LIST(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), \
                         LIST(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#define LIST(...) __VA_ARGS__
INLINE vf sums_of(const vf v[16]) {
    vf a[8], b[4];
    UNROLL for (int i = 0; i < 8; i++) a[i] = FOLD8(v[2 * i], v[2 * i + 1]);
    UNROLL for (int i = 0; i < 4; i++) b[i] = FOLD4(a[2 * i], a[2 * i + 1]);
    const vf low = FOLD2(b[0], b[1]), high = FOLD2(b[2], b[3]);
    return FOLD1(low, high);
}
INLINE float largest_of(vf v) {
    v = max_of(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = max_of(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = max_of(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = max_of(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}

/* Rows become columns: halves, quarters, eighths and single lanes change places between rows 8, 4, 2 and 1 apart. */
#define SWAP(step, low, high)                                                                                          \
    UNROLL for (int i = 0; i < 16; i++) if (!(i & (step))) {                                                           \
        const vf a = v[i], b = v[i + (step)];                                                                          \
        v[i] = __builtin_shufflevector(a, b, low);                                                                     \
        v[i + (step)] = __builtin_shufflevector(a, b, high);                                                           \
    }
INLINE void transpose(vf v[16]) {
    SWAP(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
         LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    SWAP(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
         LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    SWAP(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
         LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    SWAP(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
         LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
}

/* To the nearest whole number, for |x| < 2^22: adding 1.5 * 2^23 pushes the fraction out of the mantissa. */
INLINE vi nearest(vf x) { return (vi)(x + splat(12582912.0f)) - splat_int(0x4b400000); }

/* e^x; exactly 1 at 0 and exactly 0 below -87 (where masked scores are), so that masked keys have no effect. */
INLINE vf exp_of(vf x) {
    const vi gone = x < splat(-87.0f);
    x = choose(x > splat(88.0f), splat(88.0f), choose(gone, splat(0.0f), x));
    const vi n = nearest(x * splat(1.44269504f));
    const vf whole = __builtin_convertvector(n, vf);
    vf r = x - whole * splat(0.693359375f);
    r = r - whole * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = (p * r) * r + r + splat(1.0f);
    const vf power = (vf)((n + splat_int(127)) << 23);
    return (vf)((vi)(p * power) & ~gone);
}

INLINE vf silu(vf x) { return x / (splat(1.0f) + exp_of(-x)); }

#endif
