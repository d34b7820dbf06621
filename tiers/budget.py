"""How many bytes may be written per second: a token bucket. Pure; the caller passes the time."""

from __future__ import annotations


class WriteBudget:
    """Lets bytes through at a mean rate, and a burst at once.

    The budget is full at first. A write larger than the burst is let through when the budget is
    full, and leaves a debt, so that large blocks are slowed down to the rate but never shut out.

    Args:
        rate: bytes a second; None for no limit.
        burst: bytes that may go at once after a pause; one second's worth where left out.

    Raises:
        ValueError: a rate or burst that isn't positive.
    """

    def __init__(self, rate: float | None, burst: float | None = None) -> None:
        if (rate is not None and rate <= 0) or (burst is not None and burst <= 0):
            raise ValueError("rate and burst of a write budget must be positive")
        self._rate = rate
        self._burst = burst if burst is not None else (rate or 0.0)
        self._level = self._burst
        self._last: float | None = None

    @property
    def rate(self) -> float | None:
        """Bytes a second, or None for no limit."""
        return self._rate

    def take(self, size: int, now: float) -> bool:
        """Spend ``size`` bytes at ``now`` seconds (any clock that doesn't run backwards).

        Returns:
            Whether they may be written; nothing is spent otherwise.
        """
        if self._rate is None:
            return True
        self._fill(self._rate, now)
        if self._level < min(size, self._burst):
            return False
        self._level -= size
        return True

    def wait(self, size: int, now: float) -> float:
        """Seconds from ``now`` until ``size`` bytes may be written; 0 where they may at once."""
        if self._rate is None:
            return 0.0
        self._fill(self._rate, now)
        return max(0.0, (min(size, self._burst) - self._level) / self._rate)

    def refund(self, size: int) -> None:
        """Give back what was taken for a write that did not happen."""
        self._level = min(self._burst, self._level + size)

    def _fill(self, rate: float, now: float) -> None:
        if self._last is None:
            self._last = now
        elapsed = max(0.0, now - self._last)
        self._last = max(self._last, now)
        self._level = min(self._burst, self._level + elapsed * rate)
