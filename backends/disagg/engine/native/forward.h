/* The whole forward pass of a step in one call, so that no time goes to Python between its parts; included once for
 * each element type T. The residual stream is float32; what linear layers and attention read is T.
 *
 * It is held against `models/decoder.py`, which says the same in torch.
 */
#define INVERSE_RMS PICK_NAME(inverse_rms_)
#define NORM PICK_NAME(norm_)
#define NORM_IN_PLACE PICK_NAME(norm_in_place_)
#define ADD_NORMED PICK_NAME(add_normed_)
#define EMBED PICK_NAME(embed_)
#define ROTATE PICK_NAME(rotate_)
#define ATTEND PICK_NAME(attend_)
#define GATED PICK_NAME(gated_)
#define LAYER PICK_NAME(layer_)

/* RMSNorm (Zhang and Sennrich 2019) of one row. */
INLINE float INVERSE_RMS(const float *x, int width, float eps) {
    lanes squares = {0};
    float rest = 0.f;
    int j = 0;
    for (; j + LANES <= width; j += LANES) squares += load(x + j) * load(x + j);
    for (; j < width; j++) rest += x[j] * x[j];
    return 1.f / sqrtf((sum(squares) + rest) / (float)width + eps);
}
static void NORM(const float *x, const float *weight, int width, float eps, T *out) {
    float by = INVERSE_RMS(x, width, eps);
    for (int j = 0; j < width; j++) out[j] = FROM_FLOAT(x[j] * by * weight[j]);
}
static void NORM_IN_PLACE(float *x, const float *weight, int width, float eps) {
    float by = INVERSE_RMS(x, width, eps);
    for (int j = 0; j < width; j++) x[j] = x[j] * by * weight[j];
}
/* x += the norm of `added`, which is overwritten. */
static void ADD_NORMED(float *x, float *added, const float *weight, int width, float eps) {
    NORM_IN_PLACE(added, weight, width, eps);
    for (int j = 0; j < width; j++) x[j] += added[j];
}

/* A row of the embedding out of its panels: a tied head and the embedding are one copy. */
static void EMBED(const struct model *m, int token, float *x) {
    const struct linear *l = &m->embedding;
    const void *panel = AT_STEP(l->weights, (long)(token / PANEL) * (m->hidden / PER), l->scales != NULL);
    for (int j = 0; j < m->hidden; j++) {
        const void *at = AT_STEP(panel, j / PER, l->scales != NULL);
        if (l->scales) {
            int8_t code = ((const int8_t *)at)[CODE_PLACE(token % PANEL, j % PER)];
            x[j] = (float)CODE_VALUE(code) * l->scales[token] * m->embedding_scale;
        } else {
            x[j] = TO_FLOAT(((const T *)at)[token % PANEL * PER + j % PER]) * m->embedding_scale;
        }
    }
}

/* Biases are in qkv already: norms of query and key heads, rotary positions (half-split form), and into place. */
static void ROTATE(const struct model *m, const struct layer *l, const struct cache *c, float *qkv, int position,
                   T *q, T *k, T *v) {
    int dim = c->head_dim, half = dim / 2;
    const float *cos = (l->windowed ? m->local_cos : m->cos) + (long)position * half;
    const float *sin = (l->windowed ? m->local_sin : m->sin) + (long)position * half;
    for (int h = 0; h < m->heads + c->kv_heads; h++) {
        float *x = qkv + (long)h * dim;
        const float *norm = h < m->heads ? l->q_norm : l->k_norm;
        if (norm) NORM_IN_PLACE(x, norm, dim, m->eps);
        T *to = h < m->heads ? q + (long)h * dim : k + (long)(h - m->heads) * c->block_size * dim;
        for (int j = 0; j < half; j++) {
            to[j] = FROM_FLOAT(x[j] * cos[j] - x[j + half] * sin[j]);
            to[j + half] = FROM_FLOAT(x[j + half] * cos[j] + x[j] * sin[j]);
        }
    }
    for (int h = 0; h < c->kv_heads; h++)
        for (int j = 0; j < dim; j++)
            v[(long)h * c->block_size * dim + j] = FROM_FLOAT(qkv[(long)(m->heads + c->kv_heads + h) * dim + j]);
}

static void ATTEND(const struct model *m, const struct layer *l, const struct cache *c, const struct step *s,
                   const T *kv, const T *q, T *out, struct room *room) {
    int width = m->heads * c->head_dim, group = m->heads / c->kv_heads;
    int window = l->windowed ? m->window : 0;
    for (int i = 0; i < s->spans; i++) {
        const struct span *p = s->span + i;
        if (!p->single)
            PREFILL(q + (long)p->row * width, kv, c, s->tables + p->table, p->start, p->length,
                    out + (long)p->row * width, m->heads, m->scale, window, room->keys, room->values, room->scores,
                    room->shares);
    }
#pragma omp for schedule(dynamic)
    for (int unit = 0; unit < s->spans * c->kv_heads; unit++) {
        const struct span *p = s->span + unit / c->kv_heads;
        int h = unit % c->kv_heads;
        long at = (long)p->row * width + (long)h * group * c->head_dim;
        if (p->single)
            DECODE_ONE(q + at, kv + (long)h * c->block_size * c->head_dim, c, s->tables + p->table, p->start + 1,
                       out + at, group, m->scale, window, room->scores);
    }
}

/* out = act(x · gateᵀ) * (x · upᵀ), a panel of both at a time. */
static void GATED(const struct model *m, const struct layer *l, const T *x, int rows, T *out) {
    int in = m->hidden, outs = l->gate.outs, panels = PANELS(outs);
    int coded = l->gate.scales != NULL;
#pragma omp for schedule(static)
    for (int p = 0; p < panels; p++) {
        int count = outs - p * PANEL < PANEL ? outs - p * PANEL : PANEL;
        for (int r = 0; r < rows; r += TILE) {
            float gated[TILE][PANEL], upped[TILE][PANEL];
            int tile = rows - r < TILE ? rows - r : TILE;
            const void *gate = AT_STEP(l->gate.weights, (long)p * (in / PER), coded);
            const void *up = AT_STEP(l->up.weights, (long)p * (in / PER), coded);
            PANEL_ROWS(tile, coded, x + (long)r * in, in, gate, in, gated[0], PANEL);
            PANEL_ROWS(tile, coded, x + (long)r * in, in, up, in, upped[0], PANEL);
            for (int i = 0; i < tile; i++) {
                for (int o = 0; coded && o < count; o++) {
                    gated[i][o] *= l->gate.scales[p * PANEL + o];
                    upped[i][o] *= l->up.scales[p * PANEL + o];
                }
                for (int j = 0; j < PANEL; j += LANES) {
                    lanes g = load(gated[i] + j);
                    /* silu, or gelu by tanh(z) = 2 / (1 + e^-2z) - 1, which makes it silu of another slope */
                    lanes slope = m->gelu ? 1.5957691216f * (g + 0.044715f * g * g * g) : g;
                    store(gated[i] + j, g / (1.f + exp_lanes(-slope)) * load(upped[i] + j));
                }
                T *to = out + (long)(r + i) * outs + p * PANEL;
                for (int o = 0; o < count; o++) to[o] = FROM_FLOAT(gated[i][o]);
            }
        }
    }
}

static void LAYER(const struct model *m, int index, const struct cache *c, const struct step *s, struct room *room) {
    const struct layer *l = m->layer + index;
    int width = m->heads * c->head_dim, all_heads = width + 2 * c->kv_heads * c->head_dim;
    T *kv = (T *)c->data + (long)index * c->layer_stride, *narrow = room->narrow, *q = room->queries;
    float *wide = room->wide;
#pragma omp for schedule(static)
    for (int r = 0; r < s->rows; r++)
        NORM(room->x + (long)r * m->hidden, l->attention_norm, m->hidden, m->eps, narrow + (long)r * m->hidden);
    LINEAR(&l->qkv, narrow, s->rows, wide, 0);
#pragma omp for schedule(static)
    for (int r = 0; r < s->rows; r++) {
        T *k = kv + (long)s->blocks[r] * c->block_stride + (long)(s->positions[r] % c->block_size) * c->head_dim;
        ROTATE(m, l, c, wide + (long)r * all_heads, s->positions[r], q + (long)r * width, k, k + c->v_offset);
    }
    ATTEND(m, l, c, s, kv, q, narrow, room);
    LINEAR(&l->output, narrow, s->rows, l->post_attention_norm ? wide : room->x, !l->post_attention_norm);
#pragma omp for schedule(static)
    for (int r = 0; r < s->rows; r++) {
        float *x = room->x + (long)r * m->hidden, *added = wide + (long)r * m->hidden;
        if (l->post_attention_norm) ADD_NORMED(x, added, l->post_attention_norm, m->hidden, m->eps);
        NORM(x, l->mlp_norm, m->hidden, m->eps, narrow + (long)r * m->hidden);
    }
    GATED(m, l, narrow, s->rows, room->gated);
    LINEAR(&l->down, room->gated, s->rows, l->post_mlp_norm ? wide : room->x, !l->post_mlp_norm);
    if (l->post_mlp_norm) {
#pragma omp for schedule(static)
        for (int r = 0; r < s->rows; r++)
            ADD_NORMED(room->x + (long)r * m->hidden, wide + (long)r * m->hidden, l->post_mlp_norm, m->hidden, m->eps);
    }
}

/* Compute every row of `s`; logits [s->samples][vocabulary]. Returns 1 where there is no memory for it. */
int PICK_NAME(forward_)(const struct model *m, const struct cache *c, const struct step *s, float *logits,
                        int threads) {
    struct room shared;
    int failed = !make_room(&shared, m, c, s, sizeof(T));
#pragma omp parallel num_threads(threads)
    {
        struct room room = shared;
        if (!make_own_room(&room, m, c, s, sizeof(T))) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) {
#pragma omp for schedule(static)
            for (int r = 0; r < s->rows; r++) EMBED(m, s->tokens[r], room.x + (long)r * m->hidden);
            for (int i = 0; i < m->layers; i++) LAYER(m, i, c, s, &room);
#pragma omp for schedule(static)
            for (int i = 0; i < s->samples; i++)
                NORM(room.x + (long)s->sampled[i] * m->hidden, m->final_norm, m->hidden, m->eps,
                     (T *)room.narrow + (long)i * m->hidden);
            LINEAR(&m->head, room.narrow, s->samples, logits, 0);
        }
        free(room.own);
    }
    free(shared.block);
    return failed;
}
