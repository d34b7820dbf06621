"""``kvstore drain`` against a fake node behind a real control socket."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from kvstore.cli import main
from kvstore.cli.draining import sentence
from kvstore.control.drain import DrainOrder, DrainProgress
from kvstore.control.drain_service import DrainService
from kvstore.control.server import ControlServer
from kvstore.units import Address

MIB = 1 << 20
LAST = DrainProgress("drained", 12, 3, 9, 0, 9 * MIB, finished=True)


class Target:
    """A node that can be drained, in words alone."""

    def __init__(self) -> None:
        self.orders: list[DrainOrder] = []
        self.last = LAST
        self.stopped = threading.Event()

    async def drain(self, order: DrainOrder) -> AsyncIterator[DrainProgress]:
        self.orders.append(order)
        yield DrainProgress("draining", total=12)
        yield self.last

    async def resume(self) -> DrainProgress:
        return DrainProgress("serving", finished=True)

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def address(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The fake's control plane on a loop of its own, as the CLI brings another one."""
    for name in os.environ:
        if name.startswith("KVSTORE_"):
            monkeypatch.delenv(name)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> ControlServer:
        server = ControlServer([DrainService(target)], Address("127.0.0.1", 0))
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    yield str(server.address)
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_it_says_what_came_of_it(
    target: Target, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["drain", "--control", address]) == 0
    assert "others took 9 blocks (9 MiB), and had 3 before." in capsys.readouterr().out
    assert target.orders == [DrainOrder(600.0)]
    assert not target.stopped.is_set()


def test_its_options_reach_the_node(
    target: Target, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--deadline", "90s", "--rate", "2MiB/s", "--drop", "--stop", "--json"]
    assert main.main(["drain", "--control", address, *options]) == 0
    assert target.orders == [DrainOrder(90.0, drop=True, rate=2.0 * MIB, stop=True)]
    assert json.loads(capsys.readouterr().out)["moved"] == 9
    assert target.stopped.wait(10)


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (DrainProgress("drained", 12, 3, 7, 2, 7 * MIB, finished=True), 1),
        (DrainProgress("serving", 12, 0, 7, 0, 7 * MIB, finished=True), 1),
        (LAST, 0),
    ],
)
def test_its_status_says_whether_all_is_elsewhere(
    target: Target, address: str, last: DrainProgress, status: int
) -> None:
    target.last = last
    assert main.main(["drain", "--control", address]) == status


def test_cancelling_brings_a_node_back(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["drain", "--cancel", "--control", address]) == 0
    assert capsys.readouterr().out.startswith("The node is a member")


def test_a_drain_that_somebody_else_cancels_says_so(
    target: Target, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target.last = DrainProgress("serving", 12, 0, 7, 0, 7 * MIB, finished=True)
    assert main.main(["drain", "--control", address]) == 1
    assert capsys.readouterr().out.startswith("The drain was cancelled. The node is a member")


@pytest.mark.parametrize(
    "wrong",
    [["--deadline", "soon"], ["--deadline", "25h"], ["--rate", "0"], ["--rate", "fast"]],
)
def test_options_that_make_no_sense_are_refused(
    target: Target, address: str, wrong: list[str]
) -> None:
    assert main.main(["drain", "--control", address, *wrong]) == 2
    assert target.orders == []


def test_what_was_left_is_said() -> None:
    left = DrainProgress("drained", 12, 0, 7, 5, 7 * MIB, finished=True)
    assert sentence(left) == "Drained: others took 7 blocks (7 MiB); 5 were left."
    assert "with 12 blocks" in sentence(left, drop=True)
    assert "member" in sentence(DrainProgress("serving"))
