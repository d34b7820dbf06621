"""Blocks between DRAM and SSD: what demotion, promotion, reclaim and recovery keep and lose."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvstore.accounts import Accounts, Quota
from kvstore.catalog import Catalog
from kvstore.departures import DepartureReason, Departures
from kvstore.entry import Entry, ShardIndex
from kvstore.fetch import Fetch
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.index import Index
from kvstore.metrics import Metrics
from kvstore.movement import Movement
from kvstore.node import Node
from kvstore.recovery import recover
from tests.tiers.faulty_device import FaultyDevice
from tiers.budget import WriteBudget
from tiers.dram import DramTier
from tiers.ssd import SsdTier
from tiers.tier import Record

BLOCK = 16 << 10
REGION = 256 << 10
DRAM = 32 * BLOCK
NAMESPACE = Namespace("m", "float32", "test", 16, BLOCK)


def name(*path: int) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def content(block: bytes) -> bytes:
    return block * (BLOCK // len(block))


class Hierarchy:
    """A node with both tiers, as a client of one session sees it."""

    def __init__(self, node: Node, movement: Movement, ssd: SsdTier) -> None:
        self.node = node
        self.movement = movement
        self.ssd = ssd
        self.shard: ShardIndex = node.shard(NAMESPACE, 0)

    def put(
        self,
        hashes: Sequence[bytes],
        parent: bytes = ROOT_PARENT,
        *,
        tenant: str = "default",
        replica: bool = False,
    ) -> bytes:
        shard = self.node.shard(replace(NAMESPACE, tenant=tenant), 0)
        verdicts, reservation = self.node.reserve(
            shard, tenant, parent, hashes, number=1, most=1000, replica=replica
        )
        if reservation is not None:
            for entry in reservation.blocks.values():
                assert entry.dram is not None
                self.node.dram.view(entry.dram, BLOCK)[:] = content(entry.hash)
            self.node.commit(reservation, list(reservation.blocks))
        return verdicts

    async def get(self, hashes: Sequence[bytes], seconds: float = 5.0) -> tuple[bytes, list[str]]:
        """Tiers and reasons of misses; every byte that is returned has been compared."""
        fetch = Fetch(self.node, self.movement, self.shard, NAMESPACE, verify=False)
        deadline = asyncio.get_running_loop().time() + seconds
        found = await fetch.fetch(hashes, wait=False, deadline=deadline)
        for block, entry in zip(hashes, found.entries, strict=True):
            if entry is not None:
                assert entry.dram is not None
                assert bytes(self.node.dram.view(entry.dram, BLOCK)) == content(block)
                self.node.unpin((entry,))
        return found.tiers, list(found.misses)

    def entry(self, block: bytes) -> Entry:
        return self.shard.committed[block]


@contextlib.asynccontextmanager
async def hierarchy(
    directory: Path,
    *,
    ssd_bytes: int = 64 * REGION,
    rate: float | None = None,
    device: FaultyDevice | None = None,
    high: float = 0.9,
    segments: int = 1,
    quotas: Mapping[str, Quota] | None = None,
) -> AsyncIterator[Hierarchy]:
    dram = DramTier(DRAM, segment_bytes=DRAM // segments, prefault=False)
    ssd = SsdTier(directory, ssd_bytes, region_bytes=REGION, queue_depth=4, device=device)
    with dram, ssd:
        node = Node(
            index=Index(Accounts.make("lru", 64, quotas or {})),
            dram=dram,
            ssd=ssd,
            catalog=Catalog(None),
            departures=Departures(10_000),
            metrics=Metrics(),
        )
        movement = Movement(
            node,
            ssd,
            low=0.5,
            high=high,
            budget=WriteBudget(rate, BLOCK if rate else None),
            queue_depth=4,
            region_bytes=REGION,
        )
        recover(node, ssd)
        movement.open()
        try:
            yield Hierarchy(node, movement, ssd)
        finally:
            await movement.close()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.005)


async def test_demotion_runs_between_the_watermarks(tmp_path: Path) -> None:
    async with hierarchy(tmp_path) as both:
        both.put([name(index) for index in range(1)])
        for branch in range(29):
            both.put([name(0, branch)], parent=name(0))
        assert both.node.metrics.demotions["dram", "ssd"] == 0
        await until(lambda: both.node.dram.used <= DRAM // 2)
        assert both.node.dram.used > DRAM // 4, "demotion went on below the low watermark"
        tiers, misses = await both.get([name(0), *(name(0, branch) for branch in range(29))])
        assert misses == []
        assert tiers.count(3) >= 14


async def test_a_block_goes_down_with_its_prefix(tmp_path: Path) -> None:
    """So that a crash right after it leaves whole prefixes on the SSD."""
    async with hierarchy(tmp_path, high=0.99) as both:
        chain = [name(0, depth) for depth in range(10)]
        both.put(chain)
        assert await both.movement.copy_down([both.entry(chain[4])]) == 5
        assert [both.entry(block).ssd is not None for block in chain] == [True] * 5 + [False] * 5
        assert await both.movement.copy_down([both.entry(chain[4])]) == 0


async def test_a_promoted_block_is_demoted_for_free(tmp_path: Path) -> None:
    async with hierarchy(tmp_path, high=0.99) as both:
        both.put([name(1)])
        await both.movement.copy_down([both.entry(name(1))])
        both.node.evict(both.entry(name(1)), DepartureReason.ADMIN)
        assert (await both.get([name(1)]))[0] == b"\3"
        assert (await both.get([name(1)]))[0] == b"\2"
        writes = both.node.metrics.ssd_write_seconds.count
        assert await both.movement.copy_down([both.entry(name(1))]) == 0
        both.node.evict(both.entry(name(1)), DepartureReason.ADMIN)
        assert both.node.metrics.ssd_write_seconds.count == writes
        assert (await both.get([name(1)]))[0] == b"\3"


async def test_concurrent_gets_read_a_block_once(tmp_path: Path) -> None:
    async with hierarchy(tmp_path, high=0.99) as both:
        both.put([name(1)])
        await both.movement.copy_down([both.entry(name(1))])
        both.node.evict(both.entry(name(1)), DepartureReason.ADMIN)
        answers = await asyncio.gather(*(both.get([name(1)]) for _ in range(10)))
        assert {tiers for tiers, _ in answers} == {b"\3"}
        assert both.node.metrics.ssd_read_seconds.count == 1


async def test_prefetch_brings_blocks_up(tmp_path: Path) -> None:
    async with hierarchy(tmp_path, high=0.99) as both:
        both.put([name(1)])
        await both.movement.copy_down([both.entry(name(1))])
        both.node.evict(both.entry(name(1)), DepartureReason.ADMIN)
        both.movement.prefetch("default", [both.entry(name(1)), None])
        await until(lambda: both.entry(name(1)).dram is not None)


async def test_puts_never_wait_for_a_slow_ssd(tmp_path: Path) -> None:
    """Without a budget left, blocks are dropped: what stays are whole prefixes."""
    async with hierarchy(tmp_path, rate=1.0) as both:
        for branch in range(200):
            assert both.put([name(branch), name(branch, 0)]) == b"\0\0"
        assert both.node.metrics.evictions
        for entry in both.shard.committed.values():
            assert entry.parent is None or entry.parent.committed


async def test_blocks_too_large_for_the_ssd_leave_by_the_policy(tmp_path: Path) -> None:
    """They can't be demoted, and must not keep the others from it."""
    large = Namespace("m", "float32", "test", 16, REGION)
    async with hierarchy(tmp_path) as both:
        shard = both.node.shard(large, 0)
        _, reservation = both.node.reserve(
            shard, "default", ROOT_PARENT, [name(7)], number=1, most=1
        )
        assert reservation is not None
        both.node.commit(reservation, [0])
        for branch in range(16):
            both.put([name(0, branch)])
        await until(lambda: both.node.dram.used <= DRAM // 2)
        assert not shard.committed
        assert both.ssd.largest_block < REGION


async def test_reclaim_makes_room_and_keeps_prefixes_whole(tmp_path: Path) -> None:
    """Many times more is written than fits; the parent that all use is never lost."""
    async with hierarchy(tmp_path, ssd_bytes=6 * REGION) as both:
        both.put([name(0)])
        for branch in range(300):
            both.put([name(0, branch)], parent=name(0))
            assert (await both.get([name(0)]))[1] == []
            await until(lambda: both.node.dram.used < DRAM - 2 * BLOCK)
        assert both.node.metrics.evictions["ssd", "ssd_reclaim"] > 0  # type: ignore[index]
        blocks = [block for block in both.shard.committed if block != name(0)]
        assert len(blocks) > 32, "the SSD holds nothing"
        for block in blocks:
            # Reading makes room in DRAM, which may reclaim a region: a miss then, no wrong byte.
            tiers, misses = await both.get([block])
            assert tiers != b"\0" or misses == ["absent"]
        assert (await both.get([name(0)]))[1] == []


async def test_a_block_that_moves_before_its_read_begins_is_read_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hierarchy(tmp_path, high=0.99) as both:
        both.put([name(0)])
        await both.movement.flush(float("inf"))
        entry = both.entry(name(0))
        both.node.evict(entry, DepartureReason.CAPACITY)
        place, load = entry.ssd, both.ssd.load
        assert place is not None
        entry.ssd = place + 1

        def load_late(extent: int, into: memoryview) -> None:
            entry.ssd = place
            load(extent, into)

        monkeypatch.setattr(both.ssd, "load", load_late)
        with capture_logs() as lines:
            assert (await both.get([name(0)]))[1] == []
        assert lines == []


async def test_restart_serves_what_was_flushed(tmp_path: Path) -> None:
    chain = [name(0, depth) for depth in range(20)]
    async with hierarchy(tmp_path, high=0.99) as both:
        both.put(chain)
        assert await both.movement.flush(float("inf")) == 20
    async with hierarchy(tmp_path, high=0.99) as both:
        assert both.node.index.match([both.shard], chain) == b"\3" * 20
        assert (await both.get(chain)) == (b"\3" * 20, [])


async def test_flush_and_demotion_do_not_write_a_block_twice(tmp_path: Path) -> None:
    chain = [name(0, depth) for depth in range(25)]
    async with hierarchy(tmp_path, high=0.99) as both:
        both.put(chain)
        written = await asyncio.gather(
            both.movement.flush(float("inf")),
            both.movement.copy_down([both.entry(chain[-1])]),
        )
        assert sum(written) == 25
        assert both.ssd.statistics().blocks == 25
        assert await both.movement.flush(float("inf")) == 0


async def test_flush_stops_at_its_deadline_with_whole_prefixes(tmp_path: Path) -> None:
    chain = [name(0, depth) for depth in range(25)]
    async with hierarchy(tmp_path, high=0.99) as both:
        both.put(chain)
        now = iter([0.0, 2.0])
        both.node.clock = lambda: next(now, 2.0)
        assert await both.movement.flush(1.0) == 8
    async with hierarchy(tmp_path, high=0.99) as both:
        assert both.node.index.match([both.shard], chain) == b"\3" * 8


async def test_orphans_are_not_taken_up(tmp_path: Path) -> None:
    chain = [name(0, depth) for depth in range(6)]
    orphan = Record(NAMESPACE.fingerprint, 0, name(9, 9), name(9), BLOCK)
    async with hierarchy(tmp_path, high=0.99) as both:
        both.put(chain)
        await both.movement.flush(float("inf"))
        assert both.ssd.store(orphan, content(orphan.hash), None) is not None
    async with hierarchy(tmp_path, high=0.99) as both:
        assert both.node.index.match([both.shard], chain) == b"\3" * 6
        assert orphan.hash not in both.shard.committed
        assert both.ssd.statistics().blocks == 6


async def test_a_flush_ends_at_its_deadline_even_where_it_has_to_reclaim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hierarchy(tmp_path, ssd_bytes=8 * REGION, high=1.0) as levels:
        for number in range(16):
            chain = [name(number, depth) for depth in range(8)]
            levels.put(chain)
            await levels.movement.flush(float("inf"))
            levels.node.touch([levels.entry(block) for block in chain])
        levels.put([name(99, depth) for depth in range(8)])
        store = levels.ssd.store

        def slowly(*arguments: Any, **options: Any) -> Any:
            time.sleep(0.1)
            return store(*arguments, **options)

        monkeypatch.setattr(levels.ssd, "store", slowly)
        began = time.monotonic()
        await levels.movement.flush(began + 0.2)
        assert time.monotonic() - began < 0.8


async def test_blocks_go_down_where_segments_of_others_are_half_empty(tmp_path: Path) -> None:
    async with hierarchy(tmp_path, segments=4) as levels:
        dram = levels.node.dram
        per_segment = dram.capacity // 4 // BLOCK
        held = [dram.reserve("another tenant", BLOCK, object()) for _ in range(3 * per_segment)]
        for position, extent in enumerate(held):
            if position % per_segment:
                assert extent is not None
                dram.free(extent)
        chains = [[name(number, depth) for depth in range(2)] for number in range(16)]
        for chain in chains:
            levels.put(chain)
            assert dram.used < 0.5 * dram.capacity
            await asyncio.sleep(0.1)
        first_evictions = 2
        kept = sum(len(levels.node.index.match([levels.shard], chain)) for chain in chains)
        assert kept >= 2 * len(chains) - first_evictions
