"""What one side of the connector did, as plain numbers by name.

Every number is additive: over time, over workers and over engines. That is all that vLLM's
statistics and the metrics made of them need to know. A block is one rank's, so that two workers
which load one block each of the same tokens have loaded two.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Count:
    """What one number counts.

    Attributes:
        name: as ``Counts.add`` takes it.
        unit: of what the number is.
        help: one sentence for metrics and documentation.
    """

    name: str
    unit: str
    help: str


COUNTS: Final = (
    Count("lookups", "requests", "Requests whose prefix the store was asked for."),
    Count(
        "lookup_timeouts",
        "requests",
        "Lookups given up because no answer came in time or no node was there.",
    ),
    Count(
        "lookups_deferred",
        "requests",
        "Lookups put off to a later step because the step's time for lookups was spent.",
    ),
    Count(
        "asked_tokens",
        "tokens",
        "Tokens that the store was asked for: those in full blocks that the engine did not hold.",
    ),
    Count("matched_tokens", "tokens", "Tokens of those asked for that the store held."),
    Count(
        "waits",
        "requests",
        "Requests whose load was to wait for blocks that another engine computed.",
    ),
    Count("load_jobs", "jobs", "Loads into the engine's memory that ended, well or badly."),
    Count("loaded_blocks", "blocks", "Blocks read from the store into the engine's memory."),
    Count("loaded_bytes", "bytes", "Bytes read from the store into the engine's memory."),
    Count(
        "load_seconds",
        "seconds",
        "Time spent on loads, without waiting, summed over loads; those at the same time count "
        "each.",
    ),
    Count(
        "wait_seconds",
        "seconds",
        "Time that loads waited for blocks which another engine computed, summed over loads.",
    ),
    Count(
        "failed_load_blocks",
        "blocks",
        "Blocks that were to be loaded and were not; the engine computes them again.",
    ),
    Count("save_jobs", "jobs", "Saves of blocks to the store that ended, well or badly."),
    Count("stored_blocks", "blocks", "Blocks that the store took and did not hold before."),
    Count("held_blocks", "blocks", "Blocks not written because the store held them already."),
    Count("busy_blocks", "blocks", "Blocks not written because another writer was at them."),
    Count("refused_blocks", "blocks", "Blocks that the store found no room for."),
    Count("failed_save_blocks", "blocks", "Blocks not stored because of an error."),
    Count("saved_bytes", "bytes", "Bytes of blocks stored."),
    Count(
        "save_seconds",
        "seconds",
        "Time spent on saves, summed over saves; saves at the same time count each.",
    ),
    Count(
        "skipped_save_blocks",
        "blocks",
        "Full blocks not saved because too many of the engine's blocks were pinned for saves.",
    ),
    Count("guarded_errors", "errors", "Errors of the connector that were kept from the engine."),
)
"""All that is counted, in the order of documentation."""

COUNT: Final[Mapping[str, Count]] = MappingProxyType({count.name: count for count in COUNTS})
"""The same by name."""


class Counts:
    """What happened since it was last taken; any number of threads may add and take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, float] = {}

    def add(self, **numbers: float) -> None:
        """Count on.

        Args:
            **numbers: how much to add to each count; zeros leave no trace.

        Raises:
            KeyError: a name that is not in ``COUNTS``; nothing is added.
            ValueError: a number that is below zero, endless or none; nothing is added.
        """
        for name, number in numbers.items():
            if name not in COUNT:
                raise KeyError(f"no such count: {name}")
            if not 0 <= number < math.inf:
                raise ValueError(f"{name} only goes up, not by {number}")
        with self._lock:
            for name, number in numbers.items():
                if number:
                    self._numbers[name] = self._numbers.get(name, 0) + _plain(number)

    def take(self) -> dict[str, float]:
        """All counts since the last call by name, without those that are zero; the caller's own."""
        with self._lock:
            taken, self._numbers = self._numbers, {}
        return taken


def _plain(number: float) -> float:
    """As Python's own type: numpy's numbers do not pass between vLLM's processes."""
    return number if type(number) is int else float(number)
