/* The engine's forward pass on CPUs. Compiled at first use with -O3 -march=native; `native/__init__.py` builds and
 * binds it, `native/runner.py` fills in the structs, field by field as they stand here.
 */
#include "lanes.h"
#include "codes.h"

struct linear { /* weights in panels (linear.h); bias [outs] or null; scales [outs] of int8 codes, else null */
    const void *weights;
    const float *bias, *scales;
    int in, outs;
};
struct layer {
    struct linear qkv, output, gate, up, down;
    const float *attention_norm, *mlp_norm;
    const float *post_attention_norm, *post_mlp_norm, *q_norm, *k_norm; /* or null */
    int windowed;
};
struct model {
    const struct layer *layer;
    struct linear embedding, head;
    const float *final_norm;
    const float *cos, *sin, *local_cos, *local_sin; /* [positions][head_dim / 2] */
    int layers, hidden, heads, gelu, window;
    float eps, scale, embedding_scale;
};
struct cache { /* strides in elements; [block][layer][K, V][kv_head][token][head_dim] */
    void *data;
    long block_stride, layer_stride, v_offset;
    int kv_heads, head_dim, block_size;
};
struct span { /* rows `row ..` are tokens `start .. start + length` of the sequence whose blocks begin at `table` */
    int row, start, length, table, single;
};
struct step {
    const int32_t *tokens, *positions, *blocks; /* [rows]: blocks are those the rows' own KV goes to */
    const int32_t *tables, *sampled;
    const struct span *span;
    int rows, spans, samples;
};

/* Scratch memory: `block` is everybody's, `own` a thread's. */
struct room {
    char *block, *own;
    float *x, *wide, *scores;
    void *narrow, *queries, *gated, *keys, *values, *shares;
};
static char *cut(char **from, long bytes) {
    char *piece = *from;
    *from += (bytes + 63) / 64 * 64;
    return piece;
}
static long most(long a, long b) { return a > b ? a : b; }
static long padded(long tokens) { return PANELS(tokens) * PANEL; }

/* The tokens that the longest chunk and the longest single row attend to. */
static void longest(const struct step *s, long *chunk, long *single) {
    *chunk = *single = 0;
    for (int i = 0; i < s->spans; i++) {
        long tokens = (long)s->span[i].start + s->span[i].length;
        if (s->span[i].single) *single = most(*single, tokens);
        else *chunk = most(*chunk, tokens);
    }
}
static int make_room(struct room *room, const struct model *m, const struct cache *c, const struct step *s, int size) {
    long chunk, single, rows = s->rows, width = (long)m->heads * c->head_dim;
    longest(s, &chunk, &single);
    long x = rows * m->hidden * 4, narrow = most(rows, s->samples) * most(m->hidden, width) * size;
    long wide = rows * most(m->hidden, width + 2L * c->kv_heads * c->head_dim) * 4, queries = rows * width * size;
    long gated = rows * m->layer[0].gate.outs * size;
    long keys = padded(chunk) * c->head_dim * size, values = padded(chunk) * padded(c->head_dim) * size;
    void *block = NULL;
    if (posix_memalign(&block, 64, x + narrow + wide + queries + gated + keys + values + 7 * 64)) block = NULL;
    char *at = room->block = block;
    if (!block) return 0;
    room->x = (float *)cut(&at, x);
    room->wide = (float *)cut(&at, wide);
    room->narrow = cut(&at, narrow);
    room->queries = cut(&at, queries);
    room->gated = cut(&at, gated);
    room->keys = cut(&at, keys);
    room->values = cut(&at, values);
    return 1;
}
static int make_own_room(struct room *room, const struct model *m, const struct cache *c, const struct step *s,
                         int size) {
    long chunk, single, group = m->heads / c->kv_heads;
    longest(s, &chunk, &single);
    long scores = most(TILE * padded(chunk), group * (single + 2 * LANES + c->block_size)) * 4;
    void *own = NULL;
    if (posix_memalign(&own, 64, scores + TILE * padded(chunk) * size + 2 * 64)) own = NULL;
    char *at = room->own = own;
    if (!own) return 0;
    room->scores = (float *)cut(&at, scores);
    room->shares = cut(&at, TILE * padded(chunk) * size);
    return 1;
}

#define JOIN(a, b) a##b
#define JOINED(a, b) JOIN(a, b)
#define PICK_NAME(prefix) JOINED(prefix, SUFFIX)

#define SUFFIX f32
#define T float
#define IS_BF16 0
#define PER 1
#define TO_FLOAT same
#define FROM_FLOAT same
#define LOAD load_f32
#define STORE store_f32
#define CODE_PLACE(o, i) (o)
#define CODE_OF(code) (code)
#define CODE_VALUE(code) (code)
#include "linear.h"
#include "attention.h"
#include "forward.h"
#undef SUFFIX
#undef T
#undef IS_BF16
#undef PER
#undef TO_FLOAT
#undef FROM_FLOAT
#undef LOAD
#undef STORE
#undef CODE_PLACE
#undef CODE_OF
#undef CODE_VALUE

#define SUFFIX bf16
#define T uint16_t
#define IS_BF16 1
#define PER 2 /* inputs to a step: a pair */
#define TO_FLOAT bf16_to_float
#define FROM_FLOAT float_to_bf16
#define LOAD load_bf16
#define STORE store_bf16
#define CODE_PLACE place_in_pairs
#define CODE_OF code_in_pairs
#define CODE_VALUE value_in_pairs
#include "linear.h"
#include "attention.h"
#include "forward.h"

int panel(void) { return PANEL; }
