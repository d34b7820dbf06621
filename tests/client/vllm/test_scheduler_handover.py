"""The scheduler's side where one engine computes a prompt and another goes on with it."""

from __future__ import annotations

import pytest

from client.vllm.jobs import LoadJob
from client.vllm.progress import Finished
from tests.client.vllm.test_scheduler import TOKENS, Bench


def test_a_decode_request_waits_for_the_whole_prompt_without_asking() -> None:
    bench = Bench()
    request = bench.begin(tokens=18, kvstore={"wait": 3})
    assert bench.side.lookup("r", TOKENS) == 12
    assert not bench.stores[0].asked
    bench.side.allocated("r", [10, 11, 12, 13], 12)
    (load,) = bench.side.take_step().loads
    assert load == LoadJob("r", tuple(request.names()[1:]), (11, 12, 13), 3.0)


def test_it_waits_once() -> None:
    bench = Bench()
    bench.begin(tokens=18, kvstore={"wait": 3})
    assert bench.side.lookup("r", 0) == 16
    bench.side.allocated("r", [10, 11, 12, 13], 16)
    bench.side.update(Finished(loaded={"r"}), {})
    assert bench.side.lookup("r", 0) == 0
    assert bench.stores[0].asked


def test_it_does_not_wait_for_a_node_that_is_gone() -> None:
    bench = Bench()
    bench.begin(tokens=18, kvstore={"wait": 3})
    bench.links[0].up = False
    assert bench.side.lookup("r", 0) == 0


def test_it_waits_no_longer_than_is_allowed() -> None:
    bench = Bench(max_wait="2s")
    bench.begin(tokens=18, kvstore={"wait": 3})
    assert bench.side.lookup("r", 0) == 16
    bench.side.allocated("r", [10, 11, 12, 13], 16)
    assert bench.side.take_step().loads[0].wait == 2.0


def test_the_time_in_the_queue_counts() -> None:
    bench = Bench()
    bench.begin(tokens=18, kvstore={"wait": 3})
    bench.clock.now += 2.0
    assert bench.side.lookup("r", 0) == 16
    bench.clock.now += 0.5
    bench.side.allocated("r", [10, 11, 12, 13], 16)
    assert bench.side.take_step().loads[0].wait == 0.5


def test_a_request_that_has_waited_long_enough_in_the_queue_takes_what_is_there() -> None:
    bench = Bench()
    request = bench.begin(tokens=18, kvstore={"wait": 3})
    bench.holds(request.names()[:1])
    bench.clock.now += 3.0
    assert bench.side.lookup("r", 0) == TOKENS
    bench.side.allocated("r", [10], TOKENS)
    assert bench.side.take_step().loads[0].wait == 0.0


def test_a_request_that_ends_while_it_waits_is_called_off() -> None:
    bench = Bench()
    request = bench.begin(tokens=18, kvstore={"wait": 3})
    bench.side.lookup("r", 0)
    bench.side.allocated("r", [10, 11, 12, 13], 16)
    bench.side.take_step()
    bench.side.finished(request, [])
    assert bench.side.take_step().cancelled == ["r"]
    assert bench.side.take_step().cancelled == []


@pytest.mark.parametrize("wait", [0, 3])
def test_a_request_that_does_not_wait_is_not_called_off(wait: int) -> None:
    bench = Bench()
    request = bench.begin(tokens=18, kvstore={"wait": wait})
    bench.holds(request.names())
    external = bench.side.lookup("r", 0)
    assert external == 16
    bench.side.allocated("r", [10, 11, 12, 13], external)
    bench.side.take_step()
    if wait:
        bench.side.update(Finished(loaded={"r"}), {})
    bench.side.finished(request, [])
    assert bench.side.take_step().cancelled == []


def test_an_endless_wait_is_the_longest_allowed() -> None:
    bench = Bench()
    bench.begin(tokens=18, kvstore={"wait": 10**400})
    bench.side.lookup("r", 0)
    bench.side.allocated("r", [10, 11, 12, 13], 16)
    assert bench.side.take_step().loads[0].wait == pytest.approx(30.0)


@pytest.mark.parametrize("params", [{"wait": "x"}, {"wait": -1}, {"wait": True}, {}, None, "x", 3])
def test_nonsense_is_no_wait(params: object) -> None:
    bench = Bench()
    bench.begin(tokens=18, kvstore=params)
    assert bench.side.lookup("r", 0) == 0
    assert bench.stores[0].asked


def test_nonsense_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    Bench().begin(kvstore={"wait": "x" * 100_000})
    (message,) = caplog.messages
    assert "xxx" in message
    assert len(message) < 200
