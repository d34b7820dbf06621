"""What moves blocks between the tiers of a node, off the event loop and never in a put's way.

* **Promotion**: a block that only the SSD holds is read into DRAM when a get asks for it. Several
  gets of one block read it once.
* **Demotion** runs ahead of demand. Above the high watermark the coldest blocks are copied to the
  SSD and leave DRAM until the low watermark is reached. A block goes down with those of its prefix
  that have no copy there yet, so that what the SSD holds is usable after a crash. A copy below is
  kept when the block is promoted, so demoting it again is free.
  Replicas get no copy, except where others follow them: another node has them. Nor do blocks of
  tenants beyond their quota of a full SSD. Both just leave.
* **Working ahead**: DRAM can be full below the high watermark, where each tenant has segments of
  its own that others can't use. From the first eviction that a put needs, the blocks that would go
  next are kept copied, so that evicting them loses nothing: the coldest, and those of the segment
  that another tenant would take.
* **Reclaim** empties a region of the SSD log before it is needed.

A write budget that is used up, or an SSD that fails, stops demotion; puts then evict what they
need.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, takewhile
from typing import Final, TypeVar, TypeVarTuple

import structlog

from kvstore.accounts import Account
from kvstore.departures import DepartureReason
from kvstore.entry import Entry
from kvstore.metrics import MissReason
from kvstore.node import Node
from kvstore.reclaim import depths_of, plan_reclaim
from tiers.budget import WriteBudget
from tiers.errors import CorruptBlock, TierError
from tiers.ssd import SsdTier
from tiers.tier import Extent, Record

A = TypeVarTuple("A")
R = TypeVar("R")

_log = structlog.get_logger(__name__)

_BATCH: Final = 16
"""Blocks demoted between two looks at the watermark."""
_MOST_AHEAD: Final = 512
"""Blocks kept copied where puts evict: more than they evict while these are written."""
_PAUSE_SECONDS: Final = 0.05
"""Wait before trying again after the budget was used up or nothing could go."""
_MOST_AT_ONCE: Final = 128
"""Blocks written between two looks at the clock."""
_SPARE_REGIONS: Final = 2
"""Regions kept free: one for new blocks, one for those that reclaim writes again."""
_MOST_RECLAIMS: Final = 8
"""Regions reclaimed before giving up: where all is pinned, writing again gains nothing."""


class Movement:
    """Promotion, demotion and reclaim between DRAM and SSD.

    Args:
        node: whose blocks.
        ssd: the tier below.
        low: share of DRAM at which demotion stops.
        high: share of DRAM at which it starts.
        budget: bytes a second that demotion may write.
        queue_depth: reads, and writes, in flight at once.
        region_bytes: size of a region of the SSD log.
    """

    def __init__(
        self,
        node: Node,
        ssd: SsdTier,
        *,
        low: float,
        high: float,
        budget: WriteBudget,
        queue_depth: int,
        region_bytes: int,
    ) -> None:
        self._node = node
        self._region_bytes = region_bytes
        self._ssd = ssd
        self._low = low
        self._high = high
        self._budget = budget
        self._depth = queue_depth
        self._pressure = asyncio.Event()
        self._crowded = False
        self._flush_ends = float("inf")
        self._promotions: dict[Entry, asyncio.Task[MissReason | None]] = {}
        self._copies: dict[Entry, asyncio.Task[bool]] = {}
        self._writing = asyncio.Lock()
        self._spare = _SPARE_REGIONS
        self._task: asyncio.Task[None] | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._writers: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Start the demotion task; the node's growth is watched from now on."""
        self._readers = ThreadPoolExecutor(self._depth, "ssd-read")
        self._writers = ThreadPoolExecutor(min(self._depth, 4), "ssd-write")
        # Of a log of a few regions, one must be left for what is being written.
        self._spare = max(min(_SPARE_REGIONS, self._ssd.statistics().regions - 2), 1)
        self._node.on_growth = self._watch
        self._node.on_crowding = self._note_crowding
        self._task = asyncio.get_running_loop().create_task(self._run(), name="demotion")
        self._watch()

    async def close(self) -> None:
        """Stop demotion, wait for what is in flight, and end the threads."""
        self._node.on_growth = self._node.on_crowding = lambda: None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        pending = [*self._promotions.values(), *self._copies.values()]
        await asyncio.gather(*pending, return_exceptions=True)
        for executor in (self._readers, self._writers):
            if executor is not None:
                executor.shutdown(wait=True)
        self._readers = self._writers = None

    # --- promotion -----------------------------------------------------------------------------

    async def promote(self, owner: str, size: int, entry: Entry) -> MissReason | None:
        """Bring a block into DRAM.

        Returns:
            None where the block is in DRAM now, else why it is a miss.
        """
        task = self._promotions.get(entry) or self._start_promotion(owner, size, entry)
        return await asyncio.shield(task)

    def prefetch(self, owner: str, entries: Iterable[Entry | None]) -> None:
        """Begin to bring blocks up, as many as the SSD takes at once; nobody waits for them."""
        for entry in entries:
            if len(self._promotions) >= 4 * self._depth:
                return
            if entry is not None and entry.dram is None and entry not in self._promotions:
                _ = self._start_promotion(owner, entry.shard.block_bytes, entry)

    def _start_promotion(
        self, owner: str, size: int, entry: Entry
    ) -> asyncio.Task[MissReason | None]:
        task = asyncio.get_running_loop().create_task(self._promote(owner, size, entry))
        self._promotions[entry] = task
        task.add_done_callback(lambda _: self._promotions.pop(entry, None))
        return task

    async def _promote(self, owner: str, size: int, entry: Entry) -> MissReason | None:
        node = self._node
        node.pin((entry,))
        try:
            extent = node.allocate(owner, size, entry)
            if extent is None:
                return "no_space"
            reason = await self._read_entry(entry, node.dram.view(extent, size))
            if reason is None and node.holds(entry):
                node.index.place(entry, "dram", extent)
                node.metrics.promotions["ssd", "dram"] += 1
                self._watch()
                return None
            node.dram.free(extent)
        finally:
            node.unpin((entry,))
        if reason == "corrupt" and node.holds(entry):
            _log.error("block corrupt", tier="ssd", hash=entry.hash.hex())
            node.drop(entry, "ssd", DepartureReason.CORRUPT)
        return reason or "absent"

    async def _read_entry(self, entry: Entry, into: memoryview) -> MissReason | None:
        while (source := entry.ssd) is not None:
            reason = await self._read(entry, source, into)
            if reason is None or entry.ssd == source:
                return reason
            # Reclaim has moved the block to another region meanwhile.
        return "absent"

    async def _read(self, entry: Entry, extent: Extent, into: memoryview) -> MissReason | None:
        began = time.perf_counter()
        try:
            await self._in_thread(self._readers, self._ssd.load, extent, into)
        except CorruptBlock:
            return "corrupt"
        except TierError as error:
            # Where reclaim has moved or dropped the block, there was nothing left to be read.
            if entry.ssd == extent:
                _log.error("read failed", tier="ssd", error=str(error))
            return "medium"
        self._node.metrics.ssd_read_seconds.observe(time.perf_counter() - began)
        return None

    # --- demotion ------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._occupancy() > self._high:
            self._pressure.set()

    def _note_crowding(self) -> None:
        self._crowded = True
        self._pressure.set()

    def _occupancy(self) -> float:
        dram = self._node.dram
        return dram.used / dram.capacity

    async def _run(self) -> None:
        while True:
            await self._pressure.wait()
            while self._occupancy() > self._low:
                if not await self._demote_some():
                    await asyncio.sleep(_PAUSE_SECONDS)
            self._pressure.clear()
            if self._crowded:
                self._crowded = False
                await self._copy_ahead()

    async def _copy_ahead(self) -> None:
        """Copy what puts would evict next, a part at a time as what that is changes."""
        ahead = [*self._node.cleared_next(), *self._coldest(_MOST_AHEAD)]
        dirty = [entry for entry in dict.fromkeys(ahead) if self._wants_copy(entry)]
        for start in range(0, len(dirty), _BATCH):
            if not await self.copy_down(
                entry for entry in dirty[start : start + _BATCH] if not entry.gone
            ):
                await asyncio.sleep(_PAUSE_SECONDS)
                return

    async def _demote_some(self) -> bool:
        node = self._node
        victims = self._next_to_leave()
        await self.copy_down([entry for entry in victims if self._wants_copy(entry)])
        freed = 0
        for entry in victims:
            if entry.gone or entry.dram is None or entry.pins:
                continue
            if entry.ssd is not None:
                node.metrics.demotions["dram", "ssd"] += 1
            elif self._size(entry) <= self._ssd.largest_block and self._wants_copy(entry):
                continue
            freed += 1
            node.evict(entry, self._why_without_copy(entry))
        return freed > 0

    def _wants_copy(self, entry: Entry) -> bool:
        """Whether a block has no copy on the SSD and should have one for its own sake."""
        return entry.ssd is None and not entry.replica and not self._is_too_much(entry)

    def _is_too_much(self, entry: Entry) -> bool:
        """Whether the SSD is full, and the block's tenant has its share of it."""
        beyond = entry.shard.account.beyond("ssd", self._size(entry))
        return beyond > 0 and self._ssd.free_regions <= self._spare

    def _why_without_copy(self, entry: Entry) -> DepartureReason:
        if entry.ssd is None and not entry.replica and self._is_too_much(entry):
            return DepartureReason.QUOTA
        return DepartureReason.CAPACITY

    def _next_to_leave(self) -> list[Entry]:
        """The next blocks to go, as far as that is known before any has: up to a tenant's quota."""
        leaving: list[Entry] = []
        surplus: dict[Account, int] = {}
        for entry in islice(self._node.index.victims(), _BATCH):
            leaving.append(entry)
            account = entry.shard.account
            before = surplus.setdefault(account, account.beyond("dram"))
            surplus[account] = before - self._size(entry)
            if before > 0 >= surplus[account]:
                break
        return leaving

    def _coldest(self, number: int) -> list[Entry]:
        return list(islice(self._node.index.victims(), number))

    async def copy_down(self, entries: Iterable[Entry]) -> int:
        """Write blocks, and those of their prefixes that have no copy yet, to the SSD.

        Returns:
            How many were written; fewer where the budget, the room or the medium gave out.
        """
        now = self._node.clock()
        chain = self._with_ancestors(entries)
        within_budget = takewhile(lambda entry: self._budget.take(self._size(entry), now), chain)
        return await self._write_down(list(within_budget), float("inf"))

    async def _write_down(self, entries: Sequence[Entry], deadline: float) -> int:
        """Write copies, a part at a time, while there is room and time.

        Never to the last region: where blocks are pinned, reclaim can't do without it.
        """
        written = 0
        for some in self._parts(entries):
            async with self._writing:
                if self._is_over(deadline):
                    break
                await self._make_room(deadline)
                if self._ssd.free_regions < self._spare:
                    break
                # Others may have gone, or gone down, since.
                part = [entry for entry in some if entry.ssd is None and not entry.gone]
                done = sum(await asyncio.gather(*map(self._copy, part)))
            written += done
            if part and not done:
                break
        return written

    def _is_over(self, deadline: float) -> bool:
        """Whether writing has to stop; nothing goes on beyond the end of a flush that waits."""
        return self._node.clock() >= min(deadline, self._flush_ends)

    def _parts(self, entries: Iterable[Entry]) -> Iterator[list[Entry]]:
        """Divide blocks into parts that take little time and put at most one more region to use."""
        part: list[Entry] = []
        size = 0
        for entry in entries:
            size += self._size(entry)
            if part and (size > self._region_bytes // 2 or len(part) >= _MOST_AT_ONCE):
                yield part
                part, size = [], self._size(entry)
            part.append(entry)
        if part:
            yield part

    def _with_ancestors(self, entries: Iterable[Entry]) -> list[Entry]:
        chain: dict[Entry, None] = {}
        for entry in entries:
            if self._size(entry) > self._ssd.largest_block:
                continue
            path = []
            step: Entry | None = entry
            while step is not None and step.ssd is None and step not in chain:
                path.append(step)
                step = step.parent
            chain.update(dict.fromkeys(reversed(path)))
        return list(chain)

    def _size(self, entry: Entry) -> int:
        return entry.shard.block_bytes

    async def _copy(self, entry: Entry) -> bool:
        task = self._copies.get(entry)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._copy_one(entry))
            self._copies[entry] = task
            task.add_done_callback(lambda _: self._copies.pop(entry, None))
        return await asyncio.shield(task)

    async def _copy_one(self, entry: Entry) -> bool:
        node = self._node
        source = entry.dram
        if source is None or entry.ssd is not None or not node.holds(entry):
            return False
        size = self._size(entry)
        node.pin((entry,))
        try:
            extent = await self._write(entry, node.dram.view(source, size))
            if extent is None:
                return False
            if not node.holds(entry):
                self._ssd.free(extent)
                return False
            node.index.place(entry, "ssd", extent)
            return True
        finally:
            node.unpin((entry,))

    async def _write(self, entry: Entry, data: memoryview) -> Extent | None:
        began = time.perf_counter()
        try:
            extent = await self._in_thread(
                self._writers, self._ssd.store, self._record(entry, len(data)), data, entry
            )
        except TierError as error:
            _log.error("write failed", tier="ssd", error=str(error))
            return None
        self._node.metrics.ssd_write_seconds.observe(time.perf_counter() - began)
        return extent

    @staticmethod
    def _record(entry: Entry, size: int) -> Record:
        parent = entry.parent.hash if entry.parent is not None else bytes(32)
        return Record(entry.shard.namespace, entry.shard.number, entry.hash, parent, size)

    async def flush(self, deadline: float) -> int:
        """Write what only this node's DRAM holds to the SSD, most recently used first.

        Args:
            deadline: seconds on the node's clock at which to stop.

        Returns:
            How many blocks were written.
        """
        dirty = [
            entry
            for shard in self._node.index.shards
            for entry in shard.committed.values()
            if self._wants_copy(entry)
        ]
        # Stable: among blocks used at the same time the parent comes first, as it was committed.
        dirty.sort(key=lambda entry: entry.last_use, reverse=True)
        self._flush_ends = min(self._flush_ends, deadline)
        try:
            return await self._write_down(self._with_ancestors(dirty), deadline)
        finally:
            self._flush_ends = float("inf")

    # --- reclaim -------------------------------------------------------------------------------

    async def _make_room(self, deadline: float) -> None:
        for _ in range(_MOST_RECLAIMS):
            if self._ssd.free_regions >= self._spare:
                return
            region = self._ssd.victim()
            if region is None or not await self._reclaim(region, deadline):
                return

    async def _reclaim(self, region: int, deadline: float) -> bool:
        """Empty a region; returns whether that was done, and before the deadline."""
        residents = set(self._residents(region))
        loading = [task for entry, task in self._promotions.items() if entry in residents]
        await asyncio.gather(*loading, return_exceptions=True)
        plan = plan_reclaim(self._residents(region), self._region_bytes)
        for entry in plan.keep:
            if self._is_over(deadline):
                return False
            await self._rewrite(entry)
        remaining = self._residents(region)
        for entry in sorted(remaining, key=depths_of(remaining).__getitem__, reverse=True):
            self._give_up(entry)
        if self._ssd.residents(region):
            return False
        await self._in_thread(self._writers, self._ssd.reclaim, region)
        return True

    def _residents(self, region: int) -> list[Entry]:
        return [entry for entry in self._ssd.residents(region) if isinstance(entry, Entry)]

    async def _rewrite(self, entry: Entry) -> None:
        """Move a block's SSD copy to the region that is being filled."""
        node, old, size = self._node, entry.ssd, self._size(entry)
        if old is None or not node.holds(entry):
            return
        node.pin((entry,))
        try:
            if entry.dram is not None:
                data = node.dram.view(entry.dram, size)
            else:
                data = memoryview(bytearray(size))
                if await self._read(entry, old, data) is not None:
                    return
            new = await self._write(entry, data)
            if new is None:
                return
            if node.holds(entry) and entry.ssd == old:
                self._ssd.free(node.index.relocate(entry, "ssd", new))
            else:
                self._ssd.free(new)
        finally:
            node.unpin((entry,))

    def _give_up(self, entry: Entry) -> None:
        node, extent = self._node, entry.ssd
        if extent is None or entry.pins or not node.holds(entry):
            return
        if entry.dram is None:
            node.drop(entry, "ssd", DepartureReason.SSD_RECLAIM)
            return
        node.forget_ssd(entry, DepartureReason.SSD_RECLAIM)

    async def _in_thread(
        self, executor: ThreadPoolExecutor | None, call: Callable[[*A], R], *arguments: *A
    ) -> R:
        return await asyncio.get_running_loop().run_in_executor(executor, call, *arguments)
