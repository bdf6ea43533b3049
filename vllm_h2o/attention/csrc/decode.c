/* The CPU kernels: decode.h has those of resident rows and the layout of a page,
 * observe.h and gate.h those that score prompts, select.h the choice of what stays. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

/* Query heads that share one read of K and V, and vectors per register tile, of
 * keys and, where there are enough registers, of values. */
#define H2O_GROUP 4
#define H2O_TILE 2
#define H2O_WIDE_TILE (H2O_LANES / 4)
/* Pages between the prefetch of their attention and births and the search in them. */
#define H2O_AHEAD 8
/* Prompt rows (a query head of a query) that share one read of K, and the bytes of
 * their logits that a thread holds at a time: about half an L2 cache. */
#define H2O_ROWS (H2O_LANES / 2) /* with K and q they fill the registers */
#define H2O_SCRATCH_BYTES (512 * 1024)

/* benchmarks/kernel.py builds a variant without scoring and graduation. */
#ifdef H2O_BARE
#define H2O_TRACKS 0
#else
#define H2O_TRACKS 1
#endif

/* Queries that meet one read of K: those of the group, and a lost key (merge.h). */
#define H2O_MEETING (H2O_ROWS > H2O_GROUP ? H2O_ROWS : H2O_GROUP + 1)
/* Weight of the newest loss in the running threshold, see policy/merging.py. */
#define H2O_NEWEST_SHARE 0.7f
/* A key or value is no shorter, see policy/gate.py. */
#define H2O_LEAST_NORM 1e-6f
/* Weight of a page's highest keys beside its lowest, see policy/sparse_read.py. */
#define H2O_HIGHEST_SHARE 0.6f

/* Mirrored by vllm_h2o/attention/ops/cpu.py. Strides of pages in bytes, of the
 * others in elements. */
typedef struct {
    const void *query;            /* [num_tokens, num_heads, head_size] */
    const void *key;              /* [num_tokens, num_kv_heads, head_size] */
    const void *value;            /* [num_tokens, num_kv_heads, head_size] */
    void *output;                 /* [num_tokens, num_heads, head_size] */
    void *cache;                  /* page of block 0 */
    const int32_t *block_table;   /* [num_rows, budget_blocks] */
    const int64_t *positions;     /* [num_rows] position of the first new token */
    const int64_t *first_queries; /* [num_rows] first query that scores */
    const int32_t *placements;    /* [num_rows] in the tables below; NULL: all 0 */
    const int64_t *grown_at;      /* [num_rows] tokens when a row's budget last grew */
    /* How heads split slots, by placement; all NULL for none. Of 0 only the order and
     * what has grown are read: there all have `budget` and `heavy_slots`, in blocks of
     * their own. */
    const int64_t *head_sizes;    /* [.][num_kv_heads][3] budget, heavy slots, the
                                   * budget before it grew to this one */
    const int64_t *head_offsets;  /* [.][num_kv_heads][head_blocks] see h2o_slots */
    const int32_t *head_columns;  /* [.][num_kv_heads][head_blocks] */
    const int64_t *head_order;    /* [.][num_kv_heads] the largest budget first */
    const float *sink_logits;     /* [num_heads]; NULL: there are no sinks */
    const int32_t *counts;        /* [num_rows] new tokens; NULL: one of each row */
    const int32_t *starts;        /* [num_rows] the first of them among the batch's */
    const int32_t *refused;       /* [num_rows] the last of them, to be taken back */
    /* What drafts change, as DraftLog has it: [num_rows][most_drafts][num_kv_heads]
     * of each; all NULL: nothing is noted. */
    void *log_keys, *log_values;  /* [head_size] */
    float *log_scales;            /* [2], where they are rounded */
    int32_t *log_births, *log_losers;
    float *log_attention;         /* [log_slots] */
    int64_t num_rows, num_heads, num_kv_heads, head_size, block_size;
    int64_t query_stride, key_stride, value_stride, output_stride;
    int64_t block_table_stride, page_stride, page_bytes, state_offset;
    int64_t most_drafts, log_slots;
    int64_t budget, heavy_slots, pinned_slots, head_blocks, largest_budget;
    int64_t whole_blocks, score_mean, merges, num_threads;
    float scale, softcap, score_decay;
    double read; /* share of the heavy set's pages that a scoring query reads */
} h2o_decode_args;

/* Mirrored likewise: what one layer keeps of a request's tokens, and their copies
 * between its blocks. Its slots are those of the only row of `target`, which has no
 * query. */
typedef struct {
    h2o_decode_args target;
    const int32_t *source_blocks; /* [.] of position p: [p / source_block_size] */
    const void *source_cache;     /* page of block 0 */
    int64_t *positions; /* [num_kv_heads][most] chosen, -1 past a head's own */
    int64_t *slots;     /* where they go, ascending or once around a ring */
    const float *attention; /* [num_kv_heads][num_tokens] */
    int64_t source_block_size, source_page_stride;
    int64_t num_tokens, most, pooling, in_place;
} h2o_transition_args;

/* Mirrored likewise: consecutive queries over the dense pages of one request, of
 * which those before `first_scoring` only attend. */
typedef struct {
    const void *query;     /* [num_queries][num_heads][head_size] */
    const void *cache;     /* page of block 0 */
    const int32_t *blocks; /* block of position p: [p / block_size] */
    float *attention;         /* [num_kv_heads][>= first_position + num_queries] */
    void *output;          /* like query; NULL: not asked for */
    const float *sink_logits; /* [num_heads]; NULL: there are no sinks */
    int64_t num_queries, num_heads, num_kv_heads, head_size, block_size;
    int64_t query_stride, output_stride, attention_stride, page_stride;
    int64_t first_position, first_scoring, num_threads;
    float scale, softcap, score_decay;
} h2o_observe_args;

/* Mirrored likewise: the dense pages of a request in one layer, and what says how much
 * attention their tokens will get. The same request in all layers. */
typedef struct {
    const void *cache;     /* page of block 0 */
    const int32_t *blocks; /* block of position p: [p / block_size] */
    const float *weights;  /* [num_kv_heads][2 * head_size + 4] */
    const void *angles;    /* [num_positions][rotary_dim] cosines, then sines */
    float *attention;         /* [num_kv_heads][num_tokens] */
    int64_t num_tokens, first_query, group, num_kv_heads, head_size, block_size;
    int64_t page_stride, num_positions, rotary_dim; /* 0: keys are not rotated */
    int64_t neox, unknown, floats, num_threads; /* floats: the angles are, not ELEMs */
} h2o_gate_args;

/* The slots of one KV head of one row. Its i-th page is in the resident block
 * column[i], offset[i] bytes from this layer's: another layer may lend it. */
typedef struct {
    const int32_t *blocks;
    const int64_t *offset; /* NULL: the own page of block i */
    const int32_t *column;
    int64_t head, budget, heavy_slots;
    int64_t position, first_query;
    int64_t place, slot; /* the place in the order of slots: policy/layout.py::place_of */
} h2o_slots;

/* Whether the row's query scores. */
#define H2O_SCORES(r) (H2O_TRACKS && (r)->position >= (r)->first_query)

/* The index of the row's placement. */
static inline int64_t h2o_placement_of(const h2o_decode_args *a, int64_t row) {
    return a->placements ? a->placements[row] : 0;
}

/* For the row's new token of index `draft`. */
static inline h2o_slots h2o_slots_of(const h2o_decode_args *a, int64_t row,
                                     int64_t head, int64_t draft) {
    h2o_slots r = {.blocks = a->block_table + row * a->block_table_stride,
                   .head = head,
                   .budget = a->budget,
                   .heavy_slots = a->heavy_slots,
                   .position = a->positions[row] + draft,
                   .place = a->positions[row] + draft,
                   .first_query = a->first_queries[row]};
    const int64_t placement = h2o_placement_of(a, row);
    const int64_t at = placement * a->num_kv_heads + head;
    const int64_t *sizes = a->head_sizes + 3 * at;
    if (placement) {
        r.budget = sizes[0];
        r.heavy_slots = sizes[1];
        r.offset = a->head_offsets + at * a->head_blocks;
        r.column = a->head_columns + at * a->head_blocks;
    }
    const int64_t grown_at = a->grown_at ? a->grown_at[row] : 0;
    if (grown_at) r.place -= grown_at - (grown_at < sizes[2] ? grown_at : sizes[2]);
    r.slot = r.place < r.heavy_slots
                 ? r.place
                 : r.heavy_slots +
                       (r.place - r.heavy_slots) % (r.budget - r.heavy_slots);
    return r;
}

/* The row's new tokens. */
static inline int64_t h2o_count_of(const h2o_decode_args *a, int64_t row) {
    return a->counts ? a->counts[row] : 1;
}

/* In place of a slot among the losers: the ring's token was lost, or none was. */
#define H2O_RING -1
#define H2O_NOTHING -2

typedef struct {
    float score;
    int32_t birth;
    int64_t slot; /* -1: none yet */
} h2o_lowest;

/* A token that was dropped, and the kept one with the most similar key so far. */
typedef struct {
    float *key, *value; /* [head_size]; the key of length 1 */
    float cosine;
    void *nearest; /* its value, [head_size] */
} h2o_lost;

/* Ask for `bytes` from `from` on: into the second-level cache, because the few loads
 * that the first level can have under way are needed for what is read now. */
#define H2O_TO_L2 2
static inline void h2o_prefetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
        const char *line = (const char *)from + i;
#if defined(__x86_64__)
        /* gcc 12 loses the builtin in some loops, as in those of bfloat16. */
        __asm__ volatile("prefetcht1 %0" : : "m"(*line));
#else
        __builtin_prefetch(line, 0, H2O_TO_L2);
#endif
    }
}

/* Steps of a scale, see policy/quantization.py. */
static inline int8_t h2o_quantized(float x, float scale) {
    const float steps = rintf(x / scale);
    if (!(scale > 0.0f) || steps != steps) return 0;
    return (int8_t)(steps > 127.0f ? 127.0f : steps < -127.0f ? -127.0f : steps);
}

/* e^x for x <= 0, relative error below 3e-7; vectorizes. */
static inline float h2o_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return y * power.f;
}

/* log(x) of normal x > 0, error below 2e-7 of it or of 1; vectorizes. The polynomial is
 * that of Cephes' logf. */
static inline float h2o_log(float x) {
    union { float f; int32_t i; } bits = {x};
    /* x = 2^n (1 + r) with 1 + r from sqrt(1/2) to sqrt(2). */
    const int32_t n = (bits.i - 0x3F3504F3) >> 23;
    bits.i -= n * (1 << 23);
    const float r = bits.f - 1.0f, e = (float)n;
    float y = 7.0376836292e-2f;
    y = y * r - 1.1514610310e-1f;
    y = y * r + 1.1676998740e-1f;
    y = y * r - 1.2420140846e-1f;
    y = y * r + 1.4249322787e-1f;
    y = y * r - 1.6668057665e-1f;
    y = y * r + 2.0000714765e-1f;
    y = y * r - 2.4999993993e-1f;
    y = y * r + 3.3333331174e-1f;
    y = y * r * r * r + e * -2.12194440e-4f - 0.5f * r * r;
    return r + y + e * 0.693359375f;
}

/* The length of a key or value to divide by; in full, since fmaxf does not vectorize. */
static inline float h2o_at_least_a_norm(float x) {
    return x > H2O_LEAST_NORM ? x : H2O_LEAST_NORM;
}

/* What tokens are compared by: their attention, or its mean per query that saw it. */
static inline float h2o_score(const h2o_decode_args *a, float attention, int32_t birth,
                              const h2o_slots *r) {
    if (!a->score_mean) return attention;
    const int32_t first_query = (int32_t)r->first_query;
    const int32_t seen_since = birth > first_query ? birth : first_query;
    return attention / (float)((int32_t)r->position - seen_since);
}

static inline float h2o_bf16_to_f32(uint16_t x) {
    union { uint32_t i; float f; } bits = {(uint32_t)x << 16};
    return bits.f;
}

static inline uint16_t h2o_f32_to_bf16(float x) { /* round to nearest even */
    union { float f; uint32_t i; } bits = {x};
    return (uint16_t)((bits.i + 0x7FFFu + ((bits.i >> 16) & 1u)) >> 16);
}

/* cap * tanh(x / cap) for each x; absolute error below cap * 3e-7; vectorizes. */
static inline void h2o_softcap(float *x, int64_t count, float cap) {
    for (int64_t i = 0; i < count; ++i) {
        const float e = h2o_exp(-2.0f * fabsf(x[i]) / cap);
        x[i] = copysignf(cap * (1.0f - e) / (1.0f + e), x[i]);
    }
}

/* Tokens from the t-th on that come from one page and go to consecutive slots of one. */
static inline int64_t h2o_piece(const int64_t *positions, const int64_t *slots,
                                int64_t t, int64_t count, int64_t from_size,
                                int64_t to_size) {
    const int64_t page = positions[t] / from_size;
    int64_t end = t + 1;
    while (end < count && positions[end] / from_size == page &&
           slots[end] == slots[end - 1] + 1 && slots[end] % to_size)
        ++end;
    return end - t;
}

static inline int64_t h2o_round_up(int64_t x, int64_t unit) {
    return (x + unit - 1) / unit * unit;
}

/* Floats from a row of prompt logits to the next: whole pages, and a cache line
 * more, since rows a power of two apart would fall into the same cache set. */
static inline int64_t h2o_logits_stride(const h2o_observe_args *a) {
    return h2o_round_up(a->first_position + a->num_queries, a->block_size) + 16;
}

/* Rows of prompt logits that fit H2O_SCRATCH_BYTES, whole register tiles; no more
 * than what leaves a tile for every thread. */
static inline int64_t h2o_tile_rows(const h2o_observe_args *a) {
    const int64_t all = a->num_queries * (a->num_heads / a->num_kv_heads);
    const int64_t share = h2o_round_up((all + a->num_threads - 1) / a->num_threads,
                                       H2O_ROWS);
    int64_t rows = H2O_SCRATCH_BYTES / (int64_t)sizeof(float) / h2o_logits_stride(a);
    rows = rows / H2O_ROWS * H2O_ROWS;
    if (rows < H2O_ROWS) rows = H2O_ROWS;
    return rows < share ? rows : share;
}

/* x[0..count) -> e^(x - highest); returns their sum. */
static inline float h2o_exps(float *restrict x, int64_t count, float highest) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        x[i] = h2o_exp(x[i] - highest);
        sum += x[i];
    }
    return sum;
}

/* logits[0..visible) -> x with softmax = returned value * x, beside the logit of a sink
 * (NULL: there is none); then zeros up to `length`. */
static inline float h2o_softmax(float *restrict logits, int64_t visible, int64_t length,
                                float softcap, const float *sink) {
    if (softcap > 0.0f) h2o_softcap(logits, visible, softcap);
    const float highest = h2o_highest(logits, visible, sink ? *sink : -FLT_MAX);
    float sum = h2o_exps(logits, visible, highest);
    if (sink) sum += h2o_exp(*sink - highest);
    for (int64_t i = visible; i < length; ++i) logits[i] = 0.0f;
    return 1.0f / sum;
}

/* sums[0..length) += the sum of the rows, each times its factor. */
static inline void h2o_add_columns(const float *restrict rows, const float *factors,
                                   int64_t count, int64_t stride, int64_t length,
                                   float *restrict sums) {
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) {
        const float *restrict p = rows + r * stride, *f = factors + r;
        for (int64_t i = 0; i < length; ++i)
            sums[i] += f[0] * p[i] + f[1] * p[stride + i] + f[2] * p[2 * stride + i] +
                       f[3] * p[3 * stride + i];
    }
    for (; r < count; ++r)
        for (int64_t i = 0; i < length; ++i)
            sums[i] += factors[r] * rows[r * stride + i];
}

/* attention += the parts [num_kv_heads][num_parts][num_keys]. */
static void h2o_add_parts(const h2o_observe_args *a, const float *parts,
                          int64_t num_parts, int64_t num_keys) {
    for (int64_t i = 0; i < a->num_kv_heads * num_parts; ++i) {
        float *restrict attention = a->attention + i / num_parts * a->attention_stride;
        for (int64_t t = 0; t < num_keys; ++t) attention[t] += parts[i * num_keys + t];
    }
}

#include "select.h"

#ifndef H2O_INT8

#define NAME h2o_decode_float32
#define COPY_KEPT h2o_copy_kept_float32
#define ORDER_RINGS h2o_order_rings_float32
#define TAKE_BACK h2o_take_back_float32
#define OBSERVE h2o_observe_float32
#define GATE h2o_gate_float32
#define ELEM float
#define TO_F32(x) (x)
#define FROM_F32(x) (x)
#define LOAD(from) h2o_load_f32(from)
#define LOAD_PAIR(from, pair) ((pair)[0] = LOAD(from), (pair)[1] = LOAD((from) + H2O_LANES))
#define IN_ORDER(pair) ((void)(pair))
#include "decode.h"
#include "observe.h"
#include "gate.h"
#include "undefine.h"

#define NAME h2o_decode_bfloat16
#define COPY_KEPT h2o_copy_kept_bfloat16
#define ORDER_RINGS h2o_order_rings_bfloat16
#define TAKE_BACK h2o_take_back_bfloat16
#define OBSERVE h2o_observe_bfloat16
#define GATE h2o_gate_bfloat16
#define ELEM uint16_t
#define TO_F32(x) h2o_bf16_to_f32(x)
#define FROM_F32(x) h2o_f32_to_bf16(x)
#define LOAD(from) h2o_load_bf16(from)
#define LOAD_PAIR(from, pair) h2o_load_pair_bf16(from, pair)
#define IN_ORDER(pair) h2o_in_order_bf16(pair)
#include "decode.h"
#include "observe.h"
#include "gate.h"
#include "undefine.h"

#ifdef __FLT16_MANT_DIG__ /* gcc before 12 has no _Float16 on x86 */
#define NAME h2o_decode_float16
#define COPY_KEPT h2o_copy_kept_float16
#define ORDER_RINGS h2o_order_rings_float16
#define TAKE_BACK h2o_take_back_float16
#define OBSERVE h2o_observe_float16
#define GATE h2o_gate_float16
#define ELEM _Float16
#define TO_F32(x) ((float)(x))
#define FROM_F32(x) ((_Float16)(x))
#define LOAD(from) h2o_load_f16(from)
#define LOAD_PAIR(from, pair) ((pair)[0] = LOAD(from), (pair)[1] = LOAD((from) + H2O_LANES))
#define IN_ORDER(pair) ((void)(pair))
#include "decode.h"
#include "observe.h"
#include "gate.h"
#include "undefine.h"
#endif

#else /* a library of its own: resident pages of int8, by the type of the query */

#define KV int8_t
#define KV_TO_F32(x) ((float)(x))
#define KV_FROM_F32(x) ((int8_t)(x))
#define KV_LOAD(from) h2o_load_i8(from)
#define KV_LOAD_PAIR(from, pair) \
    ((pair)[0] = KV_LOAD(from), (pair)[1] = KV_LOAD((from) + H2O_LANES))
#define KV_IN_ORDER(pair) ((void)(pair))

#define NAME h2o_decode_float32
#define COPY_KEPT h2o_copy_kept_float32
#define ORDER_RINGS h2o_order_rings_float32
#define TAKE_BACK h2o_take_back_float32
#define ELEM float
#define TO_F32(x) (x)
#define FROM_F32(x) (x)
#include "decode.h"
#include "undefine.h"

#define NAME h2o_decode_bfloat16
#define COPY_KEPT h2o_copy_kept_bfloat16
#define ORDER_RINGS h2o_order_rings_bfloat16
#define TAKE_BACK h2o_take_back_bfloat16
#define ELEM uint16_t
#define TO_F32(x) h2o_bf16_to_f32(x)
#define FROM_F32(x) h2o_f32_to_bf16(x)
#include "decode.h"
#include "undefine.h"

#ifdef __FLT16_MANT_DIG__
#define NAME h2o_decode_float16
#define COPY_KEPT h2o_copy_kept_float16
#define ORDER_RINGS h2o_order_rings_float16
#define TAKE_BACK h2o_take_back_float16
#define ELEM _Float16
#define TO_F32(x) ((float)(x))
#define FROM_F32(x) ((_Float16)(x))
#include "decode.h"
#include "undefine.h"
#endif

#endif
