/* kvp_table_internal.h - what the two files of the block table share. */
#ifndef KVP_TABLE_INTERNAL_H
#define KVP_TABLE_INTERNAL_H

#include "kvp_block_table.h"

static inline kvp_table_status_t kvpi_table_fault(kvp_table_fault_t *fault, int64_t index, int64_t value,
                                                  kvp_table_status_t status) {
    if (fault != NULL) {
        *fault = (kvp_table_fault_t){index, value};
    }
    return status;
}

static inline bool kvpi_is_row(const kvp_block_table_t *table, int64_t row) {
    return (uint64_t)row < (uint64_t)table->num_rows;
}

static inline int32_t *kvpi_row(const kvp_block_table_t *table, int64_t row) {
    return table->cells + row * table->width;
}

#endif
