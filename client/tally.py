"""What a client counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from client.results import ClientStats
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.protocol.caller import Counters


class OpenSession(Protocol):
    """What the statistics say of a session."""

    node: str
    incarnation: str

    @property
    def transport(self) -> str:
        """How its payload moves."""


class Tally:
    """Counts over all calls of one client; two threads at once may make it lose a count."""

    def __init__(self) -> None:
        self.calls = 0
        self._hits = 0
        self._misses = 0
        self._stored = 0
        self._bytes_read = 0
        self._bytes_written = 0
        self._timeouts = 0
        self._failures = 0

    def got(self, asked: int, found: int, length: int) -> None:
        """Count blocks of a get or view, ``length`` bytes each."""
        self._hits += found
        self._misses += asked - found
        self._bytes_read += found * length

    def put(self, stored: int, block_bytes: int) -> None:
        """Count blocks stored."""
        self._stored += stored
        self._bytes_written += stored * block_bytes

    def failed(self, error: KVStoreError) -> None:
        """Count a call without an answer."""
        if isinstance(error, DeadlineExceeded):
            self._timeouts += 1
        else:
            self._failures += 1

    def stats(
        self,
        url: str,
        counters: Sequence[Counters],
        *,
        connected: bool,
        session: OpenSession | None,
    ) -> ClientStats:
        """All of it for the caller."""
        return ClientStats(
            url=url,
            connected=connected,
            transport=session.transport if session is not None else "",
            node=session.node if session is not None else "",
            incarnation=session.incarnation if session is not None else "",
            calls=self.calls,
            hits=self._hits,
            misses=self._misses,
            stored=self._stored,
            bytes_read=self._bytes_read,
            bytes_written=self._bytes_written,
            timeouts=self._timeouts,
            failures=self._failures,
            connects=sum(each.connects for each in counters),
        )
