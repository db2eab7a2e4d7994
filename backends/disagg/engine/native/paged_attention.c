/* Decode attention over a paged KV cache, one query token per row, for CPUs.
 *
 * A row's result is computed in one fixed order that depends on that row alone, so it is the same bit for bit
 * whatever else is in the batch. Compiled at first use with -O3 -march=native; the loops over head_dim are
 * written to be vectorised. `native/__init__.py` builds and binds it; `attention.py` has the torch version that
 * the tests hold it against.
 *
 * kv points at layer L of block 0: K of [kv_heads][block_size][head_dim], and V `v_offset` elements further on.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static inline float bf16_to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline uint16_t float_to_bf16(float f) { /* round to nearest even */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits += 0x7fff + ((bits >> 16) & 1);
    return (uint16_t)(bits >> 16);
}
static inline float same(float x) { return x; }

#define DEFINE_PAGED_DECODE(NAME, T, LOAD, STORE)                                                              \
    static void NAME##_one(const T *q, const T *kv, long block_stride, long v_offset, const int32_t *table,   \
                           int length, T *out, int group, int head_dim, int block_size, float scale,           \
                           int window, float *scratch) {                                                       \
        int begin = window > 0 && length > window ? length - window : 0;                                       \
        int span = length - begin; /* tokens that are attended to */                                           \
        float *query = scratch, *acc = query + group * head_dim, *row = acc + group * head_dim;               \
        float *scores = row + head_dim; /* [group][span] */                                                    \
        for (int i = 0; i < group * head_dim; i++) query[i] = LOAD(q[i]) * scale, acc[i] = 0.f;               \
        for (int start = begin / block_size * block_size; start < length; start += block_size) {               \
            const T *k = kv + (long)table[start / block_size] * block_stride;                                  \
            int count = length - start < block_size ? length - start : block_size;                             \
            for (int t = start < begin ? begin - start : 0; t < count; t++) {                                  \
                for (int j = 0; j < head_dim; j++) row[j] = LOAD(k[t * head_dim + j]);                         \
                for (int g = 0; g < group; g++) {                                                              \
                    float sum = 0.f;                                                                           \
                    for (int j = 0; j < head_dim; j++) sum += query[g * head_dim + j] * row[j];                \
                    scores[(long)g * span + start - begin + t] = sum;                                          \
                }                                                                                              \
            }                                                                                                  \
        }                                                                                                      \
        for (int g = 0; g < group; g++) {                                                                      \
            float *s = scores + (long)g * span, top = s[0], total = 0.f;                                       \
            for (int t = 1; t < span; t++) top = s[t] > top ? s[t] : top;                                    \
            for (int t = 0; t < span; t++) s[t] = expf(s[t] - top);                                          \
            for (int t = 0; t < span; t++) total += s[t];                                                    \
            float inverse = 1.f / total;                                                                       \
            for (int t = 0; t < span; t++) s[t] *= inverse;                                                  \
        }                                                                                                      \
        for (int start = begin / block_size * block_size; start < length; start += block_size) {               \
            const T *v = kv + (long)table[start / block_size] * block_stride + v_offset;                       \
            int count = length - start < block_size ? length - start : block_size;                             \
            for (int t = start < begin ? begin - start : 0; t < count; t++) {                                  \
                for (int j = 0; j < head_dim; j++) row[j] = LOAD(v[t * head_dim + j]);                         \
                for (int g = 0; g < group; g++) {                                                              \
                    float p = scores[(long)g * span + start - begin + t];                                           \
                    for (int j = 0; j < head_dim; j++) acc[g * head_dim + j] += p * row[j];                    \
                }                                                                                              \
            }                                                                                                  \
        }                                                                                                      \
        for (int i = 0; i < group * head_dim; i++) out[i] = STORE(acc[i]);                                     \
    }                                                                                                          \
    int NAME(const T *q, const T *kv, long block_stride, long v_offset, const int32_t *tables,                \
             int table_width, const int32_t *lengths, T *out, int rows, int kv_heads, int group, int head_dim, \
             int block_size, float scale, int window, int threads) {                                           \
        int longest = 0, failed = 0;                                                                           \
        for (int r = 0; r < rows; r++) longest = lengths[r] > longest ? lengths[r] : longest;                  \
        long floats = (long)group * longest + (2L * group + 1) * head_dim;                                     \
        _Pragma("omp parallel num_threads(threads)") {                                                         \
            float *scratch = malloc(floats * sizeof(float));                                                   \
            _Pragma("omp for schedule(dynamic)") for (int i = 0; i < rows * kv_heads; i++) {                   \
                int r = i / kv_heads, h = i % kv_heads;                                                        \
                long at = ((long)r * kv_heads + h) * group * head_dim;                                         \
                if (!scratch) {                                                                                \
                    failed = 1;                                                                                \
                    continue;                                                                                  \
                }                                                                                              \
                NAME##_one(q + at, kv + (long)h * block_size * head_dim, block_stride, v_offset,               \
                           tables + (long)r * table_width, lengths[r], out + at, group, head_dim, block_size,  \
                           scale, window, scratch);                                                                  \
            }                                                                                                  \
            free(scratch);                                                                                     \
        }                                                                                                      \
        return failed;                                                                                         \
    }

DEFINE_PAGED_DECODE(paged_decode_f32, float, same, same)
DEFINE_PAGED_DECODE(paged_decode_bf16, uint16_t, bf16_to_float, float_to_bf16)
