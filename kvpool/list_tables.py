"""Block tables that are plain lists of ints; see ``kvpool.pool.list_tables``."""

from kvpool.backend import (
    allocate_table,
    cache_completed_blocks,
    find_prefix_of_tokens,
    free_table,
    touch_table,
)

__all__ = ["allocate_table", "cache_completed_blocks", "find_prefix_of_tokens", "free_table", "touch_table"]
