"""What every policy keeps, whatever its order: inherit `PolicyContract` and name the policy.

A state machine works a policy beside a model that only knows which items are in line, held or
parked, and leaves scans open while it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiers.links import OUTSIDE, Link
from tiers.policies import make_policy
from tiers.policy import Policy

CAPACITY = 8


class Item(Link):
    """An item that knows its name."""

    __slots__ = ("name",)

    def __init__(self, name: int) -> None:
        super().__init__()
        self.name = name

    def key(self) -> int:
        return self.name

    def __repr__(self) -> str:
        return f"Item({self.name})"


@dataclass
class Scan:
    """An open scan, and what must still come of it."""

    steps: Iterator[Link]
    due: set[Item]


def names(items: Iterator[Link]) -> list[int]:
    return [item.name for item in items if isinstance(item, Item)]


class PolicyContract(RuleBasedStateMachine):
    """The rules; `kind` is the policy's name."""

    kind: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.policy: Policy = make_policy(self.kind, CAPACITY)
        self.line: dict[Item, None] = {}
        self.held: dict[Item, None] = {}
        self.parked: dict[Item, None] = {}
        self.outside = [Item(name) for name in range(2 * CAPACITY)]
        self.scan: Scan | None = None

    def members(self) -> list[Item]:
        return [*self.line, *self.held, *self.parked]

    def changed(self, item: Item) -> None:
        if self.scan is not None:
            self.scan.due.discard(item)

    def leave(self, item: Item) -> None:
        for place in (self.line, self.held, self.parked):
            place.pop(item, None)
        self.changed(item)

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.outside))
        self.outside.remove(item)
        self.policy.insert(item)
        self.line[item] = None

    @precondition(lambda self: self.members())
    @rule(data=st.data(), evicted=st.booleans())
    def remove(self, data: st.DataObject, evicted: bool) -> None:
        item = data.draw(st.sampled_from(self.members()))
        self.policy.remove(item, evicted=evicted)
        self.leave(item)
        self.outside.append(item)
        assert item.queue == OUTSIDE

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        items = data.draw(st.lists(st.sampled_from(self.members() + self.outside), max_size=5))
        self.policy.touch(items)
        for item in items:
            if item not in self.outside:
                self.touched(item)

    def touched(self, item: Item) -> None:
        """A use brings an item that was set aside back in line. FIFO knows no uses."""
        self.leave(item)
        self.line[item] = None

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(list(self.line)))
        self.policy.hold(item)
        self.leave(item)
        self.held[item] = None

    @precondition(lambda self: self.line or self.held)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from([*self.line, *self.held]))
        self.policy.park(item)
        self.leave(item)
        self.parked[item] = None

    @precondition(lambda self: self.held or self.parked)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from([*self.held, *self.parked]))
        self.policy.release(item)
        self.leave(item)
        self.line[item] = None

    @rule(held=st.booleans())
    def open_scan(self, held: bool) -> None:
        due = {*self.line, *self.held} if held else set(self.line)
        self.scan = Scan(self.policy.victims(held=held), due)

    @precondition(lambda self: self.scan is not None)
    @rule(steps=st.integers(1, 4))
    def advance(self, steps: int) -> None:
        assert self.scan is not None
        for _ in range(steps):
            item = next(self.scan.steps, None)
            if item is None:
                assert not self.scan.due, "a scan passed an item that had not moved"
                self.scan = None
                return
            assert isinstance(item, Item)
            assert item in self.line or item in self.held
            self.scan.due.discard(item)

    @rule(capacity=st.integers(1, 2 * CAPACITY))
    def resize(self, capacity: int) -> None:
        self.policy.resize(capacity)

    @invariant()
    def counts(self) -> None:
        assert len(self.policy) == len(self.members())

    @invariant()
    def everything_is_offered_once(self) -> None:
        offered = names(self.policy.victims())
        assert sorted(offered) == sorted(item.name for item in self.line)
        offered = names(self.policy.victims(held=True))
        assert sorted(offered) == sorted(item.name for item in [*self.line, *self.held])
