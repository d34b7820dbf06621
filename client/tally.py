"""What a client counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from client.results import ClientStats
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.protocol.caller import Counters
from kvstore.protocol.messages import Welcome


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a session is, for logs and statistics.

    Attributes:
        node: name of the node.
        incarnation: which start of the node it is.
        transport: how payload moves.
        why: why not another way that was liked more; empty where there was none.
    """

    node: str
    incarnation: str
    transport: str
    why: str = ""

    def __str__(self) -> str:
        because = f" ({self.why})" if self.why else ""
        return f"{self.node} (incarnation {self.incarnation}) over {self.transport}{because}"

    @classmethod
    def of(cls, welcome: Welcome, why: str) -> SessionFacts:
        """The facts of a session that a node has opened.

        Args:
            welcome: what it answered.
            why: what the client could not offer, and why.
        """
        theirs = welcome.details.get("why")
        reasons = [reason for reason in (why, theirs) if reason and isinstance(reason, str)]
        return cls(welcome.node, welcome.incarnation, welcome.transport, "; ".join(reasons))


NO_SESSION: Final = SessionFacts("", "", "")
"""Before the first session."""


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
        session: SessionFacts,
    ) -> ClientStats:
        """All of it for the caller."""
        return ClientStats(
            url=url,
            connected=connected,
            transport=session.transport,
            transport_why=session.why,
            node=session.node,
            incarnation=session.incarnation,
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
