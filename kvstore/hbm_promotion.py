"""Copies blocks that GPUs want up from DRAM, in batches, in the background: nobody waits for them.

For the time of its copy a block is pinned: its bytes stay in DRAM, and what is said of it here when
the copy is done is said of the same block. It is in HBM only from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from kvstore.dram_pins import DramPins
from kvstore.entry import COMMITTED, IN_DRAM, IN_HBM, Entry
from kvstore.gpus import Gpus
from kvstore.hbm_copies import Copy
from kvstore.node import Node
from tiers.device import Event
from tiers.errors import TierError

_BATCH_BLOCKS: Final = 64
"""Blocks in one batch: about a millisecond of the event loop's time."""
_BATCH_BYTES: Final = 64 << 20
"""Bytes in one batch: about a millisecond of a GPU's bus."""
_MOST_WAITING: Final = 4096
"""Blocks that may wait for one GPU. What more is wanted meanwhile can be wanted again."""


class Move(NamedTuple):
    """A copy to be made.

    Attributes:
        copy: the block, pinned, and the room that is reserved for it.
        source: where it lies in DRAM.
        address: the same for the GPU, where that memory is pinned, else None.
    """

    copy: Copy
    source: memoryview
    address: int | None


class Promotion:
    """Brings blocks from DRAM to the GPUs.

    ``begin`` and ``finish`` belong to the event loop's thread, what is between them to another.

    Args:
        node: whose blocks.
        gpus: where to.
        pins: the memory that GPUs copy from by themselves.
    """

    def __init__(self, node: Node, gpus: Gpus, pins: DramPins) -> None:
        self._node = node
        self._gpus = gpus
        self._pins = pins
        self._waiting: list[dict[Entry, None]] = [{} for _ in range(len(gpus))]
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._threads: list[ThreadPoolExecutor] = []

    def open(self) -> None:
        """Take what is wanted from now on."""
        self._threads = [
            ThreadPoolExecutor(1, f"hbm-copy-{number}") for number in range(len(self._gpus))
        ]
        self._gpus.wanted = self.want

    async def close(self) -> None:
        """Take nothing more, wait for what is under way, and end the threads."""
        for waiting in self._waiting:
            waiting.clear()
        threads, self._threads = self._threads, []
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for thread in threads:
            thread.shutdown(wait=True)

    def want(self, entry: Entry, gpu: int) -> None:
        """Have a block brought to a GPU some time, if it is in DRAM then and there is room."""
        if not self._threads:
            return
        self.note(entry, gpu)
        if gpu not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._run(gpu), name=f"promotion-{gpu}")
            self._tasks[gpu] = task

    async def _run(self, gpu: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting[gpu]:
                moves = self.begin(gpu)
                if moves:
                    thread = self._threads[gpu]
                    failure = await loop.run_in_executor(thread, self._copy, gpu, moves)
                    self.finish(gpu, moves, failure)
                else:
                    await asyncio.sleep(0)
        finally:
            del self._tasks[gpu]

    def note(self, entry: Entry, gpu: int) -> None:
        """Let a block be among those of the next ``begin``."""
        waiting = self._waiting[gpu]
        if len(waiting) < _MOST_WAITING:
            waiting[entry] = None

    # --- one batch -------------------------------------------------------------------------------

    def begin(self, gpu: int) -> list[Move]:
        """Pin the next blocks, and find room for them; may find none, or nothing that is wanted."""
        waiting = self._waiting[gpu]
        if self._gpus[gpu].failed:
            waiting.clear()
        moves: list[Move] = []
        full: set[tuple[str, int]] = set()
        size = 0
        for entry in list(islice(waiting, _BATCH_BLOCKS)):
            if size >= _BATCH_BYTES:
                break
            del waiting[entry]
            move = self._prepare(entry, gpu, full)
            if move is not None:
                moves.append(move)
                size += len(move.source)
        if full and not moves:
            # What is asked for again finds room, perhaps; what is not needs none.
            waiting.clear()
        return moves

    def _prepare(self, entry: Entry, gpu: int, full: set[tuple[str, int]]) -> Move | None:
        node, owner, size = self._node, entry.shard.tenant, entry.shard.block_bytes
        there = COMMITTED | IN_DRAM
        if entry.state & (there | IN_HBM) != there or entry.dram is None or owner is None:
            return None
        if (owner, size) in full:
            return None
        node.pin((entry,))
        copy = self._gpus.reserve(entry, owner, gpu)
        if copy is None:
            full.add((owner, size))
            node.unpin((entry,))
            return None
        number, offset = node.dram.locate(entry.dram)
        address = None
        if self._pins.covers(number):
            address = node.dram.segment(number).address + offset
        return Move(copy, node.dram.view(entry.dram, size), address)

    def queue(self, gpu: int, moves: Sequence[Move]) -> list[Event]:
        """Have the GPU begin to copy. May wait, for memory that is not pinned.

        Returns:
            What to wait for.

        Raises:
            MediumFailed: the GPU failed.
        """
        tier = self._gpus[gpu].tier
        direct: dict[int, list[tuple[int, int]]] = {}
        for copy, source, address in moves:
            if address is None:
                tier.fill(copy.extent, np.frombuffer(source, np.uint8))
            else:
                direct.setdefault(len(source), []).append((copy.extent, address))
        return [tier.copy_in(pairs, size) for size, pairs in direct.items()]

    def _copy(self, gpu: int, moves: Sequence[Move]) -> str | None:
        """Make the copies, in a thread; why that failed, or None."""
        try:
            for end in self.queue(gpu, moves):
                end.wait()
        except TierError as error:
            return str(error)
        except OSError as error:
            return f"the GPU failed: {error.strerror}"
        return None

    def finish(self, gpu: int, moves: Sequence[Move], failure: str | None) -> None:
        """Let the copies be used, or take the GPU out of use."""
        node, gpus = self._node, self._gpus
        if failure is not None:
            gpus.fail(gpu, failure)
        # Leaf first, so that no parent is older than its child.
        for move in reversed(moves):
            if gpus.settle(move.copy):
                node.metrics.promotions["dram", "hbm"] += 1
        node.unpin([move.copy.entry for move in moves])
