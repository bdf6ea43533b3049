/* The transition's choice: which prompt tokens a KV head keeps, and in which slots.
 *
 * Formula and reference: vllm_h2o/policy/selection.py::select_residents, with its
 * ties; here for tokens only, each head by its own layout:
 *   score(t) = attention[t], or attention[t] / (n - max(t, first_query)) for mean
 *   pooled(t) = max of score over the `pooling` positions around t
 *   the sinks, then the heavy_slots of highest score before the ring, in order; the
 *   ring holds the rest. A request within the budget keeps all.
 */

/* Bins of the first step of the selection: sign, exponent and three more bits. */
#define H2O_BINS 4096
#define H2O_BIN_SHIFT 20

/* What the first `count` tokens before the ring are compared by; NaN is infinite. */
static void h2o_comparable(const h2o_transition_args *c,
                           const float *restrict attention, int64_t count,
                           float *restrict scores) {
    const int32_t seen = (int32_t)c->num_tokens;
    const int32_t first = (int32_t)c->target.first_queries[0];
    for (int32_t t = 0; t < (int32_t)count; ++t) {
        const int32_t queries = seen - (t > first ? t : first);
        const float divisor =
            c->target.score_mean ? (float)(queries > 1 ? queries : 1) : 1.0f;
        const float score = attention[t] / divisor;
        scores[t] = score != score ? INFINITY : score;
    }
}

/* to[t] = max of from[t - reach .. t + reach], as far as there are such. */
static void h2o_pool(const float *restrict from, int64_t length, int64_t reach,
                     float *restrict to, int64_t count) {
    memcpy(to, from, count * sizeof(float));
    for (int64_t by = 1; by <= reach; ++by) {
        for (int64_t t = by; t < count; ++t)
            to[t] = from[t - by] > to[t] ? from[t - by] : to[t];
        const int64_t end = count + by < length ? count : length - by;
        for (int64_t t = 0; t < end; ++t)
            to[t] = from[t + by] > to[t] ? from[t + by] : to[t];
    }
}

/* The rank-th highest of x[0..count), rank from 1; x is reordered. */
static float h2o_quickselect(float *x, int64_t count, int64_t rank) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const float pivot = x[low + (high - low) / 2];
        int64_t above = low, i = low, below = high; /* higher | equal | .. | lower */
        while (i < below) {
            const float v = x[i];
            if (v > pivot) {
                x[i++] = x[above];
                x[above++] = v;
            } else if (v < pivot) {
                x[i] = x[--below];
                x[below] = v;
            } else {
                ++i;
            }
        }
        if (rank <= above)
            high = above;
        else if (rank <= below)
            return pivot;
        else
            low = below;
    }
    return x[low];
}

/* Integers in the order of floats that are no NaN; a zero of either sign has its own. */
static inline uint32_t h2o_ordered(float x) {
    union { float f; uint32_t i; } bits = {x};
    return bits.i & 0x80000000u ? ~bits.i : bits.i | 0x80000000u;
}

/* The rank-th highest of values[0..count), by their leading bits first: those of the
 * bin that has it are few, and no branch on the way there is a guess. */
static float h2o_highest_at(const float *values, int64_t count, int64_t rank,
                            float *scratch) {
    int32_t bins[H2O_BINS] = {0};
    for (int64_t t = 0; t < count; ++t) ++bins[h2o_ordered(values[t]) >> H2O_BIN_SHIFT];
    uint32_t bin = H2O_BINS - 1;
    while (rank > bins[bin]) rank -= bins[bin--];
    int64_t n = 0;
    for (int64_t t = 0; t < count; ++t) {
        scratch[n] = values[t];
        n += h2o_ordered(values[t]) >> H2O_BIN_SHIFT == bin;
    }
    return h2o_quickselect(scratch, n, rank);
}

/* Positions of the `count` highest values, of which `lowest` is the lowest, ascending,
 * ties to the lower position. */
static void h2o_heaviest(const float *values, int64_t length, int64_t count,
                         float lowest, int64_t *positions) {
    int64_t room = count, n = 0;
    for (int64_t t = 0; t < length; ++t) room -= values[t] > lowest;
    for (int64_t t = 0; n < count; ++t) {
        const int tie = (values[t] == lowest) & (room > 0);
        room -= tie;
        positions[n] = t;
        n += (values[t] > lowest) | tie;
    }
}

/* One head; `scratch` has three times num_tokens floats. A head with less than the
 * request has on average, target.budget, does not pool: it has no room for spans. */
static void h2o_select_head(const h2o_transition_args *c, int64_t head,
                            float *scratch) {
    const h2o_slots target = h2o_slots_of(&c->target, 0, head, 0);
    const int64_t budget = target.budget, heavy = target.heavy_slots;
    const int64_t reach = budget < c->target.budget ? 0 : c->pooling / 2;
    const int64_t n = c->num_tokens, ring_start = n - (budget - heavy);
    const int64_t kept = n < budget ? n : budget;
    int64_t *positions = c->positions + head * c->most;
    int64_t *slots = c->slots + head * c->most;
    for (int64_t i = 0; i < c->most; ++i) slots[i] = positions[i] = i < kept ? i : -1;
    if (n <= budget) return;
    for (int64_t i = heavy; i < budget; ++i) {
        positions[i] = ring_start + i - heavy;
        slots[i] = heavy + (positions[i] - heavy) % (budget - heavy);
    }
    if (!heavy) return;
    float *scores = scratch, *pooled = scores + n;
    const int64_t visible = ring_start + reach < n ? ring_start + reach : n;
    h2o_comparable(c, c->attention + head * n, visible, scores);
    h2o_pool(scores, visible, reach, pooled, ring_start);
    for (int64_t t = 0; t < c->target.pinned_slots; ++t) pooled[t] = INFINITY;
    const float lowest = h2o_highest_at(pooled, ring_start, heavy, pooled + n);
    h2o_heaviest(pooled, ring_start, heavy, lowest, positions);
}

int h2o_select(const h2o_transition_args *c, int64_t num_layers) {
    const int64_t heads = c->target.num_kv_heads;
    int failed = 0;
#pragma omp parallel for num_threads(c->target.num_threads) \
    reduction(| : failed) schedule(dynamic)
    for (int64_t i = 0; i < num_layers * heads; ++i) {
        const h2o_transition_args *layer = c + i / heads;
        float *scratch = malloc(3 * layer->num_tokens * sizeof(float));
        if (scratch)
            h2o_select_head(layer, i % heads, scratch);
        else
            failed = 1;
        free(scratch);
    }
    return failed;
}
