/* Which pages of the heavy set a query reads; included by decode.h per element type.
 *
 * Formula and reference: vllm_h2o/policy/sparse_read.py::pages_read, with its ties. A
 * page's bound, highest and lowest key by element, lies in the page and is made anew
 * when a token enters it, from all of its keys: that reads one page of a step's many.
 * Difference: a bound passes over keys with NaN, for which the reference's is NaN.
 */

/* Of the page's first `held` slots. */
static void FN(set_bound)(const h2o_decode_args *a, FN(page) page, int64_t held) {
    float keys[held], negated[held];
    for (int64_t d = 0; d < a->head_size; ++d) {
        for (int64_t s = 0; s < held; ++s) {
            keys[s] = FN(key_at)(a, page, d, s);
            negated[s] = -keys[s];
        }
        page.bound[d] =
            H2O_HIGHEST_SHARE * h2o_highest(keys, held, -FLT_MAX) -
            (1.0f - H2O_HIGHEST_SHARE) * h2o_highest(negated, held, -FLT_MAX);
    }
}

/* The pages that are not read in any case, [first, end): those of the heavy set without
 * a sink, but for the one that the new token is written to. */
typedef struct {
    int64_t first, end;
} FN(choice);

static inline FN(choice) FN(choice_of)(const h2o_decode_args *a, const h2o_slots *r) {
    const int64_t bs = a->block_size;
    FN(choice) pages = {(a->pinned_slots + bs - 1) / bs, r->heavy_slots / bs};
    /* All pages up to that of the new token are full. */
    if (r->slot / bs < pages.end) pages.end = r->slot / bs;
    return pages;
}

/* bounds[i] = what page first + i can give `query` [group][head_size]; NaN: infinite. */
static inline void FN(bounds_of)(const h2o_decode_args *a, const h2o_slots *r,
                                 FN(choice) pages, const ELEM *query, int64_t group,
                                 float *sum, float *bounds) {
    const int64_t hs = a->head_size;
    for (int64_t d = 0; d < hs; ++d) {
        sum[d] = 0.0f;
        for (int64_t g = 0; g < group; ++g) sum[d] += TO_F32(query[g * hs + d]);
    }
    for (int64_t b = pages.first; b < pages.end; ++b) {
        const int64_t soon = b + H2O_AHEAD < pages.end ? b + H2O_AHEAD : b;
        h2o_prefetch(FN(page_of)(a, r, soon).bound, hs * sizeof(float));
        const float *restrict bound = FN(page_of)(a, r, b).bound;
        float x = 0.0f;
        for (int64_t d = 0; d < hs; ++d) x += sum[d] * bound[d];
        bounds[b - pages.first] = x != x ? INFINITY : x;
    }
}

/* The pages that a query reads, ascending, into `list`; returns how many. `scratch`
 * has head_size floats and two for each page. */
static inline int64_t FN(list_pages)(const h2o_decode_args *a, const h2o_slots *r,
                                     const ELEM *query, int64_t group, int64_t *list,
                                     float *scratch) {
    const int64_t bs = a->block_size;
    const int64_t length = r->place < r->budget ? r->place + 1 : r->budget;
    const int64_t num_blocks = (length + bs - 1) / bs;
    const FN(choice) pages = FN(choice_of)(a, r);
    const int64_t others = pages.end - pages.first;
    int64_t n = num_blocks;
    for (int64_t b = 0; b < num_blocks; ++b) list[b] = b;
    if (a->read >= 1.0 || !H2O_SCORES(r) || others <= 0) return n;
    /* Rounded first: a fifth of five pages is one, whatever 0.2 is in binary. */
    const int64_t chosen = (int64_t)ceil(rint(a->read * others * 1e9) / 1e9);
    float *bounds = scratch + a->head_size;
    FN(bounds_of)(a, r, pages, query, group, scratch, bounds);
    if (chosen) {
        float *copy = memcpy(bounds + others, bounds, others * sizeof(float));
        const float lowest = h2o_quickselect(copy, others, chosen);
        h2o_heaviest(bounds, others, chosen, lowest, list + pages.first);
    }
    n = pages.first + chosen;
    for (int64_t i = pages.first; i < n; ++i) list[i] += pages.first;
    for (int64_t b = pages.end; b < num_blocks; ++b) list[n++] = b;
    return n;
}

/* What is not read receives nothing, but decays. */
static inline void FN(decay_unread)(const h2o_decode_args *a, const h2o_slots *r,
                                    const int64_t *list) {
    const FN(choice) pages = FN(choice_of)(a, r);
    const int64_t *read = list + pages.first;
    for (int64_t b = pages.first; b < pages.end; ++b) {
        if (*read == b) {
            ++read;
            continue;
        }
        float *restrict attention = FN(page_of)(a, r, b).attention;
        for (int64_t s = 0; s < a->block_size; ++s) attention[s] *= a->score_decay;
    }
}
