"""A store that is open, and what the works keep of it from one turn to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.adapter import Adapter
from benchmarks.peers.payload import POSITIONS, Payload

ERRORS = 5
"""Errors that one outcome quotes."""


@dataclass(slots=True)
class Outcome:
    """What one turn of a work came to.

    Attributes:
        samples: seconds of each call that was timed.
        bytes: payload that these calls moved.
        items: blocks or keys that they were about.
        wrong: blocks that came back with other bytes than were put. Any makes the figure void.
        lacking: blocks that were not stored, or not found, where the work counts on them.
        errors: the first few, in words.
        figures: what else the work measured, by name.
        seconds: wall time of the turn, where it is not the sum of the samples (several threads).
    """

    samples: list[float] = field(default_factory=list)
    bytes: int = 0
    items: int = 0
    wrong: int = 0
    lacking: int = 0
    errors: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def error(self, text: str) -> None:
        """Note one more error, of which the first few are kept."""
        if len(self.errors) < ERRORS:
            self.errors.append(text)

    def as_json(self) -> dict[str, Any]:
        """What goes over the pipe."""
        return asdict(self)


@dataclass(slots=True)
class Subject:
    """An open adapter.

    Attributes:
        adapter: the store.
        payload: its blocks.
        settings: what it was opened with.
        kept: what works remember until the store is closed, each under names of its own.
    """

    adapter: Adapter
    payload: Payload
    settings: Mapping[str, str]
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return self.payload.size

    def sources(self, count: int) -> list[memoryview]:
        """Buffers to put from, ready to be stamped with a chain of so many keys."""
        found: list[memoryview] = self.kept.get("sources", [])
        if len(found) < count:
            more = self.adapter.buffers(count - len(found), self.size)
            for index, block in enumerate(more, len(found)):
                self.payload.fill(block, index % POSITIONS)
            found = self.kept["sources"] = [*found, *more]
        return found[:count]

    def destinations(self, count: int) -> list[memoryview]:
        """Buffers to get into."""
        found: list[memoryview] = self.kept.get("destinations", [])
        if len(found) < count:
            more = self.adapter.buffers(count - len(found), self.size)
            found = self.kept["destinations"] = [*found, *more]
        return found[:count]
