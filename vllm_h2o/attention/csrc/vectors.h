/* Vectors of floats and what is done to rows of them; GCC's and clang's own type.
 *
 * A register tile is an array of these with constant bounds: compilers keep that in
 * registers, which they did not do for arrays of plain floats.
 */
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define H2O_LANES 16
#else
#define H2O_LANES 8
#endif

typedef float h2o_vec __attribute__((vector_size(4 * H2O_LANES)));
typedef uint32_t h2o_bits __attribute__((vector_size(4 * H2O_LANES)));
typedef uint16_t h2o_half __attribute__((vector_size(2 * H2O_LANES)));

/* Load a vector once: gcc would rather read it from memory for each of its uses, and
 * there are fewer loads than products in a cycle. */
#if defined(__AVX512F__)
#define H2O_IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__AVX__)
#define H2O_IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define H2O_IN_REGISTER(v) ((void)(v))
#endif

static inline __attribute__((always_inline)) h2o_vec h2o_load_f32(const float *from) {
    h2o_vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline __attribute__((always_inline)) void h2o_store_f32(float *to, h2o_vec v) {
    memcpy(to, &v, sizeof v);
}

static inline __attribute__((always_inline)) h2o_vec h2o_load_bf16(const uint16_t *from) {
    h2o_half half;
    memcpy(&half, from, sizeof half);
    return (h2o_vec)(__builtin_convertvector(half, h2o_bits) << 16);
}

/* Two vectors in one read of bfloat16: the even ones and the odd ones, which takes
 * half the work of two in order. h2o_in_order_bf16 puts them back. */
static inline __attribute__((always_inline)) void h2o_load_pair_bf16(
    const uint16_t *from, h2o_vec pair[2]) {
    h2o_bits both;
    memcpy(&both, from, sizeof both);
    pair[0] = (h2o_vec)(both << 16);
    pair[1] = (h2o_vec)(both & 0xFFFF0000u);
}

#if H2O_LANES == 16
#define H2O_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define H2O_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define H2O_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define H2O_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif
#ifdef __clang__
#define H2O_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define H2O_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (h2o_bits){__VA_ARGS__})
#endif

static inline __attribute__((always_inline)) void h2o_in_order_bf16(h2o_vec pair[2]) {
    const h2o_vec even = pair[0], odd = pair[1];
    pair[0] = H2O_SHUFFLE(even, odd, H2O_LOW);
    pair[1] = H2O_SHUFFLE(even, odd, H2O_HIGH);
}

static inline __attribute__((always_inline)) h2o_vec h2o_load_i8(const int8_t *from) {
#if defined(__AVX512F__)
    __m128i bytes;
    memcpy(&bytes, from, sizeof bytes);
    return (h2o_vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (h2o_vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    typedef int8_t h2o_bytes __attribute__((vector_size(H2O_LANES)));
    typedef int32_t h2o_ints __attribute__((vector_size(4 * H2O_LANES)));
    h2o_bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, h2o_ints), h2o_vec);
#endif
}

#ifdef __FLT16_MANT_DIG__
static inline __attribute__((always_inline)) h2o_vec h2o_load_f16(const _Float16 *from) {
#if defined(__AVX512F__)
    __m256i half;
    memcpy(&half, from, sizeof half);
    return (h2o_vec)_mm512_cvtph_ps(half);
#else
    float wide[H2O_LANES];
    for (int i = 0; i < H2O_LANES; ++i) wide[i] = (float)from[i];
    return h2o_load_f32(wide);
#endif
}
#endif

/* The highest of `count` floats and `highest`. Compilers vectorize sums but not
 * this, where a NaN would make the order matter. */
static inline float h2o_highest(const float *from, int64_t count, float highest) {
    h2o_vec most = highest - (h2o_vec){0};
    int64_t i = 0;
    for (; i + H2O_LANES <= count; i += H2O_LANES) {
        const h2o_vec v = h2o_load_f32(from + i);
        const h2o_bits higher = (h2o_bits)(v > most);
        most = (h2o_vec)(((h2o_bits)v & higher) | ((h2o_bits)most & ~higher));
    }
#if defined(__AVX512F__)
    highest = _mm512_reduce_max_ps((__m512)most);
#else
    for (int j = 0; j < H2O_LANES; ++j) highest = most[j] > highest ? most[j] : highest;
#endif
    for (; i < count; ++i) highest = from[i] > highest ? from[i] : highest;
    return highest;
}
