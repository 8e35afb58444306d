/* Products of a few rows with weights that are read once, by the threads of a parallel region.

   Compiled for one type of weights at a time: -DBFLOAT16, -DFLOAT16 or -DFLOAT32. With bfloat16 the inputs of products
   are bfloat16 too; with float16 only the weights are, and all else is float32. Sums are float32 always.

   All are made by `sum_up`. It adds up the numbers of a row in their own order, whatever is computed beside it. */

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#define LANES 16 /* floats of a vector */
#define ROWS 9   /* of a product that are made at once, at most: as many sums as there are registers for */
#else
#define LANES 8
#define ROWS 5
#endif
#define VECTORS 2
#define COLUMNS (VECTORS * LANES) /* of a product that are made together */
#define LINE 64                   /* bytes that memory sends at once */
#define AHEAD 8192                /* bytes of weights that are fetched before they are wanted, */
#define LEAST_AHEAD 6             /* if they are multiplied by so many rows: with fewer a CPU sees to that itself */

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifdef BFLOAT16
#define STEP 2 /* numbers of a row that one instruction adds up */
typedef uint16_t number, weight;
#else
#define STEP 1
typedef float number;
#ifdef FLOAT16
typedef uint16_t weight;
#else
typedef float weight;
#endif
#endif

/* `parts` products of the same input, `outer` wide each, whose outputs follow each other. The weight of each is filled
   up to whole columns and laid out as [outer / columns, inner / step, columns, step]. */
typedef struct { const weight *weight; const float *bias; long parts, outer, inner; } Product;

INLINE number narrowed(float x) {
#ifdef BFLOAT16
    union { float number; uint32_t bits; } it = {x};
    return x != x ? 0x7fc0 : (it.bits + 0x7fff + (it.bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
#else
    return x;
#endif
}

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long up_to(long size, long part) { return (size + part - 1) / part * part; }

/* The numbers of LANES columns in a block, from `place` vectors on; `half` says that they are float16. */
INLINE vector load(const void *block, long place, const int half) {
#ifdef __AVX512F__
    if (half) return (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)block + place));
#else
    if (half) return (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)block + place));
#endif
    return ((const vector *)block)[place];
}

/* sum + the product of the next STEP numbers of a row with those of LANES columns. */
INLINE vector add(vector sum, const number *x, vector weights) {
#ifdef BFLOAT16
    int pair;
    memcpy(&pair, x, sizeof pair);
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
#else
    return sum + *x * weights;
#endif
}

/* sums [rows, COLUMNS] = x [rows, inner], whose rows lie `stride` apart, times a block [inner / STEP, COLUMNS, STEP].
   What lies `ahead` bytes further on is fetched meanwhile. */
INLINE void sum_rows(const int rows, const int half, const int ahead, const void *block, const number *x, long stride,
                     long inner, float *sums) {
    vector sum[ROWS][VECTORS], some[VECTORS];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) sum[row][v] = (vector){0};
    const long size = sizeof(vector) / (half ? 2 : 1);
    for (const number *end = x + inner; x < end; x += STEP, block = (const char *)block + VECTORS * size) {
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) {
            if (ahead && v * size % LINE == 0) _mm_prefetch((const char *)block + v * size + ahead, _MM_HINT_T1);
            some[v] = load(block, v, half);
        }
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < VECTORS; v++) sum[row][v] = add(sum[row][v], x + row * stride, some[v]);
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) memcpy(sums + row * COLUMNS + v * LANES, &sum[row][v], sizeof(vector));
}

/* The same for a number of rows that is not known before: for each there is code that keeps all sums in registers. */
INLINE void sum_up(int rows, const int half, const int ahead, const void *block, const number *x, long stride, long inner,
                   float *sums) {
    switch (rows) {
#define CASE(n) case n: sum_rows(n, half, n < LEAST_AHEAD ? 0 : ahead, block, x, stride, inner, sums); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if ROWS > 5
        CASE(6) CASE(7) CASE(8) CASE(9)
#endif
    }
}

enum { WRITTEN, ADDED, NARROWED }; /* what becomes of a product */

/* out = the sums of a row + bias for `there` columns, in one of these ways. */
INLINE void put_some(const float *sums, const float *bias, long there, void *out, const int how) {
#pragma omp simd
    for (long c = 0; c < there; c++) {
        const float sum = sums[c] + (bias ? bias[c] : 0.0f);
        if (how == NARROWED) ((number *)out)[c] = narrowed(sum);
        else if (how == ADDED) ((float *)out)[c] += sum;
        else ((float *)out)[c] = sum;
    }
}

/* The same, with code for whole blocks. */
INLINE void put(const float *sums, const float *bias, long there, void *out, const int how) {
    there == COLUMNS ? put_some(sums, bias, COLUMNS, out, how) : put_some(sums, bias, there, out, how);
}

/* out = x [count, inner] times the columns of a part of the weight from `column` on, at most COLUMNS, in one of these
   ways; the rows of `out` lie `stride` apart. */
INLINE void multiply_block(const Product *p, long part, long column, const number *x, long count, void *out, long stride,
                           const int how) {
    const weight *block = p->weight + (part * up_to(p->outer, COLUMNS) + column) * p->inner;
    const float *bias = p->bias ? p->bias + part * p->outer + column : NULL;
    const long turns = (count + ROWS - 1) / ROWS, size = how == NARROWED ? sizeof(number) : sizeof(float);
    for (long row = 0, rows, left = turns; left; row += rows, left--) {
        rows = (count - row + left - 1) / left; /* nearly alike: of 5 at most, 6 are 3 + 3. The first read from memory */
        float sums[ROWS * COLUMNS];
        sum_up(rows, sizeof(weight) < sizeof(number), AHEAD, block, x + row * p->inner, p->inner, p->inner, sums);
        for (long r = 0; r < rows; r++)
            put(sums + r * COLUMNS, bias, least(COLUMNS, p->outer - column), (char *)out + (row + r) * stride * size, how);
    }
}

/* out [count, parts * outer] = x [count, inner] @ weight.T + bias, in one of these ways. */
INLINE void multiply(const Product *p, const number *x, long count, void *out, const int how) {
    const long all = p->parts * p->outer, size = how == NARROWED ? sizeof(number) : sizeof(float);
#pragma omp for schedule(static) collapse(2) nowait
    for (long part = 0; part < p->parts; part++)
        for (long column = 0; column < p->outer; column += COLUMNS)
            multiply_block(p, part, column, x, count, (char *)out + (part * p->outer + column) * size, all, how);
}
