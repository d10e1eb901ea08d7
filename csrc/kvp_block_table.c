/* kvp_block_table.c - rows of block ids.
 *
 * A step's edits are checked as a whole before a cell is written. Counts are advanced while checking, so that a row
 * which appears twice is checked at its final length, and taken back if a later edit fails; the second walk writes.
 *
 * Each row remembers one span of changed cells, not a list: decoding appends at the end of a row and everything else
 * rewrites it from the front, so one span is all that a list would hold.
 */
#include "kvp_block_table.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "kvp_internal.h"
#include "kvp_table_internal.h"

static int32_t log2_or_none(int32_t n) {
    int32_t shift = 0;
    while (((int64_t)1 << shift) < n) {
        shift++;
    }
    return ((int64_t)1 << shift) == n ? shift : -1;
}

kvp_table_status_t kvp_block_table_init(kvp_block_table_t *table, const kvp_table_shape_t *shape, int32_t *cells,
                                        int32_t *num_blocks, kvp_span_t *changed) {
    if (shape->num_rows < 1 || shape->width < 1 || shape->block_size < 1 || shape->ratio < 1 || shape->num_ids < 1 ||
        (int64_t)shape->num_rows * shape->width > INT32_MAX || (int64_t)shape->num_ids * shape->ratio > INT32_MAX) {
        return KVP_TABLE_ERR_SHAPE;
    }
    *table = (kvp_block_table_t){
        .cells = cells,
        .num_blocks = num_blocks,
        .changed = changed,
        .num_rows = shape->num_rows,
        .width = shape->width,
        .block_size = shape->block_size,
        .ratio = shape->ratio,
        .num_ids = shape->num_ids,
        .shift = log2_or_none(shape->block_size),
    };
    const size_t rows = (size_t)shape->num_rows;
    memset(cells, 0, rows * (size_t)shape->width * sizeof *cells);
    memset(num_blocks, 0, rows * sizeof *num_blocks);
    memset(changed, 0, rows * sizeof *changed);
    return KVP_TABLE_OK;
}

static void mark_changed(kvp_block_table_t *table, int32_t row, int32_t begin, int32_t end) {
    kvp_span_t *const span = &table->changed[row];
    if (begin >= end) {
        return;
    }
    if (span->begin == span->end) {
        *span = (kvp_span_t){begin, end};
        return;
    }
    span->begin = begin < span->begin ? begin : span->begin;
    span->end = end > span->end ? end : span->end;
}

static void zero_cells(kvp_block_table_t *table, int32_t row, int32_t begin, int32_t end) {
    if (begin < end) {
        memset(kvpi_row(table, row) + begin, 0, (size_t)(end - begin) * sizeof(int32_t));
    }
}

static kvp_table_status_t check_row(const kvp_block_table_t *table, int64_t index, int32_t row,
                                    kvp_table_fault_t *fault) {
    return kvpi_is_row(table, row) ? KVP_TABLE_OK : kvpi_table_fault(fault, index, row, KVP_TABLE_ERR_ROW);
}

/* ---- a batch of edits ---- */

static int32_t base_of(const kvp_table_edit_t *edit) { return edit->replaces ? 0 : edit->num_before; }

/* Checks one edit and advances the count of its row. */
static kvp_table_status_t accept_edit(kvp_block_table_t *const *groups, int32_t num_groups, kvp_table_edit_t *edit,
                                      int64_t index, const int32_t *ids, kvp_table_fault_t *fault) {
    if (edit->group < 0 || edit->group >= num_groups) {
        return kvpi_table_fault(fault, index, edit->group, KVP_TABLE_ERR_GROUP);
    }
    kvp_block_table_t *const table = groups[edit->group];
    if (!kvpi_is_row(table, edit->row)) {
        return kvpi_table_fault(fault, index, edit->row, KVP_TABLE_ERR_ROW);
    }
    for (int32_t i = 0; i < edit->num_ids; i++) {
        const int32_t id = ids[edit->first + i];
        if (kvp_unlikely((uint32_t)id >= (uint32_t)table->num_ids)) {
            return kvpi_table_fault(fault, index, id, KVP_TABLE_ERR_BLOCK_ID);
        }
    }
    edit->num_before = table->num_blocks[edit->row];
    const int64_t end = base_of(edit) + (int64_t)edit->num_ids * table->ratio;
    if (end > table->width) {
        return kvpi_table_fault(fault, index, end, KVP_TABLE_ERR_FULL);
    }
    table->num_blocks[edit->row] = (int32_t)end;
    return KVP_TABLE_OK;
}

static void write_edit(kvp_block_table_t *table, const kvp_table_edit_t *edit, const int32_t *ids) {
    const int32_t base = base_of(edit), ratio = table->ratio;
    const int32_t end = base + edit->num_ids * ratio;
    int32_t *cell = kvpi_row(table, edit->row) + base;
    for (int32_t i = 0; i < edit->num_ids; i++) {
        const int32_t first = ids[edit->first + i] * ratio;
        for (int32_t part = 0; part < ratio; part++) {
            *cell++ = first + part;
        }
    }
    zero_cells(table, edit->row, end, edit->num_before);
    mark_changed(table, edit->row, base, end > edit->num_before ? end : edit->num_before);
}

kvp_table_status_t kvp_block_table_edit(kvp_block_table_t *const *groups, int32_t num_groups, kvp_table_edit_t *edits,
                                        int64_t n, const int32_t *ids, kvp_table_fault_t *fault) {
    for (int64_t i = 0; i < n; i++) {
        const kvp_table_status_t status = accept_edit(groups, num_groups, &edits[i], i, ids, fault);
        if (status != KVP_TABLE_OK) {
            while (i-- > 0) {
                groups[edits[i].group]->num_blocks[edits[i].row] = edits[i].num_before;
            }
            return status;
        }
    }
    for (int64_t i = 0; i < n; i++) {
        write_edit(groups[edits[i].group], &edits[i], ids);
    }
    return KVP_TABLE_OK;
}

/* ---- whole rows ---- */

static void empty_row(kvp_block_table_t *table, int32_t row) {
    const int32_t length = table->num_blocks[row];
    zero_cells(table, row, 0, length);
    mark_changed(table, row, 0, length);
    table->num_blocks[row] = 0;
}

kvp_table_status_t kvp_block_table_clear_row(kvp_block_table_t *table, int32_t row, kvp_table_fault_t *fault) {
    const kvp_table_status_t status = check_row(table, 0, row, fault);
    if (status == KVP_TABLE_OK) {
        empty_row(table, row);
    }
    return status;
}

static kvp_table_status_t check_two_rows(const kvp_block_table_t *table, int32_t one, int32_t other,
                                         kvp_table_fault_t *fault) {
    const kvp_table_status_t status = check_row(table, 0, one, fault);
    return status == KVP_TABLE_OK ? check_row(table, 1, other, fault) : status;
}

kvp_table_status_t kvp_block_table_move_row(kvp_block_table_t *table, int32_t source, int32_t target,
                                            kvp_table_fault_t *fault) {
    const kvp_table_status_t status = check_two_rows(table, source, target, fault);
    if (status != KVP_TABLE_OK || source == target) {
        return status;
    }
    const int32_t length = table->num_blocks[source], before = table->num_blocks[target];
    memcpy(kvpi_row(table, target), kvpi_row(table, source), (size_t)length * sizeof(int32_t));
    zero_cells(table, target, length, before);
    mark_changed(table, target, 0, length > before ? length : before);
    table->num_blocks[target] = length;
    empty_row(table, source);
    return KVP_TABLE_OK;
}

kvp_table_status_t kvp_block_table_swap_rows(kvp_block_table_t *table, int32_t one, int32_t other,
                                             kvp_table_fault_t *fault) {
    const kvp_table_status_t status = check_two_rows(table, one, other, fault);
    if (status != KVP_TABLE_OK || one == other) {
        return status;
    }
    int32_t *const a = kvpi_row(table, one), *const b = kvpi_row(table, other);
    const int32_t length_a = table->num_blocks[one], length_b = table->num_blocks[other];
    const int32_t longest = length_a > length_b ? length_a : length_b;
    for (int32_t i = 0; i < longest; i++) {
        const int32_t id = a[i];
        a[i] = b[i];
        b[i] = id;
    }
    table->num_blocks[one] = length_b;
    table->num_blocks[other] = length_a;
    mark_changed(table, one, 0, longest);
    mark_changed(table, other, 0, longest);
    return KVP_TABLE_OK;
}

void kvp_block_table_clear(kvp_block_table_t *table) {
    for (int32_t row = 0; row < table->num_rows; row++) {
        empty_row(table, row);
    }
}

/* ---- changes ---- */

static int32_t clip_rows(const kvp_block_table_t *table, int32_t num_rows) {
    return num_rows < table->num_rows ? num_rows : table->num_rows;
}

int64_t kvp_block_table_num_changes(const kvp_block_table_t *table, int32_t num_rows) {
    int64_t total = 0;
    for (int32_t row = 0; row < clip_rows(table, num_rows); row++) {
        total += table->changed[row].end - table->changed[row].begin;
    }
    return total;
}

void kvp_block_table_take_changes(kvp_block_table_t *table, int32_t num_rows, int32_t *out) {
    for (int32_t row = 0; row < clip_rows(table, num_rows); row++) {
        const kvp_span_t span = table->changed[row];
        const int32_t first = row * table->width;
        for (int32_t i = span.begin; i < span.end; i++) {
            *out++ = first + i;
            *out++ = table->cells[first + i];
        }
        table->changed[row] = (kvp_span_t){0, 0};
    }
}

void kvp_block_table_drop_changes(kvp_block_table_t *table, int32_t num_rows) {
    for (int32_t row = 0; row < clip_rows(table, num_rows); row++) {
        table->changed[row] = (kvp_span_t){0, 0};
    }
}

/* ---- checker ---- */

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static kvp_table_status_t broken(char *reason, size_t size, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(reason, size, format, arguments);
    va_end(arguments);
    return KVP_TABLE_ERR_INVARIANT;
}

static kvp_table_status_t check_cells(const kvp_block_table_t *table, int32_t row, char *reason, size_t size) {
    const int32_t *const cells = kvpi_row(table, row);
    for (int32_t i = 0; i < table->width; i++) {
        if (i >= table->num_blocks[row] && cells[i] != 0) {
            return broken(reason, size, "T2: cell %d of row %d is not in use and holds %d", i, row, cells[i]);
        }
        if (cells[i] < 0 || cells[i] >= table->num_ids * table->ratio) {
            return broken(reason, size, "T3: cell %d of row %d holds %d", i, row, cells[i]);
        }
    }
    return KVP_TABLE_OK;
}

kvp_table_status_t kvp_block_table_check(const kvp_block_table_t *table, char *reason, size_t size) {
    kvp_table_status_t status = KVP_TABLE_OK;
    for (int32_t row = 0; row < table->num_rows && status == KVP_TABLE_OK; row++) {
        const kvp_span_t span = table->changed[row];
        if (table->num_blocks[row] < 0 || table->num_blocks[row] > table->width) {
            return broken(reason, size, "T1: row %d has %d blocks", row, table->num_blocks[row]);
        }
        if (span.begin < 0 || span.begin > span.end || span.end > table->width) {
            return broken(reason, size, "T4: row %d has changes %d .. %d", row, span.begin, span.end);
        }
        status = check_cells(table, row, reason, size);
    }
    return status;
}
