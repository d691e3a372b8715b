/* Samples from the softmax of a row: the argmax of logit / temperature + Gumbel noise.
 *
 * Noise is a function of the key and the token alone, equal to the bit on every CPU and in `engine/noise.py`, which
 * defines it: integers, and floats without fused multiply-add, which not every CPU has. */
#ifndef TRIPOOL_DRAW_H
#define TRIPOOL_DRAW_H

#include "vec.h"

typedef uint64_t vq __attribute__((vector_size(128)));

/* Keeps a product from being fused with an addition; in memory where a vector has no register of its own. */
#if defined(__AVX512F__)
#define ROUNDED(v) __asm__("" : "+v"(v))
#else
#define ROUNDED(v) __asm__("" : "+m"(v))
#endif

INLINE vq mix(vq x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

INLINE vf times(vf a, vf b) {
    vf product = a * b;
    ROUNDED(product);
    return product;
}

/* Natural logarithm of normal numbers: exponent, and a polynomial around 1 (Cephes' coefficients). */
INLINE vf log_of(vf x) {
    vi exponent = ((vi)x >> 23) - splat_int(126);
    vf m = (vf)(((vi)x & splat_int(0x7fffff)) | splat_int(0x3f000000)); /* in [0.5, 1) */
    const vi small = m < splat(0.707106781186547524f);
    exponent += small; /* all ones is -1 */
    m = choose(small, m + m, m) - splat(1.0f);
    static const float terms[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                                  -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    vf p = splat(7.0376836292e-2f);
    UNROLL for (int i = 0; i < 8; i++) p = times(p, m) + splat(terms[i]);
    const vf e = __builtin_convertvector(exponent, vf), square = times(m, m);
    vf y = times(times(p, m), square);
    y = y + times(e, splat(-2.12194440e-4f));
    y = y - times(square, splat(0.5f));
    return (m + y) + times(e, splat(0.693359375f));
}

/* 23 random bits for each token. */
INLINE vi bits_of(vq tokens, uint64_t key) {
    return __builtin_convertvector(mix(mix((tokens + 1) * 0x9E3779B97F4A7C15u) + key) >> 41, vi);
}

INLINE vf gumbel_of(vi bits) {
    const vf uniform = (__builtin_convertvector(bits, vf) + splat(0.5f)) * splat(0x1p-23f);
    return -log_of(-log_of(uniform));
}

/* Upper bound of `gumbel_of`: -log(-log(1 - w)) < -log(w), and w is at least the power of two in its exponent. */
INLINE vf noise_below(vi bits) {
    const vf w = (__builtin_convertvector(splat_int(0x7fffff) - bits, vf) + splat(0.5f)) * splat(0x1p-23f);
    return __builtin_convertvector(splat_int(127) - ((vi)w >> 23), vf) * splat(0.6932f); /* a little over log(2) */
}
#define MOST_NOISE 16.7f /* of any token: w is 2^-24 or more */

/* Index of the first of the largest values, given the first largest of each lane. */
INLINE int first_of_largest(vf best, vi best_at) {
    int top = 0;
    for (int lane = 1; lane < LANES; lane++)
        if (best[lane] > best[top] || (best[lane] == best[top] && best_at[lane] < best_at[top])) top = lane;
    return best_at[top];
}

#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}

static int largest(const float *values, int count) {
    vf best = splat(-INFINITY);
    vi best_at = LANE_NUMBERS, at = LANE_NUMBERS;
    for (int i = 0; i < count; i += LANES, at += LANES) {
        const vf value = load_upto(values + i, count - i);
        const vi better = (value > best) & (at < splat_int(count));
        best = choose(better, value, best);
        best_at = (at & better) | (best_at & ~better);
    }
    return first_of_largest(best, best_at);
}

/* The likeliest token with its noise gives a threshold that most others cannot reach, by the largest possible noise
 * or by a bound of their own. Only the remaining few need exact noise, whose logarithms are most of the work. Sums
 * are rounded monotonically: a token below the threshold with more noise is below it with its own. */
static int draw(const float *logits, int count, float temperature, uint64_t key) {
    const int likeliest = largest(logits, count);
    const vf divisor = splat(temperature);
    const vf threshold = splat(logits[likeliest]) / divisor + gumbel_of(bits_of((uint64_t)likeliest - (vq){0}, key));
    vf best = splat(-INFINITY);
    vi best_at = {0}, at = LANE_NUMBERS;
    vq tokens = LANE_NUMBERS;
    for (int i = 0; i < count; i += LANES, at += LANES, tokens += LANES) {
        vf value = load_upto(logits + i, count - i) / divisor;
        if (!total_of(value + splat(MOST_NOISE) >= threshold)) continue;
        const vi bits = bits_of(tokens, key);
        if (!total_of(value + noise_below(bits) >= threshold)) continue;
        value += gumbel_of(bits);
        const vi better = (value > best) & (at < splat_int(count));
        best = choose(better, value, best);
        best_at = (at & better) | (best_at & ~better);
    }
    return first_of_largest(best, best_at);
}

#endif
