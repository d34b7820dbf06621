from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.budget import WriteBudget

MIB = 1 << 20


def test_no_rate_lets_everything_through() -> None:
    budget = WriteBudget(None)
    assert budget.rate is None
    assert all(budget.take(1 << 40, 0.0) for _ in range(100))
    assert budget.wait(1 << 40, 0.0) == 0


def test_spends_the_burst_then_waits_for_the_rate() -> None:
    budget = WriteBudget(10 * MIB, 4 * MIB)
    assert [budget.take(MIB, 5.0) for _ in range(5)] == [True] * 4 + [False]
    assert budget.wait(MIB, 5.0) == pytest.approx(0.1)
    assert not budget.take(MIB, 5.09)
    assert budget.take(MIB, 5.11)


def test_a_block_larger_than_the_burst_goes_and_leaves_a_debt() -> None:
    budget = WriteBudget(MIB, MIB)
    assert budget.take(3 * MIB, 0.0)
    assert not budget.take(1, 1.9)
    assert budget.wait(MIB, 2.0) == pytest.approx(1.0)
    assert budget.take(3 * MIB, 3.0)


def test_what_was_not_written_is_given_back_up_to_the_burst() -> None:
    budget = WriteBudget(MIB, 2 * MIB)
    assert budget.take(2 * MIB, 0.0)
    budget.refund(2 * MIB)
    budget.refund(2 * MIB)
    assert budget.take(2 * MIB, 0.0)
    assert not budget.take(1, 0.0)


def test_a_clock_that_runs_backwards_earns_nothing() -> None:
    budget = WriteBudget(MIB, MIB)
    assert budget.take(MIB, 100.0)
    assert not budget.take(MIB, 50.0)
    assert not budget.take(MIB, 100.5)
    assert budget.take(MIB, 101.0)


@pytest.mark.parametrize(("rate", "burst"), [(0, None), (-1, None), (1, 0), (None, -5)])
def test_refuses_what_is_not_positive(rate: float | None, burst: float | None) -> None:
    with pytest.raises(ValueError, match="positive"):
        WriteBudget(rate, burst)


@given(
    st.floats(1, 1e9),
    st.floats(1, 1e9),
    st.lists(st.tuples(st.integers(1, 1 << 24), st.floats(0, 10)), max_size=50),
)
def test_never_exceeds_the_rate(rate: float, burst: float, wishes: list[tuple[int, float]]) -> None:
    budget, now, written, largest = WriteBudget(rate, burst), 0.0, 0, 0
    for size, pause in wishes:
        now += pause
        largest = max(largest, size)
        if budget.take(size, now):
            written += size
        assert written <= (burst + largest + now * rate) * (1 + 1e-9)
