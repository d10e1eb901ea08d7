/* check.h - counts what is checked, says what failed, and goes on. One test program a file. */
#ifndef KVP_TEST_CHECK_H
#define KVP_TEST_CHECK_H

#include <stdint.h>
#include <stdio.h>

static int num_failed, num_checks;

#define CHECK(condition)                                                   \
    do {                                                                   \
        num_checks++;                                                      \
        if (!(condition)) {                                                \
            num_failed++;                                                  \
            printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
        }                                                                  \
    } while (0)

/* xorshift: the same numbers on every machine. */
static uint64_t random_state = 88172645463325252u;

static uint32_t random_below(uint32_t n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 33) % n;
}

/* The closing line; the exit status of the program. */
static int report(const char *what) {
    printf("%s: %d checks, %d failed\n", what, num_checks, num_failed);
    return num_failed == 0 ? 0 : 1;
}

#endif
