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
    int64_t num_rows, num_heads, num_kv_heads, head_size, block_size;
    int64_t query_stride, key_stride, value_stride, output_stride;
    int64_t block_table_stride, page_stride, state_offset;
    int64_t budget, heavy_slots, pinned_slots;
    int64_t whole_blocks, score_mean, num_threads;
    float scale, softcap, score_decay;
} h2o_decode_args;

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
                              int64_t position, int64_t first_query) {
    if (!a->score_mean) return score;
    const int64_t seen_since = birth > first_query ? birth : first_query;
    return score / (float)(position - seen_since);
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
#define ELEM float
#define TO_F32(x) (x)
#define FROM_F32(x) (x)
#include "decode.h"

#define NAME h2o_decode_bfloat16
#define ELEM uint16_t
#define TO_F32(x) h2o_bf16_to_f32(x)
#define FROM_F32(x) h2o_f32_to_bf16(x)
#include "decode.h"

#define NAME h2o_decode_float16
#define ELEM _Float16
#define TO_F32(x) ((float)(x))
#define FROM_F32(x) ((_Float16)(x))
#include "decode.h"
