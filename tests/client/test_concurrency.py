"""Many threads, many tasks, cancellation, and closing in the middle of things."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from client.blocking import MAX_LANES
from kvstore.identity import Namespace, prefix_hashes
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import GetAnswer, MatchAnswer
from rdma.shm import ShmClientTransport
from tests.client.scripted_node import NAMESPACE, Session, scripted_node
from tests.running import DaemonThread, make_config, wait_for

BLOCK = 4096


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonThread]:
    # Room for all that is put, so that a block that is missing is a block that was lost.
    room = {"capacity": "256MiB", "segment": "4MiB"}
    with DaemonThread(make_config(tmp_path_factory.mktemp("concurrency"), dram=room)) as running:
        yield running


def namespace(name: str) -> Namespace:
    return Namespace(name, "uint8", "raw", 4, BLOCK)


def chain(number: int, blocks: int = 8) -> tuple[list[bytes], Any]:
    names = prefix_hashes([number, *range(4 * blocks)], 4)
    data = np.random.default_rng(number).integers(0, 256, (len(names), BLOCK), np.uint8)
    return names, data


def in_threads(count: int, work: Any) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_many_threads_share_a_client(daemon: DaemonThread, transport: str) -> None:
    with kvstore.connect(
        daemon.url, namespace(f"threads {transport}"), transport=transport, deadline=20.0
    ) as client:

        def work(number: int) -> None:
            for turn in range(10):
                names, data = chain(100 * number + turn)
                assert client.put(names, data).stored == len(names)
                into = np.zeros_like(data)
                with client.view(names) as views:
                    assert client.get(names, into).found == len(names)
                    assert views.found == len(names)
                    assert b"".join(views) == data.tobytes()  # type: ignore[arg-type]
                assert np.array_equal(into, data)

        in_threads(8, work)
        assert 1 <= client.stats().connects <= MAX_LANES
    metrics = daemon.daemon.metrics
    wait_for(lambda: (metrics.pins, metrics.reservations, metrics.sessions) == (0, 0, 0))


def test_a_thread_that_waits_does_not_hold_up_the_one_it_waits_for(daemon: DaemonThread) -> None:
    names, data = chain(1)
    into = np.zeros_like(data)
    with kvstore.connect(daemon.url, namespace("handover"), deadline=10.0) as client:

        class Slow(list[Any]):
            """Blocks that are reserved for a while before they are filled."""

            block_bytes = BLOCK

            def __getitem__(self, index: Any) -> Any:
                reserved.set()
                waiting.wait(5)
                return super().__getitem__(index)

        reserved, waiting = threading.Event(), threading.Event()

        def work(number: int) -> None:
            if number == 0:
                assert client.put(names, Slow(data)).stored == len(names)
                return
            reserved.wait(5)
            threading.Timer(0.1, waiting.set).start()
            assert client.get(names, into, wait=True).found == len(names)

        in_threads(2, work)
    assert np.array_equal(into, data)


def test_a_thread_that_finds_no_session_free_misses_in_time(daemon: DaemonThread) -> None:
    with kvstore.connect(daemon.url, namespace("full"), deadline=10.0) as client:
        names, data = chain(1)

        def work(number: int) -> None:
            if number < MAX_LANES:
                client.get(names, np.zeros_like(data), wait=True, deadline=1.5)
                return
            time.sleep(0.3)
            began = time.monotonic()
            assert client.match(names, deadline=0.2).failure == "deadline_exceeded"
            assert time.monotonic() - began < 0.7

        # A get waits only for what is being written.
        with kvstore.connect(daemon.url, namespace("full"), deadline=10.0) as other:

            class Slow(list[Any]):
                """Blocks that take longer to fill than anybody waits."""

                block_bytes = BLOCK

                def __getitem__(self, index: Any) -> Any:
                    done.wait(5)
                    return super().__getitem__(index)

            done = threading.Event()
            writer = threading.Thread(target=other.put, args=(names, Slow(data)))
            writer.start()
            wait_for(lambda: daemon.daemon.metrics.reservations)
            in_threads(MAX_LANES + 1, work)
            done.set()
            writer.join()


def test_close_ends_calls_under_way(tmp_path: Path) -> None:
    def silent(session: Session) -> None:
        session.welcome()
        session.ask()
        session.sock.recv(1)

    with scripted_node(tmp_path, silent) as url:
        client = kvstore.connect(url, NAMESPACE, transport="tcp", deadline=30.0)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(client.match([bytes(32)])))
        thread.start()
        time.sleep(0.1)
        began = time.monotonic()
        client.close()
        thread.join(5)
        assert time.monotonic() - began < 2
        assert results[0].failure == "unavailable"


def test_views_that_outlive_their_session_are_not_valid(tmp_path: Path) -> None:
    names, data = chain(1)
    with DaemonThread(make_config(tmp_path)) as running:
        client = kvstore.connect(running.url, namespace("m"), deadline=5.0)
        client.put(names, data)
        views = client.view(names)
        other = client.view(names)
        valid = [views.valid]
        client.close()
        valid.append(views.valid)
        assert valid == [True, False]
        assert bytes(views[0] or b"") == data[0].tobytes()
        views.release()
        other.release()


def test_views_of_a_node_that_ended_are_not_valid(tmp_path: Path) -> None:
    names, data = chain(1)
    with DaemonThread(make_config(tmp_path)) as running:
        client = kvstore.connect(running.url, namespace("m"), deadline=5.0)
        client.put(names, data)
        views = client.view(names)
    assert not views.valid
    views.release()
    client.close()


async def test_many_tasks_share_a_client(daemon: DaemonThread) -> None:
    async with await kvstore.aconnect(daemon.url, namespace("tasks"), deadline=20.0) as client:

        async def work(number: int) -> None:
            for turn in range(5):
                names, data = chain(100 * number + turn)
                assert (await client.put(names, data)).stored == len(names)
                into = np.zeros_like(data)
                async with client.view(names) as views:
                    assert (await client.get(names, into)).found == len(names)
                    assert b"".join(views) == data.tobytes()  # type: ignore[arg-type]
                assert np.array_equal(into, data)

        await asyncio.gather(*(work(number) for number in range(20)))
        assert client.stats().connects == 1
    metrics = daemon.daemon.metrics
    wait_for(lambda: (metrics.pins, metrics.reservations, metrics.sessions) == (0, 0, 0))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_cancelled_tasks_leave_nothing_behind(daemon: DaemonThread, transport: str) -> None:
    big = Namespace(f"cancel {transport}", "uint8", "raw", 4, 256 << 10)
    names = prefix_hashes(range(16), 4)
    data = np.ones((4, 256 << 10), np.uint8)
    async with await kvstore.aconnect(
        daemon.url, big, transport=transport, deadline=20.0
    ) as client:
        await client.put(names, data)
        into = np.zeros_like(data)

        async def look() -> None:
            async with client.view(names):
                await asyncio.sleep(0)

        for turn in range(60):
            fresh = prefix_hashes([turn, *range(15)], 4)
            tasks = [
                asyncio.create_task(client.get(names, into)),
                asyncio.create_task(look()),
                asyncio.create_task(client.put(fresh, data)),
            ]
            for _ in range(turn % 12):
                await asyncio.sleep(0)
            if turn % 3 == 0:
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            into[:] = 7
            await asyncio.sleep(0.002)
            assert (into == 7).all()
        assert (await client.get(names, into)).found == 4
        metrics = daemon.daemon.metrics
        until = time.monotonic() + 5
        while (metrics.pins, metrics.reservations) != (0, 0):
            assert time.monotonic() < until, (metrics.pins, metrics.reservations)
            await asyncio.sleep(0.01)


async def test_answers_may_come_out_of_order(tmp_path: Path) -> None:
    def swap(session: Session) -> None:
        session.welcome()
        first, _ = session.ask()
        second, match = session.ask()
        session.answer(second, MatchAnswer(b"\2" * len(match.hashes)))
        session.sock.sendall(encode([first, 0, *GetAnswer(0, b"\2").values()], 1000) + b"a" * 1000)
        session.sock.recv(1)

    with scripted_node(tmp_path, swap) as url:
        async with await kvstore.aconnect(url, NAMESPACE, transport="tcp", deadline=5.0) as client:
            into = bytearray(1000)
            get = asyncio.create_task(client.get([bytes(32)], [into]))
            await asyncio.sleep(0.05)
            match = await client.match([bytes(32)] * 3)
            assert match.blocks == 3
            assert (await get).found == 1
            assert into == b"a" * 1000


class Held:
    """Holds up the first copy to shared memory until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        fill = ShmClientTransport.fill

        def held(*arguments: Any) -> Any:
            self.begun.set()
            assert self.go.wait(10.0)
            return fill(*arguments)

        monkeypatch.setattr(ShmClientTransport, "fill", held)


def test_memory_is_not_given_back_while_a_thread_writes_to_it(
    daemon: DaemonThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    metrics = daemon.daemon.metrics
    client = kvstore.connect(daemon.url, namespace("held"), deadline=20.0)
    names, data = chain(77)
    with ThreadPoolExecutor(2) as pool:
        put = pool.submit(client.put, names, data)
        assert held.begun.wait(10.0)
        closing = pool.submit(client.close)
        time.sleep(0.2)
        reserved = metrics.reservations
        held.go.set()
        closing.result(10.0)
        assert put.result(10.0).stored in (0, len(names))
    assert reserved == len(names)
    wait_for(lambda: (metrics.reservations, metrics.sessions) == (0, 0))


def test_memory_is_not_given_back_while_an_executor_writes_to_it(
    daemon: DaemonThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    metrics = daemon.daemon.metrics
    names, data = chain(78, blocks=80)

    async def run() -> int:
        client = await kvstore.aconnect(daemon.url, namespace("held"), deadline=20.0)
        put = asyncio.create_task(client.put(names, data))
        assert await asyncio.to_thread(held.begun.wait, 10.0)
        await client.close()
        await asyncio.sleep(0.2)
        reserved = metrics.reservations
        held.go.set()
        assert (await put).stored in (0, len(names))
        return reserved

    assert asyncio.run(run()) == len(names)
    wait_for(lambda: (metrics.reservations, metrics.sessions) == (0, 0))
