"""The bounded memory of blocks that left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.departures import Departure, DepartureReason, Departures

NAMESPACE = bytes(32)


def left(when: float) -> Departure:
    return Departure(when, "dram", DepartureReason.CAPACITY)


def block(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_departures_are_kept_apart_by_namespace_and_shard() -> None:
    departures = Departures(10)
    departures.record(NAMESPACE, 0, block(1), left(1.0))
    departures.record(NAMESPACE, 1, block(1), left(2.0))
    departures.record(b"x" * 32, 0, block(1), left(3.0))
    assert departures.of(NAMESPACE, 0, block(1)) == left(1.0)
    assert departures.of(NAMESPACE, 1, block(1)) == left(2.0)
    assert departures.of(b"x" * 32, 0, block(1)) == left(3.0)
    assert departures.of(NAMESPACE, 2, block(1)) is None


def test_without_a_memory_everything_is_forgotten() -> None:
    departures = Departures(0)
    departures.record(NAMESPACE, 0, block(1), left(1.0))
    assert (len(departures), departures.forgotten) == (0, 1)
    departures.returned(NAMESPACE, 0, block(1))


@given(
    capacity=st.integers(0, 5),
    steps=st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=60),
)
def test_the_latest_are_remembered(capacity: int, steps: list[tuple[int, bool]]) -> None:
    """Against a list of all that left and did not return, oldest first."""
    departures, model, forgotten = Departures(capacity), dict[int, float](), 0
    for when, (number, leaves) in enumerate(steps):
        if leaves:
            departures.record(NAMESPACE, 0, block(number), left(when))
            model.pop(number, None)
            model[number] = when
            if len(model) > capacity:
                del model[next(iter(model))]
                forgotten += 1
        else:
            departures.returned(NAMESPACE, 0, block(number))
            model.pop(number, None)
        assert len(departures) == len(model) <= capacity
        assert departures.forgotten == forgotten
        for known in range(9):
            found = departures.of(NAMESPACE, 0, block(known))
            assert found == (left(model[known]) if known in model else None)
