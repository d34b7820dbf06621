"""Getting blocks into DRAM for a client that waits for the SSD or for another session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import structlog
from crc32c import crc32c

from kvstore.departures import DepartureReason
from kvstore.entry import Entry, ShardIndex
from kvstore.metrics import MissReason
from kvstore.movement import Movement
from kvstore.node import Node

_log = structlog.get_logger(__name__)


_Outcome: TypeAlias = tuple[Entry, int] | MissReason
"""A block, pinned, with the code of the tier that it was found in; or why it is a miss."""
_Task: TypeAlias = asyncio.Task[_Outcome]


@dataclass(slots=True)
class Found:
    """What a get found.

    Attributes:
        entries: for each hash the entry, pinned and in DRAM, or None for a miss.
        tiers: for each hash the code of the tier that it was found in, 0 for a miss.
        misses: why, for each miss in order.
    """

    entries: list[Entry | None]
    tiers: bytes
    misses: list[MissReason]


class Fetch:
    """Gets blocks of one shard, waiting where that helps.

    Args:
        node: where the blocks are.
        movement: brings blocks up from SSD; None where there is no SSD.
        shard: whose blocks.
        owner: the tenant, whose segments blocks are brought up to.
        verify: whether to compare each block with its checksum.
    """

    def __init__(
        self,
        node: Node,
        movement: Movement | None,
        shard: ShardIndex,
        owner: str,
        *,
        verify: bool,
    ) -> None:
        self._node = node
        self._movement = movement
        self._shard = shard
        self._owner = owner
        self._verify = verify

    async def fetch(self, hashes: Sequence[bytes], *, wait: bool, deadline: float) -> Found:
        """Find blocks and pin them.

        Args:
            hashes: the blocks wanted.
            wait: whether to wait for blocks that are being written.
            deadline: seconds on the event loop's clock; what has not come by then is a miss.
        """
        outcomes: list[_Outcome | _Task] = [self._at_once(block, wait) for block in hashes]
        tasks = [outcome for outcome in outcomes if isinstance(outcome, asyncio.Task)]
        if tasks:
            await self._wait_for(tasks, outcomes, deadline)
        found = Found([], b"", [])
        tiers = bytearray()
        for outcome in map(_outcome_of, outcomes):
            if isinstance(outcome, str):
                found.entries.append(None)
                tiers.append(0)
                found.misses.append(outcome)
            else:
                found.entries.append(outcome[0])
                tiers.append(outcome[1])
        found.tiers = bytes(tiers)
        return found

    def _at_once(self, block: bytes, wait: bool) -> _Outcome | _Task:
        """What can be said of a block now, or the task that finds out."""
        entry = self._shard.committed.get(block)
        if entry is None:
            pending = block in self._shard.reserved
            if not (pending and wait):
                return "pending" if pending else "absent"
        elif entry.dram is not None and not self._verify:
            self._node.pin((entry,))
            return entry, entry.tier_code
        return asyncio.get_running_loop().create_task(self._fetch_one(block, wait))

    async def _wait_for(
        self, tasks: Sequence[_Task], outcomes: Sequence[_Outcome | _Task], deadline: float
    ) -> None:
        """Wait for tasks until the deadline and cancel the others."""
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait(tasks, timeout=max(deadline - loop.time(), 0.0))
        except asyncio.CancelledError:
            for outcome in map(_outcome_of, outcomes):
                if not isinstance(outcome, str):
                    self._node.unpin((outcome[0],))
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch_one(self, block: bytes, wait: bool) -> _Outcome:
        shard = self._shard
        pending = shard.reserved.get(block)
        if pending is not None and wait:
            await self._node.arrival(pending)
        entry = shard.committed.get(block)
        if entry is None:
            return "absent" if pending is None else "pending"
        origin = entry.tier_code
        reason: MissReason | None = "deadline"
        # Pinned before it is brought up: demotion may want the room again at once.
        self._node.pin((entry,))
        try:
            reason = await self._make_ready(entry)
        finally:
            if reason is not None:
                self._node.unpin((entry,))
        return reason or (entry, origin)

    async def _make_ready(self, entry: Entry) -> MissReason | None:
        if entry.dram is None:
            reason = await self._bring_up(entry)
            if reason is not None:
                return reason
        if self._verify and not await self._is_sound(entry):
            return "corrupt"
        return None

    async def _bring_up(self, entry: Entry) -> MissReason | None:
        if self._movement is None:
            return "absent"
        reason = await self._movement.promote(self._owner, self._shard.block_bytes, entry)
        if reason is None and entry.dram is None:
            return "absent"
        return reason

    async def _is_sound(self, entry: Entry) -> bool:
        """Compare a pinned block with its checksum; drop it where they differ."""
        expected, extent = self._node.checksum(entry), entry.dram
        if expected is None or extent is None:
            return True
        block = self._node.dram.view(extent, self._shard.block_bytes)
        if await asyncio.to_thread(crc32c, block) == expected:
            return True
        _log.error("block corrupt", tier="dram", hash=entry.hash.hex())
        if self._node.holds(entry):
            self._node.drop(entry, "dram", DepartureReason.CORRUPT)
        return False


def _outcome_of(outcome: _Outcome | _Task) -> _Outcome:
    """What came of a block; a task that is not done was too slow."""
    if not isinstance(outcome, asyncio.Task):
        return outcome
    return outcome.result() if outcome.done() and not outcome.cancelled() else "deadline"
