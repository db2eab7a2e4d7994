/* out = x · wᵀ for few rows of x, on CPUs: the linear layers of a decode step.
 *
 * Such a product is bound by reading w. General matrix libraries pack w for it and lose: on a Zen 3 core MKL
 * reads float32 weights at 3.6 GB/s with 4 rows of x, this at the memory's pace. A result depends on its row of
 * x and its row of w alone and is summed in one fixed order, so it is the same bit for bit whatever else is in
 * the batch and however many threads there are.
 *
 * Rows of x go in fours (the last four filled with zeros) and rows of w in threes: 12 sums in registers.
 * `in` must be a multiple of 8.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float lanes __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(32)));

enum { X_ROWS = 4, W_ROWS = 3, LANES = 8 };

static inline lanes load(const float *p) {
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline float sum(lanes v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
static void widen(float *to, const uint16_t *from, int count) { /* bf16 is the upper half of a float */
    for (int j = 0; j < count; j += LANES) {
        halves half;
        memcpy(&half, from + j, sizeof half);
        words bits = __builtin_convertvector(half, words) << 16;
        memcpy(to + j, &bits, sizeof bits);
    }
}
static inline uint16_t narrow(float f) { /* round to nearest even */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits += 0x7fff + ((bits >> 16) & 1);
    return (uint16_t)(bits >> 16);
}

/* 4 rows of x against `count` (1 to 3) rows of w; out[4][3]. */
static inline void block(const float *x, const float *w, int in, int count, float out[X_ROWS][W_ROWS]) {
    lanes acc[X_ROWS][W_ROWS] = {{{0}}};
    if (count == W_ROWS) {
        for (int j = 0; j < in; j += LANES) {
            lanes w0 = load(w + j), w1 = load(w + in + j), w2 = load(w + 2 * (long)in + j);
            for (int r = 0; r < X_ROWS; r++) {
                lanes xr = load(x + (long)r * in + j);
                acc[r][0] += xr * w0;
                acc[r][1] += xr * w1;
                acc[r][2] += xr * w2;
            }
        }
    } else {
        for (int o = 0; o < count; o++)
            for (int j = 0; j < in; j += LANES) {
                lanes w0 = load(w + (long)o * in + j);
                for (int r = 0; r < X_ROWS; r++) acc[r][o] += load(x + (long)r * in + j) * w0;
            }
    }
    for (int r = 0; r < X_ROWS; r++)
        for (int o = 0; o < count; o++) out[r][o] = sum(acc[r][o]);
}

#define DEFINE_SKINNY_LINEAR(NAME, T, FILL, WEIGHTS, STORE)                                                    \
    int NAME(const T *x, const T *w, T *out, int rows, int in, int outs, int threads) {                        \
        int padded = (rows + X_ROWS - 1) / X_ROWS * X_ROWS, failed = 0;                                        \
        int groups = (outs + W_ROWS - 1) / W_ROWS;                                                             \
        float *wide = calloc((long)padded * in, sizeof(float));                                                \
        if (!wide) return 1;                                                                                   \
        FILL(wide, x, rows *in);                                                                               \
        _Pragma("omp parallel num_threads(threads)") {                                                         \
            float *scratch = malloc(sizeof(float) * W_ROWS * in);                                              \
            _Pragma("omp for schedule(static)") for (int g = 0; g < groups; g++) {                             \
                int first = g * W_ROWS, count = outs - first < W_ROWS ? outs - first : W_ROWS;                 \
                float part[X_ROWS][W_ROWS];                                                                    \
                if (!scratch) {                                                                                \
                    failed = 1;                                                                                \
                    continue;                                                                                  \
                }                                                                                              \
                const float *weights = WEIGHTS(scratch, w + (long)first * in, count * in);                     \
                for (int r = 0; r < padded; r += X_ROWS) {                                                     \
                    block(wide + (long)r * in, weights, in, count, part);                                      \
                    for (int i = 0; i < X_ROWS && r + i < rows; i++)                                           \
                        for (int o = 0; o < count; o++) out[(long)(r + i) * outs + first + o] = STORE(part[i][o]); \
                }                                                                                              \
            }                                                                                                  \
            free(scratch);                                                                                     \
        }                                                                                                      \
        free(wide);                                                                                            \
        return failed;                                                                                         \
    }

static inline const float *in_place(float *scratch, const float *w, int count) {
    (void)scratch, (void)count;
    return w;
}
static inline const float *widened(float *scratch, const uint16_t *w, int count) {
    widen(scratch, w, count);
    return scratch;
}
static inline void copy(float *to, const float *from, int count) { memcpy(to, from, sizeof(float) * count); }
static inline float same(float x) { return x; }

DEFINE_SKINNY_LINEAR(skinny_linear_f32, float, copy, in_place, same)
DEFINE_SKINNY_LINEAR(skinny_linear_bf16, uint16_t, widen, widened, narrow)
