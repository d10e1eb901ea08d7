/* fuzz_block_table.c - histories of calls on block tables and on what is read of them, against rows in plain arrays.
 *
 * Every array is exactly as long as it must be. The changes that are taken go to a copy of the table, as to a device:
 * after a take of all rows, copy and table must be equal. A call that was refused has written nothing, not to the tables
 * and not to its output. */
#include "kvp_block_table.h"

#include <string.h>

#include "input.h"

enum { MAX_GROUPS = 3, MAX_CELLS = 512, MAX_ROWS = 16, MAX_STEPS = 300, MAX_IDS = 64, MAX_EDITS = 8, MAX_BATCH = 24 };

typedef struct {
    kvp_block_table_t table;
    int32_t cells[MAX_CELLS]; /* the model: num_blocks[row] of them count in each row */
    int32_t num_blocks[MAX_ROWS];
    int32_t device[MAX_CELLS];
} group_t;

typedef struct {
    group_t groups[MAX_GROUPS];
    kvp_block_table_t *tables[MAX_GROUPS];
    int32_t num_groups;
} state_t;

static void *exact(size_t n, size_t size) {
    void *const memory = malloc(n * size + (n == 0));
    REQUIRE(memory != NULL);
    memset(memory, 0x5a, n * size);
    return memory;
}

static bool make_group(input_t *input, group_t *group) {
    kvp_table_shape_t shape = {next_int(input, 1, MAX_ROWS), next_int(input, 1, 32), next_int(input, 1, 32),
                               next_int(input, 1, 4), next_int(input, 1, 100)};
    const bool is_valid = shape.num_rows > 0 && shape.width > 0 && shape.block_size > 0 && shape.ratio > 0 &&
                          shape.num_ids > 0 && (int64_t)shape.num_rows * shape.width <= INT32_MAX &&
                          (int64_t)shape.num_ids * shape.ratio <= INT32_MAX;
    memset(group, 0, sizeof *group);
    if (!is_valid) {
        kvp_block_table_t table;
        REQUIRE(kvp_block_table_init(&table, &shape, NULL, NULL, NULL) == KVP_TABLE_ERR_SHAPE);
        return false;
    }
    if (shape.num_rows > MAX_ROWS || (int64_t)shape.num_rows * shape.width > MAX_CELLS) {
        return false;
    }
    const size_t rows = (size_t)shape.num_rows;
    REQUIRE(kvp_block_table_init(&group->table, &shape, exact(rows * (size_t)shape.width, sizeof(int32_t)),
                                 exact(rows, sizeof(int32_t)), exact(rows, sizeof(kvp_span_t))) == KVP_TABLE_OK);
    return true;
}

static void free_group(group_t *group) {
    free(group->table.cells);
    free(group->table.num_blocks);
    free(group->table.changed);
}

static int32_t *model_row(group_t *group, int64_t row) { return group->cells + row * group->table.width; }

static bool is_row(const group_t *group, int64_t row) { return row >= 0 && row < group->table.num_rows; }

static void compare(const group_t *group) {
    const kvp_block_table_t *const table = &group->table;
    char reason[256];
    if (kvp_block_table_check(table, reason, sizeof reason) != KVP_TABLE_OK) {
        FOUND("check: %s", reason);
    }
    REQUIRE(memcmp(table->num_blocks, group->num_blocks, (size_t)table->num_rows * sizeof(int32_t)) == 0);
    REQUIRE(memcmp(table->cells, group->cells, (size_t)table->num_rows * (size_t)table->width * sizeof(int32_t)) == 0);
    for (int32_t row = 0; row < table->num_rows; row++) {
        for (int32_t i = 0; i < table->width; i++) {
            const bool may_differ = i >= table->changed[row].begin && i < table->changed[row].end;
            REQUIRE(may_differ || table->cells[row * table->width + i] == group->device[row * table->width + i]);
        }
    }
}

/* ---- edits ---- */

static kvp_table_status_t model_edit(state_t *state, const kvp_table_edit_t *edits, int64_t n, const int32_t *ids,
                                     kvp_table_fault_t *fault) {
    static state_t next;
    next = *state;
    for (int64_t i = 0; i < n; i++) {
        const kvp_table_edit_t *const edit = &edits[i];
        if (edit->group < 0 || edit->group >= state->num_groups) {
            *fault = (kvp_table_fault_t){i, edit->group};
            return KVP_TABLE_ERR_GROUP;
        }
        group_t *const group = &next.groups[edit->group];
        if (!is_row(group, edit->row)) {
            *fault = (kvp_table_fault_t){i, edit->row};
            return KVP_TABLE_ERR_ROW;
        }
        const int32_t ratio = group->table.ratio, before = group->num_blocks[edit->row];
        int64_t end = edit->replaces ? 0 : before;
        for (int32_t j = 0; j < edit->num_ids; j++) {
            const int32_t id = ids[edit->first + j];
            if (id < 0 || id >= group->table.num_ids) {
                *fault = (kvp_table_fault_t){i, id};
                return KVP_TABLE_ERR_BLOCK_ID;
            }
        }
        if (end + (int64_t)edit->num_ids * ratio > group->table.width) {
            *fault = (kvp_table_fault_t){i, end + (int64_t)edit->num_ids * ratio};
            return KVP_TABLE_ERR_FULL;
        }
        int32_t *const row = model_row(group, edit->row);
        for (int32_t j = 0; j < edit->num_ids; j++) {
            for (int32_t part = 0; part < ratio; part++) {
                row[end++] = ids[edit->first + j] * ratio + part;
            }
        }
        for (int64_t j = end; j < before; j++) {
            row[j] = 0;
        }
        group->num_blocks[edit->row] = (int32_t)end;
    }
    *state = next;
    return KVP_TABLE_OK;
}

static void edit(input_t *input, state_t *state) {
    int32_t *const ids = exact(MAX_IDS, sizeof *ids);
    const int32_t num_ids = (int32_t)next_below(input, MAX_IDS + 1), n = (int32_t)next_below(input, MAX_EDITS + 1);
    kvp_table_edit_t *const edits = exact((size_t)n, sizeof *edits);
    for (int32_t i = 0; i < num_ids; i++) {
        ids[i] = next_int(input, 0, state->groups[0].table.num_ids - 1);
    }
    for (int32_t i = 0; i < n; i++) {
        const int32_t first = (int32_t)next_below(input, (uint32_t)num_ids + 1);
        edits[i] = (kvp_table_edit_t){
            .first = first,
            .num_ids = (int32_t)next_below(input, (uint32_t)(num_ids - first) + 1),
            .group = next_int(input, 0, state->num_groups - 1),
            .row = next_int(input, 0, state->groups[0].table.num_rows - 1),
            .num_before = INT32_MIN,
            .replaces = next_byte(input) & 1,
        };
        if ((next_byte(input) & 3) != 0) {
            edits[i].num_ids %= 4;
        }
    }
    kvp_table_fault_t fault = {0, 0}, wanted_fault = {0, 0};
    const kvp_table_status_t status = kvp_block_table_edit(state->tables, state->num_groups, edits, n, ids, &fault);
    const kvp_table_status_t wanted = model_edit(state, edits, n, ids, &wanted_fault);
    REQUIRE(status == wanted && fault.index == wanted_fault.index && fault.value == wanted_fault.value);
    free(ids);
    free(edits);
}

/* ---- whole rows ---- */

static void empty_row(group_t *group, int32_t row) {
    memset(model_row(group, row), 0, (size_t)group->table.width * sizeof(int32_t));
    group->num_blocks[row] = 0;
}

static void on_rows(input_t *input, group_t *group, uint32_t how) {
    const int32_t last = group->table.num_rows - 1, one = next_int(input, 0, last), other = next_int(input, 0, last);
    const size_t row_bytes = (size_t)group->table.width * sizeof(int32_t);
    kvp_table_fault_t fault = {0, 0};
    kvp_table_status_t status;
    if (how == 0) {
        status = kvp_block_table_clear_row(&group->table, one, &fault);
        REQUIRE(status == (is_row(group, one) ? KVP_TABLE_OK : KVP_TABLE_ERR_ROW));
        REQUIRE(status == KVP_TABLE_OK || (fault.index == 0 && fault.value == one));
        if (status == KVP_TABLE_OK) {
            empty_row(group, one);
        }
        return;
    }
    status = how == 1 ? kvp_block_table_move_row(&group->table, one, other, &fault)
                      : kvp_block_table_swap_rows(&group->table, one, other, &fault);
    if (!is_row(group, one) || !is_row(group, other)) {
        const int64_t index = is_row(group, one);
        REQUIRE(status == KVP_TABLE_ERR_ROW && fault.index == index && fault.value == (index == 0 ? one : other));
        return;
    }
    REQUIRE(status == KVP_TABLE_OK);
    if (one == other) {
        return;
    }
    int32_t *const a = model_row(group, one), *const b = model_row(group, other), spare[MAX_CELLS];
    const int32_t num_spare = group->num_blocks[other];
    memcpy(spare, b, row_bytes);
    memcpy(b, a, row_bytes);
    group->num_blocks[other] = group->num_blocks[one];
    if (how == 1) {
        empty_row(group, one);
    } else {
        memcpy(a, spare, row_bytes);
        group->num_blocks[one] = num_spare;
    }
}

static void take_changes(input_t *input, group_t *group, bool drops) {
    const kvp_block_table_t *const table = &group->table;
    const int32_t num_rows = next_int(input, 0, table->num_rows);
    const int64_t n = kvp_block_table_num_changes(table, num_rows);
    REQUIRE(n >= 0 && n <= (int64_t)table->num_rows * table->width);
    if (drops) {
        kvp_block_table_drop_changes(&group->table, num_rows);
        const int32_t num_dropped = num_rows < 0 ? 0 : num_rows < table->num_rows ? num_rows : table->num_rows;
        memcpy(group->device, group->cells, (size_t)num_dropped * (size_t)table->width * sizeof(int32_t));
    } else {
        int32_t *const out = exact((size_t)n * KVP_TABLE_CHANGE_WORDS, sizeof *out);
        kvp_block_table_take_changes(&group->table, num_rows, out);
        for (int64_t i = 0; i < n; i++) {
            REQUIRE(out[2 * i] >= 0 && out[2 * i] < table->num_rows * table->width);
            group->device[out[2 * i]] = out[2 * i + 1];
        }
        free(out);
    }
    REQUIRE(kvp_block_table_num_changes(table, num_rows) == 0);
}

/* ---- outputs ---- */

typedef struct {
    int64_t wide[MAX_BATCH];
    int32_t narrow[MAX_BATCH];
    bool is_wide;
    bool is_absent; /* rows 0, 1, 2 ... */
    void *memory;
} ints_t;

static int64_t at(const ints_t *ints, int64_t i) { return ints->is_absent ? i : ints->wide[i]; }

static ints_t next_ints(input_t *input, int64_t n, int32_t last, bool may_be_absent) {
    const uint32_t options = next_byte(input);
    ints_t ints = {.is_wide = options & 1, .is_absent = may_be_absent && (options & 6) == 6};
    for (int64_t i = 0; i < n; i++) {
        ints.wide[i] = ints.narrow[i] = next_int(input, 0, last);
        if (ints.is_wide && next_byte(input) == 255) {
            ints.wide[i] = (int64_t)((uint64_t)next_word(input) << 32 | next_word(input));
        }
    }
    const size_t size = ints.is_wide ? sizeof(int64_t) : sizeof(int32_t);
    ints.memory = exact((size_t)n, size);
    memcpy(ints.memory, ints.is_wide ? (void *)ints.wide : (void *)ints.narrow, (size_t)n * size);
    return ints;
}

static kvp_ints_t view(const ints_t *ints) {
    return (kvp_ints_t){ints->is_absent ? NULL : ints->memory, ints->is_wide};
}

static bool is_untouched(const void *memory, size_t size) {
    for (size_t i = 0; i < size; i++) {
        if (((const uint8_t *)memory)[i] != 0x5a) {
            return false;
        }
    }
    return true;
}

/* The first row that is none, as the functions report it; n: all are rows. */
static int64_t first_bad_row(const group_t *group, const ints_t *rows, int64_t n) {
    if (rows->is_absent) {
        return n > group->table.num_rows ? n - 1 : n;
    }
    for (int64_t i = 0; i < n; i++) {
        if (!is_row(group, at(rows, i))) {
            return i;
        }
    }
    return n;
}

static void slots(input_t *input, group_t *group) {
    const kvp_block_table_t *const table = &group->table;
    const int64_t n = next_below(input, MAX_BATCH + 1);
    ints_t rows = next_ints(input, n, table->num_rows - 1, true);
    ints_t positions = next_ints(input, n, table->width * 4, false);
    int64_t *const out = exact((size_t)n, sizeof *out);
    kvp_table_fault_t fault = {0, 0};
    const kvp_table_status_t status = kvp_table_slots(table, view(&rows), view(&positions), n, out, &fault);
    int64_t bad = first_bad_row(group, &rows, n);
    kvp_table_status_t wanted = bad < n ? KVP_TABLE_ERR_ROW : KVP_TABLE_OK;
    int64_t value = bad < n ? at(&rows, bad) : 0;
    for (int64_t i = 0; i < n && wanted == KVP_TABLE_OK; i++) {
        const int64_t position = at(&positions, i);
        if (position < 0 || position / table->block_size >= group->num_blocks[at(&rows, i)]) {
            wanted = KVP_TABLE_ERR_POSITION;
            bad = i;
            value = position;
        }
    }
    REQUIRE(status == wanted);
    if (status != KVP_TABLE_OK) {
        REQUIRE(fault.index == bad && fault.value == value && is_untouched(out, (size_t)n * sizeof *out));
    }
    for (int64_t i = 0; i < n && status == KVP_TABLE_OK; i++) {
        const int64_t position = at(&positions, i), block = position / table->block_size;
        REQUIRE(out[i] ==
                (int64_t)model_row(group, at(&rows, i))[block] * table->block_size + position % table->block_size);
    }
    if (status == KVP_TABLE_OK) {
        int64_t *const key_rows = exact((size_t)n, sizeof *key_rows), *const value_rows = exact((size_t)n, sizeof *out);
        for (int64_t i = 0; i < n; i++) {
            out[i] = (next_byte(input) & 7) == 0 ? KVP_TABLE_PAD : out[i];
        }
        kvp_table_kv_rows(out, n, table->block_size, key_rows, value_rows);
        for (int64_t i = 0; i < n; i++) {
            const int64_t slot = out[i] < 0 ? 0 : out[i], block = slot / table->block_size;
            REQUIRE(key_rows[i] == block * 2 * table->block_size + slot % table->block_size);
            REQUIRE(value_rows[i] == (block * 2 + 1) * table->block_size + slot % table->block_size);
        }
        free(key_rows);
        free(value_rows);
    }
    free(rows.memory);
    free(positions.memory);
    free(out);
}

static void query_slots(input_t *input, group_t *group) {
    const kvp_block_table_t *const table = &group->table;
    const int32_t num_rows = next_int(input, 0, table->num_rows);
    const int64_t num_tokens = next_below(input, MAX_BATCH + 1);
    const int64_t num_starts = num_rows >= 0 && num_rows <= table->num_rows ? num_rows + 1 : 0;
    int32_t *const starts = exact((size_t)num_starts, sizeof *starts);
    for (int64_t i = 0, start = 0; i < num_starts; i++) {
        start += next_below(input, 4);
        const uint32_t how = next_byte(input);
        starts[i] = how > 250 ? next_int(input, 0, MAX_BATCH) : (int32_t)(start > num_tokens ? num_tokens : start);
    }
    int64_t *const positions = exact((size_t)num_tokens, sizeof *positions), *const out = exact((size_t)num_tokens, 8);
    for (int64_t i = 0; i < num_tokens; i++) {
        positions[i] = next_int(input, 0, table->width * 4);
    }
    kvp_table_status_t wanted = num_starts == 0 ? KVP_TABLE_ERR_ROW : KVP_TABLE_OK;
    for (int64_t i = 0; i < num_starts; i++) {
        if (starts[i] < (i == 0 ? 0 : starts[i - 1]) || starts[i] > num_tokens) {
            wanted = KVP_TABLE_ERR_QUERY;
        }
    }
    REQUIRE(kvp_table_query_slots(table, starts, num_rows, positions, num_tokens, out, NULL) == wanted);
    if (wanted != KVP_TABLE_OK) {
        REQUIRE(is_untouched(out, (size_t)num_tokens * sizeof *out));
    }
    for (int32_t row = 0; row < num_rows && wanted == KVP_TABLE_OK; row++) {
        for (int32_t i = starts[row]; i < starts[row + 1]; i++) {
            const int64_t block = positions[i] < 0 ? table->width : positions[i] / table->block_size;
            REQUIRE(out[i] == (block >= table->width ? KVP_TABLE_PAD
                                                     : (int64_t)model_row(group, row)[block] * table->block_size +
                                                           positions[i] % table->block_size));
        }
    }
    free(starts);
    free(positions);
    free(out);
}

static void compress(input_t *input, group_t *group) {
    const kvp_block_table_t *const table = &group->table;
    const int64_t n = next_below(input, MAX_BATCH + 1), room = next_byte(input);
    ints_t rows = next_ints(input, n, table->num_rows - 1, true);
    ints_t tokens = next_ints(input, n, table->block_size < 64 ? table->block_size * 2 : 64, false);
    int32_t *const starts = exact((size_t)n + 1, 4), *const blocks = exact((size_t)room, 4),
                   *const lens = exact((size_t)n, 4);
    kvp_table_fault_t fault = {0, 0};
    const kvp_table_status_t status =
        kvp_table_compress(table, view(&rows), view(&tokens), n, starts, blocks, room, lens, &fault);
    kvp_table_status_t wanted = first_bad_row(group, &rows, n) < n ? KVP_TABLE_ERR_ROW : KVP_TABLE_OK;
    int64_t total = 0;
    for (int64_t i = 0; i < n && wanted == KVP_TABLE_OK; i++) {
        const int64_t held = (int64_t)group->num_blocks[at(&rows, i)] * table->block_size;
        if (at(&tokens, i) < 1 || at(&tokens, i) > held) {
            wanted = KVP_TABLE_ERR_TOKENS;
        } else {
            total += (at(&tokens, i) - 1) / table->block_size + 1;
        }
    }
    wanted = wanted == KVP_TABLE_OK && total > room ? KVP_TABLE_ERR_ROOM : wanted;
    REQUIRE(status == wanted);
    if (wanted != KVP_TABLE_OK) {
        REQUIRE(is_untouched(starts, (size_t)(n + 1) * 4) && is_untouched(blocks, (size_t)room * 4));
        REQUIRE(is_untouched(lens, (size_t)n * 4));
    } else {
        int64_t place = 0;
        REQUIRE(starts[0] == 0 && starts[n] == total && is_untouched(blocks + total, (size_t)(room - total) * 4));
        for (int64_t i = 0; i < n; i++) {
            const int64_t filled = (at(&tokens, i) - 1) / table->block_size + 1;
            REQUIRE(starts[i] == place && lens[i] == (at(&tokens, i) - 1) % table->block_size + 1);
            REQUIRE(memcmp(blocks + place, model_row(group, at(&rows, i)), (size_t)filled * 4) == 0);
            place += filled;
        }
    }
    free(rows.memory);
    free(tokens.memory);
    free(starts);
    free(blocks);
    free(lens);
}

static void num_common(input_t *input, group_t *group) {
    const kvp_block_table_t *const table = &group->table;
    const int64_t n = next_below(input, 6);
    const int32_t limit = next_int(input, 0, table->width);
    ints_t rows = next_ints(input, n, table->num_rows - 1, true);
    int32_t out = -7, common = 0;
    const bool is_valid = first_bad_row(group, &rows, n) == n;
    REQUIRE(kvp_table_num_common(table, view(&rows), n, limit, &out, NULL) ==
            (is_valid ? KVP_TABLE_OK : KVP_TABLE_ERR_ROW));
    for (bool same = is_valid && n > 0; same && common < limit && common < table->width; common += same) {
        const int32_t first = model_row(group, at(&rows, 0))[common];
        for (int64_t i = 0; i < n; i++) {
            same = same && first != 0 && model_row(group, at(&rows, i))[common] == first;
        }
    }
    REQUIRE(out == (is_valid ? common : -7));
    free(rows.memory);
}

/* ---- a history ---- */

static void step(input_t *input, state_t *state) {
    const uint32_t call = next_below(input, 20);
    group_t *const group = &state->groups[next_below(input, (uint32_t)state->num_groups)];
    switch (call) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 4:
    case 5: edit(input, state); break;
    case 6:
    case 7:
    case 8: on_rows(input, group, call - 6); break;
    case 9:
        if (next_below(input, 8) == 0) {
            kvp_block_table_clear(&group->table);
            for (int32_t row = 0; row < group->table.num_rows; row++) {
                empty_row(group, row);
            }
        }
        break;
    case 10:
    case 11: take_changes(input, group, call == 11); break;
    case 12:
    case 13: slots(input, group); break;
    case 14:
    case 15: query_slots(input, group); break;
    case 16:
    case 17: compress(input, group); break;
    default: num_common(input, group); break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static state_t state;
    input_t input = {data, data + size};
    const int32_t num_groups = 1 + (int32_t)next_below(&input, MAX_GROUPS);
    state.num_groups = 0;
    while (state.num_groups < num_groups && make_group(&input, &state.groups[state.num_groups])) {
        state.tables[state.num_groups] = &state.groups[state.num_groups].table;
        state.num_groups++;
    }
    for (int i = 0; i < MAX_STEPS && state.num_groups > 0 && !input_empty(&input); i++) {
        step(&input, &state);
        for (int32_t group = 0; group < state.num_groups; group++) {
            compare(&state.groups[group]);
        }
    }
    for (int32_t group = 0; group < state.num_groups; group++) {
        free_group(&state.groups[group]);
    }
    return 0;
}
