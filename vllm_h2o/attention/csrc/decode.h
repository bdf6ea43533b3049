/* One decode step of resident rows: graduate, write, attend, score.
 *
 * Included once per element type with these macros set:
 *   ELEM        storage type of query, key, value, output and dense pages
 *   NAME        name of the exported function
 *   COPY_KEPT   name of the exported function that compresses a request
 *   ORDER_RINGS name of the exported function that puts its recent tokens in order
 *   TAKE_BACK   name of the exported function that undoes refused drafts
 *   TO_F32(x)   ELEM -> float
 *   FROM_F32(x) float -> ELEM
 *   LOAD(from)  H2O_LANES ELEMs -> vector of floats
 *   LOAD_PAIR(from, pair)  twice as many -> two of them, in any order, which
 *   IN_ORDER(pair)         undoes
 * and, where keys and values of resident pages are rounded, the same of their type as KV,
 * KV_TO_F32 and so on; else they are ELEMs.
 *
 * Formula, per row with new position p and KV head g (query heads h of g):
 *   score(s)  = attention[s], for mean attention[s] / (p - max(birth[s], first_query))
 *   graduate  : if place(p) >= budget, the token in slot(p) replaces the heavy slot of
 *               lowest score (ties: oldest) if its score is strictly higher
 *   write     : K, V of the new token -> slot(p), attention 0, birth p
 *   attend    : A[h,s] = softmax_s(scale * q[h] . K[s]), beside the logit of h's sink,
 *               out[h] = sum_s A V[s]
 *   observe   : attention[s] = attention[s] * decay + sum_{h in g} A[h,s]
 * A row's tokens go in turn, each as it would go alone; of drafts, all but the first,
 * what they change is noted, and TAKE_BACK undoes it (draft_log.h).
 * A row with p < first_query leaves all attention alone: others may share its pages.
 * Rounded keys and values (SCALED) are steps of a scale that their token has
 * (policy/quantization.py): logits, and what values are weighed by, are multiplied by it.
 * Where losses merge, what graduation drops goes into the values that are kept once
 * this query has read them (merge.h).
 * With read < 1 the other rows attend to a part of the pages only (read.h); A is 0 for
 * what they do not read.
 *
 * Reference: vllm_h2o/attention/ops/reference.py.  Differences from it: the
 * softmax and sums run in another order and use a fast exp (relative error
 * about 1e-7); everything else is the same arithmetic.
 *
 * A page (one block of one layer) is, per KV head, K column-major
 * [head_size][block_size] then V row-major [block_size][head_size] (vLLM's CPU
 * layout, ISA `vec`); then float attention[heads][block_size] and
 * int32 births[heads][block_size] of the whole page; where keys and values are rounded
 * float scales of keys and of values [heads][block_size]; with read < 1
 * float bounds[heads][head_size]; where losses merge
 * float inverse_norms[heads][block_size] lie before the bounds, and the page's last
 * floats are thresholds[heads].
 */

#ifdef KV
#define SCALED 1
#else
#define SCALED 0
#define KV ELEM
#define KV_TO_F32(x) TO_F32(x)
#define KV_FROM_F32(x) FROM_F32(x)
#define KV_LOAD(from) LOAD(from)
#define KV_LOAD_PAIR(from, pair) LOAD_PAIR(from, pair)
#define KV_IN_ORDER(pair) IN_ORDER(pair)
#define H2O_KV_IS_ELEM /* for undefine.h */
#endif

#define CAT_(a, b) b##_##a
#define CAT(a, b) CAT_(a, b)
#define FN(name) CAT(name, NAME)

typedef struct {
    KV *key;    /* [head_size][block_size] */
    KV *value;  /* [block_size][head_size] */
    float *attention; /* [block_size] */
    int32_t *birth;
    float *key_scale; /* [block_size], where they are rounded */
    float *value_scale;
    float *inverse_norm; /* [block_size] of the keys, where losses merge */
    float *bound;        /* [head_size], with read < 1 only */
    float *threshold;    /* of a head, where losses merge: in its first page */
} FN(page);

static inline FN(page) FN(page_at)(const h2o_decode_args *a, char *base, int64_t head) {
    const int64_t half = a->block_size * a->head_size;
    float *attention = (float *)(base + a->state_offset);
    FN(page) page;
    page.key = (KV *)base + head * 2 * half;
    page.value = page.key + half;
    page.attention = attention + head * a->block_size;
    attention += a->num_kv_heads * a->block_size;
    page.birth = (int32_t *)attention + head * a->block_size;
    attention += a->num_kv_heads * a->block_size;
    page.key_scale = attention + head * a->block_size;
    page.value_scale = page.key_scale + a->num_kv_heads * a->block_size;
    if (SCALED) attention += 2 * a->num_kv_heads * a->block_size;
    page.inverse_norm = attention + head * a->block_size;
    if (a->merges) attention += a->num_kv_heads * a->block_size;
    page.bound = attention + head * a->head_size;
    page.threshold = (float *)(base + a->page_bytes) - a->num_kv_heads + head;
    return page;
}

static inline FN(page) FN(page_of)(const h2o_decode_args *a, const h2o_slots *r,
                                   int64_t i) {
    char *base = (char *)a->cache;
    if (r->offset)
        base += r->offset[i] + (int64_t)r->blocks[r->column[i]] * a->page_stride;
    else
        base += (int64_t)r->blocks[i] * a->page_stride;
    return FN(page_at)(a, base, r->head);
}

/* Element d of the key in a slot. */
static inline float FN(key_at)(const h2o_decode_args *a, FN(page) page, int64_t d,
                               int64_t slot) {
    const float x = KV_TO_F32(page.key[d * a->block_size + slot]);
    return SCALED ? x * page.key_scale[slot] : x;
}

#include "merge.h"
#include "read.h"

/* Key and value, as they are. */
static inline void FN(copy_vectors)(const h2o_decode_args *a, FN(page) from, int64_t i,
                                    FN(page) to, int64_t j) {
    const int64_t bs = a->block_size, hs = a->head_size;
    for (int64_t d = 0; d < hs; ++d) to.key[d * bs + j] = from.key[d * bs + i];
    memcpy(to.value + j * hs, from.value + i * hs, hs * sizeof(KV));
    if (!SCALED) return;
    to.key_scale[j] = from.key_scale[i];
    to.value_scale[j] = from.value_scale[i];
}

/* The scale of a vector whose elements are `step` apart; NaN if one of them is. */
static inline float FN(scale_of)(const ELEM *x, int64_t step, int64_t count) {
    float most = 0.0f;
    int is_nan = 0;
    for (int64_t d = 0; d < count; ++d) {
        const float size = fabsf(TO_F32(x[d * step]));
        is_nan |= size != size;
        most = size > most ? size : most;
    }
    return is_nan ? NAN : most / 127.0f;
}

/* A key, whose elements are `step` apart, and a value into a slot. */
static inline void FN(put_vectors)(const h2o_decode_args *a, FN(page) to, int64_t j,
                                   const ELEM *restrict key, int64_t step,
                                   const ELEM *restrict value) {
    const int64_t bs = a->block_size, hs = a->head_size;
#if SCALED
    const float key_scale = FN(scale_of)(key, step, hs);
    const float value_scale = FN(scale_of)(value, 1, hs);
    KV *restrict to_key = to.key + j, *restrict to_value = to.value + j * hs;
    for (int64_t d = 0; d < hs; ++d)
        to_key[d * bs] = h2o_quantized(TO_F32(key[d * step]), key_scale);
    for (int64_t d = 0; d < hs; ++d)
        to_value[d] = h2o_quantized(TO_F32(value[d]), value_scale);
    to.key_scale[j] = key_scale;
    to.value_scale[j] = value_scale;
#else
    KV *restrict to_key = to.key + j;
    for (int64_t d = 0; d < hs; ++d) to_key[d * bs] = key[d * step];
    memcpy(to.value + j * hs, value, hs * sizeof(KV));
#endif
}

static inline void FN(copy_token)(const h2o_decode_args *a, FN(page) from, int64_t i,
                                  FN(page) to, int64_t j) {
    FN(copy_vectors)(a, from, i, to, j);
    to.attention[j] = from.attention[i];
    to.birth[j] = from.birth[i];
    if (a->merges) to.inverse_norm[j] = from.inverse_norm[i];
}

#include "draft_log.h"

/* The lowest score among the slots [first, last) of a page, and the oldest of those
 * that have it, if they come before `best`. Scores are negated for h2o_highest. */
static inline void FN(find_lowest)(const h2o_decode_args *a, const h2o_slots *r,
                                   FN(page) page, int64_t block, int64_t first,
                                   int64_t last, h2o_lowest *best) {
    float negated[last];
    for (int64_t i = first; i < last; ++i)
        negated[i] = -h2o_score(a, page.attention[i], page.birth[i], r);
    if (h2o_highest(negated + first, last - first, -FLT_MAX) < -best->score) return;
    for (int64_t i = first; i < last; ++i) {
        const float score = -negated[i];
        if (score < best->score ||
            (score == best->score && page.birth[i] < best->birth))
            *best = (h2o_lowest){score, page.birth[i], block * a->block_size + i};
    }
}

/* Scores and births of page b, if it is one of the first `num_blocks`. */
static inline void FN(prefetch_state)(const h2o_decode_args *a, const h2o_slots *r,
                                      int64_t b, int64_t num_blocks) {
    if (b >= num_blocks) return;
    const FN(page) page = FN(page_of)(a, r, b);
    h2o_prefetch(page.attention, a->block_size * sizeof(float));
    h2o_prefetch(page.birth, a->block_size * sizeof(int32_t));
    if (a->read < 1.0) h2o_prefetch(page.bound, a->head_size * sizeof(float));
}

/* What loses is noted in `lost` where losses merge, and of a draft in `log`. */
static void FN(graduate_token)(const h2o_decode_args *a, const h2o_slots *r,
                               h2o_lost *lost, const FN(draft_log) *log) {
    const int64_t bs = a->block_size, num_blocks = (r->heavy_slots + bs - 1) / bs;
    h2o_lowest best = {FLT_MAX, INT32_MAX, -1};
    const int64_t start = a->pinned_slots / bs;
    /* Of a short budget these are all; the processor does not look past the branches. */
    for (int64_t b = start; b < start + H2O_AHEAD; ++b)
        FN(prefetch_state)(a, r, b, num_blocks);
    for (int64_t b = start; b < num_blocks; ++b) {
        const FN(page) page = FN(page_of)(a, r, b);
        FN(prefetch_state)(a, r, b + H2O_AHEAD, num_blocks);
        const int64_t pinned = a->pinned_slots - b * bs, left = r->heavy_slots - b * bs;
        FN(find_lowest)(a, r, page, b, pinned > 0 ? pinned : 0, left < bs ? left : bs,
                        &best);
    }
    FN(page) ring = FN(page_of)(a, r, r->slot / bs);
    const int64_t i = r->slot % bs;
    const float score = h2o_score(a, ring.attention[i], ring.birth[i], r);
    const int wins = best.slot >= 0 && score > best.score;
    const FN(page) losing = wins ? FN(page_of)(a, r, best.slot / bs) : ring;
    const int64_t loser = wins ? best.slot % bs : i;
    if (a->merges) FN(note_loss)(a, losing, loser, lost);
    if (log) FN(log_loss)(a, log, losing, loser, wins ? best.slot : H2O_RING);
    if (!wins) return;
    FN(copy_token)(a, ring, i, losing, loser);
    if (a->read < 1.0) FN(set_bound)(a, losing, bs);
}

static inline float FN(block_score)(const h2o_decode_args *a, const h2o_slots *r,
                                    FN(page) page) {
    float sum = 0.0f;
    for (int64_t i = 0; i < a->block_size; ++i)
        sum += h2o_score(a, page.attention[i], page.birth[i], r);
    return sum;
}

static void FN(graduate_block)(const h2o_decode_args *a, const h2o_slots *r) {
    const int64_t bs = a->block_size;
    float lowest = FLT_MAX;
    int32_t oldest = INT32_MAX;
    int64_t loser = -1;
    for (int64_t b = a->pinned_slots / bs; b < r->heavy_slots / bs; ++b) {
        FN(page) page = FN(page_of)(a, r, b);
        const float score = FN(block_score)(a, r, page);
        if (score < lowest || (score == lowest && page.birth[0] < oldest)) {
            lowest = score;
            oldest = page.birth[0];
            loser = b;
        }
    }
    FN(page) ring = FN(page_of)(a, r, r->slot / bs);
    if (loser < 0 || FN(block_score)(a, r, ring) <= lowest) return;
    FN(page) heavy = FN(page_of)(a, r, loser);
    memcpy(heavy.key, ring.key, bs * a->head_size * sizeof(KV));
    memcpy(heavy.value, ring.value, bs * a->head_size * sizeof(KV));
    memcpy(heavy.attention, ring.attention, bs * sizeof(float));
    memcpy(heavy.birth, ring.birth, bs * sizeof(int32_t));
    if (a->read < 1.0) FN(set_bound)(a, heavy, bs);
}

/* A register tile: `tile` vectors that lie one after another, of which each two are
 * a pair as LOAD_PAIR has them; a tile of one is in order. */
static inline __attribute__((always_inline)) void FN(load_tile)(const KV *from,
                                                                h2o_vec *to,
                                                                const int tile) {
    if (tile == 1)
        to[0] = KV_LOAD(from);
    else
        for (int s = 0; s < tile; s += 2) KV_LOAD_PAIR(from + s * H2O_LANES, to + s);
}

static inline __attribute__((always_inline)) void FN(in_order)(h2o_vec *x,
                                                               const int tile) {
    for (int s = 0; s + 2 <= tile; s += 2) KV_IN_ORDER(x + s);
}

/* In what follows `next` is where the next page is read in place of this one, NULL for
 * nowhere: pages lie anywhere, so that the processor can not foresee it. */

/* rows[r][0..tile vectors) of a tile of slots: `count` queries meet one read of K. */
static inline __attribute__((always_inline)) void FN(dot_tile)(
    const float *restrict query, const KV *restrict key, const KV *next,
    int64_t head_size, int64_t block_size, int64_t stride, float *restrict rows,
    const int count, const int tile) {
    h2o_vec acc[H2O_MEETING][H2O_TILE];
    for (int r = 0; r < count; ++r)
        for (int s = 0; s < tile; ++s) acc[r][s] = (h2o_vec){0};
    for (int64_t d = 0; d < head_size; ++d) {
        h2o_vec k[H2O_TILE];
        FN(load_tile)(key + d * block_size, k, tile);
        if (next) h2o_prefetch(next + d * block_size, tile * H2O_LANES * sizeof(KV));
        for (int r = 0; r < count; ++r)
            for (int s = 0; s < tile; ++s) acc[r][s] += query[r * head_size + d] * k[s];
    }
    for (int r = 0; r < count; ++r) {
        FN(in_order)(acc[r], tile);
        for (int s = 0; s < tile; ++s)
            h2o_store_f32(rows + r * stride + s * H2O_LANES, acc[r][s]);
    }
}

/* The logits of a whole page. */
static inline __attribute__((always_inline)) void FN(dot_page)(
    const float *restrict query, const KV *restrict key, const KV *next,
    int64_t head_size, int64_t block_size, int64_t stride, float *restrict rows,
    const int count) {
    int64_t s = 0;
    for (; s + H2O_TILE * H2O_LANES <= block_size; s += H2O_TILE * H2O_LANES)
        FN(dot_tile)(query, key + s, next ? next + s : NULL, head_size, block_size,
                     stride, rows + s, count, H2O_TILE);
    for (; s < block_size; s += H2O_LANES)
        FN(dot_tile)(query, key + s, next ? next + s : NULL, head_size, block_size,
                     stride, rows + s, count, 1);
}

/* out[g][0..tile vectors) *= keep[g], += sum over slots of probs[g][s] * value[s]. */
static inline __attribute__((always_inline)) void FN(accumulate_tile)(
    const float *restrict probs, const float *restrict keep,
    const KV *restrict value, const KV *next, int64_t head_size,
    int64_t num_slots, int64_t stride, float *restrict out, const int group,
    const int tile) {
    h2o_vec acc[H2O_GROUP][H2O_WIDE_TILE];
    for (int g = 0; g < group; ++g)
        for (int d = 0; d < tile; ++d)
            acc[g][d] = keep[g] * h2o_load_f32(out + g * head_size + d * H2O_LANES);
    for (int64_t s = 0; s < num_slots; ++s) {
        h2o_vec v[H2O_WIDE_TILE];
        FN(load_tile)(value + s * head_size, v, tile);
        for (int d = 0; d < tile; ++d) H2O_IN_REGISTER(v[d]);
        if (next)
            h2o_prefetch(next + s * head_size, tile * H2O_LANES * sizeof(KV));
        for (int g = 0; g < group; ++g)
            for (int d = 0; d < tile; ++d) acc[g][d] += probs[g * stride + s] * v[d];
    }
    for (int g = 0; g < group; ++g)
        for (int d = 0; d < tile; ++d)
            h2o_store_f32(out + g * head_size + d * H2O_LANES, acc[g][d]);
}

/* The tile of head_size that starts at d. */
static inline int FN(tile_at)(int64_t d, int64_t head_size) {
    const int64_t left = (head_size - d) / H2O_LANES;
    return left >= H2O_WIDE_TILE ? H2O_WIDE_TILE : left >= 2 ? 2 : 1;
}

/* The values of a whole page. */
static inline __attribute__((always_inline)) void FN(accumulate_page)(
    const float *restrict probs, const float *restrict keep,
    const KV *restrict value, const KV *next, int64_t head_size,
    int64_t num_slots, int64_t stride, float *restrict out, const int group) {
    for (int64_t d = 0; d < head_size;) {
        const int tile = FN(tile_at)(d, head_size);
        const KV *ahead = next ? next + d : NULL;
        if (tile == H2O_WIDE_TILE)
            FN(accumulate_tile)(probs, keep, value + d, ahead, head_size, num_slots,
                                stride, out + d, group, H2O_WIDE_TILE);
        else if (tile == 2)
            FN(accumulate_tile)(probs, keep, value + d, ahead, head_size, num_slots,
                                stride, out + d, group, 2);
        else
            FN(accumulate_tile)(probs, keep, value + d, ahead, head_size, num_slots,
                                stride, out + d, group, 1);
        d += tile * H2O_LANES;
    }
}

/* Slots of a block that hold a token: all, but for a partly filled sequence and,
 * in whole-block mode, for the ring block that is being rewritten. */
static inline int64_t FN(valid_slots)(const h2o_decode_args *a, const h2o_slots *r,
                                      int64_t block) {
    const int64_t bs = a->block_size;
    if (r->place < r->budget) {
        const int64_t left = r->place + 1 - block * bs;
        return left < bs ? left : bs;
    }
    if (a->whole_blocks && block == r->slot / bs) return r->slot % bs + 1;
    return bs;
}

/* One page of a running softmax: probs[g][0..bs) are e^(logit - highest[g]) with the
 * highest so far, which is kept for each page in `marks`. */
static inline __attribute__((always_inline)) void FN(attend_page)(
    const h2o_decode_args *a, FN(page) page, FN(page) next, int64_t valid,
    int64_t stride, const float *q, float *probs, float *marks, float *out,
    float *sums, const int group, const int losses, h2o_lost *lost) {
    const int64_t bs = a->block_size, hs = a->head_size;
    float keep[H2O_GROUP], weighed[SCALED ? H2O_GROUP * bs : 1];
    FN(dot_page)(q, page.key, next.key, hs, bs, stride, probs, group + losses);
    if (SCALED) {
        h2o_prefetch(next.key_scale, bs * sizeof(float));
        h2o_prefetch(next.value_scale, bs * sizeof(float));
        for (int g = 0; g < group; ++g)
            for (int64_t s = 0; s < bs; ++s) probs[g * stride + s] *= page.key_scale[s];
    }
    if (losses)
        FN(find_nearest)(probs + group * stride, page.inverse_norm, valid, page.value,
                         hs, lost);
    for (int g = 0; g < group; ++g) {
        float *part = probs + g * stride;
        for (int64_t s = valid; s < bs; ++s) part[s] = -FLT_MAX;
        if (a->softcap > 0.0f) h2o_softcap(part, valid, a->softcap);
        const float before = marks[g - H2O_GROUP];
        const float highest = h2o_highest(part, bs, before);
        keep[g] = highest > before ? h2o_exp(before - highest) : 1.0f;
        sums[g] = sums[g] * keep[g] + h2o_exps(part, bs, highest);
        marks[g] = highest;
    }
    for (int g = 0; SCALED && g < group; ++g)
        for (int64_t s = 0; s < bs; ++s)
            weighed[g * bs + s] = probs[g * stride + s] * page.value_scale[s];
    FN(accumulate_page)(SCALED ? weighed : probs, keep, page.value, next.value, hs, valid,
                        SCALED ? bs : stride, out, group);
}

/* attention = attention * decay + what the query heads gave, page by page. */
static inline __attribute__((always_inline)) void FN(add_attention)(
    const h2o_decode_args *a, const h2o_slots *r, float decay, const int64_t *list,
    int64_t num_pages, const float *probs, const float *marks, const float *inverse,
    const int group) {
    const int64_t bs = a->block_size, stride = r->budget;
    const float *highest = marks + (num_pages - 1) * H2O_GROUP;
    for (int64_t b = 0; b < num_pages; ++b, marks += H2O_GROUP) {
        const int64_t soon = b + H2O_AHEAD < num_pages ? b + H2O_AHEAD : b;
        h2o_prefetch(FN(page_of)(a, r, list[soon]).attention, bs * sizeof(float));
        float *restrict attention = FN(page_of)(a, r, list[b]).attention;
        const int64_t valid = FN(valid_slots)(a, r, list[b]);
        const float *restrict part = probs + b * bs;
        float weight[H2O_GROUP];
        for (int g = 0; g < group; ++g)
            weight[g] = inverse[g] * h2o_exp(marks[g] - highest[g]);
        for (int64_t s = 0; s < valid; ++s) {
            float received = 0.0f;
            for (int g = 0; g < group; ++g) received += part[g * stride + s] * weight[g];
            attention[s] = attention[s] * decay + received;
        }
    }
}

/* The output of `group` query heads of a KV head, from accumulators in tiles. */
static inline void FN(write_output)(const float *restrict out, const float *inverse,
                                    int64_t head_size, int group, ELEM *output) {
    for (int g = 0; g < group; ++g)
        for (int64_t d = 0; d < head_size;) {
            const int tile = FN(tile_at)(d, head_size);
            h2o_vec x[H2O_WIDE_TILE];
            for (int i = 0; i < tile; ++i)
                x[i] = inverse[g] * h2o_load_f32(out + g * head_size + d + i * H2O_LANES);
            FN(in_order)(x, tile);
            for (int i = 0; i < tile * H2O_LANES; ++i)
                output[g * head_size + d + i] =
                    FROM_F32(x[i / H2O_LANES][i % H2O_LANES]);
            d += tile * H2O_LANES;
        }
}

static inline __attribute__((always_inline)) void FN(attend)(
    const h2o_decode_args *a, const h2o_slots *r, float decay, const int64_t *list,
    int64_t num_pages, const ELEM *query, ELEM *output, const float *sinks,
    float *scratch, const int group, const int losses, h2o_lost *lost) {
    const int64_t bs = a->block_size, hs = a->head_size, stride = r->budget;
    const int rows = group + losses;
    float *probs = scratch; /* [rows][budget] */
    float *marks = probs + rows * stride + H2O_GROUP; /* [num_pages][H2O_GROUP] */
    float *q = marks + num_pages * H2O_GROUP;
    float *out = q + rows * hs;
    float sums[H2O_GROUP] = {0};
    for (int g = 0; g < H2O_GROUP; ++g) marks[g - H2O_GROUP] = -FLT_MAX;
    for (int g = 0; sinks && g < group; ++g) { /* as if a token had come before */
        marks[g - H2O_GROUP] = sinks[g];
        sums[g] = 1.0f;
    }
    for (int64_t i = 0; i < group * hs; ++i) {
        q[i] = TO_F32(query[i]) * a->scale;
        out[i] = 0.0f;
    }
    if (losses) memcpy(q + group * hs, lost->key, hs * sizeof(float));
    FN(page) page = FN(page_of)(a, r, list[0]);
    for (int64_t b = 0; b < num_pages; ++b) {
        const FN(page) next = FN(page_of)(a, r, list[b + 1 < num_pages ? b + 1 : b]);
        FN(attend_page)(a, page, next, FN(valid_slots)(a, r, list[b]), stride, q,
                        probs + b * bs, marks + b * H2O_GROUP, out, sums, group,
                        losses, lost);
        page = next;
    }
    float inverse[H2O_GROUP];
    for (int g = 0; g < group; ++g) inverse[g] = 1.0f / sums[g];
    if (H2O_SCORES(r))
        FN(add_attention)(a, r, decay, list, num_pages, probs, marks, inverse, group);
    FN(write_output)(out, inverse, hs, group, output);
}

#define ATTEND(group, losses, lost) \
    FN(attend)(a, r, decay, list, num_pages, query, output, sinks, scratch, group, \
               losses, lost)

/* The first `left` query heads, up to H2O_GROUP. */
static void FN(attend_alone)(const h2o_decode_args *a, const h2o_slots *r, float decay,
                             const int64_t *list, int64_t num_pages, const ELEM *query,
                             ELEM *output, const float *sinks, float *scratch,
                             int64_t left) {
    switch (left) {
        case 1: ATTEND(1, 0, NULL); break;
        case 2: ATTEND(2, 0, NULL); break;
        case 3: ATTEND(3, 0, NULL); break;
        default: ATTEND(4, 0, NULL);
    }
}

/* The same, and the kept key that is nearest to what was lost. */
static void FN(attend_merging)(const h2o_decode_args *a, const h2o_slots *r, float decay,
                               const int64_t *list, int64_t num_pages,
                               const ELEM *query, ELEM *output, const float *sinks,
                               float *scratch, int64_t left, h2o_lost *lost) {
    switch (left) {
        case 1: ATTEND(1, 1, lost); break;
        case 2: ATTEND(2, 1, lost); break;
        case 3: ATTEND(3, 1, lost); break;
        default: ATTEND(4, 1, lost);
    }
}
#undef ATTEND

/* The new token into its slot. */
static void FN(write)(const h2o_decode_args *a, const h2o_slots *r, const ELEM *key,
                      const ELEM *value) {
    const int64_t bs = a->block_size, i = r->slot % bs;
    FN(page) page = FN(page_of)(a, r, r->slot / bs);
    FN(put_vectors)(a, page, i, key, 1, value);
    if (!H2O_SCORES(r)) return; /* it stays dense: its pages may have no state */
    page.attention[i] = 0.0f;
    page.birth[i] = (int32_t)r->position;
    if (a->merges) FN(set_norm)(a, page, i);
    if (a->read < 1.0 && r->slot < r->heavy_slots) FN(set_bound)(a, page, i + 1);
}

/* One token of the batch, of a row that is no padding. */
static void FN(decode_token)(const h2o_decode_args *a, const h2o_slots *r,
                             int64_t token, const FN(draft_log) *log, float *scratch) {
    const int64_t bs = a->block_size, hs = a->head_size, head = r->head;
    const int64_t group = a->num_heads / a->num_kv_heads;
    int64_t *list = (int64_t *)scratch; /* [budget / block_size] */
    scratch += 2 * (a->largest_budget / bs);
    h2o_lost lost = {.key = scratch, .value = scratch + hs, .cosine = -FLT_MAX};
    if (a->merges) scratch += 2 * hs;
    const int merging = H2O_TRACKS && a->merges && r->place >= r->budget;
    if (log) FN(log_attention)(a, r, log);
    if (H2O_TRACKS && r->place >= r->budget) {
        if (!a->whole_blocks)
            FN(graduate_token)(a, r, &lost, log);
        else if (r->place % bs == 0)
            FN(graduate_block)(a, r);
    }
    FN(write)(a, r, (const ELEM *)a->key + token * a->key_stride + head * hs,
              (const ELEM *)a->value + token * a->value_stride + head * hs);
    const ELEM *query =
        (const ELEM *)a->query + token * a->query_stride + head * group * hs;
    ELEM *output = (ELEM *)a->output + token * a->output_stride + head * group * hs;
    const int64_t num_pages = FN(list_pages)(a, r, query, group, list, scratch);
    if (a->read < 1.0 && H2O_SCORES(r) && a->score_decay != 1.0f)
        FN(decay_unread)(a, r, list);
    float decay = a->score_decay;
    for (int64_t g = 0; g < group; g += H2O_GROUP) {
        const ELEM *q = query + g * hs;
        ELEM *o = output + g * hs;
        const float *z = a->sink_logits ? a->sink_logits + head * group + g : NULL;
        if (merging && g == 0)
            FN(attend_merging)(a, r, decay, list, num_pages, q, o, z, scratch, group,
                               &lost);
        else
            FN(attend_alone)(a, r, decay, list, num_pages, q, o, z, scratch, group - g);
        decay = 1.0f; /* old attention decays once per query, not per group */
    }
    if (merging) FN(merge)(a, FN(page_of)(a, r, 0), &lost);
}

/* The new tokens of a row, in turn. */
static void FN(step)(const h2o_decode_args *a, int64_t row, int64_t head,
                     float *scratch) {
    const int64_t size = a->num_heads / a->num_kv_heads * a->head_size;
    const int64_t first = a->starts ? a->starts[row] : row;
    for (int64_t draft = 0; draft < h2o_count_of(a, row); ++draft) {
        const int64_t token = first + draft;
        if (a->positions[row] < 0) { /* padding */
            ELEM *output = (ELEM *)a->output + token * a->output_stride + head * size;
            memset(output, 0, size * sizeof(ELEM));
            continue;
        }
        const h2o_slots r = h2o_slots_of(a, row, head, draft);
        if (!a->log_losers || !draft || !H2O_SCORES(&r)) {
            FN(decode_token)(a, &r, token, NULL, scratch);
            continue;
        }
        const FN(draft_log) log = FN(log_of)(a, row, draft, head);
        FN(decode_token)(a, &r, token, &log, scratch);
    }
}

int NAME(const h2o_decode_args *a) {
    const int64_t items = a->num_rows * a->num_kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(a->num_threads)
    {
        float *scratch =
            malloc(sizeof(float) * (H2O_GROUP + 1) *
                   (a->largest_budget + 2 * (a->largest_budget / a->block_size) + 1 +
                    3 * a->head_size));
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
        /* The longest work first: what is begun last is what the others wait for. */
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < items; ++i) {
            int64_t row = i / a->num_kv_heads, head = i % a->num_kv_heads;
            if (a->head_order) {
                row = i % a->num_rows;
                head = a->head_order[h2o_placement_of(a, row) * a->num_kv_heads +
                                     i / a->num_rows];
            }
            if (scratch) FN(step)(a, row, head, scratch);
        }
        free(scratch);
    }
    return failed;
}

int TAKE_BACK(const h2o_decode_args *a, int64_t num_layers) {
    const int64_t items = a->num_rows * a->num_kv_heads;
#pragma omp parallel for num_threads(a->num_threads) schedule(dynamic)
    for (int64_t i = 0; i < num_layers * items; ++i)
        FN(take_back_row)(a + i / items, i % items / a->num_kv_heads,
                          i % a->num_kv_heads);
    return 0;
}

/* Tokens positions[0..count), which are in one page of the source, to consecutive slots
 * of a page, the first of them `to_slot`. */
static inline void FN(gather_tokens)(const h2o_transition_args *c, int64_t head,
                                     const int64_t *positions, int64_t count,
                                     FN(page) to, int64_t to_slot) {
    const h2o_decode_args *a = &c->target;
    const int64_t from_bs = c->source_block_size, hs = a->head_size;
    char *base = (char *)c->source_cache;
    base += c->source_blocks[positions[0] / from_bs] * c->source_page_stride;
    if (c->in_place) {
        const FN(page) from = FN(page_at)(a, base, head);
        for (int64_t t = 0; t < count; ++t)
            FN(copy_vectors)(a, from, positions[t] % from_bs, to, to_slot + t);
        return;
    }
    const ELEM *keys = (const ELEM *)base + head * 2 * from_bs * hs;
    const ELEM *values = keys + from_bs * hs;
    for (int64_t t = 0; t < count; ++t) {
        const int64_t i = positions[t] % from_bs;
        FN(put_vectors)(a, to, to_slot + t, keys + i, from_bs, values + i * hs);
    }
}

/* Their attention and births, into `to`. */
static inline void FN(set_state)(const h2o_transition_args *c, int64_t head,
                                 const int64_t *positions, int64_t count,
                                 FN(page) to, int64_t to_slot) {
    const float *attention = c->attention + head * c->num_tokens;
    for (int64_t t = 0; t < count; ++t) {
        to.attention[to_slot + t] = attention[positions[t]];
        to.birth[to_slot + t] = (int32_t)positions[t];
    }
}

/* Keys and values of a page of one head, one such page after another. */
static inline int64_t FN(staged_bytes)(const h2o_decode_args *a) {
    const int64_t scales = SCALED ? 2 * sizeof(float) : 0;
    return a->block_size * (2 * a->head_size * sizeof(KV) + scales);
}

/* Where they are; `to` but for these. */
static inline FN(page) FN(staged_page)(const h2o_decode_args *a, char *staged,
                                       int64_t number, FN(page) to) {
    to.key = (KV *)(staged + number * FN(staged_bytes)(a));
    to.value = to.key + a->block_size * a->head_size;
    to.key_scale = (float *)(to.value + a->block_size * a->head_size);
    to.value_scale = to.key_scale + a->block_size;
    return to;
}

/* Such pages to where a head has them. */
static inline void FN(unstage)(const h2o_decode_args *a, const h2o_slots *target,
                               char *staged, int64_t num_pages) {
    const int64_t bs = a->block_size, half = bs * a->head_size * sizeof(KV);
    for (int64_t number = 0; number < num_pages; ++number) {
        const FN(page) to = FN(page_of)(a, target, number);
        const FN(page) from = FN(staged_page)(a, staged, number, to);
        memcpy(to.key, from.key, half);
        memcpy(to.value, from.value, half);
        if (!SCALED) continue;
        memcpy(to.key_scale, from.key_scale, bs * sizeof(float));
        memcpy(to.value_scale, from.value_scale, bs * sizeof(float));
    }
}

/* Of the heavy set's pages, of which the first `count` slots are held. */
static inline void FN(set_bounds)(const h2o_decode_args *a, const h2o_slots *target,
                                  int64_t count) {
    const int64_t bs = a->block_size;
    const int64_t heavy = count < target->heavy_slots ? count : target->heavy_slots;
    for (int64_t s = 0; s < heavy; s += bs)
        FN(set_bound)(a, FN(page_of)(a, target, s / bs),
                      heavy - s < bs ? heavy - s : bs);
}

/* Chosen tokens of row 0 into its slots, by its placement. In place these
 * lie in the very pages that tokens leave, so that all are read before one is
 * written; there a head keeps all, which are where they belong, or fills its pages. */
static int FN(copy_kept_head)(const h2o_transition_args *c, int64_t head) {
    const h2o_decode_args *a = &c->target;
    const int64_t bs = a->block_size;
    const int64_t *positions = c->positions + head * c->most;
    const int64_t *slots = c->slots + head * c->most;
    const h2o_slots target = h2o_slots_of(a, 0, head, 0);
    int64_t count = 0, piece;
    while (count < c->most && positions[count] >= 0) ++count;
    const int stays = c->in_place && count == c->num_tokens;
    const int64_t num_pages = c->in_place && !stays ? count / bs : 0;
    char *staged = num_pages ? malloc(num_pages * FN(staged_bytes)(a)) : NULL;
    if (num_pages && !staged) return 1;
    for (int64_t t = 0; t < count; t += piece) {
        const int64_t number = slots[t] / bs, i = slots[t] % bs;
        FN(page) to = FN(page_of)(a, &target, number);
        piece = h2o_piece(positions, slots, t, count, c->source_block_size, bs);
        FN(set_state)(c, head, positions + t, piece, to, i);
        if (staged) to = FN(staged_page)(a, staged, number, to);
        if (!stays) FN(gather_tokens)(c, head, positions + t, piece, to, i);
    }
    FN(unstage)(a, &target, staged, num_pages);
    free(staged);
    for (int64_t t = 0; a->merges && t < count; ++t)
        FN(set_norm)(a, FN(page_of)(a, &target, slots[t] / bs), slots[t] % bs);
    if (a->read < 1.0) FN(set_bounds)(a, &target, count);
    return 0;
}

int COPY_KEPT(const h2o_transition_args *c, int64_t num_layers) {
    const int64_t heads = c->target.num_kv_heads;
    int failed = 0;
#pragma omp parallel for num_threads(c->target.num_threads) \
    reduction(| : failed) schedule(dynamic)
    for (int64_t i = 0; i < num_layers * heads; ++i)
        failed |= FN(copy_kept_head)(c + i / heads, i % heads);
    return failed;
}

/* A token between its slot and the place of index t in `staged`, which is a page of
 * one head with `count` slots whose keys are rows. */
static inline void FN(move_staged)(const h2o_decode_args *a, FN(page) page, int64_t i,
                                   FN(page) staged, int64_t t, const int back) {
    const int64_t bs = a->block_size, hs = a->head_size;
    KV *key = staged.key + t * hs, *value = staged.value + t * hs;
    if (back) {
        for (int64_t d = 0; d < hs; ++d) page.key[d * bs + i] = key[d];
        memcpy(page.value + i * hs, value, hs * sizeof(KV));
        if (SCALED) page.key_scale[i] = staged.key_scale[t];
        if (SCALED) page.value_scale[i] = staged.value_scale[t];
        page.attention[i] = staged.attention[t];
        page.birth[i] = staged.birth[t];
        if (a->merges) page.inverse_norm[i] = staged.inverse_norm[t];
        return;
    }
    for (int64_t d = 0; d < hs; ++d) key[d] = page.key[d * bs + i];
    memcpy(value, page.value + i * hs, hs * sizeof(KV));
    if (SCALED) staged.key_scale[t] = page.key_scale[i];
    if (SCALED) staged.value_scale[t] = page.value_scale[i];
    staged.attention[t] = page.attention[i];
    staged.birth[t] = page.birth[i];
    if (a->merges) staged.inverse_norm[t] = page.inverse_norm[i];
}

/* The tokens of a full ring, whose next one would be written over the oldest. */
static int FN(rotate_ring)(const h2o_decode_args *a, const h2o_slots *r) {
    const int64_t bs = a->block_size, hs = a->head_size;
    const int64_t count = r->budget - r->heavy_slots, oldest = r->slot - r->heavy_slots;
    float *state = malloc(count * (2 * hs * sizeof(KV) + 5 * sizeof(float)));
    if (!state) return 1;
    FN(page) staged = {.attention = state,
                       .birth = (int32_t *)(state + count),
                       .inverse_norm = state + 2 * count,
                       .key_scale = state + 3 * count,
                       .value_scale = state + 4 * count,
                       .key = (KV *)(state + 5 * count)};
    staged.value = staged.key + count * hs;
    for (int back = 0; back < 2; ++back)
        for (int64_t t = 0; t < count; ++t) {
            const int64_t s = r->heavy_slots + (back ? t : (oldest + t) % count);
            FN(move_staged)(a, FN(page_of)(a, r, s / bs), s % bs, staged, t, back);
        }
    free(state);
    return 0;
}

/* Of row 0. The ring's pages join the heavy set when the budget grows, and get their
 * bounds here. */
static int FN(order_ring)(const h2o_decode_args *a, int64_t head) {
    const int64_t bs = a->block_size;
    const h2o_slots slots = h2o_slots_of(a, 0, head, 0), *r = &slots;
    const int64_t held = r->place < r->budget ? r->place : r->budget;
    if (held == r->budget && FN(rotate_ring)(a, r)) return 1;
    for (int64_t b = r->heavy_slots / bs; a->read < 1.0 && b * bs < held; ++b)
        FN(set_bound)(a, FN(page_of)(a, r, b), held - b * bs < bs ? held - b * bs : bs);
    return 0;
}

int ORDER_RINGS(const h2o_transition_args *c, int64_t num_layers) {
    const int64_t heads = c->target.num_kv_heads;
    int failed = 0;
#pragma omp parallel for num_threads(c->target.num_threads) \
    reduction(| : failed) schedule(dynamic)
    for (int64_t i = 0; i < num_layers * heads; ++i)
        failed |= FN(order_ring)(&c[i / heads].target, i % heads);
    return failed;
}
