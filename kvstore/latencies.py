"""Durations of calls, and what share of the calls took how long. Pure."""

from __future__ import annotations

import math
from array import array


class Latencies:
    """Durations of one kind of call, in seconds."""

    def __init__(self) -> None:
        self._seconds = array("d")

    def add(self, seconds: float) -> None:
        """Count one call."""
        self._seconds.append(seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    @property
    def total(self) -> float:
        """Seconds of all calls together."""
        return math.fsum(self._seconds)

    def percentile(self, share: float) -> float:
        """The least duration that at least ``share`` (0 to 1) of the calls did not exceed.

        0 where there were no calls.
        """
        if not self._seconds:
            return 0.0
        rank = max(math.ceil(share * len(self._seconds)), 1)
        return sorted(self._seconds)[rank - 1]
