"""When lookups are tried, and when it is tried whether they would work again."""

from __future__ import annotations

from itertools import pairwise

from kvstore.directory.gate import FAIR_SECONDS, Gate


def test_a_way_is_open_until_a_lookup_fails() -> None:
    gate = Gate()
    assert gate.open("a")
    assert not gate.closed
    gate.failed("a", b"tag", 0.1)
    assert not gate.open("a")
    assert gate.open("b")
    gate.answered("b")
    assert gate.closed
    gate.answered("a")
    assert gate.open("a")
    assert not gate.closed


def test_too_short_a_lookup_says_nothing() -> None:
    gate = Gate()
    gate.failed("a", b"tag", FAIR_SECONDS / 2)
    assert gate.open("a")


def test_probes_grow_rarer_and_must_be_as_fast_as_what_failed() -> None:
    gate = Gate()
    gate.failed("a", b"tag", 0.05)
    tried = []
    now = 0.0
    while now < 20.0:
        for probe in gate.probes(now):
            assert probe == ("a", b"tag", 0.05)
            tried.append(now)
            gate.probe_failed(probe.route, now)
        now += 0.01
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert 5 < len(tried) < 40
    assert min(pauses) >= 0.02
    assert 0.9 < max(pauses) < 2.1


def test_the_first_probe_is_due_at_once() -> None:
    gate = Gate()
    gate.failed("a", b"tag", 0.1)
    # Lookups that were under way beside it say nothing new.
    gate.failed("a", b"other", 0.2)
    assert [tuple(probe) for probe in gate.probes(0.0)] == [("a", b"tag", 0.1)]
    gate.probe_failed("a", 0.0)
    assert not list(gate.probes(0.0))
    # What is open already stays so.
    gate.answered("a")
    gate.probe_failed("a", 0.0)
    assert gate.open("a")


def test_every_closed_way_is_probed() -> None:
    gate = Gate()
    gate.failed("a", b"tag a", 0.1)
    gate.failed("b", b"tag b", 0.2)
    assert {probe.route for probe in gate.probes(10.0)} == {"a", "b"}
    gate.answered("a")
    assert {probe.tag for probe in gate.probes(20.0)} == {b"tag b"}


def test_ways_are_bounded() -> None:
    gate = Gate()
    for number in range(5000):
        gate.failed(f"route {number}", b"tag", 0.1)
    assert len(list(gate.probes(10.0))) <= 1024
