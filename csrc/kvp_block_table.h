/* kvp_block_table.h - block ids of requests in rows, as attention kernels read them, and what is derived from them.
 *
 * Glossary
 *   table       one int32 array of num_rows x width cells, a row per request, kept in memory of the caller (which may be
 *               pinned, or belong to a tensor)
 *   cell        one block id of the kernel's block size; a row's first num_blocks[row] cells are in use
 *   ratio       kernel blocks in one block of the manager: id b appended becomes the cells b * ratio + 0 .. ratio - 1
 *   block_size  tokens of a cell
 *   slot        place of one token: cell * block_size + offset in the block, int64; KVP_TABLE_PAD: no place
 *   change      a cell written since it was last copied to the device
 *
 * Invariants, checked by kvp_block_table_check() and named by number in every assert
 *   T1  0 <= num_blocks[r] <= width
 *   T2  cells of row r from num_blocks[r] on hold the null block, so that a padded batch reads no foreign block
 *   T3  every cell is >= 0 and below num_ids * ratio
 *   T4  cells written since they were last taken lie in changed[r], 0 <= begin <= end <= width
 *
 * Rules
 *   - every mutating call is all or nothing: on any status but KVP_TABLE_OK neither table nor output has changed;
 *   - checks of the caller stay on in release builds; one thread at a time.
 *
 * Memory: none. Table, counts, changes and outputs belong to the caller.
 */
#ifndef KVP_BLOCK_TABLE_H
#define KVP_BLOCK_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    KVP_TABLE_PAD = -1, /* slot of a token that has no place: kernels skip it */
    KVP_TABLE_CHANGE_WORDS = 2, /* a taken change: index of the cell in the table, and what it holds */
};

typedef enum {
    KVP_TABLE_OK = 0,
    KVP_TABLE_ERR_SHAPE,     /* no rows, cells, ids or tokens a block; or more cells than an int32 can count */
    KVP_TABLE_ERR_GROUP,     /* no such table in the batch */
    KVP_TABLE_ERR_ROW,       /* row < 0 or >= num_rows */
    KVP_TABLE_ERR_BLOCK_ID,  /* id < 0 or >= num_ids */
    KVP_TABLE_ERR_FULL,      /* more blocks than a row has cells */
    KVP_TABLE_ERR_POSITION,  /* a token that none of the row's blocks holds */
    KVP_TABLE_ERR_TOKENS,    /* a request of no token, or of more than its blocks hold */
    KVP_TABLE_ERR_QUERY,     /* query starts that fall, or point past the tokens */
    KVP_TABLE_ERR_ROOM,      /* the output is too small */
    KVP_TABLE_ERR_INVARIANT, /* kvp_block_table_check() found the table broken */
} kvp_table_status_t;

/* Where a call failed: position in the batch, and the row, id, position or number that was refused. */
typedef struct {
    int64_t index;
    int64_t value;
} kvp_table_fault_t;

typedef struct {
    int32_t begin;
    int32_t end;
} kvp_span_t;

typedef struct {
    int32_t *cells;
    int32_t *num_blocks;
    kvp_span_t *changed;
    int32_t num_rows;
    int32_t width;
    int32_t block_size;
    int32_t ratio;
    int32_t num_ids; /* ids of the manager are below */
    int32_t shift;   /* log2 of block_size, or -1 where it is no power of two */
} kvp_block_table_t;

typedef struct {
    int32_t num_rows;
    int32_t width;
    int32_t block_size;
    int32_t ratio;
    int32_t num_ids;
} kvp_table_shape_t;

/* ---- kvp_block_table.c: rows ---- */

/* Zeroes the caller's arrays: num_rows * width cells, num_rows counts and spans. O(cells). */
kvp_table_status_t kvp_block_table_init(kvp_block_table_t *table, const kvp_table_shape_t *shape, int32_t *cells,
                                        int32_t *num_blocks, kvp_span_t *changed);

/* One edit of a row: `num_ids` ids from ids[first] on behind its blocks, or in their place. */
typedef struct {
    int64_t first;
    int32_t num_ids;
    int32_t group; /* which table */
    int32_t row;
    int32_t num_before; /* for the call itself: cells of the row before the edit */
    bool replaces;
} kvp_table_edit_t;

/* A step's edits of the tables of all KV cache groups, in order; a row may appear several times. O(ids). */
kvp_table_status_t kvp_block_table_edit(kvp_block_table_t *const *groups, int32_t num_groups, kvp_table_edit_t *edits,
                                        int64_t n, const int32_t *ids, kvp_table_fault_t *fault);
/* An emptied row holds the null block. O(cells in use), as the next two. */
kvp_table_status_t kvp_block_table_clear_row(kvp_block_table_t *table, int32_t row, kvp_table_fault_t *fault);
/* The target takes the source's blocks and the source is emptied; nothing happens when they are the same row. */
kvp_table_status_t kvp_block_table_move_row(kvp_block_table_t *table, int32_t source, int32_t target,
                                            kvp_table_fault_t *fault);
kvp_table_status_t kvp_block_table_swap_rows(kvp_block_table_t *table, int32_t one, int32_t other,
                                             kvp_table_fault_t *fault);
void kvp_block_table_clear(kvp_block_table_t *table);

/* Cells that changed in rows below num_rows (clipped to the table): how many; and take them, as pairs of cell index and
 * value, into KVP_TABLE_CHANGE_WORDS words each. Taken or dropped changes are forgotten. O(num_rows + changes). */
int64_t kvp_block_table_num_changes(const kvp_block_table_t *table, int32_t num_rows);
void kvp_block_table_take_changes(kvp_block_table_t *table, int32_t num_rows, int32_t *out);
void kvp_block_table_drop_changes(kvp_block_table_t *table, int32_t num_rows);

/* T1 .. T4; on failure the reason is written to `reason`. O(cells). */
kvp_table_status_t kvp_block_table_check(const kvp_block_table_t *table, char *reason, size_t size);

/* ---- kvp_table_outputs.c: what backends want of the rows of a batch ---- */

/* Integers of a caller, 32 or 64 bits wide. As `rows` of a batch, items == NULL stands for 0, 1, 2 ... */
typedef struct {
    const void *items;
    bool is_wide;
} kvp_ints_t;

/* Slots of n tokens, token i at positions[i] of row rows[i]; its block must be in use. O(n). */
kvp_table_status_t kvp_table_slots(const kvp_block_table_t *table, kvp_ints_t rows, kvp_ints_t positions, int64_t n,
                                   int64_t *out, kvp_table_fault_t *fault);
/* Slots of packed queries: row r has tokens query_starts[r] .. query_starts[r + 1] - 1. As device kernels do it, cells
 * that are not in use read as the null block; positions outside the row get KVP_TABLE_PAD. O(tokens). */
kvp_table_status_t kvp_table_query_slots(const kvp_block_table_t *table, const int32_t *query_starts, int32_t num_rows,
                                         const int64_t *positions, int64_t num_tokens, int64_t *out,
                                         kvp_table_fault_t *fault);
/* Rows of keys and values in a cache [blocks, 2, block_size, ...] seen as [blocks * 2 * block_size, ...]. Tokens without
 * a place go to the null block, which nobody reads. O(n). */
void kvp_table_kv_rows(const int64_t *slots, int64_t n, int32_t block_size, int64_t *key_rows, int64_t *value_rows);
/* Blocks of each row that its num_tokens[i] >= 1 tokens fill, in compressed rows (FlashInfer: indptr, indices,
 * last_page_len): starts has n + 1 items, last_lens n, each 1 .. block_size. O(blocks). */
kvp_table_status_t kvp_table_compress(const kvp_block_table_t *table, kvp_ints_t rows, kvp_ints_t num_tokens, int64_t n,
                                      int32_t *starts, int32_t *blocks, int64_t room, int32_t *last_lens,
                                      kvp_table_fault_t *fault);
/* How many leading blocks all n rows have in common, at most `limit`; the null block holds no data and ends them. */
kvp_table_status_t kvp_table_num_common(const kvp_block_table_t *table, kvp_ints_t rows, int64_t n, int32_t limit,
                                        int32_t *out, kvp_table_fault_t *fault);

#endif
