/* Attention over the paged KV cache; included once for each element type T.
 *
 * `kv` points at one layer of block 0: K of [kv_heads][block_size][head_dim], and V `v_offset` elements further on.
 * Every row's result is computed in an order that depends on its own length alone.
 */
#define DECODE_ONE PICK_NAME(decode_one_)
#define PREFILL PICK_NAME(prefill_)
#define DOT_ROW PICK_NAME(dot_row_)

/* The lanes whose sum is q · k over `dim` elements. */
INLINE lanes DOT_ROW(const T *q, const T *k, int dim) {
    lanes total = {0};
    int j = 0;
    for (; j + PER * LANES <= dim; j += PER * LANES) {
#if IS_BF16 && defined(__AVX512BF16__)
        total = (lanes)_mm512_dpbf16_ps((__m512)total, (__m512bh)load_words(q + j), (__m512bh)load_words(k + j));
#elif IS_BF16
        words a = load_words(q + j), b = load_words(k + j);
        total += (lanes)(a << 16) * (lanes)(b << 16);
        total += (lanes)(a & 0xffff0000u) * (lanes)(b & 0xffff0000u);
#else
        total += load(q + j) * load(k + j);
#endif
    }
    for (int lane = 0; j < dim; j++, lane = (lane + 1) % LANES) total[lane] += TO_FLOAT(q[j]) * TO_FLOAT(k[j]);
    return total;
}

/* One query token's `group` heads over one KV head. scores: room for [group][length + block_size + 2 * LANES]. */
static void DECODE_ONE(const T *q, const T *kv, const struct cache *c, const int32_t *table, int length, T *out,
                       int group, float scale, int window, float *scores) {
    int dim = c->head_dim, size = c->block_size;
    int begin = window > 0 && length > window ? length - window : 0;
    int first = begin / size * size, span = (length - first + LANES - 1) / LANES * LANES + LANES;
    for (int start = first; start < length; start += size) {
        const T *k = kv + (long)table[start / size] * c->block_stride;
        const T *next = start + size < length ? kv + (long)table[start / size + 1] * c->block_stride : k;
        for (int at = 0; at < size * dim; at += 64 / (int)sizeof(T)) __builtin_prefetch(next + at);
        int count = length - start < size ? length - start : size;
        for (int t = 0; t < count; t += LANES) {
            int tokens = count - t < LANES ? count - t : LANES;
            for (int g = 0; g < group; g++) {
                lanes dots[LANES];
                for (int i = 0; i < LANES; i++)
                    dots[i] = i < tokens ? DOT_ROW(q + g * dim, k + (long)(t + i) * dim, dim) : (lanes){0};
                store(scores + (long)g * span + start - first + t, sums(dots) * scale);
            }
        }
    }
    for (int g = 0; g < group; g++) {
        float *s = scores + (long)g * span;
        float inverse = exponentials(s, begin - first, length - first, span, 1.f);
        for (int t = 0; t < span; t += LANES) store(s + t, load(s + t) * inverse);
    }
    /* Two vectors of the head at a time, for up to four query heads: their sums stay in registers. */
    enum { GROUP = 4 };
    for (int j = 0; j < dim; j += PANEL)
        for (int g = 0; g < group; g += GROUP) {
            int heads = group - g < GROUP ? group - g : GROUP, wide = dim - j >= PANEL;
            lanes acc[GROUP][2] = {{{0}}};
            for (int start = first; start < length; start += size) {
                const T *v = kv + (long)table[start / size] * c->block_stride + c->v_offset + j;
                const T *next = start + size < length ? kv + (long)table[start / size + 1] * c->block_stride : kv;
                int count = length - start < size ? length - start : size;
                for (int t = 0; t < count; t++) {
                    __builtin_prefetch(next + c->v_offset + j + (long)t * dim);
                    lanes v0 = LOAD(v + (long)t * dim), v1 = {0};
                    if (wide) v1 = LOAD(v + (long)t * dim + LANES);
#pragma GCC unroll 4
                    for (int i = 0; i < GROUP; i++) {
                        if (i >= heads) break;
                        float p = scores[(long)(g + i) * span + start - first + t];
                        acc[i][0] += v0 * p;
                        acc[i][1] += v1 * p;
                    }
                }
            }
            for (int i = 0; i < heads; i++) {
                STORE(out + (long)(g + i) * dim + j, acc[i][0]);
                if (wide) STORE(out + (long)(g + i) * dim + j + LANES, acc[i][1]);
            }
        }
}

/* Called by every thread of a parallel region: a chunk's rows over the tokens up to and with themselves.
 *
 * K and V of one head are laid out as packed weights, so that scores = q · Kᵀ and scores · V are the linear kernel.
 * q, out [rows][heads][head_dim]; the chunk's own keys and values are in the cache already.
 * keys, values: shared room for one head's packed K and V; scores, shares: room of this thread for TILE rows.
 */
static void PREFILL(const T *q, const T *kv, const struct cache *c, const int32_t *table, int start, int length,
                    T *out, int heads, float scale, int window, T *keys, T *values, float *scores, T *shares) {
    int dim = c->head_dim, size = c->block_size, group = heads / c->kv_heads, total = start + length;
    int low = window > 0 && start + 1 > window ? (start + 1 - window) / PANEL * PANEL : 0;
    int panels = PANELS(total - low), padded = panels * PANEL;
    int v_panels = PANELS(dim), tiles = (length + TILE - 1) / TILE;
    for (int h = 0; h < c->kv_heads; h++) {
#pragma omp for schedule(static)
        for (int p = 0; p < panels; p++)
            for (int t = 0; t < PANEL; t++) {
                int token = low + p * PANEL + t, beyond = token >= total;
                const T *k = kv + (long)(beyond ? 0 : table[token / size]) * c->block_stride +
                             ((long)h * size + token % size) * dim;
                T *to = keys + (long)p * PANEL * dim + t * PER;
                for (int j = 0; j < dim; j += PER)
                    for (int i = 0; i < PER; i++) to[(long)j * PANEL + i] = beyond ? 0 : k[j + i];
                to = values + ((long)p * PANEL + t / PER * PER) * PANEL + t % PER;
                for (int j = 0; j < v_panels * PANEL; j++)
                    to[(long)(j / PANEL) * padded * PANEL + j % PANEL * PER] =
                        beyond || j >= dim ? 0 : k[c->v_offset + j];
            }
#pragma omp for schedule(dynamic)
        for (int unit = tiles * group - 1; unit >= 0; unit--) { /* the longest first */
            int row = unit / group * TILE, head = h * group + unit % group;
            int rows = length - row < TILE ? length - row : TILE;
            int last = start + row + rows, wanted = PANELS(last - low);
            float inverse[TILE];
            for (int p = 0; p < wanted; p++)
                PANEL_ROWS(rows, 0, q + ((long)row * heads + head) * dim, (long)heads * dim,
                           keys + (long)p * PANEL * dim, dim, scores + p * PANEL, padded);
            for (int r = 0; r < rows; r++) {
                float *s = scores + (long)r * padded;
                int end = start + row + r + 1 - low, begin = window > 0 && end > window ? end - window : 0;
                inverse[r] = exponentials(s, begin, end, wanted * PANEL, scale);
                for (int t = 0; t < wanted * PANEL; t += LANES) STORE(shares + (long)r * padded + t, load(s + t));
            }
            for (int p = 0; p < v_panels; p++) {
                float part[TILE][PANEL];
                PANEL_ROWS(rows, 0, shares, padded, values + (long)p * padded * PANEL, wanted * PANEL, part[0], PANEL);
                for (int r = 0; r < rows; r++)
                    for (int j = 0; j < PANEL && p * PANEL + j < dim; j++)
                        out[((long)(row + r) * heads + head) * dim + p * PANEL + j] =
                            FROM_FLOAT(part[r][j] * inverse[r]);
            }
        }
    }
}

int PICK_NAME(paged_decode_)(const T *q, const T *kv, const struct cache *c, const int32_t *tables, int table_width,
                             const int32_t *lengths, T *out, int rows, int group, float scale, int window,
                             int threads) {
    int longest = 0, failed = 0;
    for (int r = 0; r < rows; r++) longest = lengths[r] > longest ? lengths[r] : longest;
#pragma omp parallel num_threads(threads)
    {
        float *scores = malloc(sizeof(float) * group * (longest + 2L * LANES + c->block_size));
#pragma omp for schedule(dynamic)
        for (int i = 0; i < rows * c->kv_heads; i++) {
            int r = i / c->kv_heads, h = i % c->kv_heads;
            long at = ((long)r * c->kv_heads + h) * group * c->head_dim;
            if (!scores) failed = 1;
            else
                DECODE_ONE(q + at, kv + (long)h * c->block_size * c->head_dim, c, tables + (long)r * table_width,
                           lengths[r], out + at, group, scale, window, scores);
        }
        free(scores);
    }
    return failed;
}
