/* out = x · wᵀ, for one row of x or hundreds; included once for each element type T.
 *
 * Weights are packed in panels of PANEL outputs: [panel][pair of inputs][output][2] for bfloat16, so that one load
 * feeds a dot product of pairs, and [panel][input][output] for float32. A decode step then reads them once, in order;
 * a prompt's chunk keeps a panel in cache. Every output is summed over the inputs in order, in one register, so a row's
 * result is the same bit for bit whatever rows are beside it: prompts may be cut anywhere and batched with anything.
 */
#define STEP PICK_NAME(step_)
#define TILE_OF PICK_NAME(tile_)
#define PANEL_ROWS PICK_NAME(panel_rows_)
#define LINEAR PICK_NAME(linear_)
#define PACK PICK_NAME(pack_)

/* One step along the inputs (PER of them): sums[rows][2] += x[rows] · w. */
INLINE void STEP(int rows, lanes sums[][2], const T *x, long ldx, const T *w) {
#if IS_BF16
    words w0 = load_words(w), w1 = load_words(w + 2 * LANES);
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
    lanes w0 = load(w), w1 = load(w + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float xs = x[r * ldx];
        sums[r][0] += w0 * xs;
        sums[r][1] += w1 * xs;
    }
#endif
}

/* `rows` (a constant, at most TILE) rows of x against one panel; out [rows][PANEL]. */
INLINE void TILE_OF(int rows, const T *x, long ldx, const T *w, int in, float *out, long ldo) {
    lanes sums[TILE][2] = {{{0}}};
    for (int j = 0; j < in; j += PER) {
        __builtin_prefetch((const char *)(w + (long)j * PANEL) + 2048);
        __builtin_prefetch((const char *)(w + (long)j * PANEL) + 2048 + 64);
        STEP(rows, sums, x + j, ldx, w + (long)j * PANEL);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(out + r * ldo, sums[r][0]);
        store(out + r * ldo + LANES, sums[r][1]);
    }
}

/* At most TILE rows against one panel. */
static void PANEL_ROWS(int rows, const T *x, long ldx, const T *w, int in, float *out, long ldo) {
    switch (rows) {
#define CASE(n) case n: TILE_OF(n, x, ldx, w, in, out, ldo); break;
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
    const T *weights = l->weights;
#pragma omp for schedule(static)
    for (int p = 0; p < panels; p++) {
        int first = p * PANEL, count = l->outs - first < PANEL ? l->outs - first : PANEL;
        for (int r = 0; r < rows; r += TILE) {
            float part[TILE][PANEL];
            int tile = rows - r < TILE ? rows - r : TILE;
            PANEL_ROWS(tile, x + (long)r * l->in, l->in, weights + (long)first * l->in, l->in, part[0], PANEL);
            for (int i = 0; i < tile; i++) {
                float *to = out + (long)(r + i) * l->outs + first;
                for (int o = 0; o < count; o++) {
                    float value = part[i][o] + (l->bias ? l->bias[first + o] : 0.f);
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

void PICK_NAME(linear_rows_)(const struct linear *l, const T *x, int rows, float *out, int threads) {
#pragma omp parallel num_threads(threads)
    LINEAR(l, x, rows, out, 0);
}
