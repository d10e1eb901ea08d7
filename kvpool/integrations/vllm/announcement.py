"""The line in the log that says what is active.

vLLM loads its plugins while it parses arguments, and sets up its logger afterwards; until then what is logged at INFO
is lost, and in the process of the front end it would be of little use. So a line that comes too early waits for the
first block pool, which an engine builds with its log in place (in a forked process too: what waits is inherited).
"""

from __future__ import annotations

import logging

# A child of vLLM's own logger, whose handler and level an engine sets up.
logger = logging.getLogger("vllm.kvpool")

_waiting: str | None = None


def announce(line: str, is_pool_expected: bool) -> None:
    """Log a line at INFO, now if vLLM's log is in place, else with the first pool, or now all the same if no pool of
    kvpool's will be built."""
    global _waiting
    _waiting = line
    if logger.isEnabledFor(logging.INFO) or not is_pool_expected:
        announce_waiting()


def announce_waiting() -> None:
    """Log what waits, if something does."""
    global _waiting
    if _waiting is not None:
        line, _waiting = _waiting, None
        logger.info("%s", line)


def forget() -> None:
    """Nothing waits any more."""
    global _waiting
    _waiting = None
