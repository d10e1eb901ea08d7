"""How much may come in at once and on average: a bucket that leaks."""

from __future__ import annotations

MAX_SPENT_SECONDS = 5.0


class ByteBudget:
    """Bytes that many peers send together, those that are gone too. For one thread.

    It is spent when more than ``max_bytes`` are in the bucket, until half of it has leaked out. Whatever comes, that is
    so after ``max_bytes / 2 / bytes_per_second`` and five seconds.

    Args:
        max_bytes: at once.
        bytes_per_second: that leak out.

    Attributes:
        is_spent: whether more than that came lately.
        num_bytes: all since creation.
    """

    def __init__(self, max_bytes: int, bytes_per_second: int) -> None:
        self._max_bytes = max_bytes
        self._bytes_per_second = bytes_per_second
        self._level = 0.0
        self._leaked_at = 0.0
        self.is_spent = False
        self.num_bytes = 0

    @property
    def is_in_use(self) -> bool:
        """Whether anything came so shortly ago that it has not leaked out."""
        return self._level > 0

    def add(self, num_bytes: int) -> None:
        """So much more came."""
        self.num_bytes += num_bytes
        most = self._max_bytes + self._bytes_per_second * MAX_SPENT_SECONDS
        self._level = min(self._level + num_bytes, most)
        self.is_spent = self.is_spent or self._level > self._max_bytes

    def leak(self, now: float) -> None:
        """To call now and then.

        Args:
            now: seconds of a clock that never goes back.
        """
        self._level = max(0.0, self._level - self._bytes_per_second * (now - self._leaked_at))
        self._leaked_at = now
        self.is_spent = self.is_spent and self._level > self._max_bytes / 2
