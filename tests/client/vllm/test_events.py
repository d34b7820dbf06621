from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from client.vllm.events import Announced, Event, Ledger, RemovedEvent, StoredEvent
from kvstore.identity import ROOT_PARENT


def name(path: Sequence[int]) -> bytes:
    return sha256(bytes(path)).digest() if path else ROOT_PARENT


def engine_name(path: Sequence[int]) -> bytes | None:
    return b"engine" + bytes(path) if path else None


def block(*path: int, **facts: object) -> Announced:
    """The block that a path through the tree of prompts leads to."""
    engine_hash = engine_name(path)
    assert engine_hash is not None
    return Announced(
        hash=name(path),
        parent=name(path[:-1]),
        engine_hash=engine_hash,
        engine_parent=engine_name(path[:-1]),
        tokens=[path[-1]] * 4,
        **facts,  # type: ignore[arg-type]
    )


def chain(*path: int, start: int = 0) -> list[Announced]:
    return [block(*path[:length]) for length in range(start + 1, len(path) + 1)]


class Router:
    """Applies events as a router does, and checks that each says something new."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, StoredEvent):
                self._store(event.blocks)
            else:
                assert event.engine_hashes
                assert self.held.issuperset(event.engine_hashes)
                assert len(set(event.engine_hashes)) == len(event.engine_hashes)
                self.held.difference_update(event.engine_hashes)

    def _store(self, blocks: Sequence[Announced]) -> None:
        assert blocks
        for before, after in pairwise(blocks):
            assert after.engine_parent == before.engine_hash
        names = {each.engine_hash for each in blocks}
        assert len(names) == len(blocks)
        assert self.held.isdisjoint(names)
        self.held |= names


# --- one call at a time ------------------------------------------------------------------------


def test_one_event_tells_of_a_chain() -> None:
    blocks = chain(1, 2, 3)
    assert Ledger().announce(blocks) == [StoredEvent(tuple(blocks))]


def test_chains_are_told_apart() -> None:
    first, second = chain(1, 2), chain(3, 4)
    assert Ledger().announce(first + second) == [
        StoredEvent(tuple(first)),
        StoredEvent(tuple(second)),
    ]


@pytest.mark.parametrize(
    "facts", [{"lora_id": 7}, {"lora_name": "poet"}], ids=lambda facts: next(iter(facts))
)
def test_one_event_is_of_one_adapter(facts: dict[str, object]) -> None:
    blocks = [block(1), block(1, 2, **facts), block(1, 2, 3, **facts)]
    assert Ledger().announce(blocks) == [
        StoredEvent((blocks[0],)),
        StoredEvent((blocks[1], blocks[2])),
    ]


def test_what_is_known_is_not_said_again_and_splits_nothing_else() -> None:
    ledger = Ledger()
    ledger.announce([block(1, 2)])
    assert ledger.announce([block(1, 2)]) == []
    assert ledger.announce(chain(1, 2, 3, 4)) == [
        StoredEvent((block(1),)),
        StoredEvent((block(1, 2, 3), block(1, 2, 3, 4))),
    ]


def test_only_what_was_announced_is_taken_back_and_once() -> None:
    ledger = Ledger()
    ledger.announce(chain(1, 2))
    assert ledger.removed([name([9]), name([1, 2]), name([1, 2])]) == [
        RemovedEvent((b"engine\x01\x02",))
    ]
    assert ledger.removed([name([1, 2])]) == []
    assert ledger.believed() == [name([1])]


def test_what_came_back_is_said_again() -> None:
    ledger = Ledger()
    ledger.announce([block(1)])
    ledger.removed([name([1])])
    assert ledger.announce([block(1)]) == [StoredEvent((block(1),))]


def test_what_the_store_denies_is_taken_back() -> None:
    ledger = Ledger()
    ledger.announce(chain(1, 2, 3))
    asked = ledger.believed()
    assert ledger.missing(asked, [True, False, True]) == [RemovedEvent((b"engine\x01\x02",))]
    with pytest.raises(ValueError, match="argument 2"):
        ledger.missing(asked, [False])
    assert len(ledger) == 2


def test_clearing_takes_everything_back_once() -> None:
    ledger = Ledger()
    ledger.announce(chain(1, 2))
    assert ledger.cleared() == [RemovedEvent((b"engine\x01", b"engine\x01\x02"))]
    assert ledger.cleared() == []
    assert len(ledger) == 0


# --- too many blocks ---------------------------------------------------------------------------


def test_forgets_the_ends_of_the_oldest_chain_first() -> None:
    ledger = Ledger(capacity=4)
    ledger.announce(chain(1, 2, 3))
    events = ledger.announce(chain(1, 4, 5, start=1))
    assert events == [
        StoredEvent(tuple(chain(1, 4, 5, start=1))),
        RemovedEvent((b"engine\x01\x02\x03",)),
    ]
    assert ledger.announce([block(6)])[1:] == [RemovedEvent((b"engine\x01\x02",))]
    assert ledger.announce([block(7)])[1:] == [RemovedEvent((b"engine\x01\x04\x05",))]


def test_what_came_back_has_only_its_new_children() -> None:
    ledger = Ledger(capacity=3)
    ledger.announce([block(1), block(1, 2), block(1, 3)])
    ledger.removed([name([1]), name([1, 2]), name([1, 3])])
    ledger.announce(chain(1, 2))
    ledger.removed([name([1, 2])])
    ledger.announce([block(4), block(5)])
    assert ledger.announce([block(6)])[1:] == [RemovedEvent((b"engine\x01",))]


def test_a_child_from_before_makes_nothing_older() -> None:
    ledger = Ledger(capacity=3)
    ledger.announce(chain(1, 2))
    ledger.removed([name([1])])
    ledger.announce([block(9), block(1)])
    ledger.removed([name([1, 2])])
    assert ledger.announce([block(7), block(8)])[2:] == [RemovedEvent((b"engine\x09",))]


def test_a_ledger_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Ledger(capacity=0)


# --- whatever happens --------------------------------------------------------------------------

paths = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


class RouterBesideLedger(RuleBasedStateMachine):
    """A router that applies the events holds what was announced less what was removed."""

    capacity = 1_000

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.capacity)
        self.router = Router()
        self.held: dict[bytes, bytes] = {}
        """What the model says is held: engine hashes by hash."""

    @rule(path=paths, start=st.integers(0, 3))
    def announce(self, path: tuple[int, ...], start: int) -> None:
        blocks = chain(*path, start=start)
        self.router.apply(self.ledger.announce(blocks))
        self.held.update((each.hash, each.engine_hash) for each in blocks)

    @rule(gone=st.lists(paths, max_size=4))
    def remove(self, gone: list[tuple[int, ...]]) -> None:
        self.router.apply(self.ledger.removed([name(path) for path in gone]))
        for path in gone:
            self.held.pop(name(path), None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def reconcile(self, data: st.DataObject) -> None:
        asked = self.ledger.believed()
        held = data.draw(st.lists(st.booleans(), min_size=len(asked), max_size=len(asked)))
        self.router.apply(self.ledger.missing(asked, held))
        for each, is_held in zip(asked, held, strict=True):
            if not is_held:
                del self.held[each]

    @rule()
    def clear(self) -> None:
        self.router.apply(self.ledger.cleared())
        self.held.clear()

    @invariant()
    def router_holds_what_is_held(self) -> None:
        assert self.router.held == set(self.held.values())
        assert set(self.ledger.believed()) == set(self.held)


class RouterBesideSmallLedger(RouterBesideLedger):
    """The same where blocks are forgotten: the router holds no more than what is held."""

    capacity = 3

    @invariant()
    def router_holds_what_is_held(self) -> None:
        believed = set(self.ledger.believed())
        assert len(believed) <= self.capacity
        assert believed <= set(self.held)
        assert self.router.held == {self.held[each] for each in believed}
        self.held = {each: self.held[each] for each in believed}


TestRouter = RouterBesideLedger.TestCase
TestRouterOfSmallLedger = RouterBesideSmallLedger.TestCase
for case in (TestRouter, TestRouterOfSmallLedger):
    case.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
