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

from client.paged_sources import Source, SourceViews
from client.results import GetResult
from client.vllm.counts import Counts
from client.vllm.jobs import LoadJob
from client.vllm.progress import Progress
from kvstore.errors import Unavailable

logger = logging.getLogger("kvstore.client.vllm")

PIECE_BYTES: Final = 32 << 20
"""Payload that is asked for at once: pins of the node stay few, and other loads get their turn."""

GPU_PIECE_BYTES: Final = 128 << 20
"""The same where a GPU copies by itself, which takes it 3 ms from DRAM."""

POLL: Final = 0.002
LONGEST_POLL: Final = 0.05
"""Seconds between two looks for blocks that another engine is still computing: the longer none has
come, the longer, so that what is added to a wait stays a small part of it."""

POLL_SHARE: Final = 1 / 16
"""Part of the time without a new block that the next look is put off by."""


class Memory(Protocol):
    """The engine's KV memory, as a target."""

    @property
    def gpu(self) -> int | None:
        """Number of the GPU that takes blocks from where they lie on one; ``None`` if none does."""

    def scatter(
        self,
        blocks: Sequence[Source],
        block_ids: Sequence[int],
        *,
        after: object | None = None,
    ) -> None:
        """Write blocks to where the engine keeps those of these ids, once the mark is reached."""


class ViewClient(Protocol):
    """The calls of the blocking client that loads make."""

    def exists(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> GetResult:
        """Say which blocks are held, each by itself."""

    def view(
        self, hashes: Sequence[bytes], *, device: bool, deadline: float | None = None
    ) -> AbstractContextManager[SourceViews]:
        """Show blocks without copying them, on a GPU where they lie there."""


@dataclass(slots=True, eq=False)
class Running:
    """A load under way.

    Attributes:
        job: what is to be loaded.
        mark: what the engine's device has to have done before its blocks may be written.
        began: when it was asked for, in seconds of the clock.
        done: how many of its blocks are there.
        moved: when the last of them came.
        due: when to look for more, where it waits.
        rested: since when it waits; ``None`` while it is worked on.
        waited: seconds that it has waited so far.
    """

    job: LoadJob
    mark: object | None
    began: float
    done: int = 0
    moved: float = 0.0
    due: float = 0.0
    rested: float | None = None
    waited: float = 0.0

    @property
    def end(self) -> float:
        """When it stops waiting."""
        return self.began + self.job.wait

    def put_off(self, now: float) -> None:
        """Set when to look again."""
        pause = min(max(POLL, (now - self.moved) * POLL_SHARE), LONGEST_POLL)
        self.due = min(now + pause, self.end)
        self.rested = now

    def wake(self, now: float) -> None:
        """Take note that it waits no longer."""
        if self.rested is not None:
            self.waited += max(0.0, now - self.rested)
            self.rested = None


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
        lost: called when the node gives no answer.
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
        lost: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._memory = memory
        self._block_bytes = block_bytes
        self._deadline = deadline
        self._counts = counts
        self._progress = progress
        self._lost = lost
        self._clock = clock
        self._device = memory.gpu is not None
        self._piece = max(1, (GPU_PIECE_BYTES if self._device else PIECE_BYTES) // block_bytes)
        self._asked: queue.SimpleQueue[Running | str | None] = queue.SimpleQueue()
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
        now = self._clock()
        self._asked.put(Running(job, mark, now, moved=now))

    def cancel(self, request: str) -> None:
        """Stop waiting for blocks of a request: the engine wants its memory back."""
        self._asked.put(request)

    def close(self) -> None:
        """End the thread; loads not done yet fail."""
        self._closing.set()
        self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (asked := self._next()) is not None or not self._closing.is_set():
            if isinstance(asked, Running):
                self._go_on(asked)
            elif asked is not None:
                self._end_all(self._take_waiting(asked))
            now = self._clock()
            while (due := self._take_due(now)) is not None:
                self._go_on(due)
        self._end_all(self._take_waiting())

    def _next(self) -> Running | str | None:
        due = min((each.due for each in self._waiting), default=None)
        try:
            return self._asked.get(timeout=None if due is None else max(0, due - self._clock()))
        except queue.Empty:
            return None

    def _take_due(self, now: float) -> Running | None:
        at = next((at for at, each in enumerate(self._waiting) if each.due <= now), None)
        return None if at is None else self._waiting.pop(at)

    def _take_waiting(self, request: str | None = None) -> list[Running]:
        """Those that wait, or only those of a request."""
        taken = [each for each in self._waiting if request in (None, each.job.request)]
        self._waiting = [each for each in self._waiting if each not in taken]
        return taken

    def _go_on(self, running: Running) -> None:
        """Load what is there; the boundary that keeps errors from the engine."""
        running.wake(self._clock())
        try:
            while running.done < len(running.job.hashes) and self._load_piece(running):
                pass
        except Unavailable as error:
            # The others wait for the same node, and what it held is likely to be lost.
            logger.warning("no blocks are waited for any more: %s", error)
            self._lost()
            self._end_all([running, *self._take_waiting()])
            return
        except Exception:
            logger.exception("a load failed, its blocks are computed instead")
            self._counts.add(guarded_errors=1)
            self._end(running)
            return
        now = self._clock()
        if running.done < len(running.job.hashes) and now < running.end:
            running.put_off(now)
            self._waiting.append(running)
            return
        if running.job.wait and not running.done:
            # Perhaps the engines differ in something that their namespaces name.
            waited = now - running.began
            logger.warning("waited %.1f s for blocks of a request, and none came", waited)
        self._end(running)

    def _load_piece(self, running: Running) -> bool:
        """Load the next blocks; returns whether all that were asked for were there."""
        first = running.done
        hashes = running.job.hashes[first : first + self._piece]
        asked = len(hashes)
        if running.job.wait and not (hashes := hashes[: self._committed(hashes)]):
            return False
        with self._client.view(hashes, device=self._device, deadline=self._deadline) as views:
            if views.failure is not None:
                self._lost()
            found = views.prefix
            blocks = [view for view in views[:found] if view is not None]
            if blocks:
                targets = running.job.blocks[first : first + found]
                self._memory.scatter(blocks, targets, after=running.mark)
            # Checked after the copy: a session that ended meanwhile no longer kept them in place.
            if not views.valid:
                return False
        if found:
            running.done, running.moved = running.done + found, self._clock()
            self._counts.add(loaded_blocks=found, loaded_bytes=found * self._block_bytes)
        return found == asked

    def _committed(self, hashes: Sequence[bytes]) -> int:
        """How many of the next blocks are there already.

        Looking with ``view`` would make each look one more miss in the node's counts.

        Raises:
            Unavailable: the node does not answer.
        """
        there = self._client.exists(hashes, deadline=self._deadline)
        if there.failure is not None:
            raise Unavailable(there.failure)
        return there.prefix

    def _end_all(self, ended: Sequence[Running]) -> None:
        for each in ended:
            self._end(each)

    def _end(self, running: Running) -> None:
        job, done, now = running.job, running.done, self._clock()
        running.wake(now)
        self._counts.add(
            load_jobs=1,
            load_seconds=max(0.0, now - running.began - running.waited),
            wait_seconds=running.waited,
            failed_load_blocks=len(job.hashes) - done,
        )
        self._progress.loaded(job.request, job.blocks[done:])
