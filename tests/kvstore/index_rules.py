"""What must hold of an index between any two calls: for every test that has one."""

from __future__ import annotations

from kvstore.entry import IN_DRAM, IN_HBM, IN_SSD, Entry, ShardIndex
from kvstore.index import Index
from tiers.links import HELD, OUTSIDE, PARKED


def check(index: Index) -> None:
    """Fail where a rule of `kvstore.index` is broken."""
    residents = replicas = 0
    for shard in index.shards:
        assert not shard.committed.keys() & shard.reserved.keys()
        entries = [*shard.committed.values(), *shard.reserved.values()]
        for entry in entries:
            _check_entry(shard, entry)
        assert shard.in_dram == sum(entry.dram is not None for entry in entries)
        assert shard.in_ssd == sum(entry.ssd is not None for entry in entries)
        assert shard.in_hbm == sum(bool(entry.state & IN_HBM) for entry in entries)
        assert shard.hbm_bytes == shard.in_hbm * shard.block_bytes
        assert shard.dram_bytes == shard.in_dram * shard.block_bytes
        assert shard.ssd_bytes == shard.in_ssd * shard.block_bytes
        ordered = [entry.replica for entry in entries if entry.queue != OUTSIDE]
        residents += len(ordered)
        replicas += sum(ordered)
    assert sum(len(account.policy) for account in index.accounts) == residents - replicas
    assert sum(len(account.replicas) for account in index.accounts) == replicas
    for account in index.accounts:
        shards = [shard for shard in index.shards if shard.account is account]
        assert account.hbm == sum(shard.hbm_bytes for shard in shards)
        assert account.dram == sum(shard.dram_bytes for shard in shards)
        assert account.ssd == sum(shard.ssd_bytes for shard in shards)
        orders = [entry for shard in shards for entry in shard.committed.values() if entry.queue]
        assert len(account) == len(orders)


def _check_entry(shard: ShardIndex, entry: Entry) -> None:
    assert entry.shard is shard
    assert not entry.gone
    assert entry.committed is (shard.committed.get(entry.hash) is entry)
    assert entry.reserved is (shard.reserved.get(entry.hash) is entry)
    assert entry.committed is not entry.reserved
    assert entry.pins >= 0
    assert bool(entry.state & IN_DRAM) is (entry.dram is not None)
    assert bool(entry.state & IN_SSD) is (entry.ssd is not None)
    _check_family(shard, entry)
    _check_order(entry)


def _check_family(shard: ShardIndex, entry: Entry) -> None:
    parent = entry.parent
    assert entry.root == entry.path()[0].hash
    if parent is not None:
        assert shard.get(parent.hash) is parent, "a child outlives its parent"
        assert parent.committed or entry.reserved, "a child is served before its parent"
        assert entry in parent.children()
    before = None
    for child in entry.children():
        assert child.parent is entry
        assert child.previous_sibling is before
        before = child


def _check_order(entry: Entry) -> None:
    in_order = entry.committed and entry.dram is not None
    assert (entry.queue != OUTSIDE) is in_order
    if entry.queue & HELD:
        assert entry.first_child is not None, "a childless block is held"
        assert entry.ssd is None, "a block with another copy is held"
    if entry.queue & PARKED:
        assert entry.pins, "a block without pins is parked"
