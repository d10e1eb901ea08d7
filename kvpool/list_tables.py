"""Block tables that are plain lists of ints; see ``kvpool._list_table_operations``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import _backend

if TYPE_CHECKING or _backend.BACKEND == "reference":
    from kvpool._list_table_operations import (
        allocate_table,
        cache_completed_blocks,
        find_prefix_of_tokens,
        free_table,
        touch_table,
    )
else:
    from kvpool._list_tables import (
        allocate_table,
        cache_completed_blocks,
        find_prefix_of_tokens,
        free_table,
        touch_table,
    )

__all__ = ["allocate_table", "cache_completed_blocks", "find_prefix_of_tokens", "free_table", "touch_table"]
