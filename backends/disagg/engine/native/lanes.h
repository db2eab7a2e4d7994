/* Vectors as wide as the processor's, with what the kernels need of them. GCC and clang. */
#ifndef SPLITROUTE_LANES_H
#define SPLITROUTE_LANES_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define TILE 12 /* rows of x a microkernel takes: TILE x 2 sums fill the registers */
#else
#define LANES 8
#define TILE 6
#endif
#define PANEL (2 * LANES) /* outputs a microkernel computes */
#define PANELS(outs) (((outs) + PANEL - 1) / PANEL)

typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));

#define INLINE static inline __attribute__((always_inline))

INLINE lanes load(const float *p) {
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float *p, lanes v) { memcpy(p, &v, sizeof v); }
INLINE words load_words(const void *p) {
    words v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE lanes all(float f) { return f - (lanes){0}; }
INLINE lanes choose(ints where, lanes yes, lanes no) { return (lanes)((where & (ints)yes) | (~where & (ints)no)); }
INLINE lanes at_most(lanes v, lanes top) { return choose(v < top, v, top); }
INLINE lanes at_least(lanes v, lanes low) { return choose(v > low, v, low); }

/* bfloat16 is the upper half of a float; rounding is to nearest even. */
INLINE float bf16_to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
INLINE uint16_t float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits += 0x7fff + ((bits >> 16) & 1);
    return (uint16_t)(bits >> 16);
}
INLINE lanes load_bf16(const uint16_t *p) {
    halves half;
    memcpy(&half, p, sizeof half);
    return (lanes)(__builtin_convertvector(half, words) << 16);
}
INLINE void store_bf16(uint16_t *p, lanes v) {
    words bits = (words)v;
    halves half = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, halves);
    memcpy(p, &half, sizeof half);
}
INLINE lanes load_f32(const float *p) { return load(p); }
INLINE void store_f32(float *p, lanes v) { store(p, v); }
INLINE float same(float f) { return f; }

/* The sum of the lanes of each of v[0 .. LANES): lane t of the result is v[t]'s. Always in the same order. */
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif
INLINE lanes sums(lanes v[LANES]) {
#pragma GCC unroll 8
    for (int count = LANES; count > 1; count /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < count / 2; i++) {
            lanes a = v[2 * i], b = v[2 * i + 1];
#if LANES == 16
            v[i] = PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
                   PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
            v[i] = PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
        }
    return v[0];
}
INLINE float sum(lanes v) {
    float s[LANES];
    store(s, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

/* e^x to about 2 ulp: 2^n times a polynomial (Cephes' expf); what would overflow or vanish is clamped. */
INLINE lanes exp_lanes(lanes x) {
    x = at_least(at_most(x, all(88.0f)), all(-87.0f));
    const lanes magic = all(12582912.0f); /* adding 1.5 * 2^23 rounds to a whole number */
    lanes t = x * 1.44269504f + magic;
    ints n = (ints)t - (ints)magic;
    lanes whole = t - magic;
    x = x - whole * 0.693359375f;
    x = x + whole * 2.12194440e-4f;
    lanes p = x * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    p = p * x * x + x + 1.0f;
    return p * (lanes)((n + 127) << 23);
}

/* s[begin .. end) of `count` scores, a multiple of LANES, become e^(scale * (s - their greatest)) and the others 0.
 * Returns 1 / their sum, by which the softmax (or what is computed with it) is to be multiplied. */
static inline float exponentials(float *s, int begin, int end, int count, float scale) {
    lanes tops = all(-INFINITY), totals = {0};
    float top = -INFINITY;
    for (int t = 0; t < begin; t++) s[t] = -INFINITY;
    for (int t = end; t < count; t++) s[t] = -INFINITY;
    for (int t = 0; t < count; t += LANES) tops = at_least(load(s + t), tops);
    for (int i = 0; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    for (int t = 0; t < count; t += LANES) {
        lanes v = load(s + t);
        v = choose(v > all(-INFINITY), exp_lanes((v - top) * scale), (lanes){0});
        totals += v;
        store(s + t, v);
    }
    return 1.f / sum(totals);
}
#endif
