/* The threads of torch's own OpenMP library, for code of any compiler. A second OpenMP library would bring threads of its
   own, which compete with these for the cores. */

#define INLINE static inline __attribute__((always_inline))

INLINE long min(long a, long b) { return a < b ? a : b; }
INLINE long max(long a, long b) { return a > b ? a : b; }

static void (*run_parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
static int (*thread_number)(void), (*thread_count)(void); /* in a parallel region: of this thread, and of all */

/* `compiled.py` calls this first. */
void use_threads(void *GOMP_parallel, void *omp_get_thread_num, void *omp_get_num_threads) {
    run_parallel = GOMP_parallel, thread_number = omp_get_thread_num, thread_count = omp_get_num_threads;
}

/* The first of this thread's share of `count` items, which follow each other, and where it ends. No share is more than one
   item longer than another. */
INLINE long first_of_share(long count, long *end) {
    const long threads = thread_count(), thread = thread_number(), size = count / threads, longer = count % threads;
    const long first = thread * size + min(thread, longer);
    *end = first + size + (thread < longer);
    return first;
}

/* for (SHARE(i, count)): over this thread's share. It does not wait for the others. */
#define SHARE(i, count) long end_##i, i = first_of_share(count, &end_##i); i < end_##i; i++
