/* AVX-512 (F, BW), for `products.h`; with products of 16-bit integers (VNNI) and bfloat16 where the CPU has them. */

#include <immintrin.h>

#define BYTES 64
#define VECTORS 2
#define ROWS 9
#include "vectors.h"

INLINE void pause_thread(void) { _mm_pause(); }
INLINE vector halves(const void *x) { return (vector)_mm512_cvtph_ps(_mm256_loadu_si256(x)); }
INLINE shorts shorts_of(const void *x) { return (shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256(x)); }
INLINE integers integers_of(const void *x, const int is_signed) {
    const __m128i bytes = _mm_loadu_si128(x);
    return (integers)(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

INLINE integers add_codes(integers sum, int32_t pair, shorts pairs) {
#ifdef __AVX512VNNI__
    sum = (integers)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pairs, _mm512_set1_epi32(pair));
#else
    sum += (integers)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32(pair));
#endif
    __asm__("" : "+v"(sum));
    return sum;
}

#ifdef BFLOAT16
/* sum + the products of two bfloat16 of a row, `pair`, with those of each column. */
INLINE vector add_pairs(vector sum, int32_t pair, vector pairs) {
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
}
#endif
