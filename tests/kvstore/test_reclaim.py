"""Which blocks of a region are written again, and what it costs to say so."""

from __future__ import annotations

import time

from kvstore.accounts import Accounts, Quota
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


def family(quota: int, children: int) -> list[Entry]:
    """A block and those that follow it, of a tenant with a quota, all used since they were written.

    Of the children the first was used longest ago.
    """
    index = Index(Accounts.make("lru", 10, {"a": Quota(ssd=quota)}))
    shard = index.shard(bytes(32), 0, 4096, "a")
    entries: list[Entry] = []
    for number in range(1, children + 2):
        parent = entries[0].hash if entries else ROOT_PARENT
        entry = index.reserve(shard, number.to_bytes(32, "big"), parent, 0.0)
        index.place(entry, "ssd", number)
        index.commit([entry], 0.0)
        entries.append(entry)
        index.touch(entry.path(), float(number))
    assert all(entry.worth_keeping_on_ssd for entry in entries)
    return entries


def test_a_tenant_beyond_its_quota_gives_up_what_nothing_follows() -> None:
    """Used or not, and no more than it has too much of."""
    root, *entries = family(4 * 4096, 6)
    plan = plan_reclaim([root, *entries], 100 * 4096)
    assert set(plan.keep) == {root, *entries[3:]}
    assert set(plan.give_up) == set(entries[:3])


def test_pinned_blocks_are_kept_whoever_is_beyond_a_quota() -> None:
    root, *entries = family(0, 3)
    entries[0].pins = 1
    assert set(plan_reclaim([root, *entries], 100 * 4096).keep) == {root, entries[0]}
