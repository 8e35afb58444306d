/* The experts of a layer: several MLPs, of which a router chooses `used` for each row (Shazeer et al., arXiv 1701.06538).

   A slot is a row in the input of one of its experts. Slots are in the order of the experts, so that the rows of an expert
   follow each other: its weights are read once for all of them, and those of experts that no row chose are not read. A
   row adds up the outputs of its own experts from the likeliest on, so its bits do not depend on other rows. */

/* What the router chose for the rows of a pass. */
typedef struct {
    float *scores;  /* [count, experts]: of the router, then the probabilities; -1 where one is taken */
    float *weights; /* [count, used]: of a row's experts, the likeliest first */
    int *chosen;    /* [count, used]: these experts */
    int *slots;     /* [count, used]: their slots */
    int *rows;      /* [count * used]: the row of a slot */
    int *next;      /* [experts] */
    int *named;     /* [experts]: those that some row chose, in rising order, */
    int *firsts;    /* [experts + 1]: their first slots, then the number of slots, */
    int *several;   /* and how many they are */
} Routing;

/* Bytes of a `Routing` for a pass. */
static long routing_size(long count, long experts, long used) {
    return count * (experts + used) * sizeof(float) + (3 * count * used + 3 * experts + 2) * sizeof(int);
}

/* A `Routing` in that many bytes. */
static Routing routing_in(void *bytes, long count, long experts, long used) {
    float *scores = bytes, *weights = scores + count * experts;
    int *chosen = (int *)(weights + count * used), *slots = chosen + count * used, *rows = slots + count * used;
    int *next = rows + count * used, *named = next + experts, *firsts = named + experts;
    return (Routing){scores, weights, chosen, slots, rows, next, named, firsts, firsts + experts + 1};
}

/* The experts of a row, and their weights: the largest probabilities, of equal ones the first. With `normed` they are
   divided by their sum. */
static void choose(float *scores, long experts, long used, int normed, float *weights, int *chosen) {
    float largest = scores[0], sum = 0, total = 0;
    for (long e = 1; e < experts; e++) largest = scores[e] > largest ? scores[e] : largest;
    for (long e = 0; e < experts; e++) sum += scores[e] = exponential(scores[e] - largest);
    for (long e = 0; e < experts; e++) scores[e] /= sum;
    for (long i = 0; i < used; i++) {
        int best = -1; /* never stays: no expert is taken twice, even if no score is a number */
        for (int e = 0; e < experts; e++)
            if (scores[e] != -1.0f && (best < 0 || scores[e] > scores[best])) best = e;
        total += weights[i] = scores[best];
        chosen[i] = best, scores[best] = -1.0f;
    }
    for (long i = 0; i < used && normed; i++) weights[i] /= total;
}

/* Give the rows their slots. */
static void give_slots(const Routing *r, long count, long experts, long used) {
    int slot = 0, several = 0;
    memset(r->next, 0, experts * sizeof(int));
    for (long i = 0; i < count * used; i++) r->next[r->chosen[i]]++;
    for (int e = 0; e < experts; e++) {
        const int rows = r->next[e];
        if (rows) r->named[several] = e, r->firsts[several++] = slot;
        r->next[e] = slot, slot += rows;
    }
    r->firsts[several] = slot, *r->several = several;
    for (long i = 0; i < count * used; i++) r->slots[i] = r->next[r->chosen[i]]++, r->rows[r->slots[i]] = i / used;
}

/* The inputs from a row on. */
INLINE Inputs from_row(const Inputs *in, long row, long inner, int bytes) {
    const long groups = inner / GROUP, codes = row * bytes;
    return (Inputs){in->x + row * inner, in->codes + codes * inner, in->scales + codes * groups, in->sums + codes * groups,
                    in->offsets + codes * groups * 2};
}
