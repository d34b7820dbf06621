"""Loads: blocks from the store into the engine's memory, on a thread of their own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from client.prefix import Views
from client.vllm.counts import Counts
from client.vllm.jobs import LoadJob
from client.vllm.progress import Progress

logger = logging.getLogger("kvstore.client.vllm")

PIECE_BYTES: Final = 32 << 20
"""Payload that is asked for at once: pins of the node stay few, and other loads get their turn."""

POLL: Final = 0.002
"""Seconds between two looks for blocks that another engine is still computing."""


class Memory(Protocol):
    """The engine's KV memory, as a target."""

    def scatter(
        self,
        blocks: Sequence[memoryview],
        block_ids: Sequence[int],
        *,
        after: object | None = None,
    ) -> None:
        """Write blocks to where the engine keeps those of these ids, once the mark is reached."""


class ViewClient(Protocol):
    """The call of the blocking client that loads make."""

    def view(
        self, hashes: Sequence[bytes], *, deadline: float | None = None
    ) -> AbstractContextManager[Views]:
        """Show blocks without copying them."""


@dataclass(slots=True)
class Running:
    """A load under way.

    Attributes:
        job: what is to be loaded.
        mark: what the engine's device has to have done before its blocks may be written.
        began: when it was asked for, in seconds of the clock.
        done: how many of its blocks are there.
    """

    job: LoadJob
    mark: object | None
    began: float
    done: int = 0


class Loads:
    """Carries out loads in the order asked for; those that wait for blocks do not hold up others.

    Every job ends: each of its blocks is in the engine's memory, or said to have failed.

    Args:
        client: where the blocks are.
        memory: where they go.
        block_bytes: bytes of one block.
        deadline: seconds without an answer after which a load is given up.
        counts: what was done.
        progress: told of each end.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        client: ViewClient,
        memory: Memory,
        *,
        block_bytes: int,
        deadline: float,
        counts: Counts,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._memory = memory
        self._block_bytes = block_bytes
        self._deadline = deadline
        self._counts = counts
        self._progress = progress
        self._clock = clock
        self._piece = max(1, PIECE_BYTES // block_bytes)
        self._asked: queue.SimpleQueue[Running | None] = queue.SimpleQueue()
        self._waiting: list[Running] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-loads", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: LoadJob, mark: object | None = None) -> None:
        """Ask for a load.

        Args:
            job: which blocks.
            mark: what ``PagedMemory.mark`` returned when the engine had given the blocks to the
                request.
        """
        self._progress.begin()
        self._asked.put(Running(job, mark, self._clock()))

    def close(self) -> None:
        """End the thread; loads not done yet fail."""
        self._closing.set()
        self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (running := self._next()) is not None or not self._closing.is_set():
            if running is not None:
                self._go_on(running)
            for each in self._take_waiting():
                self._go_on(each)
        for each in self._take_waiting():
            self._end(each)

    def _next(self) -> Running | None:
        try:
            return self._asked.get(timeout=POLL if self._waiting else None)
        except queue.Empty:
            return None

    def _take_waiting(self) -> list[Running]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _go_on(self, running: Running) -> None:
        """Load what is there; the boundary that keeps errors from the engine."""
        try:
            while running.done < len(running.job.hashes) and self._load_piece(running):
                pass
        except Exception:
            logger.exception("a load failed, its blocks are computed instead")
            self._counts.add(guarded_errors=1)
            self._end(running)
            return
        left = len(running.job.hashes) - running.done
        if left and self._clock() < running.began + running.job.wait:
            self._waiting.append(running)
        else:
            self._end(running)

    def _load_piece(self, running: Running) -> bool:
        """Load the next blocks; returns whether all that were asked for were there."""
        first = running.done
        hashes = running.job.hashes[first : first + self._piece]
        with self._client.view(hashes, deadline=self._deadline) as views:
            found = views.prefix
            blocks = [view for view in views[:found] if view is not None]
            if blocks:
                targets = running.job.blocks[first : first + found]
                self._memory.scatter(blocks, targets, after=running.mark)
            # Checked after the copy: a session that ended meanwhile no longer kept them in place.
            if not views.valid:
                return False
        running.done += found
        return found == len(hashes)

    def _end(self, running: Running) -> None:
        job, done = running.job, running.done
        self._counts.add(
            load_jobs=1,
            loaded_blocks=done,
            loaded_bytes=done * self._block_bytes,
            load_seconds=max(0.0, self._clock() - running.began),
            failed_load_blocks=len(job.hashes) - done,
        )
        self._progress.loaded(job.request, job.blocks[done:])
