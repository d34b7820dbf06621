"""What goes to the SSD and what doesn't, by whose it is and who else has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvstore.accounts import Quota
from kvstore.departures import DepartureReason
from kvstore.entry import ShardIndex
from tests.kvstore.test_movement import (
    BLOCK,
    DRAM,
    NAMESPACE,
    REGION,
    Hierarchy,
    hierarchy,
    name,
    until,
)


def shard_of(both: Hierarchy, tenant: str) -> ShardIndex:
    return both.node.shard(replace(NAMESPACE, tenant=tenant), 0)


def on_ssd(both: Hierarchy, tenant: str) -> int:
    return shard_of(both, tenant).in_ssd


async def test_replicas_leave_without_a_copy(tmp_path: Path) -> None:
    async with hierarchy(tmp_path) as both:
        for branch in range(10):
            both.put([name(0, branch)])
        for branch in range(21):
            both.put([name(1, branch)], replica=True)
        await until(lambda: both.node.dram.used <= DRAM // 2)
        kept = both.shard.committed.values()
        assert sum(not entry.replica for entry in kept) == 10, "replicas go first"
        assert both.node.metrics.demotions["dram", "ssd"] == 0
        assert on_ssd(both, "default") == 0


async def test_a_replica_gets_a_copy_for_those_that_follow_it(tmp_path: Path) -> None:
    async with hierarchy(tmp_path) as both:
        both.put([name(0), name(0, 1)], replica=True)
        for branch in range(29):
            both.put([name(0, 1, branch)], parent=name(0, 1))
        await until(lambda: both.node.dram.used <= DRAM // 2)
        assert len(both.shard.committed) == 31
        assert both.entry(name(0)).ssd is not None
        assert both.entry(name(0, 1)).ssd is not None


async def test_what_is_flushed_is_whole_prefixes_and_no_replicas(tmp_path: Path) -> None:
    async with hierarchy(tmp_path, high=0.99) as both:
        both.put([name(0), name(0, 1)], replica=True)
        both.put([name(0, 2)], parent=name(0))
        both.put([name(3)])
        assert await both.movement.flush(both.node.clock() + 60) == 3
        assert both.entry(name(0, 1)).ssd is None
    async with hierarchy(tmp_path, high=0.99) as again:
        assert set(again.shard.committed) == {name(0), name(0, 2), name(3)}


async def test_demotion_takes_from_who_is_beyond_its_quota(tmp_path: Path) -> None:
    """Down to the quota, although the other's blocks were used longer ago."""
    quotas = {"a": Quota(dram=3 * BLOCK)}
    async with hierarchy(tmp_path, segments=2, quotas=quotas) as both:
        for branch in range(12):
            both.put([name(branch)], tenant="b")
        for branch in range(12):
            both.put([name(branch)], tenant="a")
        both.put([name(99)], tenant="b")
        assert both.node.dram.used == 25 * BLOCK
        for branch in range(12, 16):
            both.put([name(branch)], tenant="a")
        await until(lambda: both.node.dram.used <= DRAM // 2)
        assert shard_of(both, "a").in_dram == 3
        assert shard_of(both, "b").in_dram == 13


async def test_a_tenant_beyond_its_share_of_a_full_ssd_is_not_demoted(tmp_path: Path) -> None:
    """Its blocks are dropped instead, and what the other has there stays."""
    quotas = {"a": Quota(ssd=8 * BLOCK)}
    async with hierarchy(tmp_path, ssd_bytes=6 * REGION, quotas=quotas) as both:
        both.put([name(1000 + branch) for branch in range(24)], tenant="b")
        other = list(shard_of(both, "b").committed.values())
        assert await both.movement.copy_down(other) == 24
        for entry in reversed(other):
            both.node.evict(entry, DepartureReason.ADMIN)
        for branch in range(300):
            both.put([name(branch)], tenant="a")
            await until(lambda: both.node.dram.used <= 0.9 * DRAM)
        assert on_ssd(both, "b") == 24
        assert both.node.metrics.ssd_write_seconds.count < 150
        assert both.node.metrics.evictions["dram", DepartureReason.QUOTA] > 100
