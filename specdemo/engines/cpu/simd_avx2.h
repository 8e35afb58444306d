/* AVX2, FMA and F16C, for `products.h`; with products of bytes (VNNI) where the CPU has them. */

#include <immintrin.h>

#define BYTES 32 /* of a vector */
#define VECTORS 2 /* vectors of a block of columns */
#define ROWS 6    /* the most rows of a product at once: their sums fill the registers */
#include "vectors.h"

INLINE void pause_thread(void) { _mm_pause(); }

/* A vector of float16. */
INLINE vector halves(const void *x) { return (vector)_mm256_cvtph_ps(_mm_loadu_si128(x)); }

/* Bytes as integers. gcc has slow code for `__builtin_convertvector` here. */
INLINE integers integers_of(const void *x, const int is_signed) {
    const __m128i bytes = _mm_loadl_epi64(x);
    return (integers)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}

/* sum + the products of four codes of a row, `x`, with those of each column. Codes of a column are 0 to 15 with 4 bits,
   -32 to 31 with 6, and -127 to 127 with 8; BIAS was added to those of 6 and 8. With 4 and 6 bits `sum_of` what was added
   for the numbers of a scale are their sums: without VNNI (products of bytes) two of 16 bits make one, which are at most
   8 * 2 * 15 * LARGEST or 4 * 2 * 32 * LARGEST. */
#ifdef __AVXVNNI__
#define BIAS 128
INLINE integers add_codes(integers sum, int32_t x, integers codes, const int bits) {
    sum = (integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(x));
    __asm__("" : "+v"(sum)); /* else the compiler puts the additions off, and the products into memory */
    return sum;
}
INLINE integers sum_of(integers sum) { return sum; }
#else
#define BIAS 0
INLINE integers sum_of(integers sum) { return (integers)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
INLINE integers add_codes(integers sum, int32_t x, integers codes, const int bits) {
    const __m256i fours = _mm256_set1_epi32(x), c = (__m256i)codes;
    const __m256i products =
        bits == 4 ? _mm256_maddubs_epi16(c, fours) : _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(fours, c));
    if (bits == 8) sum += sum_of((integers)products);
    else sum = (integers)_mm256_add_epi16((__m256i)sum, products);
    __asm__("" : "+v"(sum));
    return sum;
}
#endif
