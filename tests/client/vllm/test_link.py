"""A link to a node that is there, comes late, goes and comes back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import pytest

from client.results import GetResult
from client.vllm.link import REMIND, Link
from kvstore.errors import AccessDenied, KVStoreError, Unavailable
from tests.running import wait_for

Told: TypeAlias = Callable[[], list[tuple[str, str]]]


class Node:
    """What a link opens."""

    def __init__(self) -> None:
        self.there = True
        self.attempts = 0
        self.closed = False
        self.answers = True
        self.refusal: KVStoreError | None = None
        self.opening = threading.Event()
        self.opening.set()

    def open(self) -> None:
        self.attempts += 1
        assert self.opening.wait(10)
        if self.refusal is not None:
            raise self.refusal
        if not self.there:
            raise Unavailable("nobody is there")

    def exists(self, hashes: Sequence[bytes]) -> GetResult:
        return GetResult(bytes(len(hashes)), None if self.answers else "deadline_exceeded")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def node() -> Node:
    return Node()


class Clock:
    """Seconds that pass as told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(node: Node, clock: Clock) -> Iterator[Link]:
    link = Link(node, "the node", "start it", clock)
    yield link
    node.opening.set()
    link.close()


def test_it_is_up_when_the_node_is_there(node: Node, link: Link) -> None:
    link.open(wait=10)
    wait_for(lambda: link.up)
    assert node.attempts == 1


def test_opening_waits_no_longer_than_asked(node: Node, link: Link) -> None:
    node.opening.clear()
    link.open(wait=0.01)
    assert not link.up


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """What was logged so far."""
    caplog.set_level(logging.INFO, "kvstore.client.vllm")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def attempted(node: Node) -> None:
    """Wait until an attempt that began after this call is over."""
    attempts = node.attempts
    wait_for(lambda: node.attempts >= attempts + 2)


def test_a_node_that_is_there_is_told_of_once(node: Node, link: Link, told: Told) -> None:
    link.open(wait=10)
    wait_for(lambda: link.up)
    link.failed()
    wait_for(lambda: link.up)
    assert told() == [("INFO", "the node is reached")]


def test_a_node_that_comes_late_is_found(node: Node, link: Link, clock: Clock, told: Told) -> None:
    node.there = False
    link.open(wait=10)
    attempted(node)
    assert not link.up
    clock.now += 31
    link.went_without()
    node.there = True
    wait_for(lambda: link.up)
    assert told() == [
        ("WARNING", "the node can't be reached, nothing is reused: nobody is there; start it"),
        ("INFO", "the node is reached, after 31 s; requests that went without: 1"),
    ]


def test_a_node_that_refuses_need_not_be_started(node: Node, link: Link, told: Told) -> None:
    node.refusal = AccessDenied("wrong token")
    link.open(wait=10)
    message = "the node can't be reached, nothing is reused: wrong token"
    assert told() == [("WARNING", message)]


def test_the_loss_of_a_node_is_told_of_now_and_then(
    node: Node, link: Link, clock: Clock, told: Told
) -> None:
    link.open(wait=10)
    wait_for(lambda: link.up)
    node.there = False
    link.failed()
    attempted(node)
    for _ in range(3):
        link.went_without()
    clock.now += REMIND
    attempted(node)
    clock.now += 5
    node.there = True
    wait_for(lambda: link.up)
    assert told()[1:] == [
        ("WARNING", "the node is lost, nothing is reused until it is back: nobody is there"),
        (
            "WARNING",
            "the node still can't be reached, after 60 s; requests that went without: 3: "
            "nobody is there",
        ),
        ("WARNING", "the node is back, after 65 s; requests that went without: 3"),
    ]


def test_after_a_failure_it_is_opened_again(node: Node, link: Link) -> None:
    link.open(wait=10)
    wait_for(lambda: link.up)
    node.opening.clear()
    link.failed()
    assert not link.up
    wait_for(lambda: node.attempts == 2)
    assert not link.up
    node.opening.set()
    wait_for(lambda: link.up)


def test_a_session_whose_node_has_stopped_is_not_up(node: Node, link: Link) -> None:
    node.answers = False
    link.open(wait=10)
    wait_for(lambda: node.attempts >= 2)
    assert not link.up
    node.answers = True
    wait_for(lambda: link.up)


def test_closing_ends_the_thread_and_the_client(node: Node, link: Link) -> None:
    node.there = False
    link.open(wait=10)
    link.close()
    assert node.closed
    assert "kvstore-link" not in [thread.name for thread in threading.enumerate()]
