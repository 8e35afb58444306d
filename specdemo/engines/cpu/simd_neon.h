/* NEON of ARM64, for `products.h`; with products of bfloat16 where the CPU has them. */

#if defined(BFLOAT16) && !defined(__clang__)
#pragma GCC target("arch=armv8.2-a+bf16") /* clang has bfloat16 for any, see `compiled.py` */
#endif
#include <arm_neon.h>

#define BYTES 16
#define VECTORS 4
#define ROWS 6
#include "vectors.h"

INLINE void pause_thread(void) { __asm__ volatile("yield"); }
INLINE vector halves(const void *x) { return (vector)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
INLINE shorts shorts_of(const void *x) { return (shorts)vmovl_s8(vld1_s8(x)); }
INLINE integers integers_of(const void *x, const int is_signed) {
    int32_t word;
    memcpy(&word, x, sizeof word);
    const int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(word));
    const int16x8_t wide = is_signed ? vmovl_s8(bytes) : vreinterpretq_s16_u16(vmovl_u8(vreinterpret_u8_s8(bytes)));
    return (integers)vmovl_s16(vget_low_s16(wide));
}

INLINE integers add_codes(integers sum, int32_t pair, shorts pairs) {
    const int16x4_t x = vreinterpret_s16_s32(vdup_n_s32(pair));
    const int16x4_t first = vmovn_s32((int32x4_t)pairs), second = vshrn_n_s32((int32x4_t)pairs, 16);
    return (integers)vmlal_lane_s16(vmlal_lane_s16((int32x4_t)sum, first, x, 0), second, x, 1);
}

#ifdef BFLOAT16
INLINE vector add_pairs(vector sum, int32_t pair, vector pairs) {
    const bfloat16x8_t x = vreinterpretq_bf16_s32(vdupq_n_s32(pair));
    return (vector)vbfdotq_f32((float32x4_t)sum, x, vreinterpretq_bf16_f32((float32x4_t)pairs));
}
#endif
