/* Draws tokens by an exponential race (see noise.py) in one reading of the probabilities.

   u <= -log1p(-u) for every u in (0, 1), so a token whose u / p is not below the second best e / p so far cannot be among
   the two best. That test needs no logarithm, and nearly every token fails it. */

#include <math.h>
#include <stdint.h>

#define BLOCK 256 /* tokens tested together */
#define STEP 0x9E3779B97F4A7C15ull

static inline uint64_t mix(uint64_t x) { /* splitmix64 (Steele, Lea and Flood 2014) */
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/* tokens [rows]: the token with the least e / p of each row of probabilities [rows, size], -1 if no p is above 0 or one is
   not a number. margins [rows]: the logarithm of the second least over the least, infinite if only one token is possible.
   keys [rows] name the noise of each row. ids [size] are the tokens that the columns stand for, all of them if NULL; what
   is returned are columns. */
void race(const float *probs, long rows, long size, const uint64_t *keys, const int64_t *ids, int64_t *tokens,
          double *margins) {
    for (long row = 0; row < rows; row++) {
        const float *p = probs + row * size;
        double best = INFINITY, second = INFINITY;
        long winner = -1;
        int finite = 1;
        for (long begin = 0; begin < size; begin += BLOCK) {
            const long end = begin + BLOCK < size ? begin + BLOCK : size;
            const float bound = (float)(second * 1.0001); /* rounded up: u and p below are rounded too */
            int hit = 0, bad = 0;
#pragma omp simd reduction(| : hit, bad)
            for (long i = begin; i < end; i++) {
                const uint64_t x = mix(keys[row] + (uint64_t)((ids ? ids[i] : i) + 1) * STEP);
                const float u = (float)(int32_t)(x >> 40) * 0x1p-24f; /* rounded down */
                hit |= (u < bound * p[i]) & (p[i] > 0);
                bad |= !(p[i] < INFINITY);
            }
            if (bad) {
                finite = 0;
                break;
            }
            if (!hit) continue;
            for (long i = begin; i < end; i++) {
                if (!(p[i] > 0)) continue;
                const uint64_t x = mix(keys[row] + (uint64_t)((ids ? ids[i] : i) + 1) * STEP);
                const double u = ((double)(x >> 11) + 0.5) * 0x1p-53;
                if (u >= second * p[i]) continue;
                const double time = -log1p(-u) / p[i];
                if (time < best)
                    second = best, best = time, winner = i;
                else if (time < second)
                    second = time;
            }
        }
        tokens[row] = finite ? winner : -1;
        margins[row] = second < INFINITY ? log(second / best) : INFINITY;
    }
}
