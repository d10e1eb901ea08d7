/* bench_pool.c - the loops of bench/workloads.py over the C core, without Python: what the extension can at best reach.
 *
 * Build, from the root of the repository:
 *     cc -O3 -std=c11 -Icsrc bench/c/bench_pool.c csrc/kvp_*.c -o build/bench_pool
 * Run:
 *     build/bench_pool [--json] [--row NAME] [--samples N] [--ms M]
 * Prints nanoseconds per block, the median of N samples (7) of about M milliseconds (20) each.
 *
 * Rows are named operation/state/batch/pool:
 *     get_free/on|off/B/P    kvp_pool_allocate + kvp_pool_free of the same ids, free list in id order
 *     get_free/churned/B/P   half the pool is in use in batches of random ids; each step frees one, takes a new one
 *     evict/-/B/P, free_cached/-/B/P, touch/-/B/P, cache_full/-/B/P, prefix_hit/-/B/P
 *                            every block cached and free, ids shuffled, in batches of B; only the named call is timed
 */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvp.h"

enum { BLOCKS_PER_ROUND = 4096, BLOCK_SIZE = 16, MAX_SAMPLES = 101, NAME_SIZE = 64 };

static const int32_t BATCHES[] = {1, 16, 256, 4096};
static const int32_t POOL_SIZES[] = {1000, 100000, 2000000};
static const uint64_t SECRET[KVP_SECRET_WORDS] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb,
                                                  0x2545f4914f6cdd1d};

typedef enum {
    GET_FREE_ON,
    GET_FREE_OFF,
    GET_FREE_CHURNED,
    EVICT,
    FREE_CACHED,
    TOUCH,
    CACHE_FULL,
    PREFIX_HIT,
} operation_t;

static const char *const NAMES[] = {"get_free/on",   "get_free/off", "get_free/churned", "evict/-",
                                    "free_cached/-", "touch/-",      "cache_full/-",     "prefix_hit/-"};
enum { NUM_OPERATIONS = sizeof NAMES / sizeof NAMES[0] };

/* One pool and its batches; `ids` holds num_batches batches one after the other. */
typedef struct {
    kvp_pool_t *pool;
    int32_t *ids;
    kvp_key_t *keys;
    uint8_t *digests;
    int32_t *found;
    int32_t batch;
    int32_t num_batches;
    int32_t batches_per_round;
    int32_t position;
    bool has_current; /* batches from `position` on are in the state that the operation left them in */
} stage_t;

typedef struct {
    bool json;
    const char *row;
    int samples;
    double ms;
} options_t;

static void must(bool condition, const char *what) {
    if (!condition) {
        fprintf(stderr, "bench_pool: %s failed\n", what);
        exit(EXIT_FAILURE);
    }
}

static void must_be_ok(kvp_status_t status, const char *what) { must(status == KVP_OK, what); }

static void *must_allocate(size_t count, size_t size) {
    void *memory = calloc(count, size);
    must(memory != NULL, "calloc");
    return memory;
}

static uint64_t next_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void shuffle(int32_t *ids, int32_t n) {
    uint64_t state = 20260101;
    for (int32_t i = n - 1; i > 0; i--) {
        int32_t j = (int32_t)(next_random(&state) % (uint64_t)(i + 1));
        int32_t id = ids[i];
        ids[i] = ids[j];
        ids[j] = id;
    }
}

static int32_t *batch_at(const stage_t *stage, int32_t i) {
    return stage->ids + (size_t)((stage->position + i) % stage->num_batches) * (size_t)stage->batch;
}

static const kvp_key_t *keys_at(const stage_t *stage, int32_t i) {
    return stage->keys + (batch_at(stage, i) - stage->ids);
}

static void free_batch(stage_t *stage, int32_t i) {
    must_be_ok(kvp_pool_free(stage->pool, batch_at(stage, i), stage->batch, KVP_PLACE_BY_HASH, NULL), "free");
}

static void take_batch(stage_t *stage, int32_t i) {
    must_be_ok(kvp_pool_allocate(stage->pool, stage->batch, batch_at(stage, i)), "allocate");
}

static void touch_batch(stage_t *stage, int32_t i) {
    must_be_ok(kvp_pool_touch(stage->pool, batch_at(stage, i), stage->batch, NULL), "touch");
}

static void cache_batch(stage_t *stage, int32_t i) {
    kvp_fault_t fault;
    must_be_ok(kvp_pool_cache(stage->pool, keys_at(stage, i), batch_at(stage, i), stage->batch, BLOCK_SIZE, BLOCK_SIZE,
                              KVP_CACHE_PROMOTE, &fault),
               "cache");
}

static void find_batch(stage_t *stage, int32_t i) {
    must(kvp_pool_find_prefix(stage->pool, keys_at(stage, i), stage->batch, stage->found) == stage->batch, "find");
}

static void make_keys(stage_t *stage, int32_t n) {
    uint64_t state = 42;
    stage->digests = must_allocate((size_t)n, KVP_DIGEST_BYTES);
    stage->keys = must_allocate((size_t)n, sizeof *stage->keys);
    for (int32_t i = 0; i < n; i++) {
        uint8_t *digest = stage->digests + (size_t)i * KVP_DIGEST_BYTES;
        for (size_t word = 0; word < KVP_DIGEST_BYTES / sizeof state; word++) {
            uint64_t random = next_random(&state);
            memcpy(digest + word * sizeof random, &random, sizeof random);
        }
        stage->keys[i] = (kvp_key_t){.digest = digest, .digest_len = KVP_DIGEST_BYTES, .group_id = 0};
    }
}

/* The state a round of the operation starts from; batches are shuffled unless the free list is to be in id order. */
static void open_stage(stage_t *stage, operation_t operation, int32_t batch, int32_t num_blocks) {
    int32_t usable = num_blocks - 1;
    bool is_fresh = operation == GET_FREE_ON || operation == GET_FREE_OFF;
    memset(stage, 0, sizeof *stage);
    must_be_ok(kvp_pool_create(num_blocks, operation != GET_FREE_OFF, true, SECRET, &stage->pool), "create");
    stage->ids = must_allocate((size_t)usable, sizeof *stage->ids);
    stage->found = must_allocate((size_t)batch, sizeof *stage->found);
    stage->batch = batch;
    stage->num_batches = is_fresh ? 1 : operation == GET_FREE_CHURNED ? usable / 2 / batch : usable / batch;
    stage->num_batches = stage->num_batches < 1 ? 1 : stage->num_batches;
    stage->batches_per_round = BLOCKS_PER_ROUND / batch < 1 ? 1 : BLOCKS_PER_ROUND / batch;
    if (is_fresh) {
        return;
    }
    must_be_ok(kvp_pool_allocate(stage->pool, usable, stage->ids), "allocate all");
    shuffle(stage->ids, usable);
    if (operation == GET_FREE_CHURNED) {
        int32_t held = stage->num_batches * batch;
        must_be_ok(kvp_pool_free(stage->pool, stage->ids + held, usable - held, KVP_PLACE_BY_HASH, NULL), "free half");
        return;
    }
    if (stage->batches_per_round > stage->num_batches) {
        stage->batches_per_round = stage->num_batches;
    }
    make_keys(stage, stage->num_batches * batch);
    for (int32_t i = 0; i < stage->num_batches; i++) {
        cache_batch(stage, i);
        free_batch(stage, i);
    }
}

static void close_stage(stage_t *stage) {
    char reason[256];
    if (kvp_pool_check(stage->pool, reason, sizeof reason) != KVP_OK) {
        fprintf(stderr, "bench_pool: %s\n", reason);
        exit(EXIT_FAILURE);
    }
    kvp_pool_destroy(stage->pool);
    free(stage->ids);
    free(stage->keys);
    free(stage->digests);
    free(stage->found);
}

static void for_round(stage_t *stage, void (*act)(stage_t *, int32_t)) {
    for (int32_t i = 0; i < stage->batches_per_round; i++) {
        act(stage, i);
    }
}

/* Undoes the last round, moves on, and sets the stage for the next. Not timed. */
static void prepare(stage_t *stage, operation_t operation) {
    if (stage->has_current) {
        if (operation == EVICT) {
            for_round(stage, cache_batch);
        }
        if (operation == EVICT || operation == TOUCH || operation == CACHE_FULL) {
            for_round(stage, free_batch);
        }
        stage->position = (stage->position + stage->batches_per_round) % stage->num_batches;
    }
    stage->has_current = true;
    if (operation == FREE_CACHED) {
        for_round(stage, touch_batch);
    } else if (operation == CACHE_FULL) {
        for_round(stage, take_batch);
    }
}

/* Timed. */
static void operate(stage_t *stage, operation_t operation) {
    switch (operation) {
    case GET_FREE_ON:
    case GET_FREE_OFF:
        for (int32_t i = 0; i < stage->batches_per_round; i++) {
            take_batch(stage, 0);
            free_batch(stage, 0);
        }
        break;
    case GET_FREE_CHURNED:
        for (int32_t i = 0; i < stage->batches_per_round; i++) {
            free_batch(stage, i);
            take_batch(stage, i);
        }
        break;
    case EVICT: for_round(stage, take_batch); break;
    case FREE_CACHED: for_round(stage, free_batch); break;
    case TOUCH: for_round(stage, touch_batch); break;
    case CACHE_FULL: for_round(stage, cache_batch); break;
    case PREFIX_HIT: for_round(stage, find_batch); break;
    }
}

/* Nanoseconds per block over rounds that take about `ms` milliseconds. */
static double sample(stage_t *stage, operation_t operation, double ms) {
    double total = 0;
    int64_t rounds = 0;
    while (total < ms * 1e6) {
        prepare(stage, operation);
        double start = now_ns();
        operate(stage, operation);
        total += now_ns() - start;
        rounds++;
    }
    return total / (double)rounds / ((double)stage->batches_per_round * stage->batch);
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of_samples(operation_t operation, int32_t batch, int32_t num_blocks, const options_t *options) {
    stage_t stage;
    double samples[MAX_SAMPLES];
    open_stage(&stage, operation, batch, num_blocks);
    (void)sample(&stage, operation, 1.0);
    for (int i = 0; i < options->samples; i++) {
        samples[i] = sample(&stage, operation, options->ms);
    }
    close_stage(&stage);
    qsort(samples, (size_t)options->samples, sizeof samples[0], compare_doubles);
    return samples[options->samples / 2];
}

static options_t parse_options(int argc, char **argv) {
    options_t options = {.json = false, .row = NULL, .samples = 7, .ms = 20};
    for (int i = 1; i < argc; i++) {
        bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--json") == 0) {
            options.json = true;
        } else if (strcmp(argv[i], "--row") == 0 && has_value) {
            options.row = argv[++i];
        } else if (strcmp(argv[i], "--samples") == 0 && has_value) {
            options.samples = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--ms") == 0 && has_value) {
            options.ms = atof(argv[++i]);
        } else {
            fprintf(stderr, "usage: bench_pool [--json] [--row NAME] [--samples 1..%d] [--ms M]\n", MAX_SAMPLES);
            exit(EXIT_FAILURE);
        }
    }
    must(options.samples >= 1 && options.samples <= MAX_SAMPLES && options.ms > 0, "--samples or --ms");
    return options;
}

int main(int argc, char **argv) {
    options_t options = parse_options(argc, argv);
    int num_rows = 0;
    if (options.json) {
        printf("{\"unit\": \"ns per block\", \"rows\": {");
    }
    for (int operation = 0; operation < NUM_OPERATIONS; operation++) {
        for (size_t b = 0; b < sizeof BATCHES / sizeof BATCHES[0]; b++) {
            for (size_t p = 0; p < sizeof POOL_SIZES / sizeof POOL_SIZES[0]; p++) {
                char name[NAME_SIZE];
                snprintf(name, sizeof name, "%s/%" PRId32 "/%" PRId32, NAMES[operation], BATCHES[b], POOL_SIZES[p]);
                if (BATCHES[b] >= POOL_SIZES[p] || (options.row != NULL && strcmp(options.row, name) != 0)) {
                    continue;
                }
                double ns = median_of_samples((operation_t)operation, BATCHES[b], POOL_SIZES[p], &options);
                if (options.json) {
                    printf("%s\"%s\": %.3f", num_rows > 0 ? ", " : "", name, ns);
                } else {
                    printf("%-32s %10.2f\n", name, ns);
                }
                num_rows++;
            }
        }
    }
    if (options.json) {
        printf("}}\n");
    }
    must(num_rows > 0, "--row: no such row");
    return EXIT_SUCCESS;
}
