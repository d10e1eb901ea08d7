/* kvp_hash_input.c - pickle and CBOR bytes of one block.
 *
 * Token ids are spread over all widths, so a branch on the width would be mispredicted for every other token. Each
 * token is written at full width instead, and only the step to the next one depends on its value: hence the few bytes
 * of slack behind the last token that kvp_hash_input_room() counts.
 */
#include "kvp_hash_input.h"

#include <string.h>

#include "kvp_internal.h"

enum {
    FIXED_ROOM = 64,     /* opcodes, heads and lengths around parent and tokens, and the slack */
    ROOM_PER_TOKEN = 5,  /* an opcode or a head, and 32 bits */
    TOKEN_BYTES = 4,
    FRAME_HEAD_BYTES = 11, /* protocol, FRAME and its length */
    FRAME_LENGTH_AT = 3,
};

size_t kvp_hash_input_room(size_t parent_len, size_t num_tokens) {
    return FIXED_ROOM + parent_len + ROOM_PER_TOKEN * num_tokens;
}

static inline uint8_t *put(uint8_t *at, uint8_t byte) {
    *at = byte;
    return at + 1;
}

static inline uint8_t *put_bytes(uint8_t *at, const uint8_t *bytes, size_t n) {
    memcpy(at, bytes, n);
    return at + n;
}

static inline void put_little_endian(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
    at[2] = (uint8_t)(value >> 16);
    at[3] = (uint8_t)(value >> 24);
}

static inline void put_big_endian(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)(value >> 24);
    at[1] = (uint8_t)(value >> 16);
    at[2] = (uint8_t)(value >> 8);
    at[3] = (uint8_t)value;
}

/* ---- pickle ---- */

enum {
    PROTO = 0x80,
    PROTOCOL = 5,
    FRAME = 0x95,
    SHORT_BINBYTES = 'C',
    MEMOIZE = 0x94,
    MARK = '(',
    BININT1 = 'K',
    BININT2 = 'M',
    BININT = 'J',
    EMPTY_TUPLE = ')',
    TUPLE1 = 0x85,
    TUPLE2 = 0x86,
    TUPLE3 = 0x87,
    TUPLE = 't',
    NONE = 'N',
    STOP = '.',
};

static inline uint8_t *pickle_token(uint8_t *at, int32_t token) {
    static const uint8_t opcode_of_width[TOKEN_BYTES + 1] = {0, BININT1, BININT2, 0, BININT};
    const uint32_t bits = (uint32_t)token; /* BININT is signed, the shorter two are not: a negative one is wide */
    const size_t width = 1 + (size_t)(bits > 0xff) + 2 * (size_t)(bits > 0xffff);
    at[0] = opcode_of_width[width];
    put_little_endian(at + 1, bits);
    return at + 1 + width;
}

static uint8_t *pickle_tokens(uint8_t *at, const int32_t *tokens, size_t n) {
    static const uint8_t opcode_of_length[] = {EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3};
    if (n == 0) {
        return put(at, EMPTY_TUPLE); /* the one tuple that is not memoized */
    }
    const bool is_short = n < sizeof opcode_of_length;
    if (!is_short) {
        at = put(at, MARK);
    }
    for (size_t i = 0; i < n; i++) {
        at = pickle_token(at, tokens[i]);
    }
    at = put(at, is_short ? opcode_of_length[n] : TUPLE);
    return put(at, MEMOIZE);
}

static size_t write_pickle(const uint8_t *parent, size_t parent_len, const int32_t *tokens, size_t n, uint8_t *out) {
    (void)put(put(put(out, PROTO), PROTOCOL), FRAME); /* its length is known at the end */
    uint8_t *at = put(put(out + FRAME_HEAD_BYTES, SHORT_BINBYTES), (uint8_t)parent_len);
    at = put(put_bytes(at, parent, parent_len), MEMOIZE);
    at = pickle_tokens(at, tokens, n);
    at = put(put(put(put(at, NONE), TUPLE3), MEMOIZE), STOP);
    put_little_endian(out + FRAME_LENGTH_AT, (uint32_t)(at - out) - FRAME_HEAD_BYTES);
    put_little_endian(out + FRAME_LENGTH_AT + 4, 0);
    return (size_t)(at - out);
}

/* ---- CBOR ---- */

enum {
    MAJOR_UNSIGNED = 0x00,
    MAJOR_NEGATIVE = 0x20,
    MAJOR_BYTES = 0x40,
    MAJOR_ARRAY = 0x80,
    NULL_VALUE = 0xf6,
    DIRECT_VALUES = 24, /* values below are in the head itself; 24 + i in it announces 2^i bytes */
};

static inline uint8_t *cbor_head(uint8_t *at, uint8_t major, uint32_t value) {
    static const uint8_t announced_by_width[TOKEN_BYTES + 1] = {0, DIRECT_VALUES, DIRECT_VALUES + 1, 0,
                                                                DIRECT_VALUES + 2};
    const size_t width = (size_t)(value >= DIRECT_VALUES) + (size_t)(value > 0xff) + 2 * (size_t)(value > 0xffff);
    at[0] = (uint8_t)(major | (width == 0 ? (uint8_t)value : announced_by_width[width]));
    put_big_endian(at + 1, (uint32_t)((uint64_t)value << (8 * (TOKEN_BYTES - width))));
    return at + 1 + width;
}

static inline uint8_t *cbor_token(uint8_t *at, int32_t token) {
    const uint32_t sign = token < 0 ? UINT32_MAX : 0; /* -1 - token is ~token */
    return cbor_head(at, (uint8_t)(sign & MAJOR_NEGATIVE), (uint32_t)token ^ sign);
}

static size_t write_cbor(const uint8_t *parent, size_t parent_len, const int32_t *tokens, size_t n, uint8_t *out) {
    uint8_t *at = cbor_head(out, MAJOR_ARRAY, 3);
    at = put_bytes(cbor_head(at, MAJOR_BYTES, (uint32_t)parent_len), parent, parent_len);
    at = cbor_head(at, MAJOR_ARRAY, (uint32_t)n);
    for (size_t i = 0; i < n; i++) {
        at = cbor_token(at, tokens[i]);
    }
    at = put(at, NULL_VALUE);
    return (size_t)(at - out);
}

size_t kvp_hash_input_write(kvp_hash_input_format_t format, const uint8_t *parent, size_t parent_len,
                            const int32_t *tokens, size_t num_tokens, uint8_t *out) {
    return format == KVP_HASH_INPUT_PICKLE ? write_pickle(parent, parent_len, tokens, num_tokens, out)
                                           : write_cbor(parent, parent_len, tokens, num_tokens, out);
}
