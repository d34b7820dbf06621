"""What the threads of a worker have finished, until the engine's own thread asks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Finished:
    """What ended since it was last asked.

    Attributes:
        loaded: requests whose load is over.
        failed_blocks: the engine's ids of blocks that were to be loaded and were not.
        saved: for each save that is over, how many of its leading blocks the store holds.
        orphaned: requests of which the store has lost blocks before those to be saved.
    """

    loaded: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    saved: dict[int, int] = field(default_factory=dict)
    orphaned: set[str] = field(default_factory=set)


class Progress:
    """Where threads say that a job is over, and where an idle engine waits for that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._loads = Finished()
        self._saves = Finished()
        self._news = 0

    def begin(self) -> None:
        """Take note of a job to come."""
        with self._changed:
            self._running += 1

    def loaded(self, request: str, failed_blocks: Sequence[int]) -> None:
        """Take note that a load is over."""
        with self._changed:
            self._loads.loaded.add(request)
            self._loads.failed_blocks.update(failed_blocks)
            self._end()

    def saved(self, number: int, held: int, orphaned: str | None = None) -> None:
        """Take note that a save is over.

        Args:
            number: of the job.
            held: how many of its leading blocks the store holds.
            orphaned: the request, where the store did not hold what comes before them.
        """
        with self._changed:
            self._saves.saved[number] = held
            if orphaned is not None:
                self._saves.orphaned.add(orphaned)
            self._end()

    def _end(self) -> None:
        self._running -= 1
        self._news += 1
        self._changed.notify_all()

    def take_loads(self) -> Finished:
        """The loads that ended since the last call."""
        with self._changed:
            taken, self._loads = self._loads, Finished()
            self._news -= len(taken.loaded)
        return taken

    def take_saves(self) -> Finished:
        """The saves that ended since the last call."""
        with self._changed:
            taken, self._saves = self._saves, Finished()
            self._news -= len(taken.saved)
        return taken

    def wait(self, seconds: float, *, pause: bool = False) -> None:
        """Return when something is over that has not been taken, or nothing is under way.

        An engine without work steps on and on until its transfers are over; waiting here instead
        leaves the processor to them.

        Args:
            seconds: how long at most.
            pause: whether to wait although nothing is under way.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._news or not (self._running or pause), seconds)
