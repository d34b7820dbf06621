from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import islice

import pytest

from kvstore.entry import DRAM_CODE, SSD_CODE, Entry, ShardIndex
from kvstore.identity import ROOT_PARENT
from kvstore.index import Index, TierName
from tests.kvstore.index_rules import check
from tiers.links import PARKED, Link
from tiers.policies import POLICIES, make_policy

BLOCK = 4096


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "little")


def new_index(policy: str = "lru") -> tuple[Index, ShardIndex]:
    index = Index(make_policy(policy, 64))
    return index, index.shard(b"n" * 32, 0, BLOCK)


def chain(
    index: Index,
    shard: ShardIndex,
    numbers: Sequence[int],
    parent: bytes = ROOT_PARENT,
    tier: TierName = "dram",
    now: float = 0.0,
    replica: bool = False,
) -> list[Entry]:
    """Commit blocks, each the parent of the next."""
    entries = []
    for number in numbers:
        entry = index.reserve(shard, block_hash(number), parent, now, replica=replica)
        index.place(entry, tier, number)
        entries.append(entry)
        parent = entry.hash
    index.commit(entries, now)
    return entries


def test_what_stops_a_match() -> None:
    index, shard = new_index()
    entries = chain(index, shard, [1, 2, 3])
    index.place(entries[1], "ssd", 5)
    index.displace(entries[1], "dram")
    reserved = index.reserve(shard, block_hash(4), entries[2].hash, 0.0)
    index.place(reserved, "dram", 9)
    hashes = [block_hash(number) for number in (1, 2, 3, 4)]
    assert index.match([shard], hashes) == bytes([DRAM_CODE, SSD_CODE, DRAM_CODE])
    assert index.match_joined([shard], b"".join(hashes)) == index.match([shard], hashes)
    for nothing in (index.match([shard], []), index.match_joined([shard], b"")):
        assert nothing == b""
    for nothing in (index.match([], hashes), index.match_joined([], b"".join(hashes))):
        assert nothing == b""


@pytest.mark.parametrize(
    ("numbers", "held"),
    [
        ([1, 2, 3, 9], 3),  # a chain
        ([2, 3], 2),  # the middle of one
        ([1, 3], 2),  # one with a gap
        ([3, 2, 1], 3),  # one from its end
        ([4, 1, 2], 3),  # two chains
        ([1, 9, 2, 3, 4], 1),  # where bisection meets what is held behind what is not
        ([1, 9, 9, 9, 2], 1),
        ([9, 1, 2, 3], 0),
    ],
)
def test_joined_hashes_need_not_be_a_chain(numbers: list[int], held: int) -> None:
    index, shard = new_index()
    chain(index, shard, [1, 2, 3])
    chain(index, shard, [4])
    hashes = [block_hash(number) for number in numbers]
    assert index.match_joined([shard], b"".join(hashes)) == bytes([DRAM_CODE]) * held
    assert index.match([shard], hashes) == bytes([DRAM_CODE]) * held


def test_a_prefix_counts_only_where_every_shard_has_it() -> None:
    index, first = new_index()
    second = index.shard(b"n" * 32, 1, BLOCK)
    chain(index, first, [1, 2, 3])
    chain(index, second, [1, 2], tier="ssd")
    hashes = [block_hash(number) for number in (1, 2, 3)]
    assert index.match([first, second], hashes) == bytes([SSD_CODE] * 2)
    assert index.exists([first, second], hashes[1:]) == bytes([SSD_CODE, 0])


def test_the_same_hash_in_two_namespaces_is_two_blocks() -> None:
    index, mine = new_index("arc")
    other = index.shard(b"o" * 32, 0, BLOCK)
    (here,) = chain(index, mine, [1])
    (there,) = chain(index, other, [1])
    assert index.find(block_hash(1)) == [here, there]
    assert here.key() != there.key()
    index.drop(here)
    assert index.find(block_hash(1)) == [there]
    assert index.shard(b"o" * 32, 0, BLOCK) is other


@pytest.mark.parametrize("policy", POLICIES)
def test_victims_come_leaf_first_whatever_the_policy(policy: str) -> None:
    index, shard = new_index(policy)
    chain(index, shard, [1, 2, 3, 4])
    chain(index, shard, [5, 6], parent=block_hash(2))
    order = []
    for victim in index.victims():
        assert victim.first_child is None
        order.append(victim.hash[0])
        index.drop(victim)
    assert sorted(order) == [1, 2, 3, 4, 5, 6]
    assert len(index) == 0


def test_lru_gives_up_the_end_of_the_prefix_longest_unused() -> None:
    index, shard = new_index()
    old = chain(index, shard, [1, 2, 3])
    new = chain(index, shard, [4, 5], parent=old[0].hash)
    index.touch([old[0], *new], 1.0)
    index.touch(old[:2], 2.0)
    order = [victim.hash[0] for victim in index.victims(parents=True)]
    assert order == [3, 5, 4, 2, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_go_before_others_the_longest_unused_first(policy: str) -> None:
    index, shard = new_index(policy)
    chain(index, shard, [1, 2])
    old = chain(index, shard, [3, 4], replica=True)
    chain(index, shard, [5, 6], replica=True)
    index.touch(old, 1.0)
    order = []
    for victim in index.victims():
        order.append(victim.hash[0])
        index.drop(victim)
    assert order[:4] == [6, 5, 4, 3]
    assert sorted(order[4:]) == [1, 2]


def test_a_replica_that_others_follow_waits_for_them_and_comes_next() -> None:
    index, shard = new_index()
    replicas = chain(index, shard, [1, 2], replica=True)
    chain(index, shard, [3], parent=replicas[-1].hash)
    chain(index, shard, [4])
    assert [victim.hash[0] for victim in index.victims()] == [3, 4]
    order = []
    for victim in index.victims():
        order.append(victim.hash[0])
        index.drop(victim)
    assert order == [3, 2, 1, 4]


def test_a_replica_that_is_owned_goes_when_the_policy_says() -> None:
    index, shard = new_index()
    chain(index, shard, [1])
    replicas = chain(index, shard, [2, 3], replica=True)
    chain(index, shard, [4], replica=True)
    index.pin(replicas[:1])
    assert [victim.hash[0] for victim in index.victims()] == [3, 4, 1]
    index.own(replicas)
    index.own(replicas)
    check(index)
    assert [entry.replica for entry in replicas] == [False, False]
    assert [victim.hash[0] for victim in index.victims()] == [4, 1, 3]
    index.unpin(replicas[:1])
    index.drop(replicas[1])
    assert [victim.hash[0] for victim in index.victims()] == [4, 2, 1]


def test_a_use_moves_replicas_and_others_each_in_their_order() -> None:
    index, shard = new_index()
    first, second = chain(index, shard, [1]), chain(index, shard, [2])
    third = chain(index, shard, [3], parent=first[0].hash, replica=True)
    chain(index, shard, [4], replica=True)
    index.touch([*first, *third], 1.0)
    assert [victim.hash[0] for victim in index.victims(parents=True)] == [4, 3, 2, 1]
    assert [entry.last_use for entry in (*first, *second, *third)] == [1.0, 0.0, 1.0]


def test_making_room_steps_over_pinned_replicas_once() -> None:
    index = Index(make_policy("lru", 20_000))
    shard = index.shard(b"n" * 32, 0, BLOCK)
    stuck = [chain(index, shard, [number], replica=True)[0] for number in range(1, 1_001)]
    index.pin(stuck)
    for number in range(20_000, 20_010):
        (entry,) = chain(index, shard, [number])
        assert next(index.victims()) is entry
        assert all(one.queue & PARKED for one in stuck)
        index.drop(entry)


def test_a_parent_may_leave_dram_before_its_children_if_it_has_a_copy() -> None:
    index, shard = new_index()
    parent, child = chain(index, shard, [1, 2])
    index.pin([child])
    assert list(index.victims()) == []
    index.place(parent, "ssd", 7)
    assert list(index.victims()) == [parent]
    assert index.displace(parent, "dram") == 1
    assert index.match([shard], [parent.hash, child.hash]) == bytes([SSD_CODE, DRAM_CODE])


def test_the_last_child_gone_makes_the_parent_next() -> None:
    index, shard = new_index()
    first, second = chain(index, shard, [1, 2])
    chain(index, shard, [3])
    index.touch([second], 1.0)
    assert [victim.hash[0] for victim in index.victims()] == [3, 2]
    index.drop(second)
    assert [victim.hash[0] for victim in index.victims()] == [1, 3]
    assert first.first_child is None


def test_a_victim_pinned_during_a_scan_is_not_offered_by_the_next() -> None:
    index, shard = new_index()
    (entry,) = chain(index, shard, [1])
    for victim in index.victims():
        index.pin([victim])
    assert list(index.victims()) == []
    assert index.unpin([entry]) == []
    assert list(index.victims()) == [entry]


def test_unpinned_chain_goes_leaf_first_again() -> None:
    index, shard = new_index()
    entries = chain(index, shard, [1, 2, 3])
    index.pin(entries)
    assert list(index.victims(parents=True)) == []
    index.unpin(entries)
    assert [victim.hash[0] for victim in index.victims(parents=True)] == [3, 2, 1]


def test_dropped_while_pinned_is_freed_by_the_last_pin() -> None:
    index, shard = new_index()
    parent, child = chain(index, shard, [1, 2])
    index.pin([child, child])
    assert index.drop(parent) == [child, parent]
    assert index.match([shard], [parent.hash]) == b""
    assert index.unpin([child]) == []
    assert index.unpin([child]) == [child]
    assert (child.dram, child.parent_hash) == (2, parent.hash)


def test_drop_takes_reservations_below_with_it() -> None:
    index, shard = new_index()
    (parent,) = chain(index, shard, [1])
    child = index.reserve(shard, block_hash(2), parent.hash, 0.0)
    grandchild = index.reserve(shard, block_hash(3), child.hash, 0.0)
    index.place(child, "dram", 1)
    assert index.drop(parent) == [grandchild, child, parent]
    assert (shard.in_dram, shard.reserved) == (0, {})
    with pytest.raises(ValueError, match="not a reserved block"):
        index.commit([child], 0.0)


def test_a_commit_that_breaks_off_keeps_the_prefix() -> None:
    index, shard = new_index()
    first = index.reserve(shard, block_hash(1), ROOT_PARENT, 0.0)
    second = index.reserve(shard, block_hash(2), first.hash, 0.0)
    index.place(first, "dram", 1)
    with pytest.raises(ValueError, match="with an extent"):
        index.commit([first, second], 1.0)
    check(index)
    assert first.committed
    assert second.reserved
    assert list(index.victims()) == []


def test_used_since_it_was_written_to_ssd() -> None:
    index, shard = new_index()
    (entry,) = chain(index, shard, [1], tier="ssd")
    worth = [entry.worth_keeping_on_ssd]
    index.touch([entry], 1.0)
    worth.append(entry.worth_keeping_on_ssd)
    index.relocate(entry, "ssd", 8)
    worth.append(entry.worth_keeping_on_ssd)
    assert worth == [False, True, False]


def test_pages_list_each_block_that_stays_exactly_once() -> None:
    index, shard = new_index()
    entries = [chain(index, shard, [number])[0] for number in range(1, 41)]
    seen: list[Entry] = []
    after, fresh = b"", iter(range(100, 103))
    while page := shard.page(7, after):
        seen += page
        after = page[-1].hash
        for number in islice(fresh, 1):
            index.drop(entries.pop(0))
            index.drop(entries.pop())
            chain(index, shard, [number])
    assert len(set(seen)) == len(seen)
    assert set(entries) <= set(seen)
    assert [entry.hash for entry in seen] == sorted(entry.hash for entry in seen)


def test_family() -> None:
    index, shard = new_index()
    entries = chain(index, shard, [1, 2, 3])
    branch = chain(index, shard, [4], parent=entries[0].hash)
    assert entries[2].path() == entries
    assert list(entries[0].children()) == [branch[0], entries[1]]
    assert set(entries[0].subtree()) == {*entries, *branch}
    assert entries[1].subtree() == entries[1:]
    assert "shard 0" in repr(entries[0])


def test_a_long_chain_is_dropped_and_freed_without_recursion_or_garbage() -> None:
    index, shard = new_index()
    entries = chain(index, shard, range(1, 50_001))
    gone = index.drop(entries[0])
    assert len(gone) == 50_000
    before = len(gc.get_objects())
    gc.disable()
    try:
        del entries, gone
        assert before - len(gc.get_objects()) >= 50_000
    finally:
        gc.enable()


def test_making_room_does_not_pass_what_it_cannot_take_again() -> None:
    """Ten thousand pinned blocks at the cold end are stepped over once, not each time."""
    index = Index(make_policy("lru", 20_000))
    shard = index.shard(b"n" * 32, 0, BLOCK)
    stuck = [chain(index, shard, [number])[0] for number in range(1, 10_001)]
    index.pin(stuck)
    steps = 0
    policy = index.accounts.others.policy
    scan = policy.scan

    class Counted:
        def __init__(self, *, held: bool = False) -> None:
            self.scan = scan(held=held)
            self.peek, self.close = self.scan.peek, self.scan.close

        def take(self) -> Link | None:
            nonlocal steps
            steps += 1
            return self.scan.take()

    policy.scan = Counted  # type: ignore[method-assign, assignment]
    for number in range(20_000, 20_100):
        chain(index, shard, [number])
        index.drop(next(index.victims()))
    assert steps == 10_000 + 100


def test_every_scan_that_making_room_begins_is_ended() -> None:
    """A scan that stays on its line is passed by all later ones: each put may begin one."""
    index = Index(make_policy("lru", 8))
    shard = index.shard(b"n" * 32, 0, BLOCK)
    chain(index, shard, [1, 2, 3])
    account = index.accounts.others
    scan, open_scans = account.policy.scan, 0

    class Counted:
        def __init__(self, *, held: bool = False) -> None:
            nonlocal open_scans
            open_scans += 1
            self.scan = scan(held=held)
            self.peek, self.take = self.scan.peek, self.scan.take

        def close(self) -> None:
            nonlocal open_scans
            open_scans -= 1
            self.scan.close()

    account.policy.scan = Counted  # type: ignore[method-assign, assignment]
    for taken in range(5):
        for victims in (index.victims(), index.victims(parents=True)):
            list(islice(victims, taken))
        del victims
        list(islice(index.victims_for(account, BLOCK), taken))
        assert open_scans == 0
    victims = index.victims()
    next(victims)
    assert open_scans == 1
    del victims
    assert open_scans == 0
