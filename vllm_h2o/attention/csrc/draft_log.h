/* What drafts change in a KV head's slots, and how it is undone; included by decode.h per
 * element type.
 *
 * Reference: vllm_h2o/attention/ops/reference.py::take_back.
 */

/* Of one draft, as DraftLog has it. */
typedef struct {
    KV *key, *value; /* [head_size] of the token that it displaced for good */
    float *scales;   /* [2], where they are rounded */
    int32_t *birth, *loser;
    float *attention; /* [log_slots] before the draft */
} FN(draft_log);

/* `draft` counts from 1. */
static inline FN(draft_log) FN(log_of)(const h2o_decode_args *a, int64_t row,
                                       int64_t draft, int64_t head) {
    const int64_t hs = a->head_size;
    const int64_t at = (row * a->most_drafts + draft - 1) * a->num_kv_heads + head;
    return (FN(draft_log)){.key = (KV *)a->log_keys + at * hs,
                           .value = (KV *)a->log_values + at * hs,
                           .scales = a->log_scales + 2 * at,
                           .birth = a->log_births + at,
                           .loser = a->log_losers + at,
                           .attention = a->log_attention + at * a->log_slots};
}

/* The attention of the slots that hold a token before the draft, to the log or back. */
static inline void FN(copy_attention)(const h2o_decode_args *a, const h2o_slots *r,
                                      const FN(draft_log) *log, const int back) {
    const int64_t bs = a->block_size;
    const int64_t held = r->place < r->budget ? r->place : r->budget;
    for (int64_t s = 0; s < held; s += bs) {
        float *attention = FN(page_of)(a, r, s / bs).attention;
        const int64_t size = (held - s < bs ? held - s : bs) * sizeof(float);
        if (back)
            memcpy(attention, log->attention + s, size);
        else
            memcpy(log->attention + s, attention, size);
    }
}

static inline void FN(log_attention)(const h2o_decode_args *a, const h2o_slots *r,
                                     const FN(draft_log) *log) {
    *log->loser = H2O_NOTHING;
    FN(copy_attention)(a, r, log, 0);
}

/* The token in slot i of a page is about to be lost; `loser` is as DraftLog has it. */
static void FN(log_loss)(const h2o_decode_args *a, const FN(draft_log) *log,
                         FN(page) page, int64_t i, int64_t loser) {
    const int64_t bs = a->block_size, hs = a->head_size;
    *log->loser = (int32_t)loser;
    *log->birth = page.birth[i];
    for (int64_t d = 0; d < hs; ++d) log->key[d] = page.key[d * bs + i];
    memcpy(log->value, page.value + i * hs, hs * sizeof(KV));
    if (!SCALED) return;
    log->scales[0] = page.key_scale[i];
    log->scales[1] = page.value_scale[i];
}

/* The inverse of graduation, but for attention. */
static void FN(undo_draft)(const h2o_decode_args *a, const h2o_slots *r,
                           const FN(draft_log) *log) {
    const int64_t bs = a->block_size, hs = a->head_size, loser = *log->loser;
    if (loser == H2O_NOTHING) return;
    FN(page) page = FN(page_of)(a, r, r->slot / bs);
    int64_t i = r->slot % bs;
    if (loser != H2O_RING) {
        const FN(page) heavy = FN(page_of)(a, r, loser / bs);
        FN(copy_token)(a, heavy, loser % bs, page, i);
        page = heavy;
        i = loser % bs;
    }
    page.birth[i] = *log->birth;
    for (int64_t d = 0; d < hs; ++d) page.key[d * bs + i] = log->key[d];
    memcpy(page.value + i * hs, log->value, hs * sizeof(KV));
    if (!SCALED) return;
    page.key_scale[i] = log->scales[0];
    page.value_scale[i] = log->scales[1];
}

/* The last `refused` tokens of a row, newest first. */
static void FN(take_back_row)(const h2o_decode_args *a, int64_t row, int64_t head) {
    const int64_t count = h2o_count_of(a, row), first = count - a->refused[row];
    if (first == count || a->positions[row] < 0) return;
    const h2o_slots oldest = h2o_slots_of(a, row, head, first);
    if (!H2O_SCORES(&oldest)) return; /* it stays dense */
    for (int64_t draft = count - 1; draft >= first; --draft) {
        const h2o_slots r = h2o_slots_of(a, row, head, draft);
        const FN(draft_log) log = FN(log_of)(a, row, draft, head);
        FN(undo_draft)(a, &r, &log);
    }
    const FN(draft_log) log = FN(log_of)(a, row, first, head);
    FN(copy_attention)(a, &oldest, &log, 1);
}
