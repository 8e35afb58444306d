/* Products with weights of 4 and 8 bits, see `quantized.py`: weight = scale * code - low.

   The inputs of such a product become integers of 16 bits, with a scale for each GROUP. So the sums of a group are exact,
   and an input changes by at most 1 / 65534 of the largest of its group.

   codes, scales, lows and units are packed in blocks of COLUMNS outputs: [outer / COLUMNS, ., COLUMNS] of what `Quantized`
   has as [outer, .]. */

#define GROUP 32  /* numbers that share a scale and a low */
#define SUPER 256 /* numbers that share the units of these */
#define SHARED (1 << 20) /* bytes from which packing is divided among the threads: to wake them takes as long as 100 KB */
#define LIMIT 32767.0f
#define LEAST 1e-30f /* smaller inputs count as zero, or the inverse of their scale would be infinite */

/* Of a weight of type weight_t only `codes` is set, and `kind` is 0. */
typedef struct { const void *codes, *scales, *lows, *scale_units, *low_units; int kind; } Part;
enum { EIGHT = 1, LOWS = 2, UNITS = 4 }; /* bits of `kind` - 1 */

/* The rows [count, inner] of inputs of a product. `codes`, scales and sums [count, inner / GROUP] are those of x, if the
   product needs them; a sum is that of a group. */
typedef struct { act_t *x; int16_t *codes; float *scales, *sums; } Inputs;

INLINE shorts four_bits(const void *stored, const int k) { return *(const shorts *)stored >> 4 * k & 15; }

/* Scales or lows of LANES columns: those of a group, times those of its SUPER if there are units. */
INLINE vector scaled(const void *scales, const void *units, long group, long super, int v, const int kind) {
    const long column = v * LANES;
    if (!(kind - 1 & UNITS)) return halves((const uint16_t *)scales + group * COLUMNS + column);
    return halves((const uint16_t *)units + super * COLUMNS + column) *
           to_floats(integers_of((const char *)scales + group * COLUMNS + column, !(kind - 1 & LOWS)));
}

/* sums [rows, COLUMNS] = rows of inputs from `row` on, times a block of a weight of a kind. */
INLINE void sum_codes(const int rows, const int kind, const Part *p, long block, const Inputs *in, long row, long inner,
                      float *sums) {
    const int eight = kind - 1 & EIGHT, lows = kind - 1 & LOWS, narrow = kind - 1 & UNITS && !lows;
    const long groups = inner / GROUP, supers = inner / SUPER, per_group = narrow ? 2 : 1; /* scales */
    const char *stored = (const char *)p->codes + block * COLUMNS * inner / (eight ? 1 : 2);
    const char *scales = (const char *)p->scales + block * COLUMNS * groups * per_group * (kind - 1 & UNITS ? 1 : 2);
    const char *low = (const char *)p->lows + block * COLUMNS * groups * (kind - 1 & UNITS ? 1 : 2);
    const uint16_t *units = (const uint16_t *)p->scale_units + block * COLUMNS * supers;
    const uint16_t *low_units = (const uint16_t *)p->low_units + block * COLUMNS * supers;
    const int fetch = rows > (eight && LANES > 8 ? 2 : 0); /* else the CPU's own prefetch is enough */
    vector total[ROWS][VECTORS];
UNROLLED
    for (int r = 0; r < rows; r++)
UNROLLED
        for (int v = 0; v < VECTORS; v++) total[r][v] = (vector){0};
    for (long group = 0; group < groups; group++)
        for (int part = 0; part < per_group; part++) {
            const int pairs = GROUP / 2 / per_group;
            const int16_t *x = in->codes + row * inner + group * GROUP + part * 2 * pairs;
            integers sum[ROWS][VECTORS];
            shorts number[VECTORS];
UNROLLED
            for (int r = 0; r < rows; r++)
UNROLLED
                for (int v = 0; v < VECTORS; v++) sum[r][v] = (integers){0};
UNROLLED
            for (int pair = 0; pair < pairs; pair++) {
UNROLLED
                for (int v = 0; v < VECTORS; v++) {
                    const char *next = stored + ((eight ? pair : pair / 4) * COLUMNS + v * LANES) * (eight ? 2 : 4);
                    if (fetch && (eight || pair % 4 == 0) && (next - stored) % LINE == 0)
                        __builtin_prefetch(next + AHEAD, 0, 2);
                    number[v] = eight ? shorts_of(next) : four_bits(next, pair % 4);
                }
UNROLLED
                for (int r = 0; r < rows; r++)
UNROLLED
                    for (int v = 0; v < VECTORS; v++)
                        sum[r][v] = add_codes(sum[r][v], pair_of(x + r * inner + 2 * pair), number[v]);
            }
            stored += pairs * COLUMNS * (eight ? 2 : 1);
UNROLLED
            for (int v = 0; v < VECTORS; v++) {
                const vector scale = scaled(scales, units, group * per_group + part, group * GROUP / SUPER, v, kind);
                const vector least = lows ? scaled(low, low_units, group, group * GROUP / SUPER, v, kind) : (vector){0};
UNROLLED
                for (int r = 0; r < rows; r++) {
                    const long at = (row + r) * groups + group;
                    total[r][v] += to_floats(sum[r][v]) * (scale * in->scales[at]);
                    if (lows) total[r][v] -= least * in->sums[at];
                }
            }
        }
UNROLLED
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) memcpy(sums + r * COLUMNS + v * LANES, &total[r][v], sizeof(vector));
}

/* The codes, scales and sums of x [count, inner], computed by all threads. */
static void encode(const Inputs *in, long count, long inner) {
    for (SHARE(group, count * inner / GROUP)) {
        float x[GROUP], largest = 0, wrong = 0;
        int sum = 0;
        for (int i = 0; i < GROUP; i++) x[i] = from_act(in->x[group * GROUP + i]);
#pragma omp simd reduction(max : largest) reduction(+ : wrong)
        for (int i = 0; i < GROUP; i++) {
            const float size = __builtin_fabsf(x[i]);
            largest = size > largest ? size : largest;
            wrong += x[i] * 0.0f; /* not a number if x is not finite */
        }
        const float inverse = largest > LEAST ? LIMIT / largest : 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < GROUP; i++) {
            const int code = __builtin_rintf(x[i] * inverse);
            in->codes[group * GROUP + i] = code;
            sum += code;
        }
        in->scales[group] = largest / LIMIT + wrong;
        in->sums[group] = in->scales[group] * sum;
    }
}

/* The same for any number of rows up to ROWS, and any kind. It takes three times as long to compile as all the rest, so
   only a library that needs it has it (-DQUANTIZED). */
static void sum_quantized(int rows, const Part *p, long block, const Inputs *in, long row, long inner, float *sums) {
#ifdef QUANTIZED
    switch (p->kind * 16 + rows) {
#define CASE(n, kind) case kind * 16 + n: sum_codes(n, kind, p, block, in, row, inner, sums); break;
#define KINDS(n) CASE(n, 2) CASE(n, 3) CASE(n, 4) CASE(n, 6) CASE(n, 7) CASE(n, 8)
        KINDS(1) KINDS(2) KINDS(3) KINDS(4) KINDS(5) KINDS(6)
#if ROWS > 6
        KINDS(7) KINDS(8) KINDS(9)
#endif
    default: /* `Quantized` has no others; what is not computed is no number */
        for (long i = 0; i < rows * COLUMNS; i++) sums[i] = NAN;
    }
#undef CASE
#endif
}

/* A block of COLUMNS outputs, of which there are `count`, of items of some bytes: [count, size] -> [size, COLUMNS]. A line
   of 64 bytes of an output is read at once, because the next output may push it out of the cache; the CPU cannot tell which
   lines follow, so they are fetched. As many outputs as fill a word are written together. */
INLINE void pack_block(const char *from, long count, long size, const int bytes, char *to) {
    static const char zeros[64];
    for (long begin = 0; begin < size; begin += 64 / bytes)
        for (long column = 0; column < COLUMNS; column += 8 / bytes) {
            const char *lines[8];
            for (int k = 0; k < 8 / bytes; k++) {
                lines[k] = column + k < count ? from + ((column + k) * size + begin) * bytes : zeros;
                __builtin_prefetch(lines[k] + 128);
            }
            for (long i = 0; i < 64 / bytes && begin + i < size; i++) {
                char word[8];
                for (int k = 0; k < 8 / bytes; k++) memcpy(word + k * bytes, lines[k] + i * bytes, bytes);
                memcpy(to + ((begin + i) * COLUMNS + column) * bytes, word, 8);
            }
        }
}

/* A tensor of a quantized weight, of items of 1, 2 or 4 bytes: [outer, size]. */
typedef struct { const char *from; long outer, size; int bytes; char *to; } Packing;

static void pack_share(void *data) {
    const Packing p = *(Packing *)data;
    for (SHARE(block, blocks_of(p.outer))) {
        const long first = block * COLUMNS, there = p.outer - first, skipped = first * p.size * p.bytes;
        switch (p.bytes) {
        case 1: pack_block(p.from + skipped, there, p.size, 1, p.to + skipped); break;
        case 2: pack_block(p.from + skipped, there, p.size, 2, p.to + skipped); break;
        case 4: pack_block(p.from + skipped, there, p.size, 4, p.to + skipped); break;
        }
    }
}

/* Pack it: [outer, size] -> [outer / COLUMNS, size, COLUMNS], padded with zeros. */
void pack_columns(const char *from, long outer, long size, int bytes, char *to, int threads) {
    Packing packing = {from, outer, size, bytes, to};
    run_parallel(pack_share, &packing, outer * size * bytes < SHARED ? 1 : threads, 0);
}
