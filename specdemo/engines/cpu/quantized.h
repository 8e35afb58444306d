/* Products with weights of 4 and 8 bits, see `quantized.py`: weight = scale * code - low.

   The inputs of such a product become codes, too, with a scale for each GROUP. So the sums of a group are exact. A code of
   one byte is at most LARGEST. One of two bytes is FACTOR * high + low, where both are at most LARGEST: that counts as two
   rows, whose results are added up. An input changes by at most 1 / 254 or 1 / 65024 of the largest of its group.

   codes, scales, lows and units are packed in blocks of COLUMNS outputs: [outer / COLUMNS, ., COLUMNS] of what `Quantized`
   has as [outer, .]. An item of codes has four bytes, which are 4 codes of 8 bits or 8 of 4 bits. */

#define GROUP 32  /* numbers that share a scale and a low */
#define NARROW 16 /* numbers that share a scale where it is a level and there are no lows */
#define SUPER 256 /* numbers that share the units of these */
#define LARGEST 127
#define FACTOR 255
#define SHARED (1 << 20) /* bytes from which packing is divided among the threads: to wake them takes as long as 100 KB */
#define LEAST 1e-30f /* smaller inputs count as zero, or the inverse of their scale would be infinite */

/* Of a weight of type weight_t only `codes` is set, and `kind` is 0. */
typedef struct { const void *codes, *scales, *lows, *scale_units, *low_units; int kind; } Part;
enum { EIGHT = 1, LOWS = 2, UNITS = 4 }; /* bits of `kind` - 1 */

/* The inputs x [count, inner] of a product. If a part is quantized, they have one or two rows of `codes` each, [rows, inner].
   `scales` and `sums` [rows, inner / GROUP] are those of groups, and a sum is multiplied by its scale. `offsets`
   [rows, inner / NARROW] are -BIAS * the sums of codes. */
typedef struct { act_t *x; int8_t *codes; float *scales, *sums; int32_t *offsets; } Inputs;

/* The bytes of the codes of `count` inputs with all that goes with them, and these inputs with them at `place`. */
INLINE long code_room(long count, long inner) { return count * (inner / GROUP) * (8 * sizeof(float) + 2 * GROUP); }
INLINE Inputs inputs_at(char *place, act_t *x, long count, long inner) {
    const long groups = 2 * count * (inner / GROUP); /* of two rows of codes each */
    float *scales = (float *)place, *sums = scales + groups;
    int32_t *offsets = (int32_t *)(sums + groups);
    return (Inputs){x, (int8_t *)(offsets + 2 * groups), scales, sums, offsets};
}

/* Scales or lows of LANES columns: those of a group, times those of its SUPER if there are units. */
INLINE vector scaled(const void *scales, const void *units, long group, long super, int v, const int kind) {
    const long column = v * LANES;
    if (!(kind - 1 & UNITS)) return halves((const uint16_t *)scales + group * COLUMNS + column);
    return halves((const uint16_t *)units + super * COLUMNS + column) *
           to_floats(integers_of((const char *)scales + group * COLUMNS + column, !(kind - 1 & LOWS)));
}

/* sums [rows, COLUMNS] = rows of codes from `row` on, times a block of a weight of a kind. */
INLINE void sum_codes(const int rows, const int kind, const Part *p, long block, const Inputs *in, long row, long inner,
                      float *sums) {
    const int eight = kind - 1 & EIGHT, lows = kind - 1 & LOWS, narrow = kind - 1 & UNITS && !lows;
    const int bits = !eight ? 4 : narrow ? 6 : 8; /* of a code's value */
    const int size = narrow ? NARROW : GROUP, fours = size / 4, per_group = GROUP / size; /* size: numbers of a scale */
    const long groups = inner / GROUP, supers = inner / SUPER;
    const char *stored = (const char *)p->codes + block * COLUMNS * inner / (eight ? 1 : 2);
    const char *scales = (const char *)p->scales + block * COLUMNS * groups * per_group * (kind - 1 & UNITS ? 1 : 2);
    const char *low = (const char *)p->lows + block * COLUMNS * groups * (kind - 1 & UNITS ? 1 : 2);
    const uint16_t *units = (const uint16_t *)p->scale_units + block * COLUMNS * supers;
    const uint16_t *low_units = (const uint16_t *)p->low_units + block * COLUMNS * supers;
    vector total[ROWS][VECTORS];
UNROLLED
    for (int r = 0; r < rows; r++)
UNROLLED
        for (int v = 0; v < VECTORS; v++) total[r][v] = (vector){0};
    for (long group = 0; group < groups; group++)
        for (int part = 0; part < per_group; part++) {
            const int8_t *x = in->codes + row * inner + group * GROUP + part * size;
            integers sum[ROWS][VECTORS], codes[VECTORS];
UNROLLED
            for (int r = 0; r < rows; r++) {
                const int32_t *offset = in->offsets + ((row + r) * groups + group) * 2 + part;
UNROLLED
                for (int v = 0; v < VECTORS; v++)
                    sum[r][v] = (integers){0} + (eight && BIAS ? narrow ? offset[0] : offset[0] + offset[1] : 0);
            }
UNROLLED
            for (int four = 0; four < fours; four++) { /* numbers of each column */
UNROLLED
                for (int v = 0; v < VECTORS; v++) {
                    const char *item = stored + ((eight ? four : four / 2) * COLUMNS + v * LANES) * 4;
                    if ((eight || four % 2 == 0) && (item - stored) % LINE == 0) __builtin_prefetch(item + AHEAD, 0, 2);
                    codes[v] = *(const integers *)item;
                    if (eight) codes[v] ^= (int32_t)(BIAS * 0x01010101u); /* the same as to add it to each code */
                    else codes[v] = codes[v] >> four % 2 * 4 & 0x0f0f0f0f;
                }
UNROLLED
                for (int r = 0; r < rows; r++)
UNROLLED
                    for (int v = 0; v < VECTORS; v++)
                        sum[r][v] = add_codes(sum[r][v], word_of(x + r * inner + four * 4), codes[v], bits);
            }
            stored += fours * COLUMNS * (eight ? 4 : 2);
UNROLLED
            for (int v = 0; v < VECTORS; v++) {
                const vector scale = scaled(scales, units, group * per_group + part, group * GROUP / SUPER, v, kind);
                const vector least = lows ? scaled(low, low_units, group, group * GROUP / SUPER, v, kind) : (vector){0};
UNROLLED
                for (int r = 0; r < rows; r++) {
                    const long at = (row + r) * groups + group;
                    total[r][v] += to_floats(bits == 8 ? sum[r][v] : sum_of(sum[r][v])) * (scale * in->scales[at]);
                    if (lows) total[r][v] -= least * in->sums[at];
                }
            }
        }
UNROLLED
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) memcpy(sums + r * COLUMNS + v * LANES, &total[r][v], sizeof(vector));
}

/* The sum of NARROW codes. */
INLINE int sum_narrow(const int32_t *codes) {
    integers sums = {0};
    int sum = 0;
    for (int k = 0; k < NARROW; k += LANES) sums += *(const integers *)(codes + k);
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return sum;
}

/* The codes of a group become those of group `at` of all. */
INLINE void put_codes(const Inputs *in, long at, const int32_t *codes, float scale) {
    int8_t bytes[GROUP];
#pragma omp simd
    for (int i = 0; i < GROUP; i++) bytes[i] = codes[i];
    memcpy(in->codes + at * GROUP, bytes, GROUP);
    const int first = sum_narrow(codes), second = sum_narrow(codes + NARROW);
    in->offsets[at * 2] = -BIAS * first, in->offsets[at * 2 + 1] = -BIAS * second;
    in->scales[at] = scale, in->sums[at] = scale * (first + second);
}

/* Compute the codes of x [count, inner], of one or two bytes. */
static void encode(const Inputs *in, long count, long inner, int bytes) {
    const float limit = bytes == 1 ? LARGEST : FACTOR * LARGEST + LARGEST;
    const long groups = inner / GROUP;
    static const float zeros[GROUP];
    for (SHARE(i, count * groups)) {
        const float *x = (const float *)in->x + i * GROUP; /* models with quantized weights compute in float32 */
        const int32_t *bits = (const int32_t *)x;
        const long first = i / groups * bytes * groups + i % groups;
        int32_t whole[GROUP], high[GROUP], rest[GROUP], most = 0;
        float largest;
#pragma omp simd reduction(max : most)
        for (int k = 0; k < GROUP; k++) { /* bits grow with sizes, and those of what is not finite are the largest */
            const int32_t size = bits[k] & INT32_MAX;
            most = size > most ? size : most;
        }
        memcpy(&largest, &most, sizeof largest);
        if (!(largest < INFINITY)) x = zeros; /* what is not finite is no integer: the scale tells of it */
        const float inverse = largest > LEAST ? limit / largest : 0, scale = largest / limit;
#pragma omp simd
        for (int k = 0; k < GROUP; k++) {
            whole[k] = __builtin_rintf(x[k] * inverse), high[k] = __builtin_rintf(whole[k] * (1.0f / FACTOR));
            rest[k] = whole[k] - FACTOR * high[k];
        }
        if (bytes == 1) put_codes(in, first, whole, scale);
        else put_codes(in, first, high, scale * FACTOR), put_codes(in, first + groups, rest, scale);
    }
}

/* sums [rows, COLUMNS] = rows of inputs from `row` on, whose codes have so many bytes, times a block of a weight; there are
   at most ROWS rows of codes. It takes longer to compile than all the rest, so only a library that needs it has it
   (-DQUANTIZED). */
static void sum_quantized(int rows, int bytes, const Part *p, long block, const Inputs *in, long row, long inner,
                          float *sums) {
#ifdef QUANTIZED
    switch (p->kind * 16 + rows * bytes) {
#define CASE(n, kind) case kind * 16 + n: sum_codes(n, kind, p, block, in, row * bytes, inner, sums); break;
#define KINDS(n) CASE(n, 2) CASE(n, 3) CASE(n, 4) CASE(n, 6) CASE(n, 7) CASE(n, 8)
        KINDS(1) KINDS(2) KINDS(3) KINDS(4) KINDS(5) KINDS(6)
#if ROWS > 6
        KINDS(7) KINDS(8) KINDS(9)
#endif
    default: /* `Quantized` has no others; what is not computed is no number */
        for (long i = 0; i < rows * bytes * COLUMNS; i++) sums[i] = NAN;
    }
#undef CASE
    for (long r = 0; r < rows && bytes == 2; r++)
        for (long c = 0; c < COLUMNS; c++)
            sums[r * COLUMNS + c] = sums[2 * r * COLUMNS + c] + sums[(2 * r + 1) * COLUMNS + c];
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
