"""Saves: full blocks out of the engine's memory into the store, on a thread of their own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from client.buffers import BlockSource
from client.results import BUSY, FAILED, HELD, STORED, GetResult, PutResult
from client.vllm.counts import Counts
from client.vllm.jobs import SaveJob
from client.vllm.progress import Progress
from kvstore.errors import ParentAbsent

logger = logging.getLogger("kvstore.client.vllm")

BUSY_PAUSE: Final = 0.02
"""Seconds until a block that another engine was writing is looked at again."""

PROBE: Final = 0.25
"""Seconds that a node which has not answered gets to answer at all. The engine can't use the blocks
of a save while it waits, nor those of the saves behind it."""


class Memory(Protocol):
    """The engine's KV memory, as a source."""

    def gather(
        self,
        block_ids: Sequence[int],
        into: Sequence[memoryview],
        *,
        after: object | None = None,
    ) -> None:
        """Copy blocks of the engine, by their ids, once the work marked is done."""


class PutClient(Protocol):
    """The calls of the blocking client that saves make."""

    def exists(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> GetResult:
        """Say which blocks are held, each by itself."""

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: BlockSource,
        *,
        parent: bytes,
        deadline: float | None = None,
    ) -> PutResult:
        """Store a chain of blocks."""


@dataclass(slots=True)
class Running:
    """A save under way.

    Attributes:
        job: what is to be saved.
        mark: what the engine's device has to have done before the blocks may be read.
        began: when it was asked for, in seconds of the clock.
        retry: when to go on, where another was writing one of the blocks.
        done: how many leading blocks the store holds.
    """

    job: SaveJob
    mark: object | None
    began: float
    retry: float = 0.0
    done: int = 0


class EngineBlocks:
    """Blocks of the engine as a put takes them: copied only where the node wants them."""

    def __init__(self, memory: Memory, blocks: Sequence[int], mark: object | None) -> None:
        self._memory = memory
        self._blocks = blocks
        self._mark = mark

    def __len__(self) -> int:
        return len(self._blocks)

    def write(self, positions: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy the blocks at these positions."""
        self._memory.gather([self._blocks[each] for each in positions], into, after=self._mark)


class Saves:
    """Carries out saves one after the other. Every job ends, within its deadline.

    Args:
        client: where the blocks go.
        memory: where they are.
        block_bytes: bytes of one block.
        deadline: seconds that one save may take.
        counts: what was done.
        progress: told of each end.
        lost: called when the node gives no answer.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        client: PutClient,
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
        self._asked: queue.SimpleQueue[Running | None] = queue.SimpleQueue()
        self._retries: list[Running] = []
        self._answers = True  # whether the node answered when it was last asked
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-saves", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: SaveJob, mark: object | None = None) -> None:
        """Ask for a save.

        Args:
            job: which blocks.
            mark: what ``PagedMemory.mark`` returned after the forward that fills them.
        """
        self._progress.begin()
        self._asked.put(Running(job, mark, self._clock()))

    def close(self) -> None:
        """Finish the saves asked for, each within its deadline, and end the thread."""
        self._closing.set()
        self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (running := self._next()) is not None:
            self._go_on(running)
        for each in self._retries:
            self._end(each, busy=len(each.job.hashes) - each.done)

    def _next(self) -> Running | None:
        """The save to go on with, once there is one; ``None`` at the end."""
        while True:
            pause = min((each.retry for each in self._retries), default=None)
            if pause is not None and (pause := pause - self._clock()) <= 0:
                return self._retries.pop(0)
            try:
                return self._asked.get(timeout=pause)
            except queue.Empty:
                continue

    def _go_on(self, running: Running) -> None:
        """Save what the node takes; the boundary that keeps errors from the engine."""
        try:
            result = self._put(running)
        except ParentAbsent:
            self._end(running, failed=self._left(running), orphaned=True)
        except Exception:
            logger.exception("a save failed, its blocks are not stored")
            self._counts.add(guarded_errors=1)
            self._end(running, failed=self._left(running))
        else:
            self._judge(running, result)

    def _put(self, running: Running) -> PutResult:
        job, done = running.job, running.done
        if not self._answers:
            there = self._client.exists(job.hashes[done : done + 1], deadline=PROBE)
            if there.failure is not None:
                return PutResult(bytes([FAILED]) * self._left(running), there.failure)
        self._answers = True
        parent = job.hashes[done - 1] if done else job.parent
        blocks = EngineBlocks(self._memory, job.blocks[done:], running.mark)
        result = self._client.put(job.hashes[done:], blocks, parent=parent, deadline=self._deadline)
        self._answers = result.failure is None
        if not self._answers:
            self._lost()
        return result

    def _judge(self, running: Running, result: PutResult) -> None:
        there = next(
            (i for i, code in enumerate(result.codes) if code not in (STORED, HELD)),
            len(result.codes),
        )
        running.done += there
        self._counts.add(
            stored_blocks=result.stored,
            held_blocks=result.held,
            saved_bytes=result.stored * self._block_bytes,
        )
        busy = there < len(result.codes) and result.codes[there] == BUSY
        if busy and not self._closing.is_set() and self._clock() < running.began + self._deadline:
            running.retry = self._clock() + BUSY_PAUSE
            self._retries.append(running)
            return
        self._end(running, busy=result.busy, refused=result.refused, failed=result.failed)

    def _left(self, running: Running) -> int:
        return len(running.job.hashes) - running.done

    def _end(
        self,
        running: Running,
        *,
        busy: int = 0,
        refused: int = 0,
        failed: int = 0,
        orphaned: bool = False,
    ) -> None:
        self._counts.add(
            save_jobs=1,
            busy_blocks=busy,
            refused_blocks=refused,
            failed_save_blocks=failed,
            save_seconds=max(0.0, self._clock() - running.began),
        )
        job = running.job
        self._progress.saved(job.number, running.done, job.request if orphaned else None)
