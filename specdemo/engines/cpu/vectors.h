/* Vectors of BYTES bytes, as gcc and clang know them: loads need no alignment, and operators work on all numbers. */

typedef float vector __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(BYTES), aligned(4), may_alias));

INLINE vector to_floats(integers x) { return __builtin_convertvector(x, vector); }

/* Before a loop: its turns one after the other, else clang keeps what they add up in memory. */
#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif
