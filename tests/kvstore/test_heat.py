"""Rates that fade."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.heat import FADE_SECONDS, Counts, Heat

steps = st.lists(st.floats(0.2, 500), min_size=1, max_size=30)


@given(steps, st.floats(0.5, 1e6))
def test_what_comes_evenly_is_what_is_said(seconds: list[float], rate: float) -> None:
    heat, now = Heat(100.0), 100.0
    for step in seconds:
        now += step
        asked = round(rate * (now - 100.0))
        heat.look(now, Counts(asked, asked // 2, asked, asked, asked // 4))
    assert heat.figures()["asked_per_second"] == pytest.approx(rate, rel=0.01, abs=5)


def test_what_has_ended_fades() -> None:
    heat = Heat(0.0)
    heat.look(100.0, Counts(asked=1000, held=500))
    assert heat.figures()["asked_per_second"] == pytest.approx(10)
    heat.look(100.0 + FADE_SECONDS, Counts(asked=1000, held=500))
    left = heat.figures()["asked_per_second"]
    assert 2 < left < 5
    assert heat.figures()["hit_rate"] == pytest.approx(0.5)
    heat.look(100_000.0, Counts(asked=1000, held=500))
    assert "hit_rate" not in heat.figures()


def test_the_present_counts_more_than_the_past() -> None:
    heat = Heat(0.0)
    heat.look(300.0, Counts(3000, 0, 3000, 3000, 0))
    heat.look(600.0, Counts(6000, 3000, 6000, 6000, 3000))
    figures = heat.figures()
    assert figures["hit_rate"] > 0.98
    assert figures["remote_share"] > 0.98


def test_two_looks_at_once_are_one() -> None:
    heat = Heat(0.0)
    heat.look(10.0, Counts(asked=100))
    before = heat.figures()
    heat.look(10.01, Counts(asked=200))
    assert heat.figures() == before
    heat.look(11.0, Counts(asked=200))
    assert heat.figures()["asked_per_second"] > before["asked_per_second"]


def test_a_node_that_nobody_asks_has_no_shares() -> None:
    heat = Heat(0.0)
    heat.look(10.0, Counts())
    assert heat.figures() == {"asked_per_second": 0.0, "lookups_per_second": 0.0}
