"""Tells the directory what this node gains and loses, and all that it holds where it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.directory.interface import Directory, Place
from kvstore.entry import Entry
from kvstore.index import Index

_PAGE: Final = 256
"""Places in one page of the inventory: a fraction of a millisecond of the event loop's time."""


class Publication:
    """The observer of an index on behalf of a directory, which only takes note and never waits.

    Args:
        index: what is told of.
        directory: is told.
    """

    def __init__(self, index: Index, directory: Directory) -> None:
        self._index = index
        self._directory = directory

    def stored(self, entry: Entry) -> None:
        """See ``kvstore.index.Observer``."""
        self._directory.stored(place_of(entry))

    def moved(self, entry: Entry) -> None:
        """See ``kvstore.index.Observer``; the directory knows of no tiers."""

    def removed(self, entry: Entry) -> None:
        """See ``kvstore.index.Observer``."""
        self._directory.removed(place_of(entry))

    def inventory(self) -> Iterator[Sequence[Place]]:
        """All blocks that can be served, in pages; see ``kvstore.directory.interface``."""
        for shard in self._index.shards:
            entries = list(shard.committed.values())
            for start in range(0, len(entries), _PAGE):
                page = entries[start : start + _PAGE]
                yield [place_of(entry) for entry in page if entry.committed]


def place_of(entry: Entry) -> Place:
    """What names a block in the directory."""
    shard = entry.shard
    return Place(shard.namespace, shard.number, entry.root, entry.hash)
