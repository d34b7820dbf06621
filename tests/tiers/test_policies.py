from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.policy_contract import CAPACITY, Item, PolicyContract, names
from tiers.arc import Arc
from tiers.fifo import Fifo
from tiers.lru import Lru
from tiers.policies import POLICIES, make_policy
from tiers.policy import Policy


class LruContract(PolicyContract):
    kind: ClassVar[str] = "lru"


class ArcContract(PolicyContract):
    kind: ClassVar[str] = "arc"

    def counts(self) -> None:
        super().counts()
        policy = self.policy
        assert isinstance(policy, Arc)
        assert 0.0 <= policy.target <= policy.capacity
        assert policy.ghosts <= max(0, 2 * policy.capacity - len(policy))


class FifoContract(PolicyContract):
    kind: ClassVar[str] = "fifo"

    def touched(self, item: Item) -> None:
        pass


TestLruContract = LruContract.TestCase
TestArcContract = ArcContract.TestCase
TestFifoContract = FifoContract.TestCase


def filled(policy: Policy, numbers: Iterable[int]) -> dict[int, Item]:
    items = {number: Item(number) for number in numbers}
    for item in items.values():
        policy.insert(item)
    return items


def replay(policy: Policy, accesses: Sequence[int], capacity: int) -> list[int]:
    """Which of the accesses hit, each miss inserted and the surplus evicted at once."""
    held: dict[int, Item] = {}
    hits = []
    for number in accesses:
        if number in held:
            policy.touch([held[number]])
            hits.append(number)
            continue
        held[number] = Item(number)
        policy.insert(held[number])
        if len(held) > capacity:
            victim = next(policy.victims())
            assert isinstance(victim, Item)
            policy.remove(victim, evicted=True)
            del held[victim.name]
    return hits


@given(st.lists(st.integers(0, 11), max_size=60), st.integers(1, 10))
def test_lru_evicts_the_least_recently_used(accesses: list[int], capacity: int) -> None:
    model: dict[int, None] = {}
    expected = []
    for number in accesses:
        if number in model:
            expected.append(number)
            del model[number]
        model[number] = None
        if len(model) > capacity:
            del model[next(iter(model))]
    assert replay(Lru(capacity), accesses, capacity) == expected


@given(st.lists(st.integers(0, 11), max_size=60), st.integers(1, 10))
def test_fifo_evicts_the_oldest(accesses: list[int], capacity: int) -> None:
    model: dict[int, None] = {}
    expected = []
    for number in accesses:
        if number in model:
            expected.append(number)
            continue
        model[number] = None
        if len(model) > capacity:
            del model[next(iter(model))]
    assert replay(Fifo(capacity), accesses, capacity) == expected


def test_lru_touched_leaf_to_root_offers_the_leaf_first() -> None:
    policy = Lru(8)
    chain = filled(policy, range(4))
    policy.touch(reversed(chain.values()))
    assert names(policy.victims()) == [3, 2, 1, 0]


def test_lru_touch_of_the_same_items_again_and_of_neighbours() -> None:
    policy = Lru(8)
    items = filled(policy, range(5))
    policy.touch([items[4], items[4], items[1], items[4], items[1]])
    assert names(policy.victims()) == [0, 2, 3, 4, 1]


def test_arc_keeps_what_is_used_through_a_scan_that_flushes_lru() -> None:
    loved = list(range(4)) * 3
    scan = list(range(100, 120))
    accesses = loved + scan + list(range(4))
    assert replay(Arc(8), accesses, 8)[-4:] == [0, 1, 2, 3]
    assert 0 not in replay(Lru(8), accesses, 8)[8:]


def test_arc_gives_room_to_what_was_evicted_too_early() -> None:
    policy = Arc(2)
    items = filled(policy, range(2))
    policy.touch([items[0]])
    policy.remove(items[1], evicted=True)
    assert policy.target == 0.0
    policy.insert(Item(1))
    assert policy.target == 1.0
    policy.remove(items[0], evicted=True)
    policy.insert(Item(0))
    assert policy.target == 0.0


def test_arc_forgets_what_is_withdrawn() -> None:
    policy = Arc(2)
    items = filled(policy, range(2))
    policy.remove(items[0], evicted=False)
    assert policy.ghosts == 0


def test_arc_ghosts_shrink_with_the_capacity() -> None:
    policy = Arc(CAPACITY)
    replay(policy, [*range(CAPACITY)] * 2 + [*range(100, 110)] + [*range(50, 60)], CAPACITY)
    assert policy.ghosts > 2
    for victim in list(policy.victims()):
        policy.remove(victim, evicted=True)
    policy.resize(1)
    assert policy.ghosts <= 2
    assert policy.target <= 1.0


@pytest.mark.parametrize("name", POLICIES)
def test_an_item_held_until_it_may_go_is_offered_next(name: str) -> None:
    policy = make_policy(name, 8)
    items = filled(policy, range(4))
    policy.hold(items[0])
    policy.park(items[1])
    assert names(policy.victims()) == [2, 3]
    assert names(policy.victims(held=True)) == [0, 2, 3]
    policy.release(items[1])
    policy.release(items[0])
    assert names(policy.victims()) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", POLICIES)
def test_a_scan_that_takes_all_sees_what_is_released_on_the_way(name: str) -> None:
    policy = make_policy(name, 8)
    items = filled(policy, range(3))
    policy.hold(items[0])
    taken = []
    for victim in policy.victims():
        assert isinstance(victim, Item)
        policy.remove(victim, evicted=True)
        taken.append(victim.name)
        if victim is items[1]:
            policy.release(items[0])
    assert taken == [1, 0, 2]


@pytest.mark.parametrize("name", POLICIES)
def test_scans_side_by_side_do_not_see_each_other(name: str) -> None:
    policy = make_policy(name, 8)
    filled(policy, range(3))
    first, second = policy.victims(), policy.victims()
    steps = [next(first), next(second), next(first), next(second)]
    assert [step.key() for step in steps] == [0, 0, 1, 1]
    assert names(first) == [2]
    assert names(second) == [2]


@pytest.mark.parametrize("name", POLICIES)
def test_setting_aside_costs_each_item_once(name: str) -> None:
    """What can't go is passed by the first scan only, however many scans follow."""
    policy = make_policy(name, 10_000)
    items = filled(policy, range(10_000))
    for item in policy.victims():
        if item is items[9_999]:
            break
        policy.park(item)
    assert [next(policy.victims()) for _ in range(10_000)] == [items[9_999]] * 10_000


def test_unknown_policy_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'mru'.*lru, arc, fifo"):
        make_policy("mru", 1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_policy(name, 0)
    with pytest.raises(ValueError, match="at least 1"):
        make_policy(name, 4).resize(0)
