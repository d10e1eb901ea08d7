/* fuzz_map.c - the stand-alone prefix map and the stand-alone free list, against arrays. */
#include <string.h>

#include "input.h"
#include "kvp_internal.h"

enum { MAX_ENTRIES = 96, NUM_KEYS = 40, MAX_NODES = 48, MAX_STEPS = 150 };

typedef struct {
    int32_t entry; /* of the map; KVP_NONE: not in it */
    int key;
    int32_t block_id;
    int64_t stamp;
} pair_t;

typedef struct {
    kvp_map_t *map;
    uint8_t digests[NUM_KEYS + 1][2 * KVP_DIGEST_BYTES];
    kvp_key_t keys[NUM_KEYS + 1];
    pair_t pairs[MAX_ENTRIES];
    int num_pairs;
    int64_t clock;
} map_state_t;

static int first_pair(const map_state_t *state, int key) {
    int found = -1;
    for (int i = 0; i < state->num_pairs; i++) {
        if (state->pairs[i].key == key && (found < 0 || state->pairs[i].stamp < state->pairs[found].stamp)) {
            found = i;
        }
    }
    return found;
}

static void compare_map(const map_state_t *state) {
    char reason[256];
    if (kvpi_map_check(state->map, reason, sizeof reason) != KVP_OK) {
        FOUND("check: %s", reason);
    }
    int num_keys = 0;
    for (int key = 0; key <= NUM_KEYS; key++) {
        const int pair = first_pair(state, key);
        num_keys += pair >= 0;
        REQUIRE(kvp_map_find(state->map, &state->keys[key]) == (pair < 0 ? KVP_NONE : state->pairs[pair].entry));
    }
    REQUIRE(state->map->num_keys == num_keys && state->map->num_entries == state->num_pairs);
    for (int i = 0; i < state->num_pairs; i++) {
        const pair_t *const pair = &state->pairs[i];
        REQUIRE(kvp_map_find_block(state->map, &state->keys[pair->key], pair->block_id) == pair->entry);
    }
}

static void map_step(input_t *input, map_state_t *state) {
    const uint32_t byte = next_byte(input);
    if (byte < 150) {
        const int key = byte < 4 ? NUM_KEYS : (int)next_below(input, NUM_KEYS);
        const int32_t block_id = next_int(input, 0, 20);
        if (kvp_map_find_block(state->map, &state->keys[key], block_id) != KVP_NONE ||
            state->num_pairs == MAX_ENTRIES) {
            return; /* the caller adds a pair once */
        }
        int32_t entry = KVP_NONE;
        allocations_left = byte >= 130 ? (long)(byte & 1) : -1;
        const kvp_status_t status = kvp_map_add(state->map, &state->keys[key], block_id, &entry);
        if (key == NUM_KEYS) {
            REQUIRE(status == KVP_ERR_DIGEST_LENGTH);
        } else if (byte < 130 || status != KVP_ERR_NO_MEMORY) {
            REQUIRE(status == KVP_OK);
            state->pairs[state->num_pairs++] = (pair_t){entry, key, block_id, state->clock++};
        }
        allocations_left = -1;
    } else if (state->num_pairs > 0) {
        pair_t *const pair = &state->pairs[next_below(input, (uint32_t)state->num_pairs)];
        kvp_map_discard(state->map, pair->entry);
        *pair = state->pairs[--state->num_pairs];
    }
}

/* ---- free list ---- */

typedef struct {
    kvp_free_list_t list;
    int32_t queue[MAX_NODES];
    int32_t num_free;
} list_state_t;

static int32_t place_of(const list_state_t *state, int32_t node) {
    for (int32_t i = 0; i < state->num_free; i++) {
        if (state->queue[i] == node) {
            return i;
        }
    }
    return -1;
}

static void compare_list(const list_state_t *state) {
    char reason[256];
    if (kvp_free_list_check(&state->list, reason, sizeof reason) != KVP_OK) {
        FOUND("check: %s", reason);
    }
    int32_t node = KVP_NONE;
    REQUIRE(state->list.num_free == state->num_free);
    for (int32_t i = 0; i < state->num_free; i++) {
        node = kvp_free_list_after(&state->list, node);
        REQUIRE(node == state->queue[i]);
    }
    REQUIRE(kvp_free_list_after(&state->list, node) == KVP_NONE);
    for (node = 0; node < state->list.capacity; node++) {
        REQUIRE(kvp_free_list_is_queued(&state->list, node) == (place_of(state, node) >= 0));
    }
}

static void link_batch(input_t *input, list_state_t *state, bool at_head) {
    int32_t nodes[12], num_before = state->num_free, before[MAX_NODES];
    const int64_t n = next_below(input, 12);
    kvp_fault_t fault = {0, 0};
    memcpy(before, state->queue, sizeof before);
    int64_t bad = n;
    for (int64_t i = 0; i < n; i++) {
        nodes[i] = (int32_t)next_below(input, (uint32_t)state->list.capacity);
    }
    for (int64_t i = 0; i < n && bad == n; i++) {
        if (place_of(state, nodes[i]) >= 0) {
            bad = i;
            break;
        }
        const int32_t place = at_head ? (int32_t)i : state->num_free;
        memmove(state->queue + place + 1, state->queue + place, (size_t)(state->num_free - place) * sizeof(int32_t));
        state->queue[place] = nodes[i];
        state->num_free++;
    }
    const kvp_status_t status = at_head ? kvp_free_list_prepend_n(&state->list, nodes, n, &fault)
                                        : kvp_free_list_append_n(&state->list, nodes, n, &fault);
    REQUIRE(status == (bad < n ? KVP_ERR_QUEUED : KVP_OK));
    if (bad < n) {
        REQUIRE(fault.index == bad && fault.block_id == nodes[bad]);
        memcpy(state->queue, before, sizeof before);
        state->num_free = num_before;
    }
}

static void list_step(input_t *input, list_state_t *state) {
    const uint32_t call = next_below(input, 5);
    if (call < 2) {
        link_batch(input, state, call == 0);
    } else if (call == 2) {
        const int32_t n = next_int(input, 0, 8);
        int32_t out[MAX_NODES];
        const kvp_status_t status = kvp_free_list_pop_n(&state->list, n, out);
        REQUIRE(status == (n < 0 || n > state->num_free ? KVP_ERR_NO_FREE_BLOCKS : KVP_OK));
        if (status == KVP_OK) {
            REQUIRE(memcmp(out, state->queue, (size_t)n * sizeof *out) == 0);
            state->num_free -= n;
            memmove(state->queue, state->queue + n, (size_t)state->num_free * sizeof(int32_t));
        }
    } else if (call == 3) {
        const int32_t node = (int32_t)next_below(input, (uint32_t)state->list.capacity), place = place_of(state, node);
        REQUIRE(kvp_free_list_remove(&state->list, node) == (place < 0 ? KVP_ERR_NOT_QUEUED : KVP_OK));
        if (place >= 0) {
            state->num_free--;
            memmove(state->queue + place, state->queue + place + 1,
                    (size_t)(state->num_free - place) * sizeof(int32_t));
        }
    } else if (state->list.capacity < MAX_NODES) {
        const int32_t room = MAX_NODES - state->list.capacity;
        const int32_t capacity = state->list.capacity + (int32_t)next_below(input, (uint32_t)room + 1);
        kvp_link_t *const links = malloc(kvp_free_list_links(capacity) * sizeof *links), *const old = state->list.links;
        REQUIRE(links != NULL);
        kvp_free_list_move(&state->list, links, capacity);
        free(old);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static map_state_t maps;
    static list_state_t lists;
    input_t input = {data, data + size};
    const uint32_t options = next_byte(&input);
    uint64_t secret[KVP_SECRET_WORDS] = {0};
    for (int i = 0; i < KVP_SECRET_WORDS && (options & 1) == 0; i++) {
        secret[i] = ((uint64_t)next_byte(&input) << 56) + 0x9e3779b97f4a7c15u * (uint64_t)(i + 1);
    }
    memset(maps.digests, 0, sizeof maps.digests);
    for (int i = 0; i < NUM_KEYS; i++) {
        /* Where the secret is zero, these all have the same home. */
        maps.digests[i][i % 2 == 0 ? KVP_DIGEST_BYTES - 1 : 0] = (uint8_t)(1 + i / 4);
        maps.keys[i] = (kvp_key_t){maps.digests[i], i % 2 == 0 ? KVP_DIGEST_BYTES : 3, i % 4 < 2 ? 0 : UINT32_MAX};
    }
    maps.keys[NUM_KEYS] = (kvp_key_t){maps.digests[NUM_KEYS], KVP_DIGEST_BYTES + 1, 0};
    maps.num_pairs = 0;
    if ((options & 2) != 0) {
        allocations_left = (options & 4) != 0;
        (void)kvp_map_create(secret, &maps.map); /* the slots are the only memory that can fail here */
        if (allocations_left < 0) {
            goto lists_only;
        }
        allocations_left = -1;
    } else {
        REQUIRE(kvp_map_create(secret, &maps.map) == KVP_OK);
    }
    for (int i = 0; i < MAX_STEPS && !input_empty(&input) && (options & 8) == 0; i++) {
        map_step(&input, &maps);
        compare_map(&maps);
    }
    kvp_map_destroy(maps.map);
lists_only:
    lists.num_free = 0;
    const int32_t capacity = 1 + (int32_t)next_below(&input, 16),
                  first = (int32_t)next_below(&input, (uint32_t)capacity + 1);
    kvp_link_t *const links = malloc(kvp_free_list_links(capacity) * sizeof *links);
    REQUIRE(links != NULL);
    kvp_free_list_init(&lists.list, links, capacity, first);
    for (int32_t node = first; node < capacity; node++) {
        lists.queue[lists.num_free++] = node;
    }
    for (int i = 0; i < MAX_STEPS && !input_empty(&input); i++) {
        list_step(&input, &lists);
        compare_list(&lists);
    }
    free(lists.list.links);
    return 0;
}
