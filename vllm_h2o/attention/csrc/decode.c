/* The CPU kernel of resident rows; decode.h has its formula and its layout. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Query heads that share one read of K and V, and slots per register tile: with
 * AVX-512 4 x 32 accumulators take 8 registers, enough to hide FMA latency. */
#define H2O_GROUP 4
#define H2O_TILE 32

/* Mirrored by vllm_h2o/attention/ops/cpu.py. Strides of pages in bytes, of the
 * others in elements. */
typedef struct {
    const void *query;            /* [num_rows, num_heads, head_size] */
    const void *key;              /* [num_rows, num_kv_heads, head_size] */
    const void *value;            /* [num_rows, num_kv_heads, head_size] */
    void *output;                 /* [num_rows, num_heads, head_size] */
    void *cache;                  /* page of block 0 */
    const int32_t *block_table;   /* [num_rows, budget_blocks] */
    const int64_t *positions;     /* [num_rows] position of the new token */
    const int64_t *first_queries; /* [num_rows] first prompt query that scored */
    /* Heads with budgets of their own, all NULL for none: */
    const int64_t *head_layouts;  /* [num_kv_heads][2] budget, heavy slots */
    const int64_t *head_offsets;  /* [num_kv_heads][head_blocks] see h2o_slots */
    const int32_t *head_columns;  /* [num_kv_heads][head_blocks] */
    int64_t num_rows, num_heads, num_kv_heads, head_size, block_size;
    int64_t query_stride, key_stride, value_stride, output_stride;
    int64_t block_table_stride, page_stride, state_offset;
    int64_t budget, heavy_slots, pinned_slots, head_blocks, largest_budget;
    int64_t whole_blocks, score_mean, num_threads;
    float scale, softcap, score_decay;
} h2o_decode_args;

/* Mirrored likewise: copies of chosen tokens between blocks of one request. */
typedef struct {
    const int32_t *source_blocks; /* [.] block of position p: [p / block_size] */
    const int64_t *starts;        /* [num_kv_heads + 1] into the next two */
    const int64_t *positions;     /* chosen tokens, head after head */
    const int64_t *slots;         /* where they go */
    const float *scores;          /* [num_kv_heads][num_tokens] */
    int64_t num_tokens;
} h2o_compress_args;

/* The slots of one KV head of one row. Its i-th page is in the resident block
 * column[i], offset[i] bytes from this layer's: another layer may lend it. */
typedef struct {
    const int32_t *blocks;
    const int64_t *offset; /* NULL: the own page of block i */
    const int32_t *column;
    int64_t head, budget, heavy_slots;
    int64_t position, first_query, slot;
} h2o_slots;

/* Heads go their own ways from the position on that outgrows the budget. */
static inline h2o_slots h2o_slots_of(const h2o_decode_args *a, int64_t row,
                                     int64_t head) {
    h2o_slots r = {.blocks = a->block_table + row * a->block_table_stride,
                   .head = head,
                   .budget = a->budget,
                   .heavy_slots = a->heavy_slots,
                   .position = a->positions[row],
                   .first_query = a->first_queries[row]};
    if (a->head_layouts && r.position >= a->budget) {
        r.budget = a->head_layouts[2 * head];
        r.heavy_slots = a->head_layouts[2 * head + 1];
        r.offset = a->head_offsets + head * a->head_blocks;
        r.column = a->head_columns + head * a->head_blocks;
    }
    r.slot = r.position < r.heavy_slots
                 ? r.position
                 : r.heavy_slots +
                       (r.position - r.heavy_slots) % (r.budget - r.heavy_slots);
    return r;
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

/* What tokens are compared by: the score, or its mean per query that saw it. */
static inline float h2o_value(const h2o_decode_args *a, float score, int32_t birth,
                              const h2o_slots *r) {
    if (!a->score_mean) return score;
    const int64_t seen_since = birth > r->first_query ? birth : r->first_query;
    return score / (float)(r->position - seen_since);
}

static inline float h2o_bf16_to_f32(uint16_t x) {
    union { uint32_t i; float f; } bits = {(uint32_t)x << 16};
    return bits.f;
}

static inline uint16_t h2o_f32_to_bf16(float x) { /* round to nearest even */
    union { float f; uint32_t i; } bits = {x};
    return (uint16_t)((bits.i + 0x7FFFu + ((bits.i >> 16) & 1u)) >> 16);
}

#define NAME h2o_decode_float32
#define COMPRESS h2o_compress_float32
#define ELEM float
#define TO_F32(x) (x)
#define FROM_F32(x) (x)
#include "decode.h"

#define NAME h2o_decode_bfloat16
#define COMPRESS h2o_compress_bfloat16
#define ELEM uint16_t
#define TO_F32(x) h2o_bf16_to_f32(x)
#define FROM_F32(x) h2o_f32_to_bf16(x)
#include "decode.h"

#define NAME h2o_decode_float16
#define COMPRESS h2o_compress_float16
#define ELEM _Float16
#define TO_F32(x) ((float)(x))
#define FROM_F32(x) ((_Float16)(x))
#include "decode.h"
