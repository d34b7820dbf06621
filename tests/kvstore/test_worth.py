"""The order in which blocks are handed over: a pure choice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.entry import Entry
from kvstore.identity import ROOT_PARENT
from kvstore.index import Index
from kvstore.worth import Runs, by_worth
from tiers.policies import make_policy


def name(at: int) -> bytes:
    return at.to_bytes(32, "big")


Tree = list[tuple[int, float, bool]]
"""For each block how far back in the list its parent is (0: a first block), when it and so all
before it was used last, and whether it is a replica."""

trees = st.lists(
    st.tuples(st.integers(0, 6), st.floats(0, 100).map(round), st.booleans()), max_size=40
)


def grow(tree: Tree) -> list[Entry]:
    index = Index(make_policy("lru", 1000))
    shard = index.shard(b"n" * 32, 0, 1)
    entries: list[Entry] = []
    for at, (back, used, replica) in enumerate(tree):
        parent = entries[at - back] if 0 < back <= at else None
        before = ROOT_PARENT if parent is None else parent.hash
        entry = index.reserve(shard, name(at + 1), before, 0.0, replica=replica)
        index.place(entry, "dram", at)
        index.commit([entry], 0.0)
        for one in entry.path():
            one.last_use = max(one.last_use, used)
        entries.append(entry)
    return entries


@given(trees, st.integers(1, 5))
def test_every_block_comes_once_and_after_its_parent(tree: Tree, most: int) -> None:
    entries = grow(tree)
    runs = Runs()
    seen: set[Entry] = set()
    for run in runs.of(by_worth(entries), most):
        assert 0 < len(run) <= most
        for before, entry in zip([None, *run], run, strict=False):
            assert before is None or entry.parent is before
            assert entry not in seen
            assert entry.parent is None or entry.parent in seen
            seen.add(entry)
    assert seen == set(entries)
    assert len(runs) == len(entries)
    assert list(runs.of(by_worth(entries), most)) == [], "nothing comes twice"


@given(trees)
def test_what_was_used_last_comes_first_and_replicas_last(tree: Tree) -> None:
    order = by_worth(grow(tree))
    keys = [(entry.replica, -entry.last_use) for entry in order]
    assert keys == sorted(keys)


def test_a_chain_used_at_once_is_one_run() -> None:
    entries = grow([(0, 5, False), (1, 5, False), (1, 5, False), (0, 7, False)])
    runs = list(Runs().of(by_worth(entries), 100))
    assert runs == [[entries[3]], entries[:3]]


def test_a_cold_end_of_a_hot_chain_comes_after_what_is_warmer() -> None:
    # The first block is shared; one chain was used at 9, the other at 2; a third, alone, at 5.
    entries = grow([(0, 9, False), (1, 9, False), (2, 2, False), (0, 5, False)])
    runs = list(Runs().of(by_worth(entries), 100))
    assert runs == [entries[:2], [entries[3]], [entries[2]]]


def test_blocks_that_have_left_are_passed_over_and_new_ones_come_in_a_second_pass() -> None:
    entries = grow([(0, 1, False), (1, 1, False), (0, 2, False)])
    runs = Runs()
    first = list(runs.of(by_worth(entries[:1]), 10))
    assert first == [entries[:1]]
    entries[2].state |= 16  # gone
    entries[2].state &= ~4
    assert list(runs.of(by_worth(entries), 10)) == [[entries[1]]]
