"""What a block costs in the index: every object counted, by the allocator itself."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from kvstore.entry import Entry
from kvstore.identity import ROOT_PARENT
from kvstore.index import Index
from tiers.policies import make_policy

CHAIN = 32
BOUND = 400.0
# Just after the hash table has grown, where its share of a block is largest.
BLOCKS = 88_000


def fill(index: Index, blocks: int) -> None:
    """Put `blocks` blocks in, as puts of 32 do, each with its own hash, extents and checksum."""
    shard = index.shard(bytes(32), 0, 1 << 20)
    for start in range(0, blocks, CHAIN):
        entries: list[Entry] = []
        parent, now = ROOT_PARENT, float(start)
        for number in range(start, min(start + CHAIN, blocks)):
            entry = index.reserve(shard, os.urandom(32), parent, now)
            index.place(entry, "dram", (number >> 10) << 44 | (number & 1023) << 20)
            entries.append(entry)
            parent = entry.hash
        index.commit(entries, now)
        for number, entry in enumerate(entries, start):
            index.place(entry, "ssd", (number + 1) << 32)
            entry.checksum = (1 << 32) - 1 - number


def bytes_a_block(blocks: int, policy: str = "lru") -> float:
    """Bytes that the allocator hands out for each block of an index of `blocks`."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = Index(make_policy(policy, blocks))
        fill(index, blocks)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == blocks
    return (after - before) / blocks


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_block_costs_less_than_its_bound(policy: str) -> None:
    assert bytes_a_block(BLOCKS, policy) < BOUND


def test_times_are_shared() -> None:
    """A time kept apart for each block would cost 24 bytes more."""
    index = Index(make_policy("lru", 64))
    fill(index, CHAIN)
    (shard,) = index.shards
    index.touch(list(shard.committed.values()), 123.456)
    assert len({id(entry.last_use) for entry in shard.committed.values()}) == 1
    assert len({id(entry.created) for entry in shard.committed.values()}) == 1
