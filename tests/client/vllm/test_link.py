"""A link to a node that is there, comes late, goes and comes back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import pytest

from client.results import GetResult
from client.vllm.link import Link
from kvstore.errors import Unavailable
from tests.running import wait_for


class Node:
    """What a link opens."""

    def __init__(self) -> None:
        self.there = True
        self.attempts = 0
        self.closed = False
        self.answers = True
        self.opening = threading.Event()
        self.opening.set()

    def open(self) -> None:
        self.attempts += 1
        assert self.opening.wait(10)
        if not self.there:
            raise Unavailable("nobody is there")

    def exists(self, hashes: Sequence[bytes]) -> GetResult:
        return GetResult(bytes(len(hashes)), None if self.answers else "deadline_exceeded")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def link(node: Node) -> Iterator[Link]:
    link = Link(node, "the node")
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


def test_a_node_that_comes_late_is_found(
    node: Node, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvstore.client.vllm")
    node.there = False
    link.open(wait=10)
    wait_for(lambda: node.attempts >= 3)
    assert not link.up
    node.there = True
    wait_for(lambda: link.up)
    assert [record.getMessage() for record in caplog.records] == [
        "the node can't be reached, nothing is reused: nobody is there",
        "the node is back",
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
