"""The queue of changes, against a model that tells everything one by one."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.directory.changes import RECORD_BYTES, Batch, Changes
from kvstore.directory.names import NAME_BYTES, unpack_numbers

_CAPACITY = 12
_LIMIT = 3
_TAGS = [b"tag a", b"tag b", b"tag c"]
_NAMES = [bytes([number]) * NAME_BYTES for number in range(5)]

_Key = tuple[bytes, bytes, int]


class ChangesMachine(RuleBasedStateMachine):
    """``said`` is the last word on every place, ``told`` what the directory believes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = Changes(_CAPACITY)
        self.said: dict[_Key, bool] = {}
        self.told: dict[_Key, bool] = {}
        self.waiting: set[_Key] = set()
        self.flying: list[Batch] = []
        self.abandoned: list[Batch] = []

    @rule(
        tag=st.sampled_from(_TAGS),
        name=st.sampled_from(_NAMES),
        number=st.integers(0, 1),
        held=st.booleans(),
        urgent=st.booleans(),
    )
    def note(self, tag: bytes, name: bytes, number: int, held: bool, urgent: bool) -> None:
        flying = sum(len(batch.changes) for batch in self.flying)
        before = len(self.waiting) + flying
        new = (tag, name, number) not in self.waiting
        self.changes.note(tag, name, number, held, batch=_LIMIT, urgent=urgent)
        if before + new > _CAPACITY:
            assert self.changes.overflowed
            self.forget()
            return
        self.said[tag, name, number] = held
        self.waiting.add((tag, name, number))

    def forget(self) -> None:
        self.abandoned += self.flying
        self.flying.clear()
        self.waiting.clear()
        self.said.clear()
        self.told.clear()

    @rule()
    def clear(self) -> None:
        self.changes.clear()
        assert not self.changes.overflowed
        self.forget()

    @rule()
    def hurry(self) -> None:
        self.changes.hurry()
        ready = {tag for tag, _, _ in self.waiting} - {batch.tag for batch in self.flying}
        assert self.changes.urgent or not ready

    @rule()
    def take(self) -> None:
        batch = self.changes.take(_LIMIT)
        if batch is None:
            return
        assert 0 < len(batch.changes) <= _LIMIT
        # Two batches of one tag at a time could be told in the wrong order.
        assert batch.tag not in {other.tag for other in self.flying}
        for (name, number), held in batch.changes.items():
            assert self.said[batch.tag, name, number] == held
            self.waiting.remove((batch.tag, name, number))
        self.flying.append(batch)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), arrived=st.booleans(), known=st.booleans())
    def land(self, data: st.DataObject, arrived: bool, known: bool) -> None:
        batch = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if arrived or known:
            for (name, number), held in batch.changes.items():
                self.told[batch.tag, name, number] = held
        if known:
            self.changes.told(batch)
        else:
            self.changes.give_back(batch)
            self.waiting |= {(batch.tag, name, number) for name, number in batch.changes}

    @precondition(lambda self: self.abandoned)
    @rule(known=st.booleans())
    def land_late(self, known: bool) -> None:
        """What was being told when everything was forgotten changes nothing."""
        batch, before = self.abandoned.pop(), len(self.changes)
        (self.changes.told if known else self.changes.give_back)(batch)
        assert len(self.changes) == before

    @invariant()
    def counts_what_waits(self) -> None:
        flying = sum(len(batch.changes) for batch in self.flying)
        assert len(self.changes) == len(self.waiting) + flying
        assert len(self.changes) <= _CAPACITY

    def teardown(self) -> None:
        """In the end the directory believes the last word on every place."""
        for batch in self.flying:
            self.changes.give_back(batch)
        self.changes.hurry()
        while (batch := self.changes.take(_LIMIT)) is not None:
            for (name, number), held in batch.changes.items():
                self.told[batch.tag, name, number] = held
            self.changes.told(batch)
        assert self.told == self.said
        assert len(self.changes) == 0
        assert not self.changes.urgent


TestChanges = ChangesMachine.TestCase


def test_every_tag_gets_its_turn() -> None:
    changes = Changes()
    for number in range(10):
        changes.note(b"busy", bytes([number]) * NAME_BYTES, 0, True, batch=4)
    changes.note(b"quiet", _NAMES[0], 0, True, batch=4)
    order = []
    while (batch := changes.take(4)) is not None:
        order.append(batch.tag)
        changes.told(batch)
    assert order == [b"busy", b"quiet", b"busy", b"busy"]


def test_what_is_not_urgent_waits_until_a_batch_is_full() -> None:
    changes = Changes()
    for name in _NAMES[:3]:
        changes.note(b"tag", name, 0, True, batch=4, urgent=False)
    assert changes.take(4) is None
    changes.note(b"tag", _NAMES[3], 0, True, batch=4, urgent=False)
    assert changes.take(4) is not None


def test_records_name_this_node_and_others() -> None:
    batch = Batch(b"tag", {(_NAMES[1], 0): True, (_NAMES[2], 9): False}, 0)
    records = batch.records(7)
    assert len(records) == 2 * RECORD_BYTES
    first, second = records[:RECORD_BYTES], records[RECORD_BYTES:]
    assert first[:1] + first[1:-4] == b"S" + _NAMES[1]
    assert second[:1] + second[1:-4] == b"R" + _NAMES[2]
    assert unpack_numbers(first[-4:] + second[-4:]) == (7, 9)


def test_as_many_batches_are_ready_as_can_be_taken() -> None:
    changes = Changes()
    for tag, number in ((_TAGS[0], 7), (_TAGS[1], 2)):
        for at in range(number):
            changes.note(tag, bytes([at]) * NAME_BYTES, 0, True, batch=_LIMIT)
    changes.note(_TAGS[2], _NAMES[0], 0, True, batch=_LIMIT, urgent=False)
    assert changes.ready(_LIMIT) == 4
    taken = 0
    while (batch := changes.take(_LIMIT)) is not None:
        changes.told(batch)
        taken += 1
        assert changes.ready(_LIMIT) == 4 - taken
    assert taken == 4
