"""The engine's blocks that saves still read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from client.vllm.jobs import SaveJob


class BlockPool(Protocol):
    """What is used of vLLM's ``BlockPool``."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None:
        """Count one more user of each block."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Count one user less of each block; those without users may be reused."""


class Pins:
    """Keeps blocks from being reused while workers copy them, whatever becomes of the request.

    A pinned block is one more user in vLLM's own count, so preemption, abortion and the end of a
    request need no care of ours.

    Args:
        pool: the engine's blocks.
        share: part of them, between 0 and 1, that may be pinned at once. A block that requests
            share counts once.
        workers: how many workers have to be done with a job.
    """

    def __init__(self, pool: BlockPool, share: float, workers: int) -> None:
        self._pool = pool
        self._workers = workers
        self._most = int(len(pool.blocks) * share)
        self._pinned: dict[int, tuple[int, ...]] = {}
        self._users: Counter[int] = Counter()
        """Jobs by block."""
        self._waiting: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._pinned)

    @property
    def room(self) -> int:
        """How many more blocks may be pinned now."""
        return self._most - len(self._users)

    def pin(self, job: SaveJob) -> None:
        """Pin the blocks of a job."""
        self._pool.touch([self._pool.blocks[number] for number in job.blocks])
        self._pinned[job.number] = job.blocks
        self._users.update(job.blocks)
        self._waiting[job.number] = self._workers

    def done(self, number: int, workers: int = 1) -> bool:
        """Take note that workers are done with a job.

        Returns:
            Whether it was the last of them: the blocks are then free to be reused.
        """
        self._waiting[number] -= workers
        if self._waiting[number] > 0:
            return False
        del self._waiting[number]
        blocks = self._pinned.pop(number)
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
        # The end of a prefix goes first, as where vLLM frees a request itself.
        self._pool.free_blocks(self._pool.blocks[block] for block in reversed(blocks))
        return True
