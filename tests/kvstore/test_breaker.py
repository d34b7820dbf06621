import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.protocol.breaker import Breaker, Decision

TRY, CONNECT, REFUSE = Decision.TRY, Decision.CONNECT, Decision.REFUSE


def breaker() -> Breaker:
    return Breaker(first_pause=1.0, longest_pause=4.0, jitter=lambda: 1.0)


def test_the_first_call_connects() -> None:
    b = breaker()
    assert b.state == "disconnected"
    assert b.decide(0.0) is CONNECT
    b.connection_made()
    assert b.state == "connected"
    assert b.decide(0.0) is TRY
    assert b.decide(0.0) is TRY


def test_calls_beside_the_one_that_connects_are_refused() -> None:
    b = breaker()
    assert b.decide(0.0) is CONNECT
    assert b.decide(0.1) is REFUSE


def test_after_a_timeout_calls_are_refused_until_an_answer() -> None:
    b = breaker()
    b.connection_made()
    b.timed_out(0.0)
    assert b.suspect
    assert b.state == "suspect"
    assert b.decide(0.5) is REFUSE
    b.answered()
    assert not b.suspect
    assert b.decide(0.5) is TRY


def test_a_suspect_connection_is_probed_and_then_replaced() -> None:
    b = breaker()
    b.connection_made()
    b.timed_out(0.0)
    assert b.decide(1.0) is TRY
    assert b.decide(1.1) is REFUSE
    b.timed_out(2.0)
    assert b.decide(3.9) is REFUSE
    assert b.decide(4.1) is CONNECT
    b.connect_failed(4.2)
    assert b.state == "disconnected"
    assert b.decide(8.1) is REFUSE
    assert b.decide(8.2) is CONNECT


def test_a_healthy_connection_that_ends_is_made_again_at_once() -> None:
    b = breaker()
    b.connection_made()
    b.connection_lost(5.0)
    assert b.decide(5.0) is CONNECT


def test_a_suspect_connection_that_ends_is_not() -> None:
    b = breaker()
    b.connection_made()
    b.timed_out(5.0)
    b.connection_lost(5.0)
    assert b.decide(5.5) is REFUSE


def test_pauses_grow_to_their_bound() -> None:
    b = breaker()
    now, pauses = 0.0, []
    for _ in range(5):
        b.connect_failed(now)
        start = now
        while b.decide(now) is REFUSE:
            now += 0.25
        pauses.append(now - start)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("jitter", [0.0, 1.0])
def test_jitter_shortens_a_pause_by_half_at_most(jitter: float) -> None:
    b = Breaker(first_pause=1.0, jitter=lambda: jitter)
    b.connect_failed(0.0)
    assert b.decide(0.49) is REFUSE
    assert b.decide(1.0) is CONNECT


class BreakerMachine(RuleBasedStateMachine):
    """However a node behaves, a call is allowed again within the longest pause."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = breaker()
        self.now = 0.0

    @rule(passed=st.floats(0, 5))
    def wait(self, passed: float) -> None:
        self.now += passed

    @rule(outcome=st.sampled_from(["answered", "timed out", "lost"]))
    def call(self, outcome: str) -> None:
        decision = self.breaker.decide(self.now)
        if decision is REFUSE:
            return
        if decision is CONNECT:
            if outcome != "answered":
                self.breaker.connect_failed(self.now)
                return
            self.breaker.connection_made()
        if outcome == "answered":
            self.breaker.answered()
        elif outcome == "timed out":
            self.breaker.timed_out(self.now)
        else:
            self.breaker.connection_lost(self.now)

    @invariant()
    def is_tried_again(self) -> None:
        saved = (self.breaker._retry_at, self.breaker._pause)
        assert self.breaker.decide(self.now + 4.0) is not REFUSE
        self.breaker._retry_at, self.breaker._pause = saved

    @invariant()
    def tries_only_what_is_connected(self) -> None:
        if not self.breaker.connected:
            assert not self.breaker.suspect


TestBreaker = BreakerMachine.TestCase
