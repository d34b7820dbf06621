"""A node that is slow or wrong about its GPUs: a client reads from memory, or has a miss."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import AccessDenied
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import (
    DRAM,
    HBM,
    DeviceSegments,
    DeviceSegmentsAnswer,
    Get,
    GetAnswer,
    Release,
    Segments,
    Unmapped,
    error_header,
)
from rdma.transport import place_of
from tests.client.scripted_node import NAMESPACE, Session, scripted_node
from tests.shared_gpu import SharedDevice, SharedGpu, name_of

SIZE = 1 << 20
NAMES = [bytes([number]) * 32 for number in range(2)]
GPUS = {"transport": "shm", "details": {"gpus": [name_of(0)]}}


@pytest.fixture
def handle() -> Iterator[bytes]:
    """Of a segment of ``SIZE`` bytes."""
    device = SharedDevice()
    address = device.allocate(SIZE)
    yield device.handle(address)
    device.release(address)


def connect(url: str, gpu: SharedGpu, deadline: float = 20.0) -> kvstore.Client:
    return kvstore.connect(url, NAMESPACE, gpu=gpu, deadline=deadline)


def show_both(session: Session, handle: bytes) -> None:
    """Open the session, and show two blocks on the GPU."""
    session.welcome(**GPUS)
    for _ in range(2):
        request_id, asked = session.ask()
        if isinstance(asked, Get):
            session.answer(request_id, GetAnswer(5, bytes([HBM]) * 2, [0, 1000]))
        else:
            session.answer(request_id, DeviceSegmentsAnswer([(0, SIZE, handle)]))


def answer_memory(session: Session, request_id: int, asked: Any) -> bool:
    """Answer what is asked about memory; whether it was."""
    if isinstance(asked, Segments):
        session.answer_with_memory(request_id, asked, SIZE)
    elif isinstance(asked, Get) and not asked.device:
        session.answer(request_id, GetAnswer(7, bytes([DRAM]) * 2, [0, 1000]))
    else:
        return False
    return True


def test_a_node_too_slow_to_share_leaves_no_trace(tmp_path: Path, handle: bytes) -> None:
    said: list[Any] = []
    ended, answered = threading.Event(), threading.Event()

    def script(session: Session) -> None:
        session.welcome(**GPUS)
        try:
            while True:
                request_id, asked = session.ask()
                said.append(asked)
                if isinstance(asked, Get):
                    session.answer(request_id, GetAnswer(5, bytes([HBM]) * 2, [0, 1000]))
                elif isinstance(asked, DeviceSegments):
                    answered.wait(20)
                    with suppress(ConnectionError):
                        session.answer(request_id, DeviceSegmentsAnswer([(0, SIZE, handle)]))
        except (EOFError, ConnectionError):
            ended.set()

    gpu = SharedGpu(0)
    with scripted_node(tmp_path, script) as url:
        with connect(url, gpu) as client:
            views = client.view(NAMES, device=True, deadline=2.0)
            assert (views.found, views.failure) == (0, "deadline_exceeded")
            answered.set()
        assert ended.wait(20)
    assert gpu.mapped == 0
    assert [type(one) for one in said] == [Get, DeviceSegments, Release, Unmapped]
    assert said[2].leases == [5]
    assert said[3].numbers == [0]


async def test_a_cancelled_view_leaves_no_trace(tmp_path: Path) -> None:
    said: list[Any] = []
    asked_for, ended = threading.Event(), threading.Event()

    def script(session: Session) -> None:
        session.welcome(**GPUS)
        try:
            while True:
                request_id, asked = session.ask()
                said.append(asked)
                if isinstance(asked, Get):
                    session.answer(request_id, GetAnswer(5, bytes([HBM]) * 2, [0, 1000]))
                elif isinstance(asked, DeviceSegments):
                    asked_for.set()
        except (EOFError, ConnectionError):
            ended.set()

    gpu = SharedGpu(0)
    with scripted_node(tmp_path, script) as url:
        client = await kvstore.aconnect(url, NAMESPACE, gpu=gpu, deadline=20.0)
        async with client:
            shown = client.view(NAMES, device=True)
            task = asyncio.create_task(shown.__aenter__())
            assert await asyncio.to_thread(asked_for.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await asyncio.to_thread(ended.wait, 20)
    assert gpu.mapped == 0
    assert [type(one) for one in said] == [Get, DeviceSegments, Release, Unmapped]
    assert said[2].leases == [5]


async def test_a_node_that_dies_leaves_the_views_of_the_asyncio_client_mapped(
    tmp_path: Path, handle: bytes
) -> None:
    die = threading.Event()

    def script(session: Session) -> None:
        show_both(session, handle)
        die.wait(20)

    gpu = SharedGpu(0)
    with scripted_node(tmp_path, script) as url:
        client = await kvstore.aconnect(url, NAMESPACE, gpu=gpu, deadline=20.0)
        async with client, client.view(NAMES, device=True) as views:
            assert views.valid
            die.set()
            async with asyncio.timeout(20):
                while views.valid:
                    await asyncio.sleep(0.005)
            assert gpu.mapped == 1
        assert gpu.mapped == 0


def _refuse(session: Session, request_id: int) -> None:
    session.sock.sendall(encode(error_header(request_id, AccessDenied("no"))))


@pytest.mark.parametrize("place", [place_of(0, 0), place_of(5 << 16, 0)])
def test_what_is_not_shared_is_read_from_memory(tmp_path: Path, place: int) -> None:
    said: list[Any] = []
    ended = threading.Event()

    def script(session: Session) -> None:
        session.welcome(**GPUS)
        try:
            while True:
                request_id, asked = session.ask()
                said.append(type(asked))
                if answer_memory(session, request_id, asked):
                    continue
                if isinstance(asked, Get):
                    session.answer(request_id, GetAnswer(5, bytes([HBM]) * 2, [place, place]))
                elif isinstance(asked, DeviceSegments):
                    _refuse(session, request_id)
        except (EOFError, ConnectionError):
            ended.set()

    with scripted_node(tmp_path, script) as url:
        with connect(url, SharedGpu(0)) as client:
            for _ in range(2):
                with client.view(NAMES, device=True) as views:
                    assert views.codes == bytes([DRAM]) * 2
                    assert all(isinstance(view, memoryview) for view in views)
        assert ended.wait(20)
    assert said.count(DeviceSegments) == 1
    assert said.count(Release) >= 3


def _outside(session: Session, request_id: int) -> None:
    session.answer(request_id, GetAnswer(5, bytes([HBM]) * 2, [0, SIZE - 999]))


def _nowhere(session: Session, request_id: int) -> None:
    session.answer(request_id, GetAnswer(5, bytes([HBM]) * 2, None))


@pytest.mark.parametrize("answer", [_outside, _nowhere])
def test_places_that_are_none_break_the_connection(
    tmp_path: Path, handle: bytes, answer: Callable[[Session, int], None]
) -> None:
    ended = threading.Event()

    def script(session: Session) -> None:
        session.welcome(**GPUS)
        try:
            while True:
                request_id, asked = session.ask()
                if isinstance(asked, Get):
                    answer(session, request_id)
                elif isinstance(asked, DeviceSegments):
                    session.answer(request_id, DeviceSegmentsAnswer([(0, SIZE, handle)]))
        except (EOFError, ConnectionError):
            ended.set()

    gpu = SharedGpu(0)
    with scripted_node(tmp_path, script) as url, connect(url, gpu) as client:
        views = client.view(NAMES, device=True)
        assert (views.found, views.failure) == (0, "protocol")
        assert ended.wait(20)
        assert gpu.mapped == 0


def test_a_segment_shorter_than_the_node_says_is_not_used(tmp_path: Path, handle: bytes) -> None:
    ended = threading.Event()

    def script(session: Session) -> None:
        session.welcome(**GPUS)
        try:
            while True:
                request_id, asked = session.ask()
                if answer_memory(session, request_id, asked):
                    continue
                if isinstance(asked, Get):
                    session.answer(request_id, GetAnswer(5, bytes([HBM]) * 2, [0, 1000]))
                elif isinstance(asked, DeviceSegments):
                    session.answer(request_id, DeviceSegmentsAnswer([(0, 2 * SIZE, handle)]))
        except (EOFError, ConnectionError):
            ended.set()

    gpu = SharedGpu(0)
    with scripted_node(tmp_path, script) as url:
        with connect(url, gpu) as client, client.view(NAMES, device=True) as views:
            assert views.codes == bytes([DRAM]) * 2
        assert ended.wait(20)
    assert gpu.mapped == 0


def test_a_node_that_dies_leaves_the_views_mapped(tmp_path: Path, handle: bytes) -> None:
    die = threading.Event()

    def script(session: Session) -> None:
        show_both(session, handle)
        die.wait(20)

    gpu = SharedGpu(0)
    with scripted_node(tmp_path, script) as url, connect(url, gpu) as client:
        views = client.view(NAMES, device=True)
        assert views.valid
        die.set()
        end = time.monotonic() + 20
        while views.valid:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert not client.view(NAMES, device=True, deadline=0.1).found
        assert gpu.mapped == 1
        views.release()
        assert gpu.mapped == 0
