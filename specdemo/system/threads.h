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

/* The first of `count` items that belong to a thread. Each thread has some that follow each other, at most one more than
   another thread. */
INLINE long first_of(long thread, long count) {
    const long threads = thread_count(), more = count % threads;
    return thread * (count / threads) + min(thread, more);
}

/* for (SHARE(i, count)): over the items that belong to this thread. It does not wait for the others. */
#define SHARE(i, count) \
    long i = first_of(thread_number(), count), end_##i = first_of(thread_number() + 1, count); i < end_##i; i++
