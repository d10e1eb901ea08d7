"""Block tables that are plain lists of ints; see ``kvpool.pool.list_tables``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import backend

if TYPE_CHECKING or backend.BACKEND == "reference":
    from kvpool.pool.list_tables import (
        allocate_table,
        cache_completed_blocks,
        find_prefix_of_tokens,
        free_table,
        touch_table,
    )
else:
    from kvpool.native.list_tables import (
        allocate_table,
        cache_completed_blocks,
        find_prefix_of_tokens,
        free_table,
        touch_table,
    )

__all__ = ["allocate_table", "cache_completed_blocks", "find_prefix_of_tokens", "free_table", "touch_table"]
