/* KV blocks made smaller for slow links. Compiled at first use; `codecs.py` builds and binds it.
 *
 * Blocks are [layer][K, V][kv_head][token][dim] in bfloat16 or float32. A "group" is one head's K or V in one layer: its
 * [token][dim] values are contiguous. A frame of blocks is encoded as a whole; each block of it decodes alone.
 *
 *   LOSSLESS  exponents by rANS (Duda 2013) with the frame's own frequencies; signs and mantissas as they are
 *   INT8      per token and head: 8 bits a value and one bfloat16 scale
 *   QUANTIZED less the channel's mean over the frame, in steps of `fineness` x the group's rms; the integers by rANS,
 *             each channel under the distribution of its own spread. CacheGen (Liu et al. 2024) without its deltas,
 *             which cost values more than they save. The first token, which attention looks at most, stays exact.
 *
 * Both sides must build the same tables: they are made with IEEE's basic operations only, from literals, and this file
 * is compiled without contraction. A decoder believes nothing: every length and index that it reads is checked.
 */
#include "../engine/native/lanes.h"
#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

enum { LOSSLESS = 1, INT8 = 2, QUANTIZED = 3 };

#define STATES 16 /* one for each lane of a vector */
#define PROB_BITS 12
#define PROBS (1 << PROB_BITS)
#define LOW (1u << 16)
#define SPREADS 29 /* 2^(k/4 - 3) steps, k = 0 ..: 0.125 to 16; wider ones send low bits as they are */
#define MOST_SHIFT 11
#define EDGE 63 /* integers beyond are escaped */
#define ESCAPE (2 * EDGE + 1)
#define SYMBOLS (2 * EDGE + 2)

/* g of p(q) ~ g^(q^2) whose rms is 2^(k/4 - 3). */
static const double SHAPE[SPREADS] = {
    0.00793649188, 0.0112981345, 0.016128755, 0.0231176213, 0.0333281514, 0.0484555125, 0.0713140293, 0.106765163,
    0.163125289, 0.251012747, 0.368618025, 0.493085566, 0.606530724, 0.702188501, 0.778800783, 0.837966886,
    0.882496903, 0.915405312, 0.939413063, 0.95676816, 0.969233234, 0.978145265, 0.984496437, 0.989012268,
    0.992217938, 0.994490959, 0.996101369, 0.997241675, 0.998048781};
#define TAIL_SHARE 0.02 /* of a wider distribution mixed in: real ones have heavier tails than a Gaussian's */

struct table {
    uint32_t code[256];   /* by symbol: frequency, and where it begins << 16 */
    uint32_t entry[PROBS]; /* by slot: symbol, frequency << 8, how far into the symbol's slots << 20 */
};

static void lay_out(struct table *table, const uint16_t *freq, int symbols) {
    int at = 0;
    for (int s = 0; s < symbols; s++) {
        table->code[s] = (uint32_t)at << 16 | freq[s];
        for (uint32_t k = 0; k < freq[s]; k++) table->entry[at++] = (uint32_t)s | (uint32_t)freq[s] << 8 | k << 20;
    }
}

/* Frequencies of `weight` that add up to PROBS, none of them all of it; what rounding leaves goes to the likeliest. */
static void to_frequencies(uint16_t *freq, const double *weight, int symbols) {
    double total = 0;
    int sum = 0, likeliest = 0;
    for (int s = 0; s < symbols; s++) total = total + weight[s];
    for (int s = 0; s < symbols; s++) {
        freq[s] = (uint16_t)(weight[s] / total * (PROBS - symbols));
        if (freq[s] == 0) freq[s] = 1;
        sum += freq[s];
        if (weight[s] > weight[likeliest]) likeliest = s;
    }
    freq[likeliest] = (uint16_t)(freq[likeliest] + PROBS - sum);
}

static struct table spread_table[SPREADS];

__attribute__((constructor)) static void make_tables(void) {
    for (int k = 0; k < SPREADS; k++) {
        double weight[SYMBOLS], narrow[EDGE + 1], wide[EDGE + 1], sums[2] = {0, 0};
        double g = SHAPE[k], odd = g, tail = k < 12 ? 0.3 : k < 20 ? 0.7 : 0.93, p = 1, w = 1;
        for (int q = 0; q <= EDGE; q++) {
            narrow[q] = p, wide[q] = w;
            sums[0] = sums[0] + (q ? 2 : 1) * p, sums[1] = sums[1] + (q ? 2 : 1) * w;
            p = p * odd, odd = odd * g * g, w = w * tail;
        }
        for (int q = 0; q <= EDGE; q++)
            weight[EDGE + q] = weight[EDGE - q] =
                (1 - TAIL_SHARE) * narrow[q] / sums[0] + TAIL_SHARE * wide[q] / sums[1];
        weight[ESCAPE] = 0.0005;
        uint16_t freq[SYMBOLS];
        to_frequencies(freq, weight, SYMBOLS);
        lay_out(&spread_table[k], freq, SYMBOLS);
    }
}

static void load_values(const void *from, int itemsize, long at, int n, float *to) {
    if (itemsize == 4) memcpy(to, (const float *)from + at, 4 * (size_t)n);
    else
        for (int i = 0; i < n; i++) to[i] = bf16_to_float(((const uint16_t *)from)[at + i]);
}
static void store_values(void *to, int itemsize, long at, int n, const float *from) {
    if (itemsize == 4) memcpy((float *)to + at, from, 4 * (size_t)n);
    else
        for (int i = 0; i < n; i++) ((uint16_t *)to)[at + i] = float_to_bf16(from[i]);
}

/* What is written grows upwards in `out`; what is read shrinks. Both stop at the end, and say so. */
struct out {
    uint8_t *at, *end;
    int full;
};
static void *put(struct out *out, const void *data, size_t size) {
    if (out->full || (size_t)(out->end - out->at) < size) {
        out->full = 1;
        return NULL;
    }
    if (data) memcpy(out->at, data, size);
    out->at += size;
    return out->at - size;
}
struct in {
    const uint8_t *at, *end;
};
static const uint8_t *take(struct in *in, size_t size) {
    if ((size_t)(in->end - in->at) < size) return NULL;
    in->at += size;
    return in->at - size;
}

/* --- rANS: symbol i belongs to state i % STATES, and is coded by the table at offset[i % period] of `tables` -------- */

#define TABLE_WORDS (sizeof(struct table) / 4)

/* A vector's worth of symbols, the last ones first: words go downwards from `at`, so that they are read upwards. */
static inline uint16_t *encode_step(uint32_t *x, const uint8_t *symbol, const uint32_t *tables, const int32_t *offset, uint16_t *at) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    __m512i state = _mm512_loadu_si512(x), s = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)symbol));
    __m512i code = _mm512_i32gather_epi32(_mm512_add_epi32(_mm512_loadu_si512(offset), s), tables, 4);
    __m512i f = _mm512_and_si512(code, _mm512_set1_epi32(0xffff)), start = _mm512_srli_epi32(code, 16);
    __mmask16 over = _mm512_cmpge_epu32_mask(state, _mm512_slli_epi32(f, 32 - PROB_BITS));
    at -= __builtin_popcount(over);
    /* The words of all lanes, those that go out first: AVX-512BW has no compress of 16 bits. */
    __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(over, state));
    _mm256_mask_storeu_epi16(at, (__mmask16)((1u << __builtin_popcount(over)) - 1), words);
    state = _mm512_mask_srli_epi32(state, over, state, 16);
    /* In doubles the quotient is exact: state < 2^32, f < 2^12. */
    __m512d a = _mm512_cvtepu32_pd(_mm512_castsi512_si256(state)), b = _mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(state, 1));
    __m512d fa = _mm512_cvtepu32_pd(_mm512_castsi512_si256(f)), fb = _mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(f, 1));
    __m256i qa = _mm512_cvttpd_epu32(_mm512_div_pd(a, fa)), qb = _mm512_cvttpd_epu32(_mm512_div_pd(b, fb));
    __m512i quotient = _mm512_inserti64x4(_mm512_castsi256_si512(qa), qb, 1);
    __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, f));
    state = _mm512_add_epi32(_mm512_slli_epi32(quotient, PROB_BITS), _mm512_add_epi32(rest, start));
    _mm512_storeu_si512(x, state);
#else
    for (int k = STATES - 1; k >= 0; k--) {
        uint32_t code = tables[offset[k] + symbol[k]], f = code & 0xffff, state = x[k];
        if (state >= f << (32 - PROB_BITS)) {
            *--at = (uint16_t)state;
            state >>= 16;
        }
        x[k] = ((state / f) << PROB_BITS) + state % f + (code >> 16);
    }
#endif
    return at;
}

struct rans {
    uint32_t x[STATES];
    const uint8_t *at, *end;
};
static int rans_begin(struct rans *rans, const uint8_t *data, size_t size) {
    if (!data || size < sizeof rans->x || size % 2) return -1;
    memcpy(rans->x, data, sizeof rans->x);
    rans->at = data + sizeof rans->x, rans->end = data + size;
    return 0;
}
/* Past the end nothing is read: what comes out then is garbage, which the frame's checksum would have told. */
static inline void decode_step(struct rans *rans, const uint32_t *tables, const int32_t *offset, uint8_t *symbol) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    if (rans->end - rans->at >= 2 * STATES) {
        __m512i x = _mm512_loadu_si512(rans->x), slot = _mm512_and_si512(x, _mm512_set1_epi32(PROBS - 1));
        __m512i entry = _mm512_i32gather_epi32(_mm512_add_epi32(_mm512_loadu_si512(offset), slot), tables + 256, 4);
        _mm_storeu_si128((__m128i *)symbol, _mm512_cvtepi32_epi8(entry));
        __m512i f = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(PROBS - 1));
        x = _mm512_add_epi32(_mm512_mullo_epi32(f, _mm512_srli_epi32(x, PROB_BITS)), _mm512_srli_epi32(entry, 20));
        __mmask16 under = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(LOW));
        __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)rans->at));
        words = _mm512_maskz_expand_epi32(under, words);
        x = _mm512_mask_or_epi32(x, under, _mm512_slli_epi32(x, 16), words);
        rans->at += 2 * __builtin_popcount(under);
        _mm512_storeu_si512(rans->x, x);
        return;
    }
#endif
    for (int k = 0; k < STATES; k++) {
        uint32_t x = rans->x[k], entry = tables[256 + offset[k] + (x & (PROBS - 1))];
        symbol[k] = (uint8_t)entry;
        x = (entry >> 8 & (PROBS - 1)) * (x >> PROB_BITS) + (entry >> 20);
        if (x < LOW && rans->at < rans->end) {
            uint16_t word;
            memcpy(&word, rans->at, 2);
            rans->at += 2;
            x = x << 16 | word;
        }
        rans->x[k] = x;
    }
}

/* Rows of `dim` symbols, `tokens` of which share the offsets [dim] of their group. Written downwards from `top`, the
 * last first; the size in bytes. */
static size_t rans_encode(const uint8_t *symbol, const uint32_t *tables, const int32_t *offset, long groups, int tokens, int dim, uint8_t *top) {
    uint32_t x[STATES];
    uint16_t *at = (uint16_t *)top;
    for (int k = 0; k < STATES; k++) x[k] = LOW;
    for (long row = groups * tokens - 1; row >= 0; row--)
        for (int d = dim - STATES; d >= 0; d -= STATES)
            at = encode_step(x, symbol + row * dim + d, tables, offset + row / tokens * dim + d, at);
    at -= 2 * STATES;
    memcpy(at, x, sizeof x);
    return (size_t)(top - (uint8_t *)at);
}

/* --- LOSSLESS ------------------------------------------------------------------------------------------- */

static uint8_t exponent_of(const uint8_t *value, int itemsize) {
    uint16_t high;
    memcpy(&high, value + itemsize - 2, 2);
    return high >> 7 & 255;
}

static int encode_lossless(const void *const *block, int n, long values, int itemsize, struct out *out) {
    static const int32_t offset[STATES] = {0};
    double weight[256] = {0};
    uint16_t freq[256];
    struct table *table = malloc(sizeof *table);
    size_t most = (size_t)values * 2 + 4 * STATES;
    uint8_t *symbol = malloc((size_t)values), *scratch = malloc(most);
    if (!table || !symbol || !scratch) out->full = 1;
    if (!out->full) {
        uint32_t count[256] = {0};
        for (int b = 0; b < n; b++)
            for (long i = 0; i < values; i++) count[exponent_of((const uint8_t *)block[b] + i * itemsize, itemsize)]++;
        for (int s = 0; s < 256; s++) weight[s] = count[s];
        to_frequencies(freq, weight, 256);
        lay_out(table, freq, 256);
        put(out, freq, sizeof freq);
    }
    for (int b = 0; b < n && !out->full; b++) {
        uint8_t *plain = put(out, NULL, (size_t)values * (itemsize - 1));
        if (!plain) break;
        for (long i = 0; i < values; i++) {
            const uint8_t *value = (const uint8_t *)block[b] + i * itemsize;
            symbol[i] = exponent_of(value, itemsize);
            plain[i * (itemsize - 1)] = (value[itemsize - 1] & 0x80) | (value[itemsize - 2] & 0x7f);
            for (int k = 0; k < itemsize - 2; k++) plain[i * (itemsize - 1) + 1 + k] = value[k];
        }
        uint32_t size = (uint32_t)rans_encode(symbol, (uint32_t *)table, offset, 1, (int)(values / STATES), STATES, scratch + most);
        put(out, &size, 4);
        put(out, scratch + most - size, size);
    }
    free(table), free(symbol), free(scratch);
    return out->full ? -1 : 0;
}

static int decode_lossless(void *const *block, int n, long values, int itemsize, struct in *in) {
    static const int32_t offset[STATES] = {0};
    uint16_t freq[256];
    const uint8_t *head = take(in, sizeof freq);
    struct table *table = malloc(sizeof *table);
    int sum = 0, bad = !head || !table;
    if (!bad) {
        memcpy(freq, head, sizeof freq);
        for (int s = 0; s < 256; s++) bad |= freq[s] == 0 || freq[s] >= PROBS, sum += freq[s];
        bad |= sum != PROBS;
    }
    if (!bad) lay_out(table, freq, 256);
    for (int b = 0; b < n && !bad; b++) {
        const uint8_t *plain = take(in, (size_t)values * (itemsize - 1));
        uint32_t size;
        struct rans rans;
        head = take(in, 4);
        if ((bad = !plain || !head)) break;
        memcpy(&size, head, 4);
        if ((bad = rans_begin(&rans, take(in, size), size))) break;
        for (long i = 0; i < values; i += STATES) {
            uint8_t symbol[STATES];
            decode_step(&rans, (uint32_t *)table, offset, symbol);
            for (int k = 0; k < STATES; k++) {
                uint8_t *value = (uint8_t *)block[b] + (i + k) * itemsize;
                const uint8_t *rest = plain + (i + k) * (itemsize - 1);
                uint16_t high = (uint16_t)((rest[0] & 0x80) << 8 | symbol[k] << 7 | (rest[0] & 0x7f));
                memcpy(value + itemsize - 2, &high, 2);
                for (int j = 0; j < itemsize - 2; j++) value[j] = rest[1 + j];
            }
        }
    }
    free(table);
    return bad ? -1 : 0;
}

/* --- INT8 ----------------------------------------------------------------------------------------------- */

static int encode_int8(const void *const *block, int n, long rows, int dim, int itemsize, struct out *out) {
    float *x = malloc(4 * (size_t)dim);
    for (int b = 0; x && b < n; b++)
        for (long r = 0; r < rows; r++) {
            uint8_t *to = put(out, NULL, (size_t)dim + 2);
            float top = 0;
            if (!to) break;
            load_values(block[b], itemsize, r * dim, dim, x);
            for (int d = 0; d < dim; d++) top = fabsf(x[d]) > top ? fabsf(x[d]) : top;
            if (!(top < 1e38f)) out->full = 1; /* not finite: goes as it is */
            uint16_t scale = float_to_bf16(top / 127);
            float inverse = bf16_to_float(scale) > 0 ? 1 / bf16_to_float(scale) : 0;
            memcpy(to, &scale, 2);
            for (int d = 0; d < dim; d++) {
                float y = rintf(x[d] * inverse);
                to[2 + d] = (uint8_t)(int8_t)(y > 127 ? 127 : y < -127 ? -127 : y);
            }
        }
    if (!x) out->full = 1;
    free(x);
    return out->full ? -1 : 0;
}

static int decode_int8(void *const *block, int n, long rows, int dim, int itemsize, struct in *in) {
    float *x = malloc(4 * (size_t)dim);
    int bad = !x;
    for (int b = 0; !bad && b < n; b++)
        for (long r = 0; r < rows; r++) {
            const uint8_t *from = take(in, (size_t)dim + 2);
            uint16_t scale;
            if ((bad = !from)) break;
            memcpy(&scale, from, 2);
            for (int d = 0; d < dim; d++) x[d] = (float)(int8_t)from[2 + d] * bf16_to_float(scale);
            store_values(block[b], itemsize, r * dim, dim, x);
        }
    free(x);
    return bad ? -1 : 0;
}

/* --- QUANTIZED ------------------------------------------------------------------------------------------ */

struct quantized { /* one frame */
    long groups;
    int tokens, dim, itemsize, exact;
    float *step;     /* [groups] */
    uint16_t *mean;  /* [groups][dim] */
    uint8_t *spread; /* [groups][dim], as 4 x log2 of the rms in steps, + 12 */
    int32_t *offset; /* [groups][dim]: of its table in spread_table, in words */
    uint8_t *symbol, *scratch, *bits; /* of one block, where it is encoded */
    int16_t *escaped;
};

/* How many low bits of a channel's integers go as they are. */
static int shift_of(int spread) { return spread < SPREADS ? 0 : (spread - SPREADS) / 4 + 1; }

static int open_quantized(struct quantized *q, int encode) {
    size_t channels = (size_t)q->groups * q->dim, values = encode ? channels * q->tokens : 0;
    q->step = malloc(4 * (size_t)q->groups), q->mean = malloc(2 * channels), q->spread = malloc(channels);
    q->offset = malloc(4 * channels), q->symbol = malloc(values + 1), q->scratch = malloc(2 * values + 4 * STATES);
    q->bits = malloc(2 * values + 8), q->escaped = malloc(2 * values + 2);
    return q->step && q->mean && q->spread && q->offset && q->symbol && q->scratch && q->bits && q->escaped ? 0 : -1;
}
static void close_quantized(struct quantized *q) {
    free(q->step), free(q->mean), free(q->spread), free(q->offset), free(q->symbol), free(q->scratch);
    free(q->bits), free(q->escaped);
}
static void choose_tables(struct quantized *q) {
    for (long c = 0; c < q->groups * q->dim; c++)
        q->offset[c] = (int32_t)((q->spread[c] - 4 * shift_of(q->spread[c])) * TABLE_WORDS);
}

/* Means, steps and spreads of the frame; the exact first token counts for none of them. -1 where not all is finite. */
static int survey(struct quantized *q, const void *const *block, int n, int heads, const float *fineness) {
    int dim = q->dim, count = n * q->tokens - q->exact;
    double sum[dim], squares[dim];
    float x[dim];
    for (long g = 0; g < q->groups; g++) {
        double power = 0;
        for (int d = 0; d < dim; d++) sum[d] = squares[d] = 0;
        for (int b = 0; b < n; b++)
            for (int t = b == 0 ? q->exact : 0; t < q->tokens; t++) {
                load_values(block[b], q->itemsize, (g * q->tokens + t) * dim, dim, x);
                for (int d = 0; d < dim; d++) sum[d] += x[d], squares[d] += (double)x[d] * x[d];
            }
        for (int d = 0; d < dim; d++) {
            uint16_t mean = float_to_bf16(count ? (float)(sum[d] / count) : 0);
            q->mean[g * dim + d] = mean;
            /* around the mean as it is sent */
            squares[d] = fmax(0, squares[d] - 2 * bf16_to_float(mean) * sum[d] + count * (double)bf16_to_float(mean) * bf16_to_float(mean));
            power += squares[d];
        }
        float rms = count ? (float)sqrt(power / count / dim) : 0;
        if (!(rms < 1e30f)) return -1;
        q->step[g] = fmaxf(rms * fineness[g / heads % 2], 1e-12f);
        for (int d = 0; d < dim; d++) {
            double spread = count ? sqrt(squares[d] / count) / q->step[g] : 0;
            int k = spread > 0.125 ? (int)lrint(4 * log2(spread)) + 12 : 0;
            q->spread[g * dim + d] = (uint8_t)(k < 0 ? 0 : k > SPREADS - 1 + 4 * MOST_SHIFT ? SPREADS - 1 + 4 * MOST_SHIFT : k);
        }
    }
    return 0;
}

/* A group's channels: mean, low bits that go as they are, half of what these count to; how many have such bits, and
 * which. */
static int read_channels(const struct quantized *q, long g, float *mean, int *shift, int *half, int *shifted) {
    int wide = 0;
    for (int d = 0; d < q->dim; d++) {
        mean[d] = bf16_to_float(q->mean[g * q->dim + d]);
        shift[d] = shift_of(q->spread[g * q->dim + d]), half[d] = shift[d] ? 1 << (shift[d] - 1) : 0;
        if (shift[d]) shifted[wide++] = d;
    }
    return wide;
}

static void encode_block(struct quantized *q, const void *block, struct out *out) {
    int dim = q->dim, waiting = 0, escapes = 0;
    uint64_t bits = 0;
    uint8_t *bits_at = q->bits;
    float x[dim], mean[dim];
    int shift[dim], half[dim], shifted[dim], number[dim], high[dim];
    for (long g = 0; g < q->groups; g++) {
        float inverse = 1 / q->step[g];
        int wide = read_channels(q, g, mean, shift, half, shifted);
        for (int t = 0; t < q->tokens; t++) {
            uint8_t *symbol = q->symbol + (g * q->tokens + t) * dim;
            int beyond = 0;
            load_values(block, q->itemsize, (g * q->tokens + t) * dim, dim, x);
            for (int d = 0; d < dim; d++) {
                float y = rintf((x[d] - mean[d]) * inverse);
                number[d] = (int)(y > 32767 ? 32767 : y < -32767 ? -32767 : y);
            }
            for (int d = 0; d < dim; d++) {
                int h = (number[d] + half[d]) >> shift[d], inside = (h >= -EDGE) & (h <= EDGE);
                high[d] = h;
                symbol[d] = (uint8_t)(inside ? h + EDGE : ESCAPE);
                beyond |= !inside;
            }
            for (int k = 0; k < wide; k++) {
                int d = shifted[k];
                if (symbol[d] == ESCAPE) continue;
                bits |= (uint64_t)(number[d] + half[d] - (high[d] << shift[d])) << waiting;
                waiting += shift[d];
                while (waiting >= 8) *bits_at++ = (uint8_t)bits, bits >>= 8, waiting -= 8;
            }
            for (int d = 0; beyond && d < dim; d++)
                if (symbol[d] == ESCAPE) q->escaped[escapes++] = (int16_t)number[d];
        }
    }
    if (waiting) *bits_at++ = (uint8_t)bits;
    uint8_t *top = q->scratch + 2 * q->groups * q->tokens * dim + 4 * STATES;
    size_t size = rans_encode(q->symbol, (uint32_t *)spread_table, q->offset, q->groups, q->tokens, dim, top);
    uint32_t sizes[3] = {(uint32_t)size, (uint32_t)(bits_at - q->bits), (uint32_t)escapes};
    put(out, sizes, sizeof sizes);
    put(out, top - size, size);
    put(out, q->bits, sizes[1]);
    put(out, q->escaped, 2 * (size_t)escapes);
}

static int decode_block(struct quantized *q, void *block, struct in *in) {
    int dim = q->dim, waiting = 0;
    uint32_t sizes[3];
    struct rans rans;
    uint64_t bits = 0;
    float x[dim], mean[dim];
    int shift[dim], half[dim], shifted[dim], number[dim];
    uint8_t symbol[dim];
    const uint8_t *head = take(in, sizeof sizes), *bits_at, *escaped;
    if (!head) return -1;
    memcpy(sizes, head, sizeof sizes);
    if (rans_begin(&rans, take(in, sizes[0]), sizes[0])) return -1;
    if (!(bits_at = take(in, sizes[1])) || !(escaped = take(in, 2 * (size_t)sizes[2]))) return -1;
    const uint8_t *bits_end = bits_at + sizes[1], *escaped_end = escaped + 2 * (size_t)sizes[2];
    for (long g = 0; g < q->groups; g++) {
        float step = q->step[g];
        int wide = read_channels(q, g, mean, shift, half, shifted);
        for (int t = 0; t < q->tokens; t++) {
            int beyond = 0;
            for (int d = 0; d < dim; d += STATES)
                decode_step(&rans, (uint32_t *)spread_table, q->offset + g * dim + d, symbol + d);
            for (int d = 0; d < dim; d++) {
                number[d] = (symbol[d] - EDGE) * (1 << shift[d]) - half[d];
                beyond |= symbol[d] == ESCAPE;
            }
            for (int k = 0; k < wide; k++) {
                int d = shifted[k];
                if (symbol[d] == ESCAPE) continue;
                while (waiting < shift[d]) {
                    if (bits_at == bits_end) return -1;
                    bits |= (uint64_t)*bits_at++ << waiting, waiting += 8;
                }
                number[d] += (int)(bits & ((1u << shift[d]) - 1));
                bits >>= shift[d], waiting -= shift[d];
            }
            for (int d = 0; beyond && d < dim; d++)
                if (symbol[d] == ESCAPE) {
                    int16_t value;
                    if (escaped == escaped_end) return -1;
                    memcpy(&value, escaped, 2);
                    escaped += 2, number[d] = value;
                }
            for (int d = 0; d < dim; d++) x[d] = (float)number[d] * step + mean[d];
            store_values(block, q->itemsize, (g * q->tokens + t) * dim, dim, x);
        }
    }
    return 0;
}

static int code_exact(struct quantized *q, void *block, struct out *out, struct in *in) {
    /* The first token of each group, as it is: written to `out`, or read from `in`. */
    size_t size = (size_t)q->dim * q->itemsize;
    for (long g = 0; g < q->groups; g++) {
        uint8_t *token = (uint8_t *)block + g * q->tokens * size;
        if (out) put(out, token, size);
        else {
            const uint8_t *from = take(in, size);
            if (!from) return -1;
            memcpy(token, from, size);
        }
    }
    return 0;
}

static int encode_quantized(struct quantized *q, const void *const *block, int n, int heads, const float *fineness, struct out *out) {
    size_t channels = (size_t)q->groups * q->dim;
    if (open_quantized(q, 1) || survey(q, block, n, heads, fineness)) out->full = 1;
    else {
        choose_tables(q);
        put(out, q->step, 4 * (size_t)q->groups), put(out, q->mean, 2 * channels), put(out, q->spread, channels);
        if (q->exact && n) code_exact(q, (void *)block[0], out, NULL);
        for (int b = 0; b < n && !out->full; b++) encode_block(q, block[b], out);
    }
    close_quantized(q);
    return out->full ? -1 : 0;
}

static int decode_quantized(struct quantized *q, void *const *block, int n, struct in *in) {
    size_t channels = (size_t)q->groups * q->dim;
    const uint8_t *step = take(in, 4 * (size_t)q->groups), *mean = take(in, 2 * channels), *spread = take(in, channels);
    int bad = open_quantized(q, 0) || !step || !mean || !spread;
    struct in first = *in;
    if (!bad) {
        memcpy(q->step, step, 4 * (size_t)q->groups), memcpy(q->mean, mean, 2 * channels);
        memcpy(q->spread, spread, channels);
        for (size_t c = 0; c < channels; c++) bad |= q->spread[c] > SPREADS - 1 + 4 * MOST_SHIFT;
    }
    if (!bad) choose_tables(q);
    if (!bad && q->exact && n) bad = !take(in, channels * q->itemsize);
    for (int b = 0; b < n && !bad; b++) bad = decode_block(q, block[b], in);
    if (!bad && q->exact && n) bad = code_exact(q, block[0], NULL, &first); /* over what was decoded in its place */
    close_quantized(q);
    return bad ? -1 : 0;
}

/* --- what is called ------------------------------------------------------------------------------------- */

/* The encoded size of `n` blocks; -1 where it is more than `room`. `exact`: the first token is the prompt's first. */
long kv_encode(int codec, int itemsize, const void *const *block, int n, int layers, int heads, int tokens, int dim,
               int exact, const float *fineness, void *to, long room) {
    long groups = (long)layers * 2 * heads, values = groups * tokens * dim;
    struct out out = {to, (uint8_t *)to + room, 0};
    int bad = -1;
    if (codec == LOSSLESS) bad = encode_lossless(block, n, values, itemsize, &out);
    if (codec == INT8) bad = encode_int8(block, n, groups * tokens, dim, itemsize, &out);
    if (codec == QUANTIZED) {
        struct quantized q = {.groups = groups, .tokens = tokens, .dim = dim, .itemsize = itemsize, .exact = exact};
        bad = encode_quantized(&q, block, n, heads, fineness, &out);
    }
    return bad ? -1 : (long)(out.at - (uint8_t *)to);
}

/* 0, or -1 where the `size` bytes are not what `kv_encode` gives for such blocks; these may hold anything then. */
int kv_decode(int codec, int itemsize, const void *from, long size, void *const *block, int n, int layers, int heads,
              int tokens, int dim, int exact) {
    long groups = (long)layers * 2 * heads, values = groups * tokens * dim;
    struct in in = {from, (const uint8_t *)from + size};
    int bad = -1;
    if (codec == LOSSLESS) bad = decode_lossless(block, n, values, itemsize, &in);
    if (codec == INT8) bad = decode_int8(block, n, groups * tokens, dim, itemsize, &in);
    if (codec == QUANTIZED) {
        struct quantized q = {.groups = groups, .tokens = tokens, .dim = dim, .itemsize = itemsize, .exact = exact};
        bad = decode_quantized(&q, block, n, &in);
    }
    return bad || in.at != in.end ? -1 : 0;
}
