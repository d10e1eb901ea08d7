"""What is logged of entries that a free skips under ``on_invalid_free="warn"``: a few lines a call, however many."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger("kvpool")

MOST_LINES = 4  # entries of a call that are named, one a line


def log_skipped(call: str, first: Sequence[tuple[int, object]], num_skipped: int) -> None:
    """Warn of skipped entries.

    Args:
        call: that skipped them.
        first: place in the batch and block, or id, of the first ones.
        num_skipped: all of them.
    """
    for place, block in first[:MOST_LINES]:
        logger.warning("%s: skipped entry %d of the batch, which is not in use: %r", call, place, block)
    if num_skipped > MOST_LINES:
        logger.warning("%s: skipped %d more entries that are not in use", call, num_skipped - MOST_LINES)
