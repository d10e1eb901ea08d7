/* test_block_table.c - block tables without Python: known answers, refusals, and a random walk against a plain model.
 * Build and run: make ctest (make asan: under the sanitizers). */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "kvp_block_table.h"

/* A table with arrays of its own, each exactly as long as it must be, so that the sanitizers see a step too far. */
typedef struct {
    kvp_block_table_t table;
    int32_t *cells;
    int32_t *num_blocks;
    kvp_span_t *changed;
} rows_t;

static const kvp_ints_t IN_ORDER = {NULL, false};

static rows_t make_rows(int32_t num_rows, int32_t width, int32_t block_size, int32_t ratio, int32_t num_ids) {
    const kvp_table_shape_t shape = {num_rows, width, block_size, ratio, num_ids};
    rows_t rows;
    rows.cells = malloc((size_t)num_rows * (size_t)width * sizeof(int32_t));
    rows.num_blocks = malloc((size_t)num_rows * sizeof(int32_t));
    rows.changed = malloc((size_t)num_rows * sizeof(kvp_span_t));
    CHECK(kvp_block_table_init(&rows.table, &shape, rows.cells, rows.num_blocks, rows.changed) == KVP_TABLE_OK);
    return rows;
}

static void free_rows(rows_t *rows) {
    free(rows->cells);
    free(rows->num_blocks);
    free(rows->changed);
}

static bool is_sound(const kvp_block_table_t *table) {
    char reason[256];
    const kvp_table_status_t status = kvp_block_table_check(table, reason, sizeof reason);
    if (status != KVP_TABLE_OK) {
        printf("check: %s\n", reason);
    }
    return status == KVP_TABLE_OK;
}

static kvp_table_status_t edit(kvp_block_table_t *table, int32_t row, const int32_t *ids, int32_t n, bool replaces) {
    kvp_table_edit_t one = {.first = 0, .num_ids = n, .group = 0, .row = row, .replaces = replaces};
    return kvp_block_table_edit(&table, 1, &one, 1, ids, NULL);
}

static bool row_is(const kvp_block_table_t *table, int32_t row, const int32_t *wanted, int32_t n) {
    return table->num_blocks[row] == n &&
           memcmp(table->cells + row * table->width, wanted, (size_t)n * sizeof(int32_t)) == 0;
}

static void test_shapes(void) {
    const kvp_table_shape_t bad[] = {{0, 1, 1, 1, 1},
                                     {1, 0, 1, 1, 1},
                                     {1, 1, 0, 1, 1},
                                     {1, 1, 1, 0, 1},
                                     {1, 1, 1, 1, 0},
                                     {65536, 32768, 1, 1, 1},
                                     {1, 1, 1, 2, INT32_MAX / 2 + 1}};
    kvp_block_table_t table;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(kvp_block_table_init(&table, &bad[i], NULL, NULL, NULL) == KVP_TABLE_ERR_SHAPE);
    }
}

static void test_rows(void) {
    rows_t rows = make_rows(3, 4, 16, 1, 100);
    kvp_block_table_t *const table = &rows.table;
    CHECK(edit(table, 0, (int32_t[]){7, 8}, 2, false) == KVP_TABLE_OK);
    CHECK(edit(table, 0, (int32_t[]){9}, 1, false) == KVP_TABLE_OK && row_is(table, 0, (int32_t[]){7, 8, 9}, 3));
    CHECK(edit(table, 0, NULL, 0, false) == KVP_TABLE_OK && row_is(table, 0, (int32_t[]){7, 8, 9}, 3));
    CHECK(edit(table, 1, (int32_t[]){1, 2, 3, 4}, 4, true) == KVP_TABLE_OK && is_sound(table));
    CHECK(kvp_block_table_swap_rows(table, 0, 1, NULL) == KVP_TABLE_OK);
    CHECK(row_is(table, 0, (int32_t[]){1, 2, 3, 4}, 4) && row_is(table, 1, (int32_t[]){7, 8, 9}, 3) && is_sound(table));
    CHECK(kvp_block_table_move_row(table, 1, 0, NULL) == KVP_TABLE_OK);
    CHECK(row_is(table, 0, (int32_t[]){7, 8, 9}, 3) && table->num_blocks[1] == 0 && is_sound(table));
    CHECK(kvp_block_table_move_row(table, 0, 0, NULL) == KVP_TABLE_OK && row_is(table, 0, (int32_t[]){7, 8, 9}, 3));
    CHECK(edit(table, 0, (int32_t[]){5}, 1, true) == KVP_TABLE_OK && row_is(table, 0, (int32_t[]){5, 0, 0, 0}, 1));
    CHECK(kvp_block_table_clear_row(table, 0, NULL) == KVP_TABLE_OK && table->num_blocks[0] == 0 && is_sound(table));
    CHECK(edit(table, 2, (int32_t[]){5}, 1, false) == KVP_TABLE_OK);
    kvp_block_table_clear(table);
    CHECK(table->num_blocks[2] == 0 && is_sound(table));
    free_rows(&rows);
}

static void test_refused_batches_change_nothing(void) {
    rows_t one = make_rows(2, 3, 16, 1, 10), other = make_rows(2, 4, 16, 2, 10);
    kvp_block_table_t *const groups[2] = {&one.table, &other.table};
    const int32_t ids[] = {1, 2, 3, 10, -1};
    kvp_table_fault_t fault;
    CHECK(edit(&one.table, 0, ids, 1, false) == KVP_TABLE_OK);
    /* Each batch starts with an edit that would succeed. */
#define BATCH(...) (kvp_table_edit_t[]){{.first = 0, .num_ids = 2, .row = 0, .replaces = true}, __VA_ARGS__}
    CHECK(kvp_block_table_edit(groups, 2, BATCH({.num_ids = 1, .group = 2}), 2, ids, &fault) == KVP_TABLE_ERR_GROUP);
    CHECK(fault.index == 1 && fault.value == 2);
    CHECK(kvp_block_table_edit(groups, 2, BATCH({.num_ids = 1, .row = 2}), 2, ids, &fault) == KVP_TABLE_ERR_ROW);
    CHECK(kvp_block_table_edit(groups, 2, BATCH({.num_ids = 1, .row = -1}), 2, ids, &fault) == KVP_TABLE_ERR_ROW);
    CHECK(kvp_block_table_edit(groups, 2, BATCH({.first = 2, .num_ids = 2, .row = 1}), 2, ids, &fault) ==
          KVP_TABLE_ERR_BLOCK_ID);
    CHECK(fault.index == 1 && fault.value == 10);
    CHECK(kvp_block_table_edit(groups, 2, BATCH({.first = 4, .num_ids = 1}), 2, ids, &fault) == KVP_TABLE_ERR_BLOCK_ID);
    /* The same row twice: 2 + 2 blocks do not fit into 3 cells, though either would. */
    CHECK(kvp_block_table_edit(groups, 2, BATCH({.num_ids = 2}), 2, ids, &fault) == KVP_TABLE_ERR_FULL);
    CHECK(fault.index == 1 && fault.value == 4);
    CHECK(kvp_block_table_edit(groups, 2, BATCH({.num_ids = 3, .group = 1}), 2, ids, &fault) == KVP_TABLE_ERR_FULL);
    CHECK(fault.value == 6);
#undef BATCH
    CHECK(row_is(&one.table, 0, ids, 1) && is_sound(&one.table) && other.table.num_blocks[0] == 0);
    CHECK(kvp_block_table_clear_row(&one.table, 2, &fault) == KVP_TABLE_ERR_ROW && fault.value == 2);
    CHECK(kvp_block_table_move_row(&one.table, 0, -1, &fault) == KVP_TABLE_ERR_ROW && fault.index == 1);
    CHECK(kvp_block_table_swap_rows(&one.table, 5, 0, &fault) == KVP_TABLE_ERR_ROW && fault.index == 0);
    CHECK(row_is(&one.table, 0, ids, 1) && is_sound(&one.table));
    free_rows(&one);
    free_rows(&other);
}

static void test_kernel_blocks(void) {
    rows_t rows = make_rows(1, 6, 8, 3, 5);
    CHECK(edit(&rows.table, 0, (int32_t[]){4, 1}, 2, false) == KVP_TABLE_OK);
    CHECK(row_is(&rows.table, 0, (int32_t[]){12, 13, 14, 3, 4, 5}, 6) && is_sound(&rows.table));
    int64_t slot;
    const int64_t position = 31; /* block 1 of the manager, 7 tokens in: its first kernel block */
    CHECK(kvp_table_slots(&rows.table, IN_ORDER, (kvp_ints_t){&position, true}, 1, &slot, NULL) == KVP_TABLE_OK);
    CHECK(slot == 3 * 8 + 7);
    free_rows(&rows);
}

static void test_slots(void) {
    rows_t rows = make_rows(2, 3, 5, 1, INT32_MAX);
    CHECK(edit(&rows.table, 0, (int32_t[]){INT32_MAX - 1, 2}, 2, false) == KVP_TABLE_OK);
    CHECK(edit(&rows.table, 1, (int32_t[]){3}, 1, false) == KVP_TABLE_OK);
    const int32_t at[3] = {0, 1, 0}, positions[3] = {4, 0, 5};
    const int64_t bad[2] = {0, 5};
    int64_t out[4] = {-7, -7, -7, -7};
    kvp_table_fault_t fault;
    CHECK(kvp_table_slots(&rows.table, (kvp_ints_t){at, false}, (kvp_ints_t){positions, false}, 3, out, NULL) ==
          KVP_TABLE_OK);
    CHECK(out[0] == (int64_t)(INT32_MAX - 1) * 5 + 4 && out[1] == 15 && out[2] == 10 && out[3] == -7);
    CHECK(kvp_table_slots(&rows.table, IN_ORDER, (kvp_ints_t){bad, true}, 2, out, &fault) == KVP_TABLE_ERR_POSITION);
    CHECK(fault.index == 1 && fault.value == 5 && out[1] == 15);
    CHECK(kvp_table_slots(&rows.table, IN_ORDER, (kvp_ints_t){positions, false}, 3, out, &fault) == KVP_TABLE_ERR_ROW);
    CHECK(kvp_table_slots(&rows.table, (kvp_ints_t){(int32_t[]){2}, false}, (kvp_ints_t){bad, true}, 1, out, &fault) ==
          KVP_TABLE_ERR_ROW);
    int64_t keys[3], values[3];
    kvp_table_kv_rows((int64_t[]){15, -1, 9}, 3, 5, keys, values);
    CHECK(keys[0] == 30 && keys[1] == 0 && keys[2] == 14 && values[0] == 35 && values[1] == 5 && values[2] == 19);
    free_rows(&rows);
}

static void test_query_slots(void) {
    rows_t rows = make_rows(2, 2, 4, 1, 100);
    CHECK(edit(&rows.table, 0, (int32_t[]){9}, 1, false) == KVP_TABLE_OK);
    const int64_t positions[5] = {3, 4, 8, -1, 0};
    int64_t out[5] = {-7, -7, -7, -7, -7};
    const int32_t falling[3] = {0, 2, 1}, too_far[2] = {0, 6}, starts[3] = {0, 3, 4};
    kvp_table_fault_t fault;
    CHECK(kvp_table_query_slots(&rows.table, falling, 2, positions, 5, out, &fault) == KVP_TABLE_ERR_QUERY);
    CHECK(kvp_table_query_slots(&rows.table, too_far, 1, positions, 5, out, &fault) == KVP_TABLE_ERR_QUERY);
    CHECK(kvp_table_query_slots(&rows.table, starts, 3, positions, 5, out, &fault) == KVP_TABLE_ERR_ROW &&
          out[0] == -7);
    CHECK(kvp_table_query_slots(&rows.table, starts, 2, positions, 5, out, NULL) == KVP_TABLE_OK);
    /* In the block, in the null block, past the row, before it; the last token belongs to no query. */
    CHECK(out[0] == 39 && out[1] == 0 && out[2] == KVP_TABLE_PAD && out[3] == KVP_TABLE_PAD && out[4] == -7);
    free_rows(&rows);
}

static void test_batches(void) {
    rows_t rows = make_rows(3, 4, 4, 1, 100);
    CHECK(edit(&rows.table, 0, (int32_t[]){5, 6, 7}, 3, false) == KVP_TABLE_OK);
    CHECK(edit(&rows.table, 1, (int32_t[]){0, 6}, 2, false) == KVP_TABLE_OK);
    CHECK(edit(&rows.table, 2, (int32_t[]){5, 6, 9, 8}, 4, false) == KVP_TABLE_OK);
    const int64_t at[2] = {2, 0}, lengths[2] = {16, 9};
    int32_t starts[3], blocks[7], last[2], common = -1;
    kvp_table_fault_t fault;
    const kvp_ints_t batch = {at, true}, tokens = {lengths, true};
    CHECK(kvp_table_compress(&rows.table, batch, tokens, 2, starts, blocks, 6, last, &fault) == KVP_TABLE_ERR_ROOM);
    CHECK(kvp_table_compress(&rows.table, batch, tokens, 2, starts, blocks, 7, last, NULL) == KVP_TABLE_OK);
    CHECK(memcmp(starts, (int32_t[]){0, 4, 7}, sizeof starts) == 0 && last[0] == 4 && last[1] == 1);
    CHECK(memcmp(blocks, (int32_t[]){5, 6, 9, 8, 5, 6, 7}, sizeof blocks) == 0);
    const int32_t none[2] = {1, 0}, many[2] = {1, 13};
    CHECK(kvp_table_compress(&rows.table, batch, (kvp_ints_t){none, false}, 2, starts, blocks, 7, last, &fault) ==
          KVP_TABLE_ERR_TOKENS);
    CHECK(kvp_table_compress(&rows.table, batch, (kvp_ints_t){many, false}, 2, starts, blocks, 7, last, &fault) ==
          KVP_TABLE_ERR_TOKENS);
    CHECK(fault.index == 1 && fault.value == 13 && starts[1] == 4);
    CHECK(kvp_table_num_common(&rows.table, batch, 2, 9, &common, NULL) == KVP_TABLE_OK && common == 2);
    CHECK(kvp_table_num_common(&rows.table, batch, 2, 1, &common, NULL) == KVP_TABLE_OK && common == 1);
    CHECK(kvp_table_num_common(&rows.table, batch, 2, -1, &common, NULL) == KVP_TABLE_OK && common == 0);
    CHECK(kvp_table_num_common(&rows.table, batch, 1, 9, &common, NULL) == KVP_TABLE_OK && common == 4);
    CHECK(kvp_table_num_common(&rows.table, batch, 0, 9, &common, NULL) == KVP_TABLE_OK && common == 0);
    CHECK(kvp_table_num_common(&rows.table, IN_ORDER, 2, 9, &common, NULL) == KVP_TABLE_OK && common == 0);
    CHECK(kvp_table_num_common(&rows.table, IN_ORDER, 4, 9, &common, NULL) == KVP_TABLE_ERR_ROW);
    free_rows(&rows);
}

static void test_checker_notices(void) {
    rows_t rows = make_rows(2, 3, 4, 1, 10);
    char reason[256];
#define NOTICES(what, change, back)                                                                  \
    do {                                                                                             \
        change;                                                                                      \
        CHECK(kvp_block_table_check(&rows.table, reason, sizeof reason) == KVP_TABLE_ERR_INVARIANT); \
        CHECK(strncmp(reason, what, 2) == 0);                                                        \
        back;                                                                                        \
        CHECK(is_sound(&rows.table));                                                                \
    } while (0)
    NOTICES("T1", rows.num_blocks[1] = 4, rows.num_blocks[1] = 0);
    NOTICES("T1", rows.num_blocks[0] = -1, rows.num_blocks[0] = 0);
    NOTICES("T2", rows.cells[5] = 3, rows.cells[5] = 0);
    NOTICES("T3", (rows.num_blocks[0] = 1, rows.cells[0] = 10), (rows.num_blocks[0] = 0, rows.cells[0] = 0));
    NOTICES("T4", rows.changed[1].end = 4, rows.changed[1].end = 0);
    NOTICES("T4", rows.changed[0].begin = 1, rows.changed[0].begin = 0);
#undef NOTICES
    free_rows(&rows);
}

/* ---- random walk: rows against a model of plain arrays, the device copy kept by taken changes only ---- */

enum { WALK_ROWS = 5, WALK_WIDTH = 8, WALK_RATIO = 2, WALK_IDS = 50, WALK_STEPS = 20000 };

typedef struct {
    int32_t cells[WALK_ROWS][WALK_WIDTH];
    int32_t length[WALK_ROWS];
} model_t;

static void model_edit(model_t *model, const kvp_table_edit_t *edit_, const int32_t *ids) {
    int32_t length = edit_->replaces ? 0 : model->length[edit_->row];
    for (int32_t i = 0; i < edit_->num_ids; i++) {
        for (int32_t part = 0; part < WALK_RATIO; part++) {
            model->cells[edit_->row][length++] = ids[edit_->first + i] * WALK_RATIO + part;
        }
    }
    model->length[edit_->row] = length;
}

static void walk_edits(kvp_block_table_t *table, model_t *model) {
    kvp_table_edit_t edits[3];
    int32_t ids[16];
    model_t after = *model;
    const int64_t n = 1 + random_below(3);
    bool fits = true;
    for (int32_t i = 0; i < 16; i++) {
        ids[i] = (int32_t)random_below(WALK_IDS);
    }
    for (int64_t i = 0; i < n; i++) {
        edits[i] = (kvp_table_edit_t){.first = random_below(12),
                                      .num_ids = (int32_t)random_below(4),
                                      .row = (int32_t)random_below(WALK_ROWS),
                                      .replaces = random_below(3) == 0};
        const int32_t base = edits[i].replaces ? 0 : after.length[edits[i].row];
        fits = fits && base + edits[i].num_ids * WALK_RATIO <= WALK_WIDTH;
        if (fits) {
            model_edit(&after, &edits[i], ids);
        }
    }
    CHECK(kvp_block_table_edit(&table, 1, edits, n, ids, NULL) == (fits ? KVP_TABLE_OK : KVP_TABLE_ERR_FULL));
    if (fits) {
        *model = after;
    }
}

static void walk_step(kvp_block_table_t *table, model_t *model) {
    const int32_t a = (int32_t)random_below(WALK_ROWS), b = (int32_t)random_below(WALK_ROWS);
    const model_t before = *model;
    switch (random_below(6)) {
    case 0:
        CHECK(kvp_block_table_clear_row(table, a, NULL) == KVP_TABLE_OK);
        model->length[a] = 0;
        break;
    case 1:
        CHECK(kvp_block_table_move_row(table, a, b, NULL) == KVP_TABLE_OK);
        model->length[a] = 0;
        model->length[b] = before.length[a];
        memcpy(model->cells[b], before.cells[a], sizeof before.cells[a]);
        break;
    case 2:
        CHECK(kvp_block_table_swap_rows(table, a, b, NULL) == KVP_TABLE_OK);
        model->length[a] = before.length[b];
        model->length[b] = before.length[a];
        memcpy(model->cells[a], before.cells[b], sizeof before.cells[b]);
        memcpy(model->cells[b], before.cells[a], sizeof before.cells[a]);
        break;
    default: walk_edits(table, model);
    }
}

static void take_changes(kvp_block_table_t *table, int32_t num_rows, int32_t *device) {
    int32_t pairs[KVP_TABLE_CHANGE_WORDS * WALK_ROWS * WALK_WIDTH];
    const int64_t n = kvp_block_table_num_changes(table, num_rows);
    kvp_block_table_take_changes(table, num_rows, pairs);
    for (int64_t i = 0; i < n; i++) {
        device[pairs[2 * i]] = pairs[2 * i + 1];
    }
    CHECK(kvp_block_table_num_changes(table, num_rows) == 0);
    CHECK(memcmp(device, table->cells, (size_t)num_rows * WALK_WIDTH * sizeof(int32_t)) == 0);
}

static void test_random_walk(void) {
    rows_t rows = make_rows(WALK_ROWS, WALK_WIDTH, 4, WALK_RATIO, WALK_IDS);
    model_t model = {.length = {0}};
    int32_t device[WALK_ROWS * WALK_WIDTH] = {0};
    for (int step = 0; step < WALK_STEPS && num_failed == 0; step++) {
        walk_step(&rows.table, &model);
        CHECK(is_sound(&rows.table));
        for (int32_t row = 0; row < WALK_ROWS; row++) {
            CHECK(row_is(&rows.table, row, model.cells[row], model.length[row]));
        }
        if (random_below(3) == 0) {
            take_changes(&rows.table, (int32_t)random_below(WALK_ROWS + 1), device);
        }
    }
    take_changes(&rows.table, WALK_ROWS, device);
    CHECK(edit(&rows.table, 0, (int32_t[]){1}, 1, true) == KVP_TABLE_OK);
    CHECK(kvp_block_table_num_changes(&rows.table, WALK_ROWS + 5) > 0);
    kvp_block_table_drop_changes(&rows.table, WALK_ROWS + 5);
    CHECK(kvp_block_table_num_changes(&rows.table, WALK_ROWS) == 0);
    free_rows(&rows);
}

int main(void) {
    test_shapes();
    test_rows();
    test_refused_batches_change_nothing();
    test_kernel_blocks();
    test_slots();
    test_query_slots();
    test_batches();
    test_checker_notices();
    test_random_walk();
    return report("block table");
}
