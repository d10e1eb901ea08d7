/* kvp_block_hash.h - the bytes that the hash of a block is taken over.
 *
 * A block hash is a digest of (hash of the block before, the block's tokens, nothing else), serialized. Engines that
 * share a cache must agree on every byte, so these are two fixed serializations, spelled out:
 *
 *   pickle   pickle.dumps((parent, tokens, None), protocol=5) of CPython: one frame, smallest opcode for each int,
 *            every bytes object and every tuple memoized
 *   cbor     RFC 8949 core deterministic encoding of [parent, tokens, null]: smallest head for each int and length
 *
 * Only the plain case is here: tokens that fit in 32 bits, a parent of up to KVP_BLOCK_MAX_PARENT bytes, a block of up
 * to KVP_BLOCK_MAX_TOKENS tokens (its pickle fits in one frame). The caller serializes everything else, and hashes.
 */
#ifndef KVP_BLOCK_HASH_H
#define KVP_BLOCK_HASH_H

#include <stddef.h>
#include <stdint.h>

enum {
    KVP_BLOCK_MAX_PARENT = 255,  /* longest parent: its length is one byte in either serialization */
    KVP_BLOCK_MAX_TOKENS = 8192, /* 5 bytes a token stay below the 64 KiB at which pickle starts a new frame */
};

typedef enum {
    KVP_BLOCK_PICKLE,
    KVP_BLOCK_CBOR,
} kvp_block_format_t;

/* Bytes that the buffer of kvp_block_write() must have for such a block, in either format. */
size_t kvp_block_room(size_t parent_len, size_t num_tokens);

/* Writes one block to out and returns the number of bytes. O(num_tokens). */
size_t kvp_block_write(kvp_block_format_t format, const uint8_t *parent, size_t parent_len, const int32_t *tokens,
                       size_t num_tokens, uint8_t *out);

#endif
