/* NEON of ARM64, for `products.h`; with products of bytes and bfloat16 where the CPU has them. */

#ifndef __clang__ /* gcc has these instructions from armv8.2 on, and forgets those of its options at a pragma */
#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#pragma GCC target("arch=armv8.2-a+dotprod+bf16")
#elif defined(__ARM_FEATURE_DOTPROD)
#pragma GCC target("arch=armv8.2-a+dotprod")
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#pragma GCC target("arch=armv8.2-a+bf16")
#endif
#endif
#include <arm_neon.h>

#define BYTES 16
#define VECTORS 4
#define ROWS 6
#include "vectors.h"

INLINE void pause_thread(void) { __asm__ volatile("yield"); }
INLINE vector halves(const void *x) { return (vector)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
INLINE integers integers_of(const void *x, const int is_signed) {
    int32_t word;
    memcpy(&word, x, sizeof word);
    const int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(word));
    const int16x8_t wide = is_signed ? vmovl_s8(bytes) : vreinterpretq_s16_u16(vmovl_u8(vreinterpret_u8_s8(bytes)));
    return (integers)vmovl_s16(vget_low_s16(wide));
}

/* As in `simd_avx2.h`. */
#define BIAS 0
INLINE integers sum_of(integers sum) { return sum; }
INLINE integers add_codes(integers sum, int32_t x, integers codes, const int bits) {
    const int8x16_t fours = vreinterpretq_s8_s32(vdupq_n_s32(x)), c = (int8x16_t)codes;
#ifdef __ARM_FEATURE_DOTPROD
    return (integers)vdotq_s32((int32x4_t)sum, c, fours);
#else
    const int16x8_t first = vmull_s8(vget_low_s8(c), vget_low_s8(fours)), second = vmull_high_s8(c, fours);
    return (integers)vpadalq_s16((int32x4_t)sum, vpaddq_s16(first, second)); /* two products fit into 16 bits */
#endif
}

#ifdef BFLOAT16
INLINE vector add_pairs(vector sum, int32_t pair, vector pairs) {
    const bfloat16x8_t x = vreinterpretq_bf16_s32(vdupq_n_s32(pair));
    return (vector)vbfdotq_f32((float32x4_t)sum, x, vreinterpretq_bf16_f32((float32x4_t)pairs));
}
#endif
