/* out = x · wᵀ, for one row of x or hundreds; included once for each element type T.
 *
 * Weights are packed in panels of PANEL outputs: [panel][pair of inputs][output][2] for bfloat16, so that one load
 * feeds a dot product of pairs, and [panel][input][output] for float32. A decode step then reads them once, in order;
 * a prompt's chunk keeps a panel in cache. Every output is summed over the inputs in order, in one register, so a row's
 * result is the same bit for bit whatever rows are beside it: prompts may be cut anywhere and batched with anything.
 *
 * `coded` weights are int8 codes from -127 to 127 in the same order, with a scale for each output. They are exact in
 * bfloat16 and float32, so the sum is over codes, and scaled once.
 */
#define STEP PICK_NAME(step_)
#define TILE_OF PICK_NAME(tile_)
#define PANEL_ROWS PICK_NAME(panel_rows_)
#define LINEAR PICK_NAME(linear_)
#define PACK PICK_NAME(pack_)
#define PACK_CODES PICK_NAME(pack_codes_)
#define AT_STEP PICK_NAME(at_step_)

/* Where step `steps` (PER inputs) of a panel begins. */
INLINE const void *AT_STEP(const void *w, long steps, int coded) {
    return (const char *)w + steps * PER * PANEL * (coded ? 1 : sizeof(T));
}

/* One step along the inputs (PER of them): sums[rows][2] += x[rows] · w. */
INLINE void STEP(int rows, int coded, lanes sums[][2], const T *x, long ldx, const void *w) {
#if IS_BF16
    words w0, w1;
    if (coded) {
        decode_pairs(w, &w0, &w1);
    } else {
        w0 = load_words(w);
        w1 = load_words((const T *)w + 2 * LANES);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        uint32_t pair;
        memcpy(&pair, x + r * ldx, 4);
#if defined(__AVX512BF16__)
        __m512bh xs = (__m512bh)_mm512_set1_epi32((int)pair);
        sums[r][0] = (lanes)_mm512_dpbf16_ps((__m512)sums[r][0], (__m512bh)w0, xs);
        sums[r][1] = (lanes)_mm512_dpbf16_ps((__m512)sums[r][1], (__m512bh)w1, xs);
#else
        float even = bf16_to_float((uint16_t)pair), odd = bf16_to_float((uint16_t)(pair >> 16));
        sums[r][0] += (lanes)(w0 << 16) * even;
        sums[r][1] += (lanes)(w1 << 16) * even;
        sums[r][0] += (lanes)(w0 & 0xffff0000u) * odd;
        sums[r][1] += (lanes)(w1 & 0xffff0000u) * odd;
#endif
    }
#else
    lanes w0 = coded ? decode(w) : load(w);
    lanes w1 = coded ? decode((const int8_t *)w + LANES) : load((const T *)w + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float xs = x[r * ldx];
        sums[r][0] += w0 * xs;
        sums[r][1] += w1 * xs;
    }
#endif
}

/* `rows` (a constant, at most TILE) rows of x against one panel; out [rows][PANEL]. */
INLINE void TILE_OF(int rows, int coded, const T *x, long ldx, const void *w, int in, float *out, long ldo) {
    lanes sums[TILE][2] = {{{0}}};
    for (int j = 0; j < in; j += PER) {
        const void *at = AT_STEP(w, j / PER, coded);
        __builtin_prefetch((const char *)at + 2048);
        if (!coded) __builtin_prefetch((const char *)at + 2048 + 64);
        STEP(rows, coded, sums, x + j, ldx, at);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(out + r * ldo, sums[r][0]);
        store(out + r * ldo + LANES, sums[r][1]);
    }
}

/* At most TILE rows against one panel. */
static void PANEL_ROWS(int rows, int coded, const T *x, long ldx, const void *w, int in, float *out, long ldo) {
    switch (coded ? rows + TILE : rows) {
#define CASE(n) \
    case n: TILE_OF(n, 0, x, ldx, w, in, out, ldo); break; \
    case TILE + n: TILE_OF(n, 1, x, ldx, w, in, out, ldo); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE == 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* Called by every thread of a parallel region. out [rows][outs] = or += x · wᵀ + bias. */
static void LINEAR(const struct linear *l, const T *x, int rows, float *out, int add) {
    int panels = PANELS(l->outs);
    int coded = l->scales != NULL;
#pragma omp for schedule(static)
    for (int p = 0; p < panels; p++) {
        int first = p * PANEL, count = l->outs - first < PANEL ? l->outs - first : PANEL;
        for (int r = 0; r < rows; r += TILE) {
            float part[TILE][PANEL];
            int tile = rows - r < TILE ? rows - r : TILE;
            const void *panel = AT_STEP(l->weights, (long)p * (l->in / PER), coded);
            PANEL_ROWS(tile, coded, x + (long)r * l->in, l->in, panel, l->in, part[0], PANEL);
            for (int i = 0; i < tile; i++) {
                float *to = out + (long)(r + i) * l->outs + first;
                for (int o = 0; o < count; o++) {
                    float value = part[i][o] * (coded ? l->scales[first + o] : 1.f);
                    value += l->bias ? l->bias[first + o] : 0.f;
                    to[o] = add ? to[o] + value : value;
                }
            }
        }
    }
}

/* w [outs][in] -> panels; the last one is filled with zeros. */
void PACK(const T *w, T *packed, int in, int outs) {
    int panels = PANELS(outs);
    for (int p = 0; p < panels; p++)
        for (int j = 0; j < in; j += PER)
            for (int o = 0; o < PANEL; o++)
                for (int i = 0; i < PER; i++) {
                    int out = p * PANEL + o;
                    packed[((long)p * in + j) * PANEL + o * PER + i] = out < outs ? w[(long)out * in + j + i] : 0;
                }
}

void PACK_CODES(const int8_t *w, int8_t *packed, int in, int outs) {
    int panels = PANELS(outs);
    for (int p = 0; p < panels; p++)
        for (int j = 0; j < in; j++)
            for (int o = 0; o < PANEL; o++) {
                int out = p * PANEL + o;
                packed[((long)p * in + j / PER * PER) * PANEL + CODE_PLACE(o, j % PER)] =
                    out < outs ? CODE_OF(w[(long)out * in + j]) : 0;
            }
}

void PICK_NAME(linear_rows_)(const struct linear *l, const T *x, int rows, float *out, int threads) {
#pragma omp parallel num_threads(threads)
    LINEAR(l, x, rows, out, 0);
}
