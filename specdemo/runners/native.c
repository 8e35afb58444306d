/* The passes of `native.py`: a model's layers over a few tokens, in one parallel region.

   Compiled for one type of weights at a time: -DBFLOAT16, -DFLOAT16 or -DFLOAT32. With bfloat16 the inputs of products,
   keys and values are bfloat16 too; with float16 only the weights are, and all else is float32. Sums and the residual
   stream are float32 always.

   Functions that divide their work among the threads do not wait for the others at their end: `meet` does.
   Every product here, attention's too, is made by `sum_up`. It adds up the numbers of a row in their own order, whatever
   is computed beside it, so a token's logits are the same bits however many tokens are read with it, if all numbers are
   finite: an attention over an odd number of tokens multiplies the next one by zero. */

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
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
#define SPINS 1000                /* looks at whether the others have come before a thread gives its core away */

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

const int columns = COLUMNS, step = STEP;

typedef struct { const float *weight, *bias; float eps; } Norm; /* layer norm, or RMS norm where there is no bias */
/* `parts` products of the same input, `outer` wide each, whose outputs follow each other. The weight of each is filled
   up to whole columns and laid out as [outer / columns, inner / step, columns, step]. */
typedef struct { const weight *weight; const float *bias; long parts, outer, inner; } Product;
typedef struct {
    Norm beside_norm, attention_norm, q_norm, k_norm, mlp_norm; /* without a weight where there is no such norm */
    Product qkv, out, up, down; /* a part of qkv is a head, and of up the gate, if there is one, and what it lets through */
    int rotated;
} Layer;
/* `window` is how many tokens are looked at, 0 for all. Those of a pass are `mutual` if each sees also the later ones;
   then the window is behind them. */
typedef struct { const Layer *layers; long hidden, heads, kv_heads, width, window; int mutual; } Model;
/* keys [layers, kv_heads, capacity / columns, width / step, columns, step],
   values [layers, kv_heads, wide / columns, capacity / step, columns, step] for wide = width filled up to whole columns;
   cosines and sines [capacity, width / 2]. The capacity is a multiple of the columns. */
typedef struct { number *keys, *values; const float *cosines, *sines; long capacity; } Cache;

INLINE number narrowed(float x) {
#ifdef BFLOAT16
    union { float number; uint32_t bits; } it = {x};
    return x != x ? 0x7fc0 : (it.bits + 0x7fff + (it.bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
#else
    return x;
#endif
}

/* Wait until all threads of the region have come here. In OpenMP's own barrier they keep their cores while they wait:
   with two threads, and two other programs that want the two cores, a pass then took a second instead of 35 ms. */
typedef struct { atomic_int here, turn; } Barrier;

static void meet(Barrier *b) {
    const int turn = atomic_load_explicit(&b->turn, memory_order_acquire);
    if (atomic_fetch_add_explicit(&b->here, 1, memory_order_acq_rel) == omp_get_num_threads() - 1) {
        atomic_store_explicit(&b->here, 0, memory_order_relaxed);
        atomic_store_explicit(&b->turn, turn + 1, memory_order_release);
    } else
        for (int spins = 0; atomic_load_explicit(&b->turn, memory_order_acquire) == turn; spins++)
            spins < SPINS ? _mm_pause() : (void)sched_yield();
}

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long up_to(long size, long part) { return (size + part - 1) / part * part; }

/* Where number i of column c lies in a block [., COLUMNS, STEP]. */
INLINE long at(long i, long c) { return (i / STEP * COLUMNS + c) * STEP + i % STEP; }

/* e to the x, for x <= 0, within two units in the last place (Cephes' polynomial). */
INLINE float exponential(float exponent) {
    float x = exponent < -87.0f ? -87.0f : exponent;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t bits; float number; } power = {((int32_t)n + 127) << 23};
    return exponent < -87.0f ? 0.0f : (p * r * r + r + 1.0f) * power.number;
}

INLINE float sigmoid(float x) {
    float small = exponential(-__builtin_fabsf(x));
    return (x < 0 ? small : 1.0f) / (1.0f + small);
}

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
   What lies `ahead` bytes behind is fetched meanwhile. */
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
    for (long turn = 0; turn < turns; turn++) { /* of rows nearly alike: of 5 at most, 6 are 3 + 3 */
        const long row = turn * count / turns, rows = (turn + 1) * count / turns - row;
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

/* out = the rows of x, normed: layer norm, or RMS norm where there is no bias. */
INLINE void norm_row(const Norm *n, const float *x, long size, void *out, const int how) {
    float mean = 0, square = 0;
    if (n->bias) {
#pragma omp simd reduction(+ : mean)
        for (long i = 0; i < size; i++) mean += x[i];
        mean /= size;
    }
#pragma omp simd reduction(+ : square)
    for (long i = 0; i < size; i++) square += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / sqrtf(square / size + n->eps);
#pragma omp simd
    for (long i = 0; i < size; i++) {
        float normed = (x[i] - mean) * scale * n->weight[i] + (n->bias ? n->bias[i] : 0.0f);
        if (how == NARROWED) ((number *)out)[i] = narrowed(normed);
        else ((float *)out)[i] = normed;
    }
}

/* Of x [count, size]; what comes out lies `stride` apart. */
static void norm_rows(const Norm *n, const float *x, long count, long size, number *out, long stride) {
#pragma omp for schedule(static) nowait
    for (long row = 0; row < count; row++) norm_row(n, x + row * size, size, out + row * stride, NARROWED);
}

/* Norm and rotate a head x [width] of the token at `position`, and put it in q [width] or in the cache. */
static void place(const Model *m, const Layer *layer, int index, const Cache *cache, long position, long head, float *x,
                  number *q) {
    const long width = m->width, half = width / 2, wide = up_to(width, COLUMNS);
    const long key = head - m->heads, value = key - m->kv_heads;
    if (value < 0) {
        const Norm *n = key < 0 ? &layer->q_norm : &layer->k_norm;
        if (n->weight) norm_row(n, x, width, x, WRITTEN);
        if (layer->rotated) {
            const float *cosine = cache->cosines + position * half, *sine = cache->sines + position * half;
#pragma omp simd
            for (long i = 0; i < half; i++) {
                const float a = x[i], b = x[half + i];
                x[i] = a * cosine[i] - b * sine[i];
                x[half + i] = b * cosine[i] + a * sine[i];
            }
        }
    }
    if (key < 0)
#pragma omp simd
        for (long i = 0; i < width; i++) q[i] = narrowed(x[i]);
    else if (value < 0) {
        number *block = cache->keys + ((index * m->kv_heads + key) * cache->capacity + position / COLUMNS * COLUMNS) * width;
        for (long i = 0; i < width; i++) block[at(i, position % COLUMNS)] = narrowed(x[i]);
    } else {
        number *block = cache->values + (index * m->kv_heads + value) * cache->capacity * wide;
        for (long i = 0; i < width; i++)
            block[i / COLUMNS * COLUMNS * cache->capacity + at(position, i % COLUMNS)] = narrowed(x[i]);
    }
}

/* The queries q [count, heads, width] of the tokens at `start`; their keys and values are put in the cache.
   `made` [count, width] is this thread's own: no other one waits for a head that it makes. */
static void enter(const Model *m, const Layer *layer, int index, const Cache *cache, long start, const number *inputs,
                  long count, float *made, number *q) {
    const long width = m->width;
#pragma omp for schedule(static) nowait
    for (long head = 0; head < layer->qkv.parts; head++) {
        for (long column = 0; column < width; column += COLUMNS)
            multiply_block(&layer->qkv, head, column, inputs, count, made + column, width, WRITTEN);
        for (long t = 0; t < count; t++)
            place(m, layer, index, cache, start + t, head, made + t * width, q + (t * m->heads + head) * width);
    }
}

/* out [count, heads * width] = attention of the queries of tokens at `start` to all that they see.
   `scores` and `shares` [ROWS, capacity] are this thread's own. */
static void attend(const Model *m, int index, const Cache *cache, long start, const number *q, long count,
                   float *scores, number *shares, number *out) {
    const long width = m->width, wide = up_to(width, COLUMNS), group = m->heads / m->kv_heads, stride = cache->capacity;
    const float scale = 1.0f / sqrtf(width);
#pragma omp for schedule(static) collapse(2) nowait
    for (long kv_head = 0; kv_head < m->kv_heads; kv_head++)
        for (long t = 0; t < count; t++)
            for (long some = 0; some < group; some += ROWS) {
                const long rows = least(ROWS, group - some), end = start + (m->mutual ? count : t + 1);
                const long behind = (m->mutual ? start : end) - m->window, from = m->window && behind > 0 ? behind : 0;
                const long even_from = from / STEP * STEP, even_end = up_to(end, STEP);
                const long begin = from / COLUMNS * COLUMNS, blocks = (end - begin + COLUMNS - 1) / COLUMNS;
                const number *keys = cache->keys + (index * m->kv_heads + kv_head) * cache->capacity * width;
                const number *values = cache->values + (index * m->kv_heads + kv_head) * cache->capacity * wide;
                const long first = (t * m->heads + kv_head * group + some) * width;
                float sums[ROWS * COLUMNS], total[ROWS];
                for (long key = begin; key < end; key += COLUMNS) {
                    sum_up(rows, 0, 0, keys + key * width, q + first, width, width, sums);
                    for (long r = 0; r < rows; r++)
                        memcpy(scores + r * stride + key, sums + r * COLUMNS, COLUMNS * sizeof(float));
                }
                for (long r = 0; r < rows; r++) {
                    float *score = scores + r * stride + begin, most = score[from - begin], sum = 0;
                    number *share = shares + r * stride + begin;
                    for (long key = 0; key < from - begin; key++) score[key] = -INFINITY; /* their share is 0 */
                    for (long key = end - begin; key < blocks * COLUMNS; key++) score[key] = -INFINITY;
#pragma omp simd reduction(max : most)
                    for (long key = 0; key < blocks * COLUMNS; key++) most = score[key] > most ? score[key] : most;
#pragma omp simd reduction(+ : sum)
                    for (long key = 0; key < blocks * COLUMNS; key++) {
                        const float part = exponential((score[key] - most) * scale);
                        sum += part;
                        share[key] = narrowed(part);
                    }
                    total[r] = sum;
                }
                for (long column = 0; column < width; column += COLUMNS) {
                    sum_up(rows, 0, 0, values + column * cache->capacity + at(even_from, 0), shares + even_from, stride,
                           even_end - even_from, sums);
                    for (long r = 0; r < rows; r++)
                        for (long c = 0; c < least(COLUMNS, width - column); c++)
                            out[first + r * width + column + c] = narrowed(sums[r * COLUMNS + c] / total[r]);
                }
            }
}

/* out [count, outer] = silu(gate) * up of the two products of x, or the tanh approximation of gelu(up) of the only one.
   gates [count, outer]; `made` [count, COLUMNS] is this thread's own. */
static void activate(const Product *p, const number *x, long count, float *gates, float *made, number *out) {
    const int gated = p->parts > 1;
    if (gated) /* Of both loops a thread gets the same columns. In one loop it would read memory by turns here and there. */
#pragma omp for schedule(static) nowait
        for (long column = 0; column < p->outer; column += COLUMNS)
            multiply_block(p, 0, column, x, count, gates + column, p->outer, WRITTEN);
#pragma omp for schedule(static) nowait
    for (long column = 0; column < p->outer; column += COLUMNS) {
        multiply_block(p, gated, column, x, count, made, COLUMNS, WRITTEN);
        for (long row = 0; row < count; row++) {
            const float *up = made + row * COLUMNS, *gate = gates + row * p->outer + column;
#pragma omp simd
            for (long c = 0; c < least(COLUMNS, p->outer - column); c++) {
                const float a = gated ? gate[c] : up[c], slope = gated ? a : 1.5957691216f * (a + 0.044715f * a * a * a);
                out[row * p->outer + column + c] = narrowed(a * sigmoid(slope) * (gated ? up[c] : 1.0f));
            }
        }
    }
}

/* The inputs of a layer's queries, keys and values: what lies beside x, if anything, and x, normed. */
static void norm_inputs(const Layer *layer, const float *beside, const float *x, long count, long hidden, number *out) {
    if (beside) norm_rows(&layer->beside_norm, beside, count, hidden, out, layer->qkv.inner);
    norm_rows(&layer->attention_norm, x, count, hidden, out + (beside ? hidden : 0), layer->qkv.inner);
}

/* Take `count` tokens x [count, hidden] that stand at `start` through the layers from `first` to before `last`, in
   place. With `entries` x enters each of them as it is, and only its keys and values are put in the cache.
   Returns whether there was memory for it. */
int run_layers(const Model *m, int first, int last, float *x, const float *beside, long count, const Cache *cache,
               long start, int entries, int threads) {
    const Layer *one = m->layers; /* all have the same shapes */
    const long hidden = m->hidden, inner = one->down.inner, queries = m->heads * m->width;
    const long made = count * (m->width > COLUMNS ? m->width : COLUMNS);
    const long each = made * sizeof(float) + ROWS * cache->capacity * (sizeof(float) + sizeof(number)); /* of a thread */
    const long numbers = one->qkv.inner + 2 * queries + inner; /* of a token */
    char *own = malloc(threads * each + count * (inner * sizeof(float) + numbers * sizeof(number)));
    if (!own) return 0;
    float *gates = (float *)(own + threads * each);
    number *inputs = (number *)(gates + count * inner), *q = inputs + count * one->qkv.inner;
    number *seen = q + count * queries, *active = seen + count * queries;
    Barrier b = {0};
#pragma omp parallel num_threads(threads)
    {
        float *sums = (float *)(own + omp_get_thread_num() * each), *scores = sums + made;
        number *shares = (number *)(scores + ROWS * cache->capacity);
        for (int index = first; index < last; index++) {
            const Layer *layer = m->layers + index;
            norm_inputs(layer, beside, x, count, hidden, inputs), meet(&b);
            enter(m, layer, index, cache, start, inputs, count, sums, q), meet(&b);
            if (entries) continue;
            attend(m, index, cache, start, q, count, scores, shares, seen), meet(&b);
            multiply(&layer->out, seen, count, x, ADDED), meet(&b);
            norm_rows(&layer->mlp_norm, x, count, hidden, inputs, hidden), meet(&b);
            activate(&layer->up, inputs, count, gates, sums, active), meet(&b);
            multiply(&layer->down, active, count, x, ADDED), meet(&b);
        }
    }
    free(own);
    return 1;
}

/* out [count, outer] = the product of x [count, inner], which is normed first. */
int run_head(const Norm *n, const Product *p, const float *x, long count, float *out, int threads) {
    number *normed = malloc(count * p->inner * sizeof(number) + 1); /* none would be no memory */
    if (!normed) return 0;
    Barrier b = {0};
#pragma omp parallel num_threads(threads)
    {
        norm_rows(n, x, count, p->inner, normed, p->inner), meet(&b);
        multiply(p, normed, count, out, WRITTEN);
    }
    free(normed);
    return 1;
}

/* out [count, outer] = the product of x [count, inner]. */
void run_product(const Product *p, const number *x, long count, number *out, int threads) {
#pragma omp parallel num_threads(threads)
    multiply(p, x, count, out, NARROWED);
}
