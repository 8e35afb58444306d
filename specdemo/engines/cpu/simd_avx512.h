/* AVX-512 (F, BW), for `products.h`; with products of bytes (VNNI) and bfloat16 where the CPU has them. */

#include <immintrin.h>

#define BYTES 64
#define VECTORS 2
#define ROWS 9
#include "vectors.h"

INLINE void pause_thread(void) { _mm_pause(); }
INLINE vector halves(const void *x) { return (vector)_mm512_cvtph_ps(_mm256_loadu_si256(x)); }
INLINE integers integers_of(const void *x, const int is_signed) {
    const __m128i bytes = _mm_loadu_si128(x);
    return (integers)(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

/* As in `simd_avx2.h`. */
#ifdef __AVX512VNNI__
#define BIAS 128
INLINE integers add_codes(integers sum, int32_t x, integers codes, const int bits) {
    sum = (integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
    __asm__("" : "+v"(sum));
    return sum;
}
INLINE integers sum_of(integers sum) { return sum; }
#else
#define BIAS 0
INLINE integers sum_of(integers sum) { return (integers)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)); }
INLINE integers add_codes(integers sum, int32_t x, integers codes, const int bits) {
    const __m512i fours = _mm512_set1_epi32(x), c = (__m512i)codes;
    const __m512i signs = _mm512_mask_sub_epi8(fours, _mm512_movepi8_mask(c), _mm512_setzero_si512(), fours);
    const __m512i products = _mm512_maddubs_epi16(bits == 4 ? c : _mm512_abs_epi8(c), bits == 4 ? fours : signs);
    if (bits == 8) sum += sum_of((integers)products);
    else sum = (integers)_mm512_add_epi16((__m512i)sum, products);
    __asm__("" : "+v"(sum));
    return sum;
}
#endif

#ifdef BFLOAT16
/* sum + the products of two bfloat16 of a row, `pair`, with those of each column. */
INLINE vector add_pairs(vector sum, int32_t pair, vector pairs) {
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
}
#endif
