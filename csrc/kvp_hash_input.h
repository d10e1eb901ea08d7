/* kvp_hash_input.h - the bytes that the hash of a block is taken over.
 *
 * A block hash is a digest of (hash of the block before, the block's tokens, nothing else), serialized. Engines that
 * share a cache must agree on every byte, so these are two fixed serializations, spelled out:
 *
 *   pickle   pickle.dumps((parent, tokens, None), protocol=5) of CPython: one frame, smallest opcode for each int,
 *            every bytes object and every tuple memoized
 *   cbor     RFC 8949 core deterministic encoding of [parent, tokens, null]: smallest head for each int and length
 *
 * Only the plain case is here: tokens that fit in 32 bits, a parent of up to KVP_HASH_INPUT_MAX_PARENT bytes, a block of
 * up to KVP_HASH_INPUT_MAX_TOKENS tokens (its pickle fits in one frame). The caller serializes everything else, and
 * hashes.
 */
#ifndef KVP_HASH_INPUT_H
#define KVP_HASH_INPUT_H

#include <stddef.h>
#include <stdint.h>

enum {
    KVP_HASH_INPUT_MAX_PARENT = 255,  /* longest parent: its length is one byte in either serialization */
    KVP_HASH_INPUT_MAX_TOKENS = 8192, /* 5 bytes a token stay below the 64 KiB at which pickle starts a new frame */
};

typedef enum {
    KVP_HASH_INPUT_PICKLE,
    KVP_HASH_INPUT_CBOR,
} kvp_hash_input_format_t;

/* Bytes that the buffer of kvp_hash_input_write() must have for such a block, in either format. */
size_t kvp_hash_input_room(size_t parent_len, size_t num_tokens);

/* Writes one block to out and returns the number of bytes. O(num_tokens). */
size_t kvp_hash_input_write(kvp_hash_input_format_t format, const uint8_t *parent, size_t parent_len,
                            const int32_t *tokens, size_t num_tokens, uint8_t *out);

#endif
