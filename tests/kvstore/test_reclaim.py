"""Which blocks of a region are written again, and what it costs to say so."""

from __future__ import annotations

import time

from kvstore.entry import Entry
from kvstore.identity import ROOT_PARENT
from kvstore.index import Index
from kvstore.reclaim import depths_of, plan_reclaim
from tiers.policies import make_policy


def chain(length: int) -> list[Entry]:
    index = Index(make_policy("lru", 10))
    shard = index.shard(bytes(32), 0, 4096)
    parent, entries = ROOT_PARENT, []
    for number in range(1, length + 1):
        block = number.to_bytes(32, "big")
        entries.append(index.reserve(shard, block, parent, 0.0))
        index.place(entries[-1], "ssd", number)
        parent = block
    index.commit(entries, 0.0)
    return entries


def test_depths() -> None:
    entries = chain(9)
    depths = depths_of([entries[4], entries[8], entries[0]])
    assert [depths[entry] for entry in entries] == list(range(1, 10))


def test_a_long_chain_holds_up_nobody() -> None:
    entries = chain(30_000)
    began = time.process_time()
    plan = plan_reclaim(reversed(entries), 10_000 * 2 * 4096)
    assert time.process_time() - began < 1.0
    assert plan.keep == entries[: len(plan.keep)]
    assert plan.give_up == entries[len(plan.keep) :][::-1]
