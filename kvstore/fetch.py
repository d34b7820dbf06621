"""Getting blocks into DRAM for a client that waits for the SSD, another session or another node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import structlog
from crc32c import crc32c

from kvstore.chains import Chain
from kvstore.departures import DepartureReason
from kvstore.entry import Entry, ShardIndex
from kvstore.identity import Namespace
from kvstore.metrics import MissReason
from kvstore.movement import Movement
from kvstore.node import Node
from kvstore.protocol.messages import REMOTE
from kvstore.remote import Remote
from kvstore.transfer import Transfer

_log = structlog.get_logger(__name__)


_Outcome: TypeAlias = tuple[Entry, int] | MissReason
"""A block, pinned, with the code of the tier that it was found in; or why it is a miss."""
_Task: TypeAlias = asyncio.Future[_Outcome]


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
        namespace: of the blocks, whose tenant's segments they are brought up to.
        verify: whether to compare each block with its checksum.
        remote: the rest of the pool; None where the node is alone.
    """

    def __init__(
        self,
        node: Node,
        movement: Movement | None,
        shard: ShardIndex,
        namespace: Namespace,
        *,
        verify: bool,
        remote: Remote | None = None,
    ) -> None:
        self._node = node
        self._movement = movement
        self._shard = shard
        self._namespace = namespace
        self._owner = namespace.tenant
        self._verify = verify
        self._remote = remote

    async def fetch(
        self, hashes: Sequence[bytes], *, wait: bool, deadline: float, own: bool = False
    ) -> Found:
        """Find blocks and pin them.

        Args:
            hashes: the blocks wanted.
            wait: whether to wait for blocks that are being written.
            deadline: seconds on the event loop's clock; what has not come by then is a miss.
            own: whether to look no further than this node.
        """
        outcomes: list[_Outcome | _Task] = [self._at_once(block, wait) for block in hashes]
        collecting = [] if own else self._collect(hashes, outcomes, deadline)
        tasks = [outcome for outcome in outcomes if isinstance(outcome, asyncio.Future)]
        try:
            if tasks:
                await self._wait_for(tasks, outcomes, deadline)
        finally:
            for task in collecting:
                task.cancel()
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
            return entry, entry.host_code
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

    # --- from other nodes ------------------------------------------------------------------------

    def reaches(self, hashes: Sequence[bytes]) -> bool:
        """Whether others were found to hold one of these blocks."""
        remote, namespace = self._remote, self._namespace
        return remote is not None and any(
            remote.find(namespace, block) is not None for block in hashes
        )

    def _collect(
        self, hashes: Sequence[bytes], outcomes: list[_Outcome | _Task], deadline: float
    ) -> list[asyncio.Task[None]]:
        """Begin to bring here what others were found to hold.

        Args:
            hashes: the blocks wanted.
            outcomes: what is known of each; what is begun takes the place of misses.
            deadline: of it all.

        Returns:
            The tasks that see to it, to be cancelled at the end.
        """
        loop, tasks = asyncio.get_running_loop(), []
        for chain, wanted in self._by_chain(hashes, outcomes).items():
            last = max(position for position, _ in wanted)
            transfer = self._remote.transfer(  # type: ignore[union-attr]
                self._namespace, self._shard.number, chain, last + 1, deadline
            )
            coming: list[tuple[int, _Task]] = []
            for position, place in sorted(wanted):
                future: _Task = loop.create_future()
                outcomes[place] = future
                coming.append((position, future))
            tasks.append(loop.create_task(self._take_in(transfer, chain, coming)))
        return tasks

    def _by_chain(
        self, hashes: Sequence[bytes], outcomes: Sequence[_Outcome | _Task]
    ) -> dict[Chain, list[tuple[int, int]]]:
        """Where in a chain, and where in the request, the blocks are that others hold."""
        found: dict[Chain, list[tuple[int, int]]] = {}
        if self._remote is None:
            return found
        chain, position = None, 0
        for place, outcome in enumerate(outcomes):
            if outcome not in ("absent", "pending"):
                continue
            block, position = hashes[place], position + 1
            if chain is None or chain.hashes[position : position + 1] != (block,):
                chain = self._remote.find(self._namespace, block)
                if chain is None:
                    continue
                position = chain.hashes.index(block)
            found.setdefault(chain, []).append((position, place))
        return found

    async def _take_in(
        self, transfer: Transfer, chain: Chain, coming: Sequence[tuple[int, _Task]]
    ) -> None:
        """Pin blocks one after the other as they come, before anything else takes their room."""
        for position, future in coming:
            await transfer.arrival(position)
            if future.done():
                continue
            outcome = await self._arrived(chain.hashes[position])
            if not future.done():
                future.set_result(outcome)
            elif not isinstance(outcome, str):
                self._node.unpin((outcome[0],))

    async def _arrived(self, block: bytes) -> _Outcome:
        entry = self._shard.committed.get(block)
        if entry is None:
            return "absent"
        if entry.dram is not None and not self._verify:
            self._node.pin((entry,))
            return entry, REMOTE
        outcome = await self._fetch_one(block, False)
        return outcome if isinstance(outcome, str) else (outcome[0], REMOTE)

    # --- one block -------------------------------------------------------------------------------

    async def _fetch_one(self, block: bytes, wait: bool) -> _Outcome:
        shard = self._shard
        pending = shard.reserved.get(block)
        if pending is not None and wait:
            await self._node.arrival(pending)
        entry = shard.committed.get(block)
        if entry is None:
            return "absent" if pending is None else "pending"
        origin = entry.host_code
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
    if not isinstance(outcome, asyncio.Future):
        return outcome
    return outcome.result() if outcome.done() and not outcome.cancelled() else "deadline"
