/* input.h - reads an input of bytes as small numbers, and stops a target that found something.
 *
 * A target is an interpreter: each byte string is a history of calls. Reading past the end gives zeroes and sets
 * `empty`, so that every input is a valid one and a shorter input is a prefix of the same history. */
#ifndef KVP_FUZZ_INPUT_H
#define KVP_FUZZ_INPUT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} input_t;

static inline bool input_empty(const input_t *input) { return input->at >= input->end; }

static inline uint32_t next_byte(input_t *input) { return input_empty(input) ? 0 : *input->at++; }

/* 0 .. n - 1; n <= 256. */
static inline uint32_t next_below(input_t *input, uint32_t n) { return next_byte(input) % n; }

static inline uint32_t next_word(input_t *input) {
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) {
        word = word << 8 | next_byte(input);
    }
    return word;
}

/* A number that mostly lies in first .. last and now and then anywhere in 32 bits. */
static inline int32_t next_int(input_t *input, int32_t first, int32_t last) {
    static const int32_t edges[] = {INT32_MIN, INT32_MIN + 1, -2, -1, INT32_MAX - 1, INT32_MAX};
    const uint32_t byte = next_byte(input);
    if (byte < 246) {
        return first + (int32_t)(byte % (uint32_t)(last - first + 1));
    }
    return byte < 252 ? edges[byte - 246] : (int32_t)next_word(input);
}

#define FOUND(...)                                            \
    do {                                                      \
        (void)fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
        (void)fprintf(stderr, __VA_ARGS__);                   \
        (void)fputc('\n', stderr);                            \
        abort();                                              \
    } while (0)

#define REQUIRE(condition)                          \
    do {                                            \
        if (!(condition)) {                         \
            FOUND("does not hold: %s", #condition); \
        }                                           \
    } while (0)

/* failing_memory.c: the allocation after `count` more fails, once; negative: none does. */
extern long allocations_left;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
