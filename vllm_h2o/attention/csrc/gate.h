/* What a prompt's tokens are expected to get of the queries after them, read off their
 * keys and values.
 *
 * Included once per element type, after decode.h, with the same macros and
 *   GATE        name of the exported function
 *
 * Formula, per KV head g and token at position t of a prompt of n, with the weights
 * w = [wk, wv, w1, w2, w3, w4] of g and k the token's key before RoPE:
 *   e              = sqrt(d) (wk . k/|k| + wv . v/|v|) + w1 log|k| + w2 log|v|
 *                    + w3 log(n - t) + w4
 *   attention[g,t] = group * max(e, 0)^4 * (n - max(t, first_query))
 *
 * Reference: attention/gate.py::LayerGate.fill.  Sums run in another order; everything
 * else is the same arithmetic.
 *
 * A page's keys are column-major, so that a vector holds a component of as many tokens,
 * and its rows of angles are turned likewise, once for all heads of all layers that
 * rotate alike. Threads share out the pages.
 */

/* angles[rotary_dim][block_size]: those of page b's positions; 0 past the table's end. */
static void FN(turn_angles)(const h2o_gate_args *a, int64_t b, float *angles) {
    const int64_t bs = a->block_size, rotary = a->rotary_dim;
    memset(angles, 0, rotary * bs * sizeof(float));
    for (int64_t s = 0; s < bs && b * bs + s < a->num_positions; ++s) {
        const int64_t row = (b * bs + s) * rotary;
        for (int64_t i = row; i < row + rotary; ++i)
            angles[(i - row) * bs + s] = a->floats ? ((const float *)a->angles)[i]
                                                   : TO_F32(((const ELEM *)a->angles)[i]);
    }
}

/* dots, squares += w . k, |k|^2 of two vectors of tokens, by component i of k. */
static inline __attribute__((always_inline)) void FN(add_component)(
    const h2o_vec *k, float weight, h2o_vec *dots, h2o_vec *squares, const int tile) {
    for (int j = 0; j < tile; ++j) {
        dots[j] += weight * k[j];
        squares[j] += k[j] * k[j];
    }
}

/* Of a register tile of tokens: w . k and |k|^2 of the keys before RoPE. */
static inline __attribute__((always_inline)) void FN(dot_keys)(
    const h2o_gate_args *a, const ELEM *key, const float *weights, const float *angles,
    float *dots, float *squares, const int tile) {
    const int64_t bs = a->block_size, pairs = a->rotary_dim / 2;
    const int64_t step = a->neox ? 1 : 2, apart = a->neox ? pairs : 1;
    h2o_vec dot[H2O_TILE], square[H2O_TILE], x[H2O_TILE], y[H2O_TILE];
    for (int j = 0; j < tile; ++j) dot[j] = square[j] = (h2o_vec){0};
    for (int64_t i = 0; i < pairs; ++i) {
        const int64_t first = i * step, second = first + apart;
        for (int j = 0; j < tile; ++j) {
            const int64_t at = j * H2O_LANES;
            const h2o_vec u = LOAD(key + first * bs + at);
            const h2o_vec v = LOAD(key + second * bs + at);
            const h2o_vec cosine = h2o_load_f32(angles + i * bs + at);
            const h2o_vec sine = h2o_load_f32(angles + (pairs + i) * bs + at);
            x[j] = u * cosine + v * sine;
            y[j] = v * cosine - u * sine;
        }
        FN(add_component)(x, weights[first], dot, square, tile);
        FN(add_component)(y, weights[second], dot, square, tile);
    }
    for (int64_t d = a->rotary_dim; d < a->head_size; ++d) {
        for (int j = 0; j < tile; ++j) x[j] = LOAD(key + d * bs + j * H2O_LANES);
        FN(add_component)(x, weights[d], dot, square, tile);
    }
    for (int j = 0; j < tile; ++j) {
        h2o_store_f32(dots + j * H2O_LANES, dot[j]);
        h2o_store_f32(squares + j * H2O_LANES, square[j]);
    }
}

/* Of the first `count` tokens of a page: w . v and |v|^2. */
static void FN(dot_values)(const h2o_gate_args *a, const ELEM *value,
                           const float *weights, int64_t count, float *dots,
                           float *squares) {
    const int64_t hs = a->head_size;
    for (int64_t s = 0; s < count; ++s, value += hs) {
        float dot = 0.0f, square = 0.0f;
        for (int64_t d = 0; d < hs; ++d) {
            const float v = TO_F32(value[d]);
            dot += weights[d] * v;
            square += v * v;
        }
        dots[s] = dot;
        squares[s] = square;
    }
}

/* The attention of page b's tokens in one KV head of a layer; `ages` and `queries` are
 * log(n - t) and n - max(t, first_query) of each. */
static void FN(expect_page)(const h2o_gate_args *a, int64_t b, int64_t head,
                            const float *angles, const float *ages,
                            const float *queries) {
    const int64_t bs = a->block_size, hs = a->head_size, n = a->num_tokens;
    const int64_t count = n - b * bs < bs ? n - b * bs : bs;
    const char *page = (const char *)a->cache + a->blocks[b] * a->page_stride;
    const ELEM *key = (const ELEM *)page + head * 2 * bs * hs;
    const float *w = a->weights + head * (2 * hs + 4);
    const float w1 = w[2 * hs], w2 = w[2 * hs + 1], w3 = w[2 * hs + 2], w4 = w[2 * hs + 3];
    const float root = sqrtf((float)hs), group = (float)a->group;
    float *restrict attention = a->attention + head * n + b * bs;
    float k[bs], v[bs], kk[bs], vv[bs];
    int64_t s = 0;
    for (; s + H2O_TILE * H2O_LANES <= bs; s += H2O_TILE * H2O_LANES)
        FN(dot_keys)(a, key + s, w, angles + s, k + s, kk + s, H2O_TILE);
    for (; s < bs; s += H2O_LANES)
        FN(dot_keys)(a, key + s, w, angles + s, k + s, kk + s, 1);
    FN(dot_values)(a, key + bs * hs, w + hs, count, v, vv);
    /* Of keys whose rotation is not known only the length is, see policy/gate.py. */
    for (s = 0; a->unknown && s < count; ++s) k[s] = w[0] * sqrtf(kk[s]);
    for (s = 0; s < count; ++s) {
        const float key_norm = h2o_at_least_a_norm(sqrtf(kk[s]));
        const float value_norm = h2o_at_least_a_norm(sqrtf(vv[s]));
        const float e = root * (k[s] / key_norm + v[s] / value_norm) +
                        w1 * h2o_log(key_norm) + w2 * h2o_log(value_norm) +
                        w3 * ages[s] + w4;
        const float square = e > 0.0f ? e * e : 0.0f;
        attention[s] = group * square * square * queries[s];
    }
}

/* Those of page b in all layers. */
static void FN(expect_pages)(const h2o_gate_args *layers, int64_t num_layers, int64_t b,
                             float *angles) {
    const int64_t bs = layers->block_size, n = layers->num_tokens;
    const void *turned = NULL;
    float ages[bs], queries[bs];
    for (int64_t s = 0; s < bs && b * bs + s < n; ++s) {
        const int64_t t = b * bs + s, first = layers->first_query;
        ages[s] = logf((float)(n - t));
        queries[s] = (float)(n - (t > first ? t : first));
    }
    for (const h2o_gate_args *a = layers; a < layers + num_layers; ++a) {
        if (a->rotary_dim && a->angles != turned) FN(turn_angles)(a, b, angles);
        turned = a->rotary_dim ? a->angles : turned;
        for (int64_t head = 0; head < a->num_kv_heads; ++head)
            FN(expect_page)(a, b, head, angles, ages, queries);
    }
}

int GATE(const h2o_gate_args *layers, int64_t num_layers) {
    const int64_t bs = layers->block_size;
    int64_t rotary = 1;
    for (int64_t i = 0; i < num_layers; ++i)
        if (layers[i].rotary_dim > rotary) rotary = layers[i].rotary_dim;
    int failed = 0;
#pragma omp parallel num_threads(layers->num_threads) reduction(| : failed)
    {
        float *angles = malloc(rotary * bs * sizeof(float));
        failed = !angles;
#pragma omp for schedule(dynamic)
        for (int64_t b = 0; b < (layers->num_tokens + bs - 1) / bs; ++b)
            if (angles) FN(expect_pages)(layers, num_layers, b, angles);
        free(angles);
    }
    return failed;
}
