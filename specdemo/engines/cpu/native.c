/* The passes of `native.py`: a model's layers over a few tokens, in one parallel region.

   Keys and values are of type act_t, the residual stream is float32. A function that divides its work among the threads
   ends without waiting: its caller calls `barrier`.

   `sum_up` computes every product, those of attention too. So a token's logits are the same bits however many tokens a
   pass reads.

   The cache. Attention is two products, and `sum_up` reads a weight in blocks [inner / STEP, COLUMNS, STEP]. So keys
   and values are stored as the weights of these products:

     scores = q @ keys.T         inner: the numbers of a head   columns: positions   a block: COLUMNS positions
     output = weights @ values   inner: positions               columns: numbers     a block: COLUMNS numbers of a head

     keys   [layers, kv_heads, capacity / COLUMNS, width / STEP,    COLUMNS, STEP]
     values [layers, kv_heads, wide / COLUMNS,     capacity / STEP, COLUMNS, STEP]   wide: width, rounded up to COLUMNS

   A block of keys, for COLUMNS = 32 and STEP = 2 (k(p, i) is number i of the key at position p):

     k(0, 0) k(0, 1) | k(1, 0) k(1, 1) | ... | k(31, 0) k(31, 1)
     k(0, 2) k(0, 3) | k(1, 2) k(1, 3) | ... | k(31, 2) k(31, 3)
     ...                                       width / 2 such lines, then the block of positions 32 to 63

   A block of values has a line for every two positions: v(0, 0) v(1, 0) | v(0, 1) v(1, 1) | ... | v(0, 31) v(1, 31).

   Example: width 64, capacity 512, position 70.
     number 5 of its key     block 70 / 32 = 2 is at 2 * 32 * 64 = 4096,    + at(5, 70 % 32)  = (2 * 32 + 6) * 2 + 1
     number 37 of its value  block 37 / 32 = 1 is at 1 * 32 * 512 = 16384,  + at(70, 37 % 32) = (35 * 32 + 5) * 2 + 0 */

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "products.h"

#define SPINS 1000 /* how often a thread looks for the others before it gives up its core */

const int columns = COLUMNS, step = STEP, lanes = LANES, paired = PAIRED;

typedef struct { const float *weight, *bias; float eps; } Norm; /* layer norm, or RMS norm where there is no bias */
typedef struct {
    /* without a weight where there is no such norm; out_norm and down_norm are of what is added to the residual stream */
    Norm second_input_norm, attention_norm, q_norm, k_norm, out_norm, mlp_norm, down_norm;
    Linear qkv, out; /* the parts of qkv are heads */
    Linear router;   /* has an output for each expert, if there are any */
    const Linear *up, *down; /* of the MLP or of each expert; up has one part, or two with a gate, which comes first */
    long window; /* how many tokens a token sees, or all if that is 0 */
    long rope;   /* which of the rotations of the cache, or -1 for none */
    long used;   /* experts of a row; 0 if there is one MLP for all rows */
    int normed;  /* whether the weights of a row's experts are divided by their sum */
} Layer;
/* `scale` multiplies scores, and `cap` limits them, or does not if it is 0: cap * tanh(score / cap). `residual` multiplies
   what is added to the residual stream. With `all_heads` the norms of queries and of keys are of all heads of a token. If a
   pass is `bidirectional`, its tokens see each other, and the window before the pass. */
typedef struct {
    const Layer *layers;
    long hidden, heads, kv_heads, width;
    float scale, cap, residual;
    int gelu, all_heads, bidirectional;
} Model;
/* Cosines and sines are [rotations, capacity, width / 2], and what multiplies rotated queries is [rotations, capacity], or
   NULL for nothing. COLUMNS divides the capacity. */
typedef struct { act_t *keys, *values; const float *cosines, *sines, *query_scales; long capacity; } Cache;
/* How the rows of a pass follow each other where they are no chain. They are written after the `base` tokens that all of
   them see, row after row, and bit i of ancestors[t] says that row t of the pass sees slot base + i; its own bit is set. A
   row stands as many positions after the base as it has ancestors. */
typedef struct { long base; const uint64_t *ancestors; } Tree;
#define MOST_ROWS 64 /* the bits of a word */
/* The rows of a pass that belong to one sequence, which follow each other in the pass: `count` tokens at the slots of its
   cache from `start` on. `tree` is NULL where they are a chain. */
typedef struct { const Cache *cache; long start, count; const Tree *tree; } Sequence;
typedef struct { const Sequence *of; long t; } Row; /* row t of a sequence */

/* Wait until all threads are here. OpenMP's own barrier keeps the cores while it waits: on two cores that
   two other programs want too, a pass took a second instead of 35 ms. */
typedef struct { atomic_int here, turn; } Barrier;

static void barrier(Barrier *b) {
    const int turn = atomic_load_explicit(&b->turn, memory_order_acquire);
    if (atomic_fetch_add_explicit(&b->here, 1, memory_order_acq_rel) == thread_count() - 1) {
        atomic_store_explicit(&b->here, 0, memory_order_relaxed);
        atomic_store_explicit(&b->turn, turn + 1, memory_order_release);
    } else
        for (int spins = 0; atomic_load_explicit(&b->turn, memory_order_acquire) == turn; spins++)
            spins < SPINS ? pause_thread() : (void)sched_yield();
}

/* The index of number i of column c in a block [., COLUMNS, STEP]. */
INLINE long at(long i, long c) { return (i / STEP * COLUMNS + c) * STEP + i % STEP; }

/* The position of a row in its sequence. */
INLINE long position_of(Row row) {
    const Tree *tree = row.of->tree;
    return tree ? tree->base + __builtin_popcountll(tree->ancestors[row.t]) - 1 : row.of->start + row.t;
}

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
        if (how == WRITE_ACT) ((act_t *)out)[i] = to_act(normed);
        else ((float *)out)[i] = normed;
    }
}

/* The same for the rows of x [count, size], which stay as they are where there is no norm; the rows of `out` are `stride`
   apart. */
static void norm_rows(const Norm *n, const float *x, long count, long size, act_t *out, long stride) {
    for (SHARE(row, count))
        if (n->weight) norm_row(n, x + row * size, size, out + row * stride, WRITE_ACT);
        else
            for (long i = 0; i < size; i++) out[row * stride + i] = to_act(x[row * size + i]);
}

/* x += a row, normed and scaled. */
INLINE void add_row(const Norm *n, float *added, float scale, long size, float *x) {
    if (n->weight) norm_row(n, added, size, added, WRITE);
#pragma omp simd
    for (long i = 0; i < size; i++) x[i] += scale * added[i];
}

/* The same for the rows of `added` [count, size]. Each thread gets the rows that `norm_rows` gives it. */
static void add_rows(const Norm *n, float *added, float scale, long count, long size, float *x) {
    for (SHARE(row, count)) add_row(n, added + row * size, scale, size, x + row * size);
}

/* Norm and rotate a head x [width] of the token at `position`, and write it to q [width] or into a slot of the cache.
   The heads are those of the queries, then of the keys, then of the values. */
static void store_head(const Model *m, const Layer *layer, int index, const Cache *cache, long position, long slot,
                       long head, float *x, act_t *q) {
    const long width = m->width, half = width / 2, wide = round_up(width, COLUMNS);
    const long key = head - m->heads, value = key - m->kv_heads;
    if (value < 0) {
        const Norm *n = key < 0 ? &layer->q_norm : &layer->k_norm;
        if (n->weight && !m->all_heads) norm_row(n, x, width, x, WRITE);
        if (layer->rope >= 0) {
            const long at_position = (layer->rope * cache->capacity + position) * half;
            const float *cosine = cache->cosines + at_position, *sine = cache->sines + at_position;
#pragma omp simd
            for (long i = 0; i < half; i++) {
                const float a = x[i], b = x[half + i];
                x[i] = a * cosine[i] - b * sine[i];
                x[half + i] = b * cosine[i] + a * sine[i];
            }
            if (key < 0 && cache->query_scales)
                for (long i = 0; i < width; i++) x[i] *= cache->query_scales[layer->rope * cache->capacity + position];
        }
    }
    if (key < 0)
#pragma omp simd
        for (long i = 0; i < width; i++) q[i] = to_act(x[i]);
    else if (value < 0) {
        act_t *block = cache->keys + ((index * m->kv_heads + key) * cache->capacity + slot / COLUMNS * COLUMNS) * width;
        for (long i = 0; i < width; i++) block[at(i, slot % COLUMNS)] = to_act(x[i]);
    } else {
        act_t *block = cache->values + (index * m->kv_heads + value) * cache->capacity * wide;
        for (long i = 0; i < width; i++)
            block[i / COLUMNS * COLUMNS * cache->capacity + at(slot, i % COLUMNS)] = to_act(x[i]);
    }
}

#include "experts.h"

/* A pass of `depth` layers over the rows x [count, hidden], and its buffers. */
typedef struct {
    const Model *m;
    int depth, kv_only;
    float *const *outputs;
    const float *second_input;
    long count, stride; /* no cache has more than `stride` slots */
    float *x, *all;     /* all: gates, all heads, or sums of each row */
    Row *rows;
    act_t *q;                                   /* [count, heads, width] */
    Inputs normed, attended, activated, sorted; /* of the products; sorted: of the experts, by their slots */
    Routing routing;
    long read;                   /* experts that some row chose */
    char *own;                   /* own_size bytes of each thread: */
    long own_size, scratch_size; /* scratch [scratch_size], scores and exps [ROWS, stride] */
    Barrier barrier;
} Pass;

/* Wait for the others, who write x too, and encode it if a part of the product is quantized. */
static void complete(const Linear *p, const Inputs *in, long count, Barrier *b) {
    barrier(b);
    if (p->code_bytes) encode(in, count, p->inner, p->code_bytes), barrier(b);
}

/* All heads of the rows [count, parts of qkv, width], those of queries and keys normed over all heads of a token. */
static void norm_all_heads(Pass *p, const Layer *layer) {
    const long queries = p->m->heads * p->m->width, keys = p->m->kv_heads * p->m->width;
    multiply(&layer->qkv, &p->normed, p->count, p->all, WRITE), barrier(&p->barrier);
    for (SHARE(row, p->count)) {
        float *one = p->all + row * (queries + 2 * keys);
        norm_row(&layer->q_norm, one, queries, one, WRITE);
        norm_row(&layer->k_norm, one + queries, keys, one + queries, WRITE);
    }
    barrier(&p->barrier);
}

/* Compute the queries of the rows, and write their keys and values into the caches. */
static void write_kv(const Pass *p, const Layer *layer, int index, float *scratch) {
    const Model *m = p->m;
    const long width = m->width, stride = m->all_heads ? layer->qkv.parts * width : width;
    for (SHARE(head, layer->qkv.parts)) {
        float *heads = m->all_heads ? p->all + head * width : scratch;
        for (long column = 0; column < width && !m->all_heads; column += COLUMNS)
            multiply_block(&layer->qkv, head, column, &p->normed, p->count, scratch + column, width, WRITE);
        for (long i = 0; i < p->count; i++) {
            const Row row = p->rows[i];
            store_head(m, layer, index, row.of->cache, position_of(row), row.of->start + row.t, head, heads + i * stride,
                       p->q + (i * m->heads + head) * width);
        }
    }
}

/* exps = e to the power of a row's scores less their maximum, 0 outside of `from` to `end`, where the scores are
   overwritten. Returns their sum, by which the caller divides. The row has whole `blocks` of COLUMNS, so that vectors
   cover all of it. */
static float softmax(const Model *m, float *scores, long from, long end, long blocks, act_t *exps) {
    const long size = blocks * COLUMNS;
    const float scale = m->cap ? 1.0f : m->scale;
    float max, sum = 0;
    if (m->cap)
#pragma omp simd
        for (long key = from; key < end; key++)
            scores[key] = m->cap * (2.0f * sigmoid(2.0f * scores[key] * m->scale / m->cap) - 1.0f);
    max = scores[from];
    for (long key = 0; key < from; key++) scores[key] = -INFINITY;
    for (long key = end; key < size; key++) scores[key] = -INFINITY;
#pragma omp simd reduction(max : max)
    for (long key = 0; key < size; key++) max = scores[key] > max ? scores[key] : max;
#pragma omp simd reduction(+ : sum)
    for (long key = 0; key < size; key++) {
        const float e = exponential((scores[key] - max) * scale);
        sum += e;
        exps[key] = to_act(e);
    }
    return sum;
}

/* out = the values of a head's block of columns at the positions from `begin` to `end`, as `sum_up` reads them: those of
   the tokens before `base`, then those of the slots of a path after it, then zero up to a multiple of STEP. */
static void gather(const act_t *values, long begin, long base, long end, const long *path, act_t *out) {
    for (long position = begin; position < round_up(end, STEP); position++)
        for (long c = 0; c < COLUMNS; c++)
            out[at(position - begin, c)] =
                position < end ? values[at(position < base ? position : base + path[position - base], c)] : 0;
}

/* attended [count, heads * width] = attention of the queries of the rows to all tokens that they see. The scores and values
   of a tree's row are brought into the order of their positions, so that its sums are those of the chain that leads to
   it. */
static void attend(const Pass *p, int index, float *scores, act_t *exps) {
    const Model *m = p->m;
    const long width = m->width, wide = round_up(width, COLUMNS), group = m->heads / m->kv_heads, stride = p->stride;
    for (SHARE(i, m->kv_heads * p->count)) {
        const long kv_head = i / p->count, row = i % p->count;
        for (long head = 0; head < group; head += ROWS) { /* of the query heads that share the key head */
            const Sequence *s = p->rows[row].of;
            const Cache *cache = s->cache;
            const Tree *tree = s->tree;
            const long t = p->rows[row].t, start = s->start;
            const long queries = min(ROWS, group - head), slots = start + (m->bidirectional ? s->count : t + 1);
            const long end = tree ? position_of(p->rows[row]) + 1 : slots;
            const long window = m->layers[index].window, behind = (m->bidirectional ? start : end) - window;
            const long from = window && behind > 0 ? behind : 0;
            const long even_from = from / STEP * STEP, even_end = round_up(end, STEP);
            const long begin = from / COLUMNS * COLUMNS, blocks = blocks_of(end - begin);
            const act_t *keys = cache->keys + (index * m->kv_heads + kv_head) * cache->capacity * width;
            const act_t *values = cache->values + (index * m->kv_heads + kv_head) * cache->capacity * wide;
            const long first = (row * m->heads + kv_head * group + head) * width;
            /* From here on values are gathered: those of a path, or the last one of an odd number, which would else be
               added up with the next token's times zero, and that need not be finite. */
            const long base = tree ? tree->base : end, branch = max(base / STEP * STEP, even_from);
            long path[MOST_ROWS], length = 0;
            float sums[ROWS * COLUMNS], total[ROWS];
            act_t gathered[(MOST_ROWS + STEP) * COLUMNS];
            for (long key = begin; key < slots; key += COLUMNS) {
                sum_up(queries, 0, 0, 0, keys + key * width, p->q + first, width, width, sums);
                for (long r = 0; r < queries; r++)
                    memcpy(scores + r * stride + key, sums + r * COLUMNS, COLUMNS * sizeof(float));
            }
            for (uint64_t left = tree ? tree->ancestors[t] : 0; left; left &= left - 1, length++) {
                path[length] = __builtin_ctzll(left); /* rises, so no score is overwritten before it has moved */
                for (long r = 0; r < queries; r++)
                    scores[r * stride + tree->base + length] = scores[r * stride + tree->base + path[length]];
            }
            for (long r = 0; r < queries; r++)
                total[r] = softmax(m, scores + r * stride + begin, from - begin, end - begin, blocks,
                                 exps + r * stride + begin);
            for (long column = 0; column < width; column += COLUMNS) {
                const act_t *block = values + column * cache->capacity;
                sum_up(queries, 0, 0, 0, block + at(even_from, 0), exps + even_from, stride, branch - even_from, sums);
                if (branch < even_end) {
                    gather(block, branch, base, end, path, gathered);
                    sum_up(queries, 0, 0, 1, gathered, exps + branch, stride, even_end - branch, sums);
                }
                for (long r = 0; r < queries; r++)
                    for (long c = 0; c < min(COLUMNS, width - column); c++)
                        p->attended.x[first + r * width + column + c] = to_act(sums[r * COLUMNS + c] / total[r]);
            }
        }
    }
}

/* out = f(gate) * up, or f(up) if it is not `gated`, where f is silu, or with `gelu` gelu in its tanh approximation. up
   [count, COLUMNS] has `there` columns; rows of gate and out are `stride` apart. */
INLINE void put_activated(const int gelu, const int gated, const float *up, const float *gate, long count, long there,
                          act_t *out, long stride) {
    for (long row = 0; row < count; row++, up += COLUMNS, gate += stride, out += stride)
#pragma omp simd
        for (long c = 0; c < there; c++) {
            const float a = gated ? gate[c] : up[c], slope = gelu ? 1.5957691216f * (a + 0.044715f * a * a * a) : a;
            out[c] = to_act(a * sigmoid(slope) * (gated ? up[c] : 1.0f));
        }
}

/* activated [count, outer] = what `put_activated` makes of a product of the rows, or of two. */
static void activate(const Pass *p, const Linear *up, float *scratch) {
    const int gated = up->parts > 1, gelu = p->m->gelu;
    const long blocks = blocks_of(up->outer), outer = up->outer;
    for (SHARE(block, gated ? blocks : 0)) /* one loop for both products would jump to and fro in memory */
        multiply_block(up, 0, block * COLUMNS, &p->normed, p->count, p->all + block * COLUMNS, outer, WRITE);
    for (SHARE(block, blocks)) {
        const long column = block * COLUMNS;
        multiply_block(up, up->parts - 1, column, &p->normed, p->count, scratch, COLUMNS, WRITE);
        put_activated(gelu, gated, scratch, p->all + column, p->count, min(COLUMNS, outer - column),
                      p->activated.x + column, outer);
    }
}

/* x [count, outer] += the product of `inputs`, normed and scaled. */
static void add_product(Pass *p, const Norm *n, const Linear *product, const Inputs *inputs) {
    const int as_it_is = !n->weight && p->m->residual == 1.0f;
    multiply(product, inputs, p->count, as_it_is ? p->x : p->all, as_it_is ? ADD : WRITE), barrier(&p->barrier);
    if (!as_it_is) add_rows(n, p->all, p->m->residual, p->count, product->outer, p->x);
}

/* x [count, hidden] += the experts of the normed inputs. */
static void add_experts(Pass *p, const Layer *layer, float *scratch) {
    const Routing *r = &p->routing;
    const long experts = layer->router.outer, used = layer->used, slots = p->count * used;
    const long hidden = p->m->hidden, inner = layer->down->inner;
    Barrier *b = &p->barrier;
    multiply(&layer->router, &p->normed, p->count, r->scores, WRITE), barrier(b);
    for (SHARE(row, p->count))
        choose(r->scores + row * experts, experts, used, layer->normed, r->weights + row * used, r->chosen + row * used);
    barrier(b);
    if (!thread_number()) give_slots(r, p->count, experts, used), p->read += *r->several;
    barrier(b);
    for (SHARE(slot, slots))
        memcpy(p->sorted.x + slot * hidden, p->normed.x + r->rows[slot] * hidden, hidden * sizeof(act_t));
    complete(layer->up, &p->sorted, slots, b);
    const long inners = blocks_of(inner), hiddens = blocks_of(hidden);
    for (int part = 0; part < 2; part++) /* the gates of all experts, then the rest, as in `activate` */
        for (SHARE(i, *r->several * inners)) {
            const long expert = i / inners, column = i % inners * COLUMNS;
            const long first = r->firsts[expert], rows = r->firsts[expert + 1] - first, at = first * inner + column;
            const Inputs in = from_row(&p->sorted, first, hidden, layer->up->code_bytes);
            multiply_block(layer->up + r->named[expert], part, column, &in, rows, part ? scratch : p->all + at,
                           part ? COLUMNS : inner, WRITE);
            if (part)
                put_activated(p->m->gelu, 1, scratch, p->all + at, rows, min(COLUMNS, inner - column),
                              p->activated.x + at, inner);
        }
    complete(layer->down, &p->activated, slots, b);
    float *outputs = p->all; /* [slots, hidden], in place of the gates */
    for (SHARE(i, *r->several * hiddens)) {
        const long expert = i / hiddens, column = i % hiddens * COLUMNS, first = r->firsts[expert];
        const Inputs in = from_row(&p->activated, first, inner, layer->down->code_bytes);
        multiply_block(layer->down + r->named[expert], 0, column, &in, r->firsts[expert + 1] - first,
                       outputs + first * hidden + column, hidden, WRITE);
    }
    barrier(b);
    for (SHARE(row, p->count)) { /* as `norm_rows` divides them */
        const int *slots = r->slots + row * used;
        const float *weights = r->weights + row * used;
        float *sum = outputs + slots[0] * hidden;
        for (long i = 0; i < hidden; i++) sum[i] *= weights[0];
        for (long expert = 1; expert < used; expert++) {
            const float *output = outputs + slots[expert] * hidden;
#pragma omp simd
            for (long i = 0; i < hidden; i++) sum[i] += weights[expert] * output[i];
        }
        add_row(&layer->down_norm, sum, p->m->residual, hidden, p->x + row * hidden);
    }
}

/* What a thread does of a pass. */
static void run_share(void *data) {
    Pass *p = data;
    Barrier *b = &p->barrier;
    float *scratch = (float *)(p->own + thread_number() * p->own_size), *scores = scratch + p->scratch_size;
    act_t *exps = (act_t *)(scores + ROWS * p->stride);
    const long hidden = p->m->hidden;
    for (int index = 0; index < p->depth; index++) {
        const Layer *layer = p->m->layers + index;
        const long inner = layer->qkv.inner; /* of the second input, if there is one, and of x */
        act_t *normed = p->normed.x;
        if (p->second_input)
            norm_rows(&layer->second_input_norm, p->second_input, p->count, hidden, normed, inner), normed += hidden;
        norm_rows(&layer->attention_norm, p->x, p->count, hidden, normed, inner);
        complete(&layer->qkv, &p->normed, p->count, b);
        if (p->m->all_heads) norm_all_heads(p, layer);
        write_kv(p, layer, index, scratch), barrier(b);
        if (p->kv_only) continue;
        attend(p, index, scores, exps), complete(&layer->out, &p->attended, p->count, b);
        add_product(p, &layer->out_norm, &layer->out, &p->attended);
        norm_rows(&layer->mlp_norm, p->x, p->count, hidden, p->normed.x, hidden);
        complete(layer->used ? &layer->router : layer->up, &p->normed, p->count, b);
        if (layer->used) add_experts(p, layer, scratch);
        else {
            activate(p, layer->up, scratch), complete(layer->down, &p->activated, p->count, b);
            add_product(p, &layer->down_norm, layer->down, &p->activated);
        }
        for (SHARE(row, p->outputs[index] ? p->count : 0)) /* the rows that `norm_rows` gives it */
            memcpy(p->outputs[index] + row * hidden, p->x + row * hidden, hidden * sizeof(float));
    }
}

/* Run the layers over the rows x [count, hidden] of some sequences, in place. With `kv_only` every layer reads x itself,
   and only writes its keys and values into the caches. Where `outputs` of a layer is not NULL, its outputs are copied
   there, [count, hidden]: a call for each part of the layers would start the threads anew.
   Returns 0 if there is no memory left, else 1 and in `read` how many experts some row chose, over all layers. */
int run_layers(const Model *m, int depth, float *const *outputs, float *x, const float *second_input,
               const Sequence *sequences, long several, int kv_only, int threads, long *read) {
    const Layer *one = m->layers; /* attention has the same shape in all */
    const long hidden = m->hidden, queries = m->heads * m->width;
    long count = 0, stride = 0, inner = 0, used = 0, experts = 0; /* inner: of all experts of a token */
    for (const Sequence *s = sequences; s < sequences + several; s++)
        count += s->count, stride = max(stride, s->cache->capacity);
    for (const Layer *l = m->layers; l < m->layers + depth; l++) {
        inner = max(inner, l->down->inner * max(l->used, 1)), used = max(used, l->used);
        experts = max(experts, l->used ? l->router.outer : 0);
    }
    const long slots = used * hidden; /* numbers of the inputs of a token's experts, and of their outputs */
    const long floats = max(max(max(inner, hidden), slots), one->qkv.parts * m->width); /* of a token, in `all` */
    const long scratch_size = count * max(m->width, COLUMNS);
    const long own_size = scratch_size * sizeof(float) + ROWS * stride * (sizeof(float) + sizeof(act_t));
    const long longest = max(max(max(one->qkv.inner, queries), inner), slots), room = code_room(count, longest);
    const long per_token = sizeof(Row) + floats * sizeof(float) +
                           (one->qkv.inner + 2 * queries + inner + slots) * sizeof(act_t);
    const long first = threads * own_size + routing_size(count, experts, used);
    char *buffers = malloc(first + sizeof(Row) + count * per_token + room);
    if (!buffers) return 0;
    Row *rows = (Row *)(buffers + round_up(first, sizeof(Row))), *next = rows;
    for (const Sequence *s = sequences; s < sequences + several; s++)
        for (long t = 0; t < s->count; t++) *next++ = (Row){s, t};
    float *all = (float *)next;
    char *codes = (char *)(all + count * floats);
    act_t *normed = (act_t *)(codes + room), *q = normed + count * one->qkv.inner, *attended = q + count * queries;
    act_t *activated = attended + count * queries, *sorted = activated + count * inner;
    Pass pass = {m, depth, kv_only, outputs, second_input, count, stride, x, all, rows, q,
                 inputs_at(codes, normed, count, longest), inputs_at(codes, attended, count, longest),
                 inputs_at(codes, activated, count, longest), inputs_at(codes, sorted, count, longest),
                 routing_in(buffers + threads * own_size, count, experts, used), 0, buffers, own_size, scratch_size};
    run_parallel(run_share, &pass, threads, 0);
    free(buffers);
    *read = pass.read;
    return 1;
}

typedef struct { const Norm *n; const Linear *product; const void *x; void *out; Inputs in; long count; Barrier b; } Product;

static void run_product_share(void *data) {
    Product *p = data;
    const long inner = p->product->inner;
    if (p->n) norm_rows(p->n, p->x, p->count, inner, p->in.x, inner);
    if (p->n || p->product->code_bytes) complete(p->product, &p->in, p->count, &p->b);
    p->n ? multiply(p->product, &p->in, p->count, p->out, WRITE) : multiply(p->product, &p->in, p->count, p->out, WRITE_ACT);
}

/* out [count, outer] = the product of x [count, inner], normed first if there is a norm; then x is float32, else act_t, and
   so is `out`. Returns 0 if there is no memory left, else 1. */
int run_product(const Norm *n, const Linear *product, const void *x, long count, void *out, int threads) {
    const long inner = product->inner, room = code_room(count, inner);
    char *buffer = malloc(room + count * inner * sizeof(act_t) + 1); /* malloc(0) may be NULL */
    if (!buffer) return 0;
    Product p = {n, product, x, out, inputs_at(buffer, (act_t *)(n ? buffer + room : x), count, inner), count};
    run_parallel(run_product_share, &p, threads, 0);
    free(buffer);
    return 1;
}
