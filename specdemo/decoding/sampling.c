/* What `sampling.py` does on a CPU, in one reading of the numbers: with torch's operations, each of which reads and
   writes a vocabulary, it takes as long as a layer of a small model. Every row is a vocabulary, of float32. */

#include <math.h>
#include <stdint.h>

#define PART 256 /* numbers that are looked at together first */

static inline long least(long a, long b) { return a < b ? a : b; }

/* places [rows] = where the largest number of each row is, the first one of equal ones, values [rows] = that number and
   seconds [rows] = the next largest. The first one that is not a number (NaN) counts as the largest, as it does for
   torch. */
void largest(const float *numbers, long rows, long size, int64_t *places, float *values, float *seconds) {
    for (long row = 0; row < rows; row++) {
        const float *x = numbers + row * size;
        float best = x[0], second = -INFINITY; /* second: of the parts that do not hold the best */
        long part = 0, place;
        for (long begin = 0; begin < size; begin += PART) {
            const long end = least(begin + PART, size);
            float most = x[begin];
            int nan = 0;
#pragma omp simd reduction(max : most) reduction(| : nan)
            for (long i = begin; i < end; i++) most = x[i] > most ? x[i] : most, nan |= x[i] != x[i];
            if (nan) {
                best = NAN, part = begin;
                break;
            }
            if (begin == 0)
                best = most;
            else if (most > best)
                second = best, best = most, part = begin;
            else
                second = fmaxf(second, most);
        }
        const long last = least(part + PART, size) - 1;
        for (place = part; place < last && x[place] != best && x[place] == x[place]; place++) {}
        for (long i = part; i <= last; i++)
            if (i != place) second = fmaxf(second, x[i]);
        places[row] = place, values[row] = x[place], seconds[row] = second;
    }
}

/* places [rows] = the first place of each row where the sum of the weights up to it exceeds its draw of their total;
   `size` where nothing is possible, or the weights are no numbers. */
void sample(const float *weights, long rows, long size, const double *draws, int64_t *places) {
    for (long row = 0; row < rows; row++) {
        const float *x = weights + row * size;
        double total = 0, sum = 0, sums[size / PART + 1]; /* of the parts */
        for (long begin = 0; begin < size; begin += PART) {
            double some = 0;
#pragma omp simd reduction(+ : some)
            for (long i = begin; i < least(begin + PART, size); i++) some += x[i];
            total += sums[begin / PART] = some;
        }
        if (!(total > 0)) {
            places[row] = size;
            continue;
        }
        /* Rounding may carry the product up to the total itself, which no sum exceeds. */
        const double threshold = fmin(draws[row] * total, nextafter(total, 0));
        long part = 0, place = 0;
        while (part + PART < size && sum + sums[part / PART] <= threshold) sum += sums[part / PART], part += PART;
        /* Within the part they are added up in another order: should none exceed, the last that is possible is it. */
        for (long i = part; i < least(part + PART, size); i++)
            if (x[i] > 0) {
                place = i, sum += x[i];
                if (sum > threshold) break;
            }
        places[row] = place;
    }
}
