"""What a client knows of its node, and what follows for the next call."""

from __future__ import annotations

import time

from kvstore.errors import KVStoreError, Unavailable, from_code
from kvstore.protocol.breaker import Breaker, Decision
from kvstore.protocol.caller import Counters


class Health:
    """The circuit breaker of one lane, and why it is open.

    Args:
        counters: of the lane.
    """

    def __init__(self, counters: Counters) -> None:
        self._breaker = Breaker()
        self._counters = counters
        self._reason = (Unavailable.code, "the node has not been reached yet", True)

    @property
    def state(self) -> str:
        """``connected``, ``suspect`` or ``disconnected``."""
        return self._breaker.state

    @property
    def suspect(self) -> bool:
        """Whether the node has not answered since a call timed out."""
        return self._breaker.suspect

    def admit(self) -> bool:
        """Say whether a call may use the session there is, or must open one first.

        Raises:
            KVStoreError: neither: the node has just failed and is left alone for a while.
        """
        decision = self._breaker.decide(time.monotonic())
        if decision is Decision.REFUSE:
            self._counters.refused += 1
            raise from_code(*self._reason)
        return decision is Decision.TRY

    def opened(self) -> None:
        """Take note of a new session."""
        self._breaker.connection_made()

    def not_opened(self, error: KVStoreError) -> None:
        """Take note that no session could be opened."""
        self._breaker.connect_failed(time.monotonic())
        self._counters.connect_failures += 1
        self._remember(error)

    def answered(self) -> None:
        """Take note that the node has answered something."""
        self._breaker.answered()

    def lost(self, error: KVStoreError) -> None:
        """Take note that the session has ended."""
        self._breaker.connection_lost(time.monotonic())
        self._remember(error)

    def judge(self, error: KVStoreError, *, heard: bool, timed_out: bool, closed: bool) -> None:
        """Draw conclusions from a call that failed.

        Args:
            error: what it failed with.
            heard: whether the node has answered anything meanwhile.
            timed_out: whether a request was given up at its deadline.
            closed: whether the session ended with it.
        """
        if heard:
            self._breaker.answered()
        elif timed_out:
            self._breaker.timed_out(time.monotonic())
            self._remember(error)
        if closed:
            self.lost(error)

    def _remember(self, error: KVStoreError) -> None:
        """Keep what an error says; itself it would keep the memory of its call alive."""
        self._reason = (error.code, str(error), error.retry)
