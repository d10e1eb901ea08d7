/* kvp_table_outputs.c - slots, compressed rows and the like of a batch.
 *
 * Each function walks its input twice where something can be refused: first to check, then to write. The input of a
 * step is small and then in the first-level cache; the cells are what costs, and they are read once.
 */
#include <string.h>

#include "kvp_internal.h"
#include "kvp_table_internal.h"

static inline int64_t int_at(kvp_ints_t ints, int64_t i) {
    return ints.is_wide ? ((const int64_t *)ints.items)[i] : ((const int32_t *)ints.items)[i];
}

static inline int64_t row_at(kvp_ints_t rows, int64_t i) { return rows.items == NULL ? i : int_at(rows, i); }

/* Block and offset of a position that is not negative. Dividing costs ten times a shift. */
static inline int64_t block_of(const kvp_block_table_t *table, int64_t position) {
    return table->shift >= 0 ? position >> table->shift : position / table->block_size;
}

static inline int64_t slot_of(const kvp_block_table_t *table, int64_t row, int64_t position) {
    const int64_t block = block_of(table, position);
    return (int64_t)kvpi_row(table, row)[block] * table->block_size + (position - block * table->block_size);
}

static kvp_table_status_t check_rows(const kvp_block_table_t *table, kvp_ints_t rows, int64_t n,
                                     kvp_table_fault_t *fault) {
    if (rows.items == NULL) {
        return n <= table->num_rows ? KVP_TABLE_OK : kvpi_table_fault(fault, n - 1, n - 1, KVP_TABLE_ERR_ROW);
    }
    for (int64_t i = 0; i < n; i++) {
        if (kvp_unlikely(!kvpi_is_row(table, int_at(rows, i)))) {
            return kvpi_table_fault(fault, i, int_at(rows, i), KVP_TABLE_ERR_ROW);
        }
    }
    return KVP_TABLE_OK;
}

/* ---- slots ---- */

kvp_table_status_t kvp_table_slots(const kvp_block_table_t *table, kvp_ints_t rows, kvp_ints_t positions, int64_t n,
                                   int64_t *out, kvp_table_fault_t *fault) {
    const kvp_table_status_t status = check_rows(table, rows, n, fault);
    if (status != KVP_TABLE_OK) {
        return status;
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t held = (int64_t)table->num_blocks[row_at(rows, i)] * table->block_size;
        if (kvp_unlikely((uint64_t)int_at(positions, i) >= (uint64_t)held)) {
            return kvpi_table_fault(fault, i, int_at(positions, i), KVP_TABLE_ERR_POSITION);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        out[i] = slot_of(table, row_at(rows, i), int_at(positions, i));
    }
    return KVP_TABLE_OK;
}

static kvp_table_status_t check_queries(const kvp_block_table_t *table, const int32_t *query_starts, int32_t num_rows,
                                        int64_t num_tokens, kvp_table_fault_t *fault) {
    if (num_rows < 0 || num_rows > table->num_rows) {
        return kvpi_table_fault(fault, 0, num_rows, KVP_TABLE_ERR_ROW);
    }
    int32_t before = 0;
    for (int32_t row = 0; row <= num_rows; row++) {
        if (query_starts[row] < before || query_starts[row] > num_tokens) {
            return kvpi_table_fault(fault, row, query_starts[row], KVP_TABLE_ERR_QUERY);
        }
        before = query_starts[row];
    }
    return KVP_TABLE_OK;
}

kvp_table_status_t kvp_table_query_slots(const kvp_block_table_t *table, const int32_t *query_starts, int32_t num_rows,
                                         const int64_t *positions, int64_t num_tokens, int64_t *out,
                                         kvp_table_fault_t *fault) {
    const kvp_table_status_t status = check_queries(table, query_starts, num_rows, num_tokens, fault);
    if (status != KVP_TABLE_OK) {
        return status;
    }
    const uint64_t held = (uint64_t)table->width * (uint64_t)table->block_size;
    for (int32_t row = 0; row < num_rows; row++) {
        for (int32_t i = query_starts[row]; i < query_starts[row + 1]; i++) {
            out[i] = (uint64_t)positions[i] < held ? slot_of(table, row, positions[i]) : KVP_TABLE_PAD;
        }
    }
    return KVP_TABLE_OK;
}

void kvp_table_kv_rows(const int64_t *slots, int64_t n, int32_t block_size, int64_t *key_rows, int64_t *value_rows) {
    for (int64_t i = 0; i < n; i++) {
        /* Unsigned, so that a slot which no cache has only gives a row which no cache has. */
        const uint64_t slot = slots[i] < 0 ? 0 : (uint64_t)slots[i], size = (uint64_t)block_size;
        key_rows[i] = (int64_t)(slot + slot / size * size);
        value_rows[i] = (int64_t)((uint64_t)key_rows[i] + size);
    }
}

/* ---- rows of a batch ---- */

static inline int64_t num_filled(const kvp_block_table_t *table, int64_t num_tokens) {
    return block_of(table, num_tokens + table->block_size - 1);
}

kvp_table_status_t kvp_table_compress(const kvp_block_table_t *table, kvp_ints_t rows, kvp_ints_t num_tokens, int64_t n,
                                      int32_t *starts, int32_t *blocks, int64_t room, int32_t *last_lens,
                                      kvp_table_fault_t *fault) {
    const kvp_table_status_t status = check_rows(table, rows, n, fault);
    if (status != KVP_TABLE_OK) {
        return status;
    }
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t tokens = int_at(num_tokens, i);
        const int64_t held = (int64_t)table->num_blocks[row_at(rows, i)] * table->block_size;
        if (tokens < 1 || tokens > held) {
            return kvpi_table_fault(fault, i, tokens, KVP_TABLE_ERR_TOKENS);
        }
        total += num_filled(table, tokens);
    }
    if (total > room || total > INT32_MAX) {
        return kvpi_table_fault(fault, n, total, KVP_TABLE_ERR_ROOM);
    }
    starts[0] = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t tokens = int_at(num_tokens, i), filled = num_filled(table, tokens);
        memcpy(blocks + starts[i], kvpi_row(table, row_at(rows, i)), (size_t)filled * sizeof(int32_t));
        starts[i + 1] = starts[i] + (int32_t)filled;
        last_lens[i] = (int32_t)(tokens - (filled - 1) * table->block_size);
    }
    return KVP_TABLE_OK;
}

kvp_table_status_t kvp_table_num_common(const kvp_block_table_t *table, kvp_ints_t rows, int64_t n, int32_t limit,
                                        int32_t *out, kvp_table_fault_t *fault) {
    const kvp_table_status_t status = check_rows(table, rows, n, fault);
    if (status != KVP_TABLE_OK) {
        return status;
    }
    if (n == 0) {
        *out = 0;
        return KVP_TABLE_OK;
    }
    const int32_t *const first = kvpi_row(table, row_at(rows, 0));
    int32_t common = limit < table->width ? limit : table->width;
    for (int64_t i = 0; i < n && common > 0; i++) {
        const int32_t *const row = kvpi_row(table, row_at(rows, i));
        int32_t same = 0;
        while (same < common && row[same] == first[same] && row[same] != KVP_NULL_BLOCK) {
            same++;
        }
        common = same;
    }
    *out = common < 0 ? 0 : common;
    return KVP_TABLE_OK;
}
