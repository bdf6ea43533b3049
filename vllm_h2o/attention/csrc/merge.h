/* What graduation drops goes into what is kept; included by decode.h per element type.
 *
 * Formula and reference: vllm_h2o/policy/merging.py::merged, for one lost token. The
 * pass over K that the queries need anyway finds the nearest key: the lost one, of
 * length 1, is one more query, and a slot keeps the inverse length of its own. Not where
 * keys and values are rounded: a value would be rounded with each loss.
 * Difference: keys with NaN are passed over, where the reference's threshold is NaN
 * from then on.
 */

static inline float FN(inverse_norm)(const h2o_decode_args *a, FN(page) page,
                                     int64_t slot) {
    float sum = 0.0f;
    for (int64_t d = 0; d < a->head_size; ++d) {
        const float x = KV_TO_F32(page.key[d * a->block_size + slot]);
        sum += x * x;
    }
    return sum > 0.0f ? 1.0f / sqrtf(sum) : 0.0f;
}

static inline void FN(set_norm)(const h2o_decode_args *a, FN(page) page, int64_t slot) {
    page.inverse_norm[slot] = FN(inverse_norm)(a, page, slot);
}

static inline void FN(note_loss)(const h2o_decode_args *a, FN(page) page, int64_t slot,
                                 h2o_lost *lost) {
    const int64_t bs = a->block_size, hs = a->head_size;
    for (int64_t d = 0; d < hs; ++d) {
        lost->key[d] = KV_TO_F32(page.key[d * bs + slot]) * page.inverse_norm[slot];
        lost->value[d] = KV_TO_F32(page.value[slot * hs + d]);
    }
}

/* Among the first `valid` slots of a page; dots[s] = lost key . key s; overwritten. */
static inline void FN(find_nearest)(float *dots, const float *inverse_norm,
                                    int64_t valid, KV *value, int64_t head_size,
                                    h2o_lost *lost) {
    for (int64_t s = 0; s < valid; ++s) dots[s] *= inverse_norm[s];
    const float highest = h2o_highest(dots, valid, lost->cosine);
    if (!(highest > lost->cosine)) return;
    int64_t s = 0;
    while (dots[s] != highest) ++s;
    lost->cosine = highest;
    lost->nearest = value + s * head_size;
}

/* After the step: into the nearest one's value, if the two are similar enough. */
static inline void FN(merge)(const h2o_decode_args *a, FN(page) first,
                             const h2o_lost *lost) {
    const int64_t hs = a->head_size;
    if (!lost->nearest) return; /* all keys have NaN */
    const float least = *first.threshold, u = lost->cosine;
    *first.threshold = least == -INFINITY ? u : least + H2O_NEWEST_SHARE * (u - least);
    if (!(u >= least)) return;
    const float one = expf(1.0f), weight = expf(u);
    KV *value = lost->nearest;
    for (int64_t d = 0; d < hs; ++d) {
        const float sum = one * KV_TO_F32(value[d]) + weight * lost->value[d];
        value[d] = KV_FROM_F32(sum / (one + weight));
    }
}
