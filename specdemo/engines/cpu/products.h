/* Products of a few rows with weights that are read once, by the threads of a parallel region.

   The compiler builds it for one type of weights: -DBFLOAT16, -DWIDENED, -DFLOAT16 or -DFLOAT32. weight_t is that type,
   act_t the type of the inputs of products: bfloat16 with -DBFLOAT16, else float32. Sums are float32. -DWIDENED is for
   bfloat16 weights on a CPU without instructions for products of bfloat16.

   A weight [outer, inner] is packed as [outer / COLUMNS, inner / STEP, COLUMNS, STEP], `outer` rounded up. A block gives
   COLUMNS outputs: `sum_up` reads it from beginning to end. For COLUMNS = 32 and STEP = 2:

     w[0, 0] w[0, 1] | w[1, 0] w[1, 1] | ... | w[31, 0] w[31, 1]     COLUMNS columns, STEP numbers of each
     w[0, 2] w[0, 3] | w[1, 2] w[1, 3] | ... | w[31, 2] w[31, 3]
     ...                                       inner / 2 such lines, then the block of outputs 32 to 63

   Example: w[40, 7] of inner = 64 is in block 40 / 32 = 1, which begins at 1 * 32 * 64, at line 7 / 2 = 3, column
   40 % 32 = 8, number 7 % 2 = 1: 2048 + (3 * 32 + 8) * 2 + 1 = 2257.

   With -DWIDENED the columns of a line come in pairs, for vectors of 8 those of w[0, .] w[8, .] | w[1, .] w[9, .] | ...
   One read then gives two vectors: a bfloat16 is the upper half of the float32 with its value.

   `sum_up` adds up the numbers of a row in their order, whatever other rows it computes with it. */

#include <stdint.h>
#include <string.h>

#include "threads.h"

#include SIMD /* -DSIMD="simd_neon.h", for one: what differs between instruction sets */

#define LANES (BYTES / 4)         /* floats of a vector */
#define COLUMNS (VECTORS * LANES) /* columns of a product at once */
#define LINE 64                   /* bytes of a cache line */
#define AHEAD 8192                /* bytes by which the prefetch of weights runs ahead */

#ifdef BFLOAT16
#define STEP 2 /* numbers of a row that one instruction multiplies and adds */
#define LEAST_AHEAD 6 /* rows from which on weights are prefetched: with fewer the CPU's own prefetch is enough, */
typedef uint16_t act_t, weight_t;
#else
#define STEP 1
#define LEAST_AHEAD (sizeof(weight_t) < sizeof(act_t) ? 1 : 3) /* but not where weights are widened, which takes time */
typedef float act_t;
#if defined(FLOAT16) || defined(WIDENED)
typedef uint16_t weight_t;
#else
typedef float weight_t;
#endif
#endif

#ifdef WIDENED
#define PAIRED 2 /* vectors that are read at once */
#else
#define PAIRED 1
#endif

INLINE act_t to_act(float x) {
#ifdef BFLOAT16
    union { float value; uint32_t bits; } it = {x};
    return x != x ? 0x7fc0 : (it.bits + 0x7fff + (it.bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
#else
    return x;
#endif
}

INLINE long round_up(long size, long part) { return (size + part - 1) / part * part; }
INLINE long blocks_of(long columns) { return (columns + COLUMNS - 1) / COLUMNS; }

/* Vector `index` of a block; `half` says that its numbers have 16 bits, while those of `act_t` have 32. */
INLINE vector load(const void *block, long index, const int half) {
#ifdef WIDENED
    typedef uint32_t pairs __attribute__((vector_size(BYTES), aligned(4), may_alias));
    const pairs both = ((const pairs *)block)[index / 2];
    if (half) return index % 2 ? (vector)(both & 0xffff0000) : (vector)(both << 16);
#else
    if (half) return halves((const uint16_t *)block + index * LANES);
#endif
    return ((const vector *)block)[index];
}

/* Four bytes: two numbers of 16 bits, or four codes. */
INLINE int32_t word_of(const void *x) {
    int32_t word;
    memcpy(&word, x, sizeof word);
    return word;
}

/* sum + the product of the next STEP numbers of a row with those of LANES columns. */
INLINE vector add(vector sum, const act_t *x, vector weights) {
#ifdef BFLOAT16
    return add_pairs(sum, word_of(x), weights);
#else
    return sum + *x * weights;
#endif
}

/* sums [rows, COLUMNS] = x [rows, inner], whose rows are `stride` apart, times a block [inner / STEP, COLUMNS, STEP].
   With `more` they go on from what is in `sums`. Prefetches the weights `ahead` bytes further on. */
INLINE void sum_rows(const int rows, const int half, const int ahead, const int more, const void *block, const act_t *x,
                     long stride, long inner, float *sums) {
    vector sum[ROWS][VECTORS], weights[VECTORS];
UNROLLED
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++)
            sum[row][v] = more ? ((const vector *)(sums + row * COLUMNS))[v] : (vector){0};
    const long size = sizeof(vector) / (half ? 2 : 1);
    for (const act_t *end = x + inner; x < end; x += STEP, block = (const char *)block + VECTORS * size) {
UNROLLED
        for (int v = 0; v < VECTORS; v++) {
            if (ahead && v * size % LINE == 0) __builtin_prefetch((const char *)block + v * size + ahead, 0, 2);
            weights[v] = load(block, v, half);
        }
UNROLLED
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < VECTORS; v++) sum[row][v] = add(sum[row][v], x + row * stride, weights[v]);
    }
UNROLLED
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) memcpy(sums + row * COLUMNS + v * LANES, &sum[row][v], sizeof(vector));
}

/* The same for any number of rows up to ROWS: for each there is code of its own, which keeps all sums in registers. */
INLINE void sum_up(int rows, const int half, const int ahead, const int more, const void *block, const act_t *x,
                   long stride, long inner, float *sums) {
    switch (rows) {
#define CASE(n) case n: sum_rows(n, half, n < LEAST_AHEAD ? 0 : ahead, more, block, x, stride, inner, sums); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS > 6
        CASE(7) CASE(8) CASE(9)
#endif
#undef CASE
    }
}

/* sums [rows, COLUMNS] = x [rows, inner] times a block of a weight. A function of its own: the compiler keeps fewer sums in
   registers where it is a part of a longer one. */
static __attribute__((noinline)) void sum_weights(int rows, const void *block, const act_t *x, long inner, float *sums) {
    sum_up(rows, sizeof(weight_t) < sizeof(act_t), AHEAD, 0, block, x, inner, inner, sums);
}

#include "quantized.h"

/* `parts` products of the same input, with `outer` outputs each, one after the other. A part is packed by itself; `code_bytes`
   are those of an input's code, or 0 if no part is quantized. */
typedef struct { const Part *each; const float *bias; long parts, outer, inner; int code_bytes; } Linear;

enum { WRITE, ADD, WRITE_ACT }; /* what to do with a result: write it as float, add it to floats, write it as act_t */
INLINE long size_of(const int how) { return how == WRITE_ACT ? sizeof(act_t) : sizeof(float); }

/* out = the sums of a row + bias for `there` columns; `how` is one of the above. */
INLINE void put(const float *sums, const float *bias, long there, void *out, const int how) {
#pragma omp simd
    for (long c = 0; c < there; c++) {
        const float sum = sums[c] + (bias ? bias[c] : 0.0f);
        if (how == WRITE_ACT) ((act_t *)out)[c] = to_act(sum);
        else if (how == ADD) ((float *)out)[c] += sum;
        else ((float *)out)[c] = sum;
    }
}

/* out = the inputs [count, inner] times the columns of a part of the weight from `column` on, at most COLUMNS of them. The
   rows of `out` are `stride` apart. */
INLINE void multiply_block(const Linear *p, long part, long column, const Inputs *in, long count, void *out, long stride,
                           const int how) {
    const Part *weight = p->each + part;
    const weight_t *block = (const weight_t *)weight->codes + column * p->inner;
    const float *bias = p->bias ? p->bias + part * p->outer + column : NULL;
    const long there = p->outer - column, most = weight->kind ? ROWS / p->code_bytes : ROWS;
    const long turns = (count + most - 1) / most, size = size_of(how);
    for (long row = 0, rows, left = turns; left; row += rows, left--) {
        rows = (count - row + left - 1) / left; /* 8 rows are 4 + 4 where ROWS is 6; the first turn reads from memory */
        float sums[ROWS * COLUMNS];
        if (weight->kind) sum_quantized(rows, p->code_bytes, weight, column / COLUMNS, in, row, p->inner, sums);
        else sum_weights(rows, block, in->x + row * p->inner, p->inner, sums);
        for (long r = 0; r < rows; r++) {
            char *place = (char *)out + (row + r) * stride * size;
            if (there >= COLUMNS) put(sums + r * COLUMNS, bias, COLUMNS, place, how); /* faster code for whole blocks */
            else put(sums + r * COLUMNS, bias, there, place, how);
        }
    }
}

/* out [count, parts * outer] = the inputs [count, inner] @ weight.T + bias. */
INLINE void multiply(const Linear *p, const Inputs *in, long count, void *out, const int how) {
    const long all = p->parts * p->outer, blocks = blocks_of(p->outer), size = size_of(how);
    for (SHARE(i, p->parts * blocks)) {
        const long part = i / blocks, column = i % blocks * COLUMNS;
        multiply_block(p, part, column, in, count, (char *)out + (part * p->outer + column) * size, all, how);
    }
}
