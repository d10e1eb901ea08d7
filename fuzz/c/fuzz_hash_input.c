/* fuzz_hash_input.c - the bytes of a block, against an encoder that is written down branch by branch.
 *
 * An input is: format, length of the parent, its bytes, then tokens of 1, 2 or 4 bytes. The buffer has exactly the room
 * that kvp_hash_input_room() asks for. (That CPython and cbor2 write the same bytes is tested in Python.) */
#include "kvp_hash_input.h"

#include <string.h>

#include "input.h"

typedef struct {
    uint8_t *bytes;
    size_t length;
} writer_t;

static void put(writer_t *writer, uint32_t byte) { writer->bytes[writer->length++] = (uint8_t)byte; }

static void put_number(writer_t *writer, uint32_t value, int width, bool big_endian) {
    for (int i = 0; i < width; i++) {
        put(writer, value >> (8 * (big_endian ? width - 1 - i : i)));
    }
}

static void put_parent(writer_t *writer, const uint8_t *parent, size_t n) {
    for (size_t i = 0; i < n; i++) {
        put(writer, parent[i]);
    }
}

static void pickle(writer_t *writer, const uint8_t *parent, size_t parent_len, const int32_t *tokens, size_t n) {
    put(writer, 0x80);
    put(writer, 5);
    put(writer, 0x95);
    put_number(writer, 0, 4, false);
    put_number(writer, 0, 4, false);
    put(writer, 'C');
    put(writer, (uint32_t)parent_len);
    put_parent(writer, parent, parent_len);
    put(writer, 0x94);
    if (n > 3) {
        put(writer, '(');
    }
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] >= 0 && tokens[i] < 1 << 8) {
            put(writer, 'K');
            put_number(writer, (uint32_t)tokens[i], 1, false);
        } else if (tokens[i] >= 0 && tokens[i] < 1 << 16) {
            put(writer, 'M');
            put_number(writer, (uint32_t)tokens[i], 2, false);
        } else {
            put(writer, 'J');
            put_number(writer, (uint32_t)tokens[i], 4, false);
        }
    }
    put(writer, n == 0 ? ')' : n == 1 ? 0x85 : n == 2 ? 0x86 : n == 3 ? 0x87 : 't');
    if (n > 0) {
        put(writer, 0x94);
    }
    put(writer, 'N');
    put(writer, 0x87);
    put(writer, 0x94);
    put(writer, '.');
    writer_t head = {writer->bytes, 3};
    put_number(&head, (uint32_t)(writer->length - 11), 4, false);
}

static void cbor_head(writer_t *writer, uint32_t major, uint32_t value) {
    if (value < 24) {
        put(writer, major << 5 | value);
    } else if (value < 1 << 8) {
        put(writer, major << 5 | 24);
        put_number(writer, value, 1, true);
    } else if (value < 1 << 16) {
        put(writer, major << 5 | 25);
        put_number(writer, value, 2, true);
    } else {
        put(writer, major << 5 | 26);
        put_number(writer, value, 4, true);
    }
}

static void cbor(writer_t *writer, const uint8_t *parent, size_t parent_len, const int32_t *tokens, size_t n) {
    cbor_head(writer, 4, 3);
    cbor_head(writer, 2, (uint32_t)parent_len);
    put_parent(writer, parent, parent_len);
    cbor_head(writer, 4, (uint32_t)n);
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] < 0) {
            cbor_head(writer, 1, (uint32_t)(-1 - (int64_t)tokens[i]));
        } else {
            cbor_head(writer, 0, (uint32_t)tokens[i]);
        }
    }
    put(writer, 0xf6);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input_t input = {data, data + size};
    const uint32_t options = next_byte(&input);
    const kvp_hash_input_format_t format = options & 1 ? KVP_HASH_INPUT_CBOR : KVP_HASH_INPUT_PICKLE;
    const size_t parent_len = next_byte(&input);
    uint8_t *const parent = malloc(parent_len + (parent_len == 0));
    /* Every token takes a byte at least; some inputs repeat theirs up to the longest block. */
    const size_t most = options & 2 ? KVP_HASH_INPUT_MAX_TOKENS : size;
    int32_t *const tokens = malloc(most * sizeof *tokens + (most == 0));
    REQUIRE(parent != NULL && tokens != NULL);
    for (size_t i = 0; i < parent_len; i++) {
        parent[i] = (uint8_t)next_byte(&input);
    }
    size_t n = 0;
    const uint8_t *const first_token = input.at;
    while (n < most && n < KVP_HASH_INPUT_MAX_TOKENS) {
        if (input_empty(&input)) {
            if ((options & 2) == 0 || first_token == input.end) {
                break;
            }
            input.at = first_token;
        }
        const uint32_t how = next_byte(&input);
        const uint32_t word = how & 1   ? next_word(&input)
                              : how & 2 ? next_byte(&input) << 8 | next_byte(&input)
                                        : how >> 2;
        memcpy(&tokens[n++], &word, sizeof word);
    }
    const size_t room = kvp_hash_input_room(parent_len, n);
    uint8_t *const out = malloc(room), *const wanted = malloc(room);
    REQUIRE(out != NULL && wanted != NULL);
    int32_t *const exact = malloc(n * sizeof *exact + (n == 0));
    REQUIRE(exact != NULL);
    memcpy(exact, tokens, n * sizeof *exact);
    const size_t length = kvp_hash_input_write(format, parent, parent_len, exact, n, out);
    writer_t writer = {wanted, 0};
    (format == KVP_HASH_INPUT_CBOR ? cbor : pickle)(&writer, parent, parent_len, tokens, n);
    REQUIRE(length == writer.length && length <= room && memcmp(out, wanted, length) == 0);
    free(parent);
    free(tokens);
    free(exact);
    free(out);
    free(wanted);
    return 0;
}
