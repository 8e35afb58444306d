/* The passes of `native.py`: a model's layers over a few tokens, in one parallel region.

   Keys and values are of the type that products read, the residual stream is float32. Functions that divide their work
   among the threads do not wait for the others at their end: `meet` does.

   Every product here, attention's too, is made by `sum_up`, so a token's logits are the same bits however many tokens are
   read with it, if all numbers are finite: an attention over an odd number of tokens multiplies the next one by zero. */

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "products.h"

#define SPINS 1000 /* looks at whether the others have come before a thread gives its core away */

const int columns = COLUMNS, step = STEP;

typedef struct { const float *weight, *bias; float eps; } Norm; /* layer norm, or RMS norm where there is no bias */
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

/* A row's shares of attention: e to the power of its scores less the largest, 0 for those that are not `from` to before
   `end`, whose scores are lost. There are `blocks` of COLUMNS, so none is left over to be weighed by itself.
   Returns the sum. */
static float weigh(float *score, long from, long end, long blocks, float scale, number *share) {
    const long size = blocks * COLUMNS;
    float most = score[from], sum = 0;
    for (long key = 0; key < from; key++) score[key] = -INFINITY;
    for (long key = end; key < size; key++) score[key] = -INFINITY;
#pragma omp simd reduction(max : most)
    for (long key = 0; key < size; key++) most = score[key] > most ? score[key] : most;
#pragma omp simd reduction(+ : sum)
    for (long key = 0; key < size; key++) {
        const float weighed = exponential((score[key] - most) * scale);
        sum += weighed;
        share[key] = narrowed(weighed);
    }
    return sum;
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
                const long begin = from / COLUMNS * COLUMNS, blocks = up_to(end - begin, COLUMNS) / COLUMNS;
                const number *keys = cache->keys + (index * m->kv_heads + kv_head) * cache->capacity * width;
                const number *values = cache->values + (index * m->kv_heads + kv_head) * cache->capacity * wide;
                const long first = (t * m->heads + kv_head * group + some) * width;
                float sums[ROWS * COLUMNS], total[ROWS];
                for (long key = begin; key < end; key += COLUMNS) {
                    sum_up(rows, 0, 0, keys + key * width, q + first, width, width, sums);
                    for (long r = 0; r < rows; r++)
                        memcpy(scores + r * stride + key, sums + r * COLUMNS, COLUMNS * sizeof(float));
                }
                for (long r = 0; r < rows; r++)
                    total[r] = weigh(scores + r * stride + begin, from - begin, end - begin, blocks, scale,
                                     shares + r * stride + begin);
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
        multiply_block(p, p->parts - 1, column, x, count, made, COLUMNS, WRITTEN);
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
    const long most = count * (m->width > COLUMNS ? m->width : COLUMNS); /* that a thread makes by itself */
    const long each = most * sizeof(float) + ROWS * cache->capacity * (sizeof(float) + sizeof(number)); /* of a thread */
    const long numbers = one->qkv.inner + 2 * queries + inner; /* of a token */
    char *own = malloc(threads * each + count * (inner * sizeof(float) + numbers * sizeof(number)));
    if (!own) return 0;
    float *gates = (float *)(own + threads * each);
    number *inputs = (number *)(gates + count * inner), *q = inputs + count * one->qkv.inner;
    number *seen = q + count * queries, *active = seen + count * queries;
    Barrier b = {0};
#pragma omp parallel num_threads(threads)
    {
        float *made = (float *)(own + omp_get_thread_num() * each), *scores = made + most;
        number *shares = (number *)(scores + ROWS * cache->capacity);
        for (int index = first; index < last; index++) {
            const Layer *layer = m->layers + index;
            norm_inputs(layer, beside, x, count, hidden, inputs), meet(&b);
            enter(m, layer, index, cache, start, inputs, count, made, q), meet(&b);
            if (entries) continue;
            attend(m, index, cache, start, q, count, scores, shares, seen), meet(&b);
            multiply(&layer->out, seen, count, x, ADDED), meet(&b);
            norm_rows(&layer->mlp_norm, x, count, hidden, inputs, hidden), meet(&b);
            activate(&layer->up, inputs, count, gates, made, active), meet(&b);
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
