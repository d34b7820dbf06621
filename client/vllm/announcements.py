"""Tells routers, step by step, what the store gained and lost.

A block counts as held where every shard holds it, and as gone as soon as one has lost it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from client.vllm.events import Announced, Event, Ledger, StoredEvent
from client.vllm.following import News


class Source(Protocol):
    """Where news of one shard come from: ``Following``."""

    def take(self) -> News:
        """What was learnt since the last call."""

    def check(self, hashes: Sequence[bytes]) -> None:
        """Ask the shard about these blocks."""


class Announcements:
    """Events of the scheduler's side; for one thread.

    News are heard before anything is announced: a block that was gone, and has been stored again
    since, is announced after what was said of its past. What was announced is asked about once
    afterwards, for it may have been gone again by then.

    Args:
        ledger: what was announced so far.
        sources: one for each shard.
    """

    def __init__(self, ledger: Ledger, sources: Sequence[Source]) -> None:
        self._ledger = ledger
        self._sources = sources
        self._events: list[Event] = []

    def known(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain stand announced, and need not be put into words again.

        Args:
            hashes: a chain.
        """
        self._hear()
        fresh = (number for number, block in enumerate(hashes) if block not in self._ledger)
        return next(fresh, len(hashes))

    def announce(self, blocks: Sequence[Announced]) -> None:
        """Announce blocks that all shards hold now.

        Args:
            blocks: as ``Ledger.announce`` takes them.
        """
        self._hear()
        events = self._ledger.announce(blocks)
        self._events += events
        told = [event.blocks for event in events if isinstance(event, StoredEvent)]
        fresh = [block.hash for chain in told for block in chain]
        if fresh:
            for source in self._sources:
                source.check(fresh)

    def clear(self) -> None:
        """Take everything back."""
        self._events += self._ledger.cleared()

    def take(self) -> list[Event]:
        """All events since the last call, in their order."""
        self._hear()
        events, self._events = self._events, []
        return events

    def _hear(self) -> None:
        for source in self._sources:
            news = source.take()
            self._events += self._ledger.removed(news.removed)
            if news.lost:
                source.check(self._ledger.believed())
