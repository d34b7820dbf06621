"""When a client tries its node, and when it gives a miss at once instead.

A dead or slow node is a miss. To find that out anew at every call would cost a deadline each
time: after a timeout the connection is suspect, and calls are not tried until it has answered
something or a pause is over. A lost connection is made again by the next call, then after pauses
that grow. Time is passed in; nothing here waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum
from typing import Final

__all__ = ["Breaker", "Decision"]

_TIMEOUTS_BEFORE_RECONNECT: Final = 2


class Decision(Enum):
    """What a call does."""

    TRY = "try"
    """Use the connection."""
    CONNECT = "connect"
    """Make a new connection first, closing the present one if there is one."""
    REFUSE = "refuse"
    """Answer a miss at once."""


class Breaker:
    """The health of one client's connection. Not thread-safe: its owner's lock guards it.

    Args:
        first_pause: pause after the first failure, in seconds.
        longest_pause: bound of the pauses, which double, in seconds.
        jitter: returns a number from 0 to 1, that spreads clients which lost the same node.
    """

    def __init__(
        self,
        first_pause: float = 0.05,
        longest_pause: float = 2.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._jitter = jitter
        self._pause = first_pause
        self._connected = False
        self._timeouts = 0
        self._retry_at = float("-inf")

    @property
    def connected(self) -> bool:
        """Whether there is a connection, healthy or not."""
        return self._connected

    @property
    def suspect(self) -> bool:
        """Whether the connection has not answered since a call timed out."""
        return self._connected and self._timeouts > 0

    @property
    def state(self) -> str:
        """``connected``, ``suspect`` or ``disconnected``, for ``stats()``."""
        if not self._connected:
            return "disconnected"
        return "suspect" if self._timeouts else "connected"

    def decide(self, now: float) -> Decision:
        """Return what a call at ``now`` does.

        Where that is to try in spite of doubt, calls beside it are refused until it is known
        how it went, or a pause is over.
        """
        if self._connected and not self._timeouts:
            return Decision.TRY
        if now < self._retry_at:
            return Decision.REFUSE
        self._retry_at = now + self._pause
        if self._connected and self._timeouts < _TIMEOUTS_BEFORE_RECONNECT:
            return Decision.TRY
        return Decision.CONNECT

    def pause(self, now: float) -> float:
        """For how many seconds from ``now`` calls are refused, 0 where one would be tried."""
        healthy = self._connected and not self._timeouts
        return 0.0 if healthy else max(0.0, self._retry_at - now)

    def connection_made(self) -> None:
        """Take note that a session was opened (and so the node has answered)."""
        self._connected = True
        self.answered()

    def answered(self) -> None:
        """Take note that the node answered anything, be it late or an error."""
        self._timeouts = 0
        self._pause = self._first_pause
        self._retry_at = float("-inf")

    def timed_out(self, now: float) -> None:
        """Take note that a call got no answer within its deadline."""
        self._timeouts += 1
        self._wait(now)

    def connection_lost(self, now: float) -> None:
        """Take note that the connection ended; a healthy one is made again at once."""
        healthy = self._connected and not self._timeouts
        self._connected = False
        self._timeouts = 0
        if not healthy:
            self._wait(now)

    def connect_failed(self, now: float) -> None:
        """Take note that no session could be opened."""
        self._connected = False
        self._timeouts = 0
        self._wait(now)

    def _wait(self, now: float) -> None:
        self._retry_at = now + self._pause * (0.5 + 0.5 * self._jitter())
        self._pause = min(2 * self._pause, self._longest_pause)
