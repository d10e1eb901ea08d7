/* standalone.c - runs a fuzz target where there is no libFuzzer: mutates the inputs of a corpus, or random ones.
 *
 *   TARGET -seconds=N [-seed=S] [-max_len=L] [CORPUS_FOLDER_FILE ...]   random and mutated inputs
 *   TARGET FILE ...                                                     replays them
 *
 * No coverage guides it; the targets are interpreters, so that random bytes are histories already. An input at which
 * the target stops is written to crash-SEED-EXECUTION, and the process ends by the target's abort. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "input.h"

enum { MAX_INPUTS = 512, LONGEST = 4096 };

typedef struct {
    uint8_t *bytes;
    size_t size;
} sample_t;

static sample_t samples[MAX_INPUTS];
static size_t num_samples;
static uint8_t current[LONGEST];
static size_t current_size;
static uint64_t seed = 1, executions, random_state;

/* The sanitizers stop by abort(), so that one handler sees every finding. */
const char *__asan_default_options(void);
const char *__ubsan_default_options(void);
const char *__asan_default_options(void) { return "abort_on_error=1:detect_leaks=1"; }
const char *__ubsan_default_options(void) { return "halt_on_error=1:abort_on_error=1:print_stacktrace=1"; }

static void save_input(int number) {
    char name[64];
    (void)snprintf(name, sizeof name, "crash-%llu-%llu", (unsigned long long)seed, (unsigned long long)executions);
    const int file = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file >= 0) {
        if (write(file, current, current_size) == (ssize_t)current_size) {
            (void)fprintf(stderr, "input written to %s\n", name);
        }
        (void)close(file);
    }
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}

static uint64_t next_random(void) {
    random_state += 0x9e3779b97f4a7c15u;
    uint64_t z = random_state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static size_t random_below(size_t n) { return n == 0 ? 0 : (size_t)(next_random() % n); }

static void read_sample(const char *name) {
    FILE *const file = fopen(name, "rb");
    if (file == NULL) {
        perror(name);
        exit(2);
    }
    uint8_t *const bytes = malloc(LONGEST);
    if (bytes == NULL || num_samples == MAX_INPUTS) {
        (void)fprintf(stderr, "%s: too many inputs\n", name);
        exit(2);
    }
    samples[num_samples++] = (sample_t){bytes, fread(bytes, 1, LONGEST, file)};
    (void)fclose(file);
}

static void make_random(size_t max_len) {
    current_size = 1 + random_below(max_len);
    for (size_t i = 0; i < current_size; i++) {
        current[i] = (uint8_t)next_random();
    }
}

static void copy_from(const sample_t *sample, size_t from, size_t n, size_t to, size_t max_len) {
    n = n > sample->size - from ? sample->size - from : n;
    n = n > max_len - to ? max_len - to : n;
    if (n > 0) {
        memcpy(current + to, sample->bytes + from, n);
    }
    current_size = to + n > current_size ? to + n : current_size;
}

/* The start of one sample, a part of another, a few bytes changed, dropped or repeated. */
static void make_mutant(size_t max_len) {
    const sample_t *const first = &samples[random_below(num_samples)];
    const sample_t *const other = &samples[random_below(num_samples)];
    current_size = 0;
    copy_from(first, 0, first->size, 0, max_len);
    if (random_below(2) == 0) {
        copy_from(other, random_below(other->size), 1 + random_below(64), random_below(current_size), max_len);
    }
    for (size_t i = 1 + random_below(8); i > 0 && current_size > 0; i--) {
        const size_t at = random_below(current_size);
        switch (random_below(4)) {
        case 0:
            memmove(current + at, current + at + 1, current_size - at - 1);
            current_size--;
            break;
        case 1: current[at] = (uint8_t)(current[at] + 1 - 2 * (int)random_below(2)); break;
        default: current[at] = (uint8_t)next_random(); break;
        }
    }
}

static double now(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* In memory of exactly that size, so that a read past the end is seen. */
static void execute(const uint8_t *bytes, size_t size) {
    uint8_t *const copy = malloc(size + (size == 0));
    if (copy == NULL) {
        exit(2);
    }
    memcpy(copy, bytes, size);
    (void)LLVMFuzzerTestOneInput(copy, size);
    free(copy);
    executions++;
}

int main(int argc, char **argv) {
    double seconds = 0;
    unsigned long max_len = 1024;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "-seconds=", 9) == 0) {
            seconds = strtod(argv[i] + 9, NULL);
        } else if (strncmp(argv[i], "-seed=", 6) == 0) {
            seed = strtoull(argv[i] + 6, NULL, 10);
        } else if (strncmp(argv[i], "-max_len=", 9) == 0) {
            max_len = strtoul(argv[i] + 9, NULL, 10);
        } else {
            read_sample(argv[i]);
        }
    }
    if (max_len < 1 || max_len > LONGEST) {
        (void)fprintf(stderr, "-max_len is 1 .. %d\n", LONGEST);
        return 2;
    }
    (void)signal(SIGABRT, save_input);
    for (size_t i = 0; i < num_samples; i++) {
        memcpy(current, samples[i].bytes, samples[i].size);
        current_size = samples[i].size;
        execute(current, current_size);
    }
    random_state = seed;
    for (const double end = now() + seconds; seconds > 0 && now() < end;) {
        for (int i = 0; i < 64; i++) {
            if (num_samples == 0 || random_below(4) == 0) {
                make_random(max_len);
            } else {
                make_mutant(max_len);
            }
            execute(current, current_size);
        }
    }
    (void)printf("%llu executions\n", (unsigned long long)executions);
    for (size_t i = 0; i < num_samples; i++) {
        free(samples[i].bytes);
    }
    return 0;
}
