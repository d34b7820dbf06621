"""Where copies go: a pure choice."""

from __future__ import annotations

import hashlib
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvstore.directory.interface import Member
from kvstore.entry import ShardIndex
from kvstore.index import Index
from kvstore.placement import branches, for_copies, for_move, ranked, spread_by
from tiers.policies import make_policy

GIB = 1 << 30


def member(
    number: int, host: str = "", *, free: float = GIB, draining: bool = False, told: bool = True
) -> Member:
    summary = {"dram_capacity": 4.0 * GIB, "dram_used": 4.0 * GIB - free, "draining": draining}
    return Member(
        number,
        f"node{number}",
        "1",
        host or f"host{number}",
        f"127.0.0.1:{number}",
        summary=summary if told else None,
    )


def key(at: int) -> bytes:
    return hashlib.sha256(str(at).encode()).digest()


members = st.lists(
    st.builds(
        member,
        st.integers(1, 40),
        st.sampled_from("abcdef"),
        free=st.floats(0, 4 * GIB),
        draining=st.booleans(),
        told=st.booleans(),
    ),
    unique_by=lambda one: one.number,
    max_size=20,
)


@given(members, st.binary(max_size=32), st.integers(0, 6), st.sets(st.integers(1, 40)))
def test_copies_are_on_different_machines_that_take_them(
    others: list[Member], name: bytes, count: int, avoid: set[int]
) -> None:
    chosen = for_copies(others, name, host="a", count=count, avoid=avoid)
    hosts = [one.host for one in chosen]
    assert len(set(hosts)) == len(hosts) <= count
    assert "a" not in hosts
    able = [
        one
        for one in others
        if one.host != "a"
        and one.number not in avoid
        and not (one.summary and one.summary["draining"])
    ]
    assert all(one in able for one in chosen)
    # As many as there are machines, if that many are wanted.
    assert len(chosen) == min(count, len({one.host for one in able}))


@given(members, st.binary(max_size=32))
def test_the_choice_does_not_hang_on_the_order_of_members(
    others: list[Member], name: bytes
) -> None:
    assert ranked(others, name) == ranked(others[::-1], name)


@given(members, st.binary(max_size=32), st.data())
def test_a_member_that_goes_changes_nothing_for_keys_of_others(
    others: list[Member], name: bytes, data: st.DataObject
) -> None:
    order = ranked(others, name)
    if not order:
        return
    gone = data.draw(st.sampled_from(order))
    rest = [one for one in others if one is not gone]
    assert ranked(rest, name) == [one for one in order if one is not gone]


@given(members, st.binary(max_size=32))
def test_a_move_goes_to_this_machine_last(others: list[Member], name: bytes) -> None:
    order = for_move(others, name, host="a")
    here = [one.host == "a" for one in order]
    assert here == sorted(here)
    assert sorted(one.number for one in order) == sorted(one.number for one in ranked(others, name))


def test_chains_are_spread_by_the_room_that_there_is() -> None:
    others = [member(1, free=2 * GIB), member(2, free=GIB), member(3, free=GIB), member(4, free=0)]
    first = Counter(ranked(others, key(at))[0].number for at in range(4000))
    assert 1800 < first[1] < 2200
    assert 800 < first[2] < 1200
    assert 800 < first[3] < 1200
    assert 0 < first[4] < 200, "a full node still takes a few"


def test_a_little_less_room_moves_nothing() -> None:
    before = [member(one, free=1.9 * GIB) for one in range(1, 6)]
    after = [member(one, free=1.1 * GIB) for one in range(1, 6)]
    for at in range(200):
        assert [one.number for one in ranked(before, key(at))] == [
            one.number for one in ranked(after, key(at))
        ]


def grown(*parents: int | None) -> tuple[Index, list[bytes]]:
    """An index of committed blocks, each the child of an earlier one."""
    index = Index(make_policy("lru", 64))
    shard: ShardIndex = index.shard(b"n" * 32, 0, 1)
    hashes: list[bytes] = []
    for at, parent in enumerate(parents):
        before = bytes(32) if parent is None else hashes[parent]
        entry = index.reserve(shard, key(at), before, 0.0)
        index.place(entry, "dram", at)
        index.commit([entry], 0.0)
        hashes.append(key(at))
    return index, hashes


def test_a_chain_alone_is_spread_by_its_first_block() -> None:
    index, hashes = grown(None, 0, 1)
    (leaf,) = index.find(hashes[2])
    assert spread_by(leaf.path()) == hashes[0]


def test_conversations_that_begin_alike_are_spread_by_where_they_part() -> None:
    # A prompt of two blocks that four share; the first goes on for two more.
    index, hashes = grown(None, 0, 1, 1, 1, 1, 2, 6)
    (leaf,) = index.find(hashes[7])
    assert spread_by(leaf.path()) == hashes[2]
    assert branches(leaf.path()[1])
    (shared,) = index.find(hashes[1])
    assert spread_by(shared.path()) == hashes[0]
