"""Leases: an extent that is freed comes back once, when all that it was leased for has ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.process_end import ProcessEnd
from tiers.leases import Leases

EXTENTS = st.integers(0, 7)


class LeasedExtents(RuleBasedStateMachine):
    """The model: for each extent the ends that it waits for, and whether it has been freed."""

    def __init__(self) -> None:
        super().__init__()
        self.come: set[int] = set()
        self.leases: Leases[int] = Leases(lambda end: end in self.come)
        self.ends: dict[int, set[int]] = {}
        self.freed: set[int] = set()
        self.next = 0

    @rule(extents=st.sets(EXTENTS, max_size=4))
    def hold(self, extents: set[int]) -> None:
        held = extents - self.freed
        self.next += 1
        self.leases.hold(held, self.next)
        for extent in held:
            self.ends.setdefault(extent, set()).add(self.next)

    @rule(extent=EXTENTS)
    def free(self, extent: int) -> None:
        if extent not in self.freed:
            waits = self.leases.depart(extent)
            # Leases end when they are settled, not when their end comes.
            assert waits == (extent in self.ends)
            if waits:
                self.freed.add(extent)

    @precondition(lambda self: self.next)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.come.add(data.draw(st.integers(1, self.next)))

    @rule()
    def settle(self) -> None:
        over = self.leases.settle()
        for extent in list(self.ends):
            self.ends[extent] -= self.come
            if not self.ends[extent]:
                del self.ends[extent]
        assert sorted(over) == sorted(self.freed - set(self.ends))
        self.freed &= set(self.ends)

    @invariant()
    def counts(self) -> None:
        assert len(self.leases) == len(self.ends)
        assert self.leases.departures == len(self.freed)
        assert all(self.leases.departing(e) == (e in self.freed) for e in range(8))


TestLeasedExtents = LeasedExtents.TestCase


def test_what_is_waited_for_can_be_asked() -> None:
    leases: Leases[str] = Leases(lambda end: end == "over")
    leases.hold([1, 2], "over")
    leases.hold([2], "later")
    leases.settle()
    assert leases.ends() == ["later"]
    assert len(leases) == 1


def test_a_process_ends_when_it_is_gone() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    end = ProcessEnd(os.pidfd_open(child.pid))
    assert not end.done()
    child.kill()
    child.communicate()
    assert end.done()
    assert end.done()


def test_closing_gives_the_descriptor_back() -> None:
    pidfd = os.pidfd_open(os.getpid())
    end = ProcessEnd(pidfd)
    assert not end.done()
    end.close()
    end.close()
    assert end.done()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pidfd)
