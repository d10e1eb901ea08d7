# Extern declarations of csrc/kvp_block_table.h, nothing else. What they mean is said there.
from libc.stdint cimport int32_t, int64_t

cdef extern from "kvp_block_table.h" nogil:
    enum:
        KVP_TABLE_PAD
        KVP_TABLE_CHANGE_WORDS

    ctypedef enum kvp_table_status_t:
        KVP_TABLE_OK
        KVP_TABLE_ERR_SHAPE
        KVP_TABLE_ERR_GROUP
        KVP_TABLE_ERR_ROW
        KVP_TABLE_ERR_BLOCK_ID
        KVP_TABLE_ERR_FULL
        KVP_TABLE_ERR_POSITION
        KVP_TABLE_ERR_TOKENS
        KVP_TABLE_ERR_QUERY
        KVP_TABLE_ERR_ROOM
        KVP_TABLE_ERR_INVARIANT

    ctypedef struct kvp_table_fault_t:
        int64_t index
        int64_t value

    ctypedef struct kvp_span_t:
        int32_t begin
        int32_t end

    ctypedef struct kvp_block_table_t:
        int32_t *cells
        int32_t *num_blocks
        int32_t num_rows
        int32_t width
        int32_t block_size
        int32_t ratio
        int32_t num_ids

    ctypedef struct kvp_table_shape_t:
        int32_t num_rows
        int32_t width
        int32_t block_size
        int32_t ratio
        int32_t num_ids

    ctypedef struct kvp_table_edit_t:
        int64_t first
        int32_t num_ids
        int32_t group
        int32_t row
        bint replaces

    ctypedef struct kvp_ints_t:
        const void *items
        bint is_wide

    kvp_table_status_t kvp_block_table_init(kvp_block_table_t *table, const kvp_table_shape_t *shape, int32_t *cells,
                                            int32_t *num_blocks, kvp_span_t *changed)
    kvp_table_status_t kvp_block_table_edit(kvp_block_table_t **groups, int32_t num_groups, kvp_table_edit_t *edits,
                                            int64_t n, const int32_t *ids, kvp_table_fault_t *fault)
    kvp_table_status_t kvp_block_table_clear_row(kvp_block_table_t *table, int32_t row, kvp_table_fault_t *fault)
    kvp_table_status_t kvp_block_table_move_row(kvp_block_table_t *table, int32_t source, int32_t target,
                                                kvp_table_fault_t *fault)
    kvp_table_status_t kvp_block_table_swap_rows(kvp_block_table_t *table, int32_t one, int32_t other,
                                                 kvp_table_fault_t *fault)
    void kvp_block_table_clear(kvp_block_table_t *table)
    int64_t kvp_block_table_num_changes(const kvp_block_table_t *table, int32_t num_rows)
    void kvp_block_table_take_changes(kvp_block_table_t *table, int32_t num_rows, int32_t *out)
    void kvp_block_table_drop_changes(kvp_block_table_t *table, int32_t num_rows)
    kvp_table_status_t kvp_block_table_check(const kvp_block_table_t *table, char *reason, size_t size)

    kvp_table_status_t kvp_table_slots(const kvp_block_table_t *table, kvp_ints_t rows, kvp_ints_t positions, int64_t n,
                                       int64_t *out, kvp_table_fault_t *fault)
    kvp_table_status_t kvp_table_query_slots(const kvp_block_table_t *table, const int32_t *query_starts,
                                             int32_t num_rows, const int64_t *positions, int64_t num_tokens,
                                             int64_t *out, kvp_table_fault_t *fault)
    void kvp_table_kv_rows(const int64_t *slots, int64_t n, int32_t block_size, int64_t *key_rows, int64_t *value_rows)
    kvp_table_status_t kvp_table_compress(const kvp_block_table_t *table, kvp_ints_t rows, kvp_ints_t num_tokens,
                                          int64_t n, int32_t *starts, int32_t *blocks, int64_t room,
                                          int32_t *last_lens, kvp_table_fault_t *fault)
    kvp_table_status_t kvp_table_num_common(const kvp_block_table_t *table, kvp_ints_t rows, int64_t n, int32_t limit,
                                            int32_t *out, kvp_table_fault_t *fault)
