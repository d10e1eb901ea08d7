/* kvp.h - the block pool of a paged KV cache, in plain C11.
 *
 * Glossary
 *   block       a fixed number of token slots of the KV cache, named by its block id
 *   block id    int32, 0 <= id < num_blocks; id 0 is the null block, a placeholder that is never handed out
 *   free list   the blocks nobody uses, in order of reuse: the head is taken next, the tail last
 *   ref_cnt     how many requests use a block
 *   digest      the hash of a block's tokens and of all tokens before them, up to 32 bytes, computed by the caller
 *   key         a digest and the id of a KV cache group (blocks of unlike layers never serve each other)
 *   entry       one (key, block) pair of the prefix map
 *   primary     the entry that is "the block's hash"; further entries of a block (partial prefixes) are secondary
 *   detached    ref_cnt 0 but not in the free list: taken out by hand through kvp_pool_detach()
 *
 * Invariants, checked by kvp_pool_check() and named by number in every assert
 *   I1  the walk over next from the sentinel returns to it after exactly num_free nodes, and prev mirrors next
 *   I2  a block outside the free list has prev == next == KVP_POISON
 *   I3  queued(b)  =>  ref_cnt[b] == 0
 *   I4  num_free + #{ref_cnt > 0} + num_detached == num_blocks - 1
 *   I5  the null block: ref_cnt 0, not queued, no entries (unless null_takes_hashes)
 *   I6  every occupied slot names the first entry of a ring of entries with an equal key; no slot is empty from the
 *       home of a key to its slot, and the slots of a run are in the order of their homes
 *   I7  an entry is in exactly one ring  <=>  its IN_MAP flag is set; rings hold entries in insertion order
 *   I8  has_hash[b] tells which of primary and secondary entries block b has; a block is in a ring at most once
 *   I9  num_keys == #occupied slots; num_entries == #entries in rings; unused extra entries are on the unused list
 *
 * Rules of every mutating call
 *   - it takes arrays and is all or nothing: on any status but KVP_OK not one array has changed;
 *   - checks of the caller stay on in release builds; kvp_assert (checks of ourselves) needs KVP_DEBUG;
 *   - one thread at a time: the caller holds a lock, or the GIL.
 *
 * Memory: one allocation when the pool is made. Only secondary entries can make it grow (kvp_map_reserve).
 */
#ifndef KVP_H
#define KVP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVP_NONE = -1,           /* no entry, no block */
    KVP_POISON = -1,         /* link of a block that is in no free list */
    KVP_NULL_BLOCK = 0,      /* id of the null block */
    KVP_DIGEST_BYTES = 32,   /* longest digest */
    KVP_SECRET_WORDS = 4,    /* 64-bit words of the probing secret */
    KVP_TOKENS_UNKNOWN = -1, /* num_tokens of an entry whose caller did not say */
};

typedef enum {
    KVP_OK = 0,
    KVP_ERR_NO_FREE_BLOCKS, /* fewer free blocks than asked for, or a negative number asked for */
    KVP_ERR_BLOCK_ID,       /* id < 0 or >= num_blocks */
    KVP_ERR_NULL_BLOCK,     /* the null block where it makes no sense */
    KVP_ERR_NOT_IN_USE,     /* ref_cnt is 0 already: a double free */
    KVP_ERR_REF_OVERFLOW,   /* ref_cnt would pass INT32_MAX */
    KVP_ERR_NOT_QUEUED,     /* to be unlinked, but in no free list */
    KVP_ERR_QUEUED,         /* to be linked, but in a free list already (or twice in the batch) */
    KVP_ERR_IN_USE,         /* ref_cnt > 0 where a free block is needed */
    KVP_ERR_HAS_HASH,       /* the block carries a hash that the call would overwrite */
    KVP_ERR_DUPLICATE,      /* the block is twice in a batch where that makes no sense */
    KVP_ERR_DIGEST_LENGTH,  /* digest longer than KVP_DIGEST_BYTES */
    KVP_ERR_NO_MEMORY,
    KVP_ERR_INVARIANT,      /* kvp_pool_check() found the state broken */
} kvp_status_t;

/* Where a batch call failed: position in the batch and the block there (KVP_NONE when no single one is to blame). */
typedef struct {
    int64_t index;
    int32_t block_id;
} kvp_fault_t;

/* ---- free list: circular, doubly linked, over one array of link pairs; the sentinel is index capacity ---- */

typedef struct {
    int32_t prev;
    int32_t next;
} kvp_link_t;

typedef struct {
    kvp_link_t *links; /* kvp_free_list_links(capacity) of them; they belong to the caller */
    int32_t capacity;
    int32_t num_free;
} kvp_free_list_t;

/* Links that a list of this capacity needs: one a node, the sentinel, and the heads of two segments. */
size_t kvp_free_list_links(int32_t capacity);
/* Links first .. capacity-1 in order; poisons the rest. O(capacity). */
void kvp_free_list_init(kvp_free_list_t *list, kvp_link_t *links, int32_t capacity, int32_t first);
/* Moves the list to a larger array; nodes keep their index, new ones are unlinked. O(capacity). */
void kvp_free_list_move(kvp_free_list_t *list, kvp_link_t *links, int32_t capacity);
bool kvp_free_list_is_queued(const kvp_free_list_t *list, int32_t node);
kvp_status_t kvp_free_list_pop_n(kvp_free_list_t *list, int32_t n, int32_t *out);
kvp_status_t kvp_free_list_remove(kvp_free_list_t *list, int32_t node);
/* Links nodes in the given order after the tail or before the head. O(n). */
kvp_status_t kvp_free_list_append_n(kvp_free_list_t *list, const int32_t *nodes, int64_t n, kvp_fault_t *fault);
kvp_status_t kvp_free_list_prepend_n(kvp_free_list_t *list, const int32_t *nodes, int64_t n, kvp_fault_t *fault);
/* The node after `node` in order of reuse, or KVP_NONE at the end; KVP_NONE as node starts at the head. */
int32_t kvp_free_list_after(const kvp_free_list_t *list, int32_t node);
int32_t kvp_free_list_before(const kvp_free_list_t *list, int32_t node);
/* I1 and I2; on failure the reason is written to `reason`. O(capacity). */
kvp_status_t kvp_free_list_check(const kvp_free_list_t *list, char *reason, size_t size);

/* ---- prefix map: key -> blocks, Robin Hood probing over 8-byte slots, backward-shift deletion ---- */

typedef struct {
    const uint8_t *digest;
    uint32_t digest_len;
    uint32_t group_id;
} kvp_key_t;

/* One cache line. Entries 0 .. num_blocks-1 are the blocks' primary entries (entry index == block id); the extra
 * entries after them are handed out one by one to secondary hashes. */
typedef struct {
    uint64_t digest[KVP_DIGEST_BYTES / 8]; /* zero padded; the length is part of the key */
    uint32_t group_id;
    int32_t num_tokens;        /* tokens of the prefix the digest covers, or KVP_TOKENS_UNKNOWN */
    int32_t block_id;
    int32_t next_same_key;     /* ring of the entries with an equal key, in insertion order */
    int32_t prev_same_key;
    int32_t next_of_block;     /* 1 + index of the block's next secondary entry, 0 at the end */
    uint32_t tag;              /* high half of the keyed hash; gives the home slot */
    uint8_t digest_len;
    uint8_t flags;             /* KVP_ENTRY_* */
    uint16_t reserved;
} kvp_entry_t;

enum {
    KVP_ENTRY_SET = 1,    /* holds a key */
    KVP_ENTRY_IN_MAP = 2, /* a lookup finds it */
};

enum {
    KVP_HAS_PRIMARY = 1,
    KVP_HAS_SECONDARY = 2,
    KVP_MARKED = 0x80, /* seen in the batch that is being validated */
};

typedef struct {
    uint32_t tag;
    int32_t entry; /* 1 + index of the first entry of the ring; 0: empty */
} kvp_slot_t;

typedef struct {
    uint64_t secret[KVP_SECRET_WORDS]; /* mixed into every hash, so that chosen digests can't build long probe runs */
    kvp_entry_t *primary;
    kvp_entry_t *extra;
    kvp_slot_t *slots;
    uint8_t *has_hash; /* per block, KVP_HAS_* */
    int32_t num_blocks;
    int32_t extra_capacity;
    int32_t extra_used;   /* extra entries handed out at least once */
    int32_t extra_unused; /* 1 + first of the list of returned extra entries, linked by next_of_block; 0: none */
    uint32_t num_slots;
    int32_t num_keys;
    int32_t num_entries;
    bool owns_slots; /* false while the slots lie in the pool's one allocation */
} kvp_map_t;

/* A map over no blocks (every entry is an extra one, block ids are the caller's business): the stand-alone map. */
kvp_status_t kvp_map_create(const uint64_t secret[KVP_SECRET_WORDS], kvp_map_t **out);
void kvp_map_destroy(kvp_map_t *map);
/* Room for `extra` more secondary entries and `keys` more keys, or KVP_ERR_NO_MEMORY. */
kvp_status_t kvp_map_reserve(kvp_map_t *map, int32_t keys, int32_t extra);
const kvp_entry_t *kvp_map_entry(const kvp_map_t *map, int32_t index);
/* First inserted entry of the key, or KVP_NONE. */
int32_t kvp_map_find(const kvp_map_t *map, const kvp_key_t *key);
/* The key's entry for this block, or KVP_NONE. O(blocks of the key). */
int32_t kvp_map_find_block(const kvp_map_t *map, const kvp_key_t *key, int32_t block_id);
/* A new entry at the end of the key's ring that belongs to no block's chain (stand-alone maps). */
kvp_status_t kvp_map_add(kvp_map_t *map, const kvp_key_t *key, int32_t block_id, int32_t *entry);
/* Takes an entry added by kvp_map_add() out again. */
void kvp_map_discard(kvp_map_t *map, int32_t entry);

/* ---- pool ---- */

typedef struct {
    kvp_free_list_t free_list;
    kvp_map_t map;
    int32_t *ref_cnt;
    void *memory; /* the one allocation */
    size_t memory_bytes;
    int32_t num_blocks;
    int32_t num_detached;
    int64_t num_evicted; /* blocks that lost a hash by reuse, since creation */
    bool enable_caching;
    bool uncached_first;
    bool null_takes_hashes; /* one by one and by hand only: a batch passes the null block over */
} kvp_pool_t;

typedef enum {
    KVP_PLACE_BY_HASH, /* no hash: before the head, hash: after the tail (all to the tail unless uncached_first) */
    KVP_PLACE_TAIL,
    KVP_PLACE_HEAD,
} kvp_placement_t;

typedef enum {
    KVP_CACHE_PROMOTE,    /* an older hash that covers fewer tokens is replaced, any other is KVP_ERR_HAS_HASH */
    KVP_CACHE_IDEMPOTENT, /* the same key again is no error, any other hash is */
} kvp_cache_mode_t;

/* 2 <= num_blocks is useful, 1 is legal (nothing to hand out). O(num_blocks) at memory speed. */
kvp_status_t kvp_pool_create(int32_t num_blocks, bool enable_caching, bool uncached_first,
                             const uint64_t secret[KVP_SECRET_WORDS], kvp_pool_t **out);
void kvp_pool_destroy(kvp_pool_t *pool);
size_t kvp_pool_nbytes(const kvp_pool_t *pool);

/* Takes n blocks from the head, ref_cnt 1, and drops their hashes when caching is on. O(n). */
kvp_status_t kvp_pool_allocate(kvp_pool_t *pool, int32_t n, int32_t *out);
/* The same, but the hashes stay: for callers that report each eviction before it happens. */
kvp_status_t kvp_pool_take(kvp_pool_t *pool, int32_t n, int32_t *out);
/* One reference less for each id; those that reach 0 join the free list. Null blocks are skipped. O(n). */
kvp_status_t kvp_pool_free(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_placement_t where, kvp_fault_t *fault);
/* The same, but ids that can't be freed are passed over: returns how many, and the first `room` of them in faults. O(n). */
int64_t kvp_pool_free_valid(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_placement_t where, kvp_fault_t *faults,
                            int64_t room);
/* Would kvp_pool_free() succeed? Changes nothing. */
kvp_status_t kvp_pool_can_free(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_fault_t *fault);
/* One reference more for each id; a block at 0 leaves the free list. Null blocks are skipped. O(n). */
kvp_status_t kvp_pool_touch(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_fault_t *fault);
kvp_status_t kvp_pool_set_ref_cnt(kvp_pool_t *pool, int32_t id, int32_t ref_cnt);

/* Hand surgery on the free list; the block is detached in between. */
kvp_status_t kvp_pool_pop_detached(kvp_pool_t *pool, int32_t n, int32_t *out);
kvp_status_t kvp_pool_detach(kvp_pool_t *pool, int32_t id);
kvp_status_t kvp_pool_attach(kvp_pool_t *pool, const int32_t *ids, int64_t n, kvp_placement_t where,
                             kvp_fault_t *fault);

/* Ids of the first inserted blocks of keys[0], keys[1] ... up to the first miss; returns how many. */
int64_t kvp_pool_find_prefix(const kvp_pool_t *pool, const kvp_key_t *keys, int64_t n, int32_t *out);
/* Whether a lookup by this key finds the block, among others perhaps. */
bool kvp_pool_is_reachable(const kvp_pool_t *pool, const kvp_key_t *key, int32_t id);
/* Makes ids[i] reachable under keys[i] as its primary hash; covers first_tokens + i * step_tokens tokens, or
 * KVP_TOKENS_UNKNOWN when step_tokens is 0. Null blocks and KVP_NONE are skipped. */
kvp_status_t kvp_pool_cache(kvp_pool_t *pool, const kvp_key_t *keys, const int32_t *ids, int64_t n,
                            int32_t first_tokens, int32_t step_tokens, kvp_cache_mode_t mode, kvp_fault_t *fault);
/* Makes one block reachable under one more key: its primary if it has none, else a secondary. No-op if it has it. */
kvp_status_t kvp_pool_insert_hash(kvp_pool_t *pool, const kvp_key_t *key, int32_t id, int32_t num_tokens);
/* The same from the map's side: never becomes the primary, but an unreachable primary of that key is put back. */
kvp_status_t kvp_pool_insert_key(kvp_pool_t *pool, const kvp_key_t *key, int32_t id);
/* Takes the (key, block) pair out of the map; a primary stays on the block. False if there is no such pair. */
bool kvp_pool_remove_key(kvp_pool_t *pool, const kvp_key_t *key, int32_t id);
/* Gives a block without one a primary hash that no lookup finds yet. */
kvp_status_t kvp_pool_set_hash(kvp_pool_t *pool, const kvp_key_t *key, int32_t id, int32_t num_tokens);
/* The block's primary hash is gone, from the map too. */
void kvp_pool_reset_hash(kvp_pool_t *pool, int32_t id);
/* All hashes of the block are gone; returns how many of them a lookup could find. */
int32_t kvp_pool_drop_hashes(kvp_pool_t *pool, int32_t id);
/* All hashes of all blocks are gone. O(slots) at memory speed. */
void kvp_pool_reset_hashes(kvp_pool_t *pool);
/* Entry indices of a block: the primary or KVP_NONE; then the secondary ones, KVP_NONE at the end. */
int32_t kvp_pool_primary(const kvp_pool_t *pool, int32_t id);
int32_t kvp_pool_next_secondary(const kvp_pool_t *pool, int32_t id, int32_t entry);
/* Free blocks that carry a hash. O(num_free). */
int32_t kvp_pool_num_evictable(const kvp_pool_t *pool);

/* Recomputes I1 .. I9 from the arrays; KVP_ERR_INVARIANT and the reason, or KVP_OK. */
kvp_status_t kvp_pool_check(const kvp_pool_t *pool, char *reason, size_t size);

#endif
