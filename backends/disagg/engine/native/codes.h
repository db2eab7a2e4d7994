/* int8 codes of weights, in registers as the kernels multiply them. Whole numbers up to 256 are exact in bfloat16. */
typedef int8_t bytes __attribute__((vector_size(LANES)));

/* LANES codes as floats. */
INLINE lanes decode(const int8_t *p) {
    bytes codes;
    memcpy(&codes, p, sizeof codes);
    return __builtin_convertvector(codes, lanes);
}

/* 2 * PANEL codes as bfloat16: w0 has the pairs of outputs 0 .. LANES, w1 those of the LANES after them. */
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
/* Two table look-ups by the magnitude's 7 bits give the two bytes of each bfloat16; the code's top bit is the sign.
 * Unpacking goes by 16-byte pieces, and the codes lie so that it puts every pair where it belongs. */
#define ENTRY(m) ((m) == 0 ? 0 : (m) < 2 ? 0x3f80 : (m) < 4 ? 0x4000 + ((m) - 2) * 0x40 : (m) < 8 ? 0x4080 + ((m) - 4) * 0x20 \
    : (m) < 16 ? 0x4100 + ((m) - 8) * 0x10 : (m) < 32 ? 0x4180 + ((m) - 16) * 8 : (m) < 64 ? 0x4200 + ((m) - 32) * 4 \
    : 0x4280 + ((m) - 64) * 2)
#define LOW(m) (ENTRY(m) & 0xff)
#define HIGH(m) (ENTRY(m) >> 8)
#define FOUR(f, m) f(m), f((m) + 1), f((m) + 2), f((m) + 3)
#define SIXTEEN(f, m) FOUR(f, m), FOUR(f, (m) + 4), FOUR(f, (m) + 8), FOUR(f, (m) + 12)
#define SIXTY_FOUR(f, m) SIXTEEN(f, m), SIXTEEN(f, (m) + 16), SIXTEEN(f, (m) + 32), SIXTEEN(f, (m) + 48)
static const uint8_t low_bytes[128] = {SIXTY_FOUR(LOW, 0), SIXTY_FOUR(LOW, 64)};
static const uint8_t high_bytes[128] = {SIXTY_FOUR(HIGH, 0), SIXTY_FOUR(HIGH, 64)};

INLINE void decode_pairs(const void *p, words *w0, words *w1) {
    __m512i codes = _mm512_loadu_si512(p);
    __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(low_bytes), codes, _mm512_loadu_si512(low_bytes + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(high_bytes), codes, _mm512_loadu_si512(high_bytes + 64));
    high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8((char)0x80), 0xf8); /* high | (codes & 0x80) */
    *w0 = (words)_mm512_unpacklo_epi8(low, high);
    *w1 = (words)_mm512_unpackhi_epi8(low, high);
}
static int place_in_pairs(int output, int input) {
    int within = output % LANES;
    return within / 4 * 16 + output / LANES * 8 + within % 4 * 2 + input;
}
static int8_t code_in_pairs(int8_t code) { return code < 0 ? (int8_t)(0x80 | -code) : code; }
static int value_in_pairs(int8_t code) { return code < 0 ? -(code & 0x7f) : code; }
#else
INLINE words decode_pairs_of(const void *p) {
    halves pairs;
    memcpy(&pairs, p, sizeof pairs);
    ints both = __builtin_convertvector(pairs, ints);
    words even = (words)__builtin_convertvector(both << 24 >> 24, lanes);
    words odd = (words)__builtin_convertvector(both << 16 >> 24, lanes);
    return even >> 16 | (odd & 0xffff0000u);
}
INLINE void decode_pairs(const void *p, words *w0, words *w1) {
    *w0 = decode_pairs_of(p);
    *w1 = decode_pairs_of((const char *)p + 2 * LANES);
}
static int place_in_pairs(int output, int input) { return output * 2 + input; }
static int8_t code_in_pairs(int8_t code) { return code; }
static int value_in_pairs(int8_t code) { return code; }
#endif
