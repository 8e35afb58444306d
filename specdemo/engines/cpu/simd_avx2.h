/* AVX2, FMA and F16C, for `products.h`. */

#include <immintrin.h>

#define BYTES 32 /* of a vector */
#define VECTORS 2 /* vectors of a block of columns */
#define ROWS 6    /* the most rows of a product at once: their sums fill the registers */
#include "vectors.h"

INLINE void pause_thread(void) { _mm_pause(); }

/* A vector of float16. */
INLINE vector halves(const void *x) { return (vector)_mm256_cvtph_ps(_mm_loadu_si128(x)); }

/* Bytes as integers of 16 and of 32 bits. gcc has slow code for `__builtin_convertvector` here. */
INLINE shorts shorts_of(const void *x) { return (shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(x)); }
INLINE integers integers_of(const void *x, const int is_signed) {
    const __m128i bytes = _mm_loadl_epi64(x);
    return (integers)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}

/* sum + the products of two codes of a row, `pair`, with those of each column. */
INLINE integers add_codes(integers sum, int32_t pair, shorts pairs) {
    sum += (integers)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(pair));
    __asm__("" : "+v"(sum)); /* else the compiler puts the additions off, and the products into memory */
    return sum;
}
