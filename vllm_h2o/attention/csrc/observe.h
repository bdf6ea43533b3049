/* Prompt scoring: the attention that consecutive queries put on a dense prompt; with
 * its output, where the stock kernel has not computed that.
 *
 * Included once per element type, after decode.h, with the same macros and
 *   OBSERVE     name of the exported function
 *
 * Formula, per KV head g with its query heads h and the queries at positions
 * first_position + q, 0 <= q < m:
 *   A[h,q,t]    = softmax over t <= first_position + q of scale * q[q,h] . K[t], beside
 *                 the sink of h
 *   attention[g,t] += sum_{q >= first_scoring} decay^(m-1-q) sum_{h in g} A[h,q,t]
 *   output[q,h]  = sum_t A[h,q,t] V[t]
 *
 * Reference: ops/reference.py::observe and ::attend_observed.  Differences from it:
 * the caller decays the old attention, sums run in another order, and exp is h2o_exp
 * (relative error about 1e-7).
 *
 * K is read in its pages, column-major [head_size][block_size], V row-major. A tile
 * of rows (a row is one query head of one query) keeps its logits over all keys in scratch
 * that fits the L2 cache, so that K meets every query once and no logit is computed
 * twice. Threads share out the tiles of each head; their sums are added in a fixed
 * order, so that a number of threads gives the same result in every run.
 */

typedef struct {
    const h2o_observe_args *a;
    int64_t head, first_row, num_rows, visible; /* keys that the last row sees */
    int64_t stride;                             /* of logits, in elements */
    float *query;   /* [tile rows][head_size], scaled; then the output */
    float *logits;  /* [tile rows][stride] */
    float *inverse; /* [tile rows] 1 / sum of the logits' exps */
} CAT(h2o_tile, OBSERVE);
#define TILE CAT(h2o_tile, OBSERVE)

/* Query of each row as scaled floats; rows past the last one are zero. */
static void FN(pack_queries)(const TILE *t) {
    const h2o_observe_args *a = t->a;
    const int64_t hs = a->head_size, group = a->num_heads / a->num_kv_heads;
    for (int64_t r = 0; r < h2o_round_up(t->num_rows, H2O_ROWS); ++r) {
        const int64_t row = t->first_row + r;
        const ELEM *query = (const ELEM *)a->query + row / group * a->query_stride +
                            (t->head * group + row % group) * hs;
        for (int64_t d = 0; d < hs; ++d)
            t->query[r * hs + d] = r < t->num_rows ? TO_F32(query[d]) * a->scale : 0.0f;
    }
}

/* Keys of the tile's head in page b; its values come behind them. */
static inline const ELEM *FN(keys_of)(const TILE *t, int64_t b) {
    const h2o_observe_args *a = t->a;
    const char *page = (const char *)a->cache + a->blocks[b] * a->page_stride;
    return (const ELEM *)page + t->head * 2 * a->block_size * a->head_size;
}

/* Those of the page after b, to be fetched while page b is read; NULL: none. */
static inline const ELEM *FN(next_keys)(const TILE *t, int64_t b) {
    return (b + 1) * t->a->block_size < t->visible ? FN(keys_of)(t, b + 1) : NULL;
}

/* Logits of all rows, whole pages; those that no row of eight sees are left out. */
static void FN(dot_pages)(const TILE *t) {
    const h2o_observe_args *a = t->a;
    const int64_t bs = a->block_size, hs = a->head_size;
    const int64_t group = a->num_heads / a->num_kv_heads;
    for (int64_t b = 0; b * bs < t->visible; ++b) {
        const ELEM *key = FN(keys_of)(t, b), *next = FN(next_keys)(t, b);
        /* The first register tile whose last row sees the page's first key. */
        const int64_t seen_by = (b * bs - a->first_position) * group - t->first_row;
        const int64_t first = seen_by > 0 ? seen_by / H2O_ROWS * H2O_ROWS : 0;
        for (int64_t r = first; r < t->num_rows; r += H2O_ROWS)
            FN(dot_page)(t->query + r * hs, key, r == first ? next : NULL, hs, bs,
                         t->stride, t->logits + r * t->stride + b * bs, H2O_ROWS);
    }
}

/* The output of the tile's rows: the values of all pages, times the probabilities,
 * H2O_GROUP rows at a time. */
static void FN(attend_tile)(const TILE *t) {
    static const float keep[H2O_GROUP] = {1.0f, 1.0f, 1.0f, 1.0f};
    const h2o_observe_args *a = t->a;
    const int64_t bs = a->block_size, hs = a->head_size, half = bs * hs;
    const int64_t group = a->num_heads / a->num_kv_heads;
    float *out = t->query; /* the queries are not needed any more */
    memset(out, 0, t->num_rows * hs * sizeof(float));
    int64_t r;
    for (int64_t b = 0; b * bs < t->visible; ++b) {
        const ELEM *value = FN(keys_of)(t, b) + half, *next = FN(next_keys)(t, b);
        if (next) next += half;
        const int64_t left = t->visible - b * bs, count = left < bs ? left : bs;
        const float *probs = t->logits + b * bs;
        for (r = 0; r + H2O_GROUP <= t->num_rows; r += H2O_GROUP)
            FN(accumulate_page)(probs + r * t->stride, keep, value, r ? NULL : next, hs,
                                count, t->stride, out + r * hs, H2O_GROUP);
        for (; r < t->num_rows; ++r)
            FN(accumulate_page)(probs + r * t->stride, keep, value, r ? NULL : next, hs,
                                count, t->stride, out + r * hs, 1);
    }
    for (r = 0; r < t->num_rows; ++r) {
        const int64_t row = t->first_row + r;
        ELEM *output = (ELEM *)a->output + row / group * a->output_stride +
                       (t->head * group + row % group) * hs;
        FN(write_output)(t->query + r * hs, t->inverse + r, hs, 1, output);
    }
}

/* Add the tile's probabilities, weighted by the age of their query, to sums. */
static void FN(score_tile)(const TILE *t, float *sums) {
    const h2o_observe_args *a = t->a;
    const int64_t group = a->num_heads / a->num_kv_heads;
    const int64_t before = a->first_scoring * group - t->first_row;
    const int64_t first = before > 0 ? before : 0;
    for (int64_t r = first; r < t->num_rows && a->score_decay != 1.0f; ++r) {
        const int64_t age = a->num_queries - 1 - (t->first_row + r) / group;
        t->inverse[r] *= powf(a->score_decay, (float)age);
    }
    h2o_add_columns(t->logits + first * t->stride, t->inverse + first,
                    t->num_rows - first, t->stride, t->visible, sums);
}

static void FN(observe_tile)(const TILE *t, float *sums) {
    const h2o_observe_args *a = t->a;
    const int64_t group = a->num_heads / a->num_kv_heads;
    FN(pack_queries)(t);
    FN(dot_pages)(t);
    for (int64_t r = 0; r < t->num_rows; ++r) {
        const int64_t row = t->first_row + r, head = t->head * group + row % group;
        const float *sink = a->sink_logits ? a->sink_logits + head : NULL;
        t->inverse[r] =
            h2o_softmax(t->logits + r * t->stride,
                        a->first_position + row / group + 1, t->visible, a->softcap, sink);
    }
    if (a->output) FN(attend_tile)(t);
    FN(score_tile)(t, sums);
}

/* Every `step`-th tile of a head from `first` on, into sums [num_tokens]. */
static void FN(observe_tiles)(const h2o_observe_args *a, int64_t head, int64_t first,
                              int64_t step, int64_t tile_rows, float *scratch,
                              float *sums) {
    const int64_t group = a->num_heads / a->num_kv_heads;
    const int64_t num_rows = a->num_queries * group;
    TILE t = {.a = a, .head = head, .query = scratch};
    t.logits = scratch + tile_rows * a->head_size;
    t.stride = h2o_logits_stride(a);
    t.inverse = t.logits + tile_rows * t.stride;
    for (int64_t row = first * tile_rows; row < num_rows; row += step * tile_rows) {
        t.first_row = row;
        t.num_rows = num_rows - row < tile_rows ? num_rows - row : tile_rows;
        t.visible = a->first_position + (row + t.num_rows - 1) / group + 1;
        FN(observe_tile)(&t, sums);
    }
}

int OBSERVE(const h2o_observe_args *a) {
    const int64_t num_keys = a->first_position + a->num_queries;
    const int64_t rows = a->num_queries * (a->num_heads / a->num_kv_heads);
    const int64_t tile_rows = h2o_tile_rows(a);
    const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
    const int64_t parts = tiles < a->num_threads ? tiles : a->num_threads;
    const int64_t items = a->num_kv_heads * parts;
    float *sums = calloc(items * num_keys, sizeof(float));
    int failed = !sums;
#pragma omp parallel num_threads(a->num_threads) if (!failed)
    {
        float *scratch = malloc(sizeof(float) * tile_rows *
                                (a->head_size + h2o_logits_stride(a) + 1));
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < items; ++i)
            if (scratch && sums)
                FN(observe_tiles)(a, i / parts, i % parts, parts, tile_rows, scratch,
                                  sums + i * num_keys);
        free(scratch);
    }
    if (!failed) h2o_add_parts(a, sums, parts, num_keys);
    free(sums);
    return failed;
}

#undef TILE
