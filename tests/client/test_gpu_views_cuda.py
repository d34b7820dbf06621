"""Blocks read where they lie on a real GPU, by other processes, however their sessions end.

Run by hand where there is one: ``scripts/gpu test_gpu_views_cuda``. The same with a stand-in, and
more of it, is in ``test_gpu_leases``.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.protocol.messages import HBM
from rdma.gpu_segments import GpuView
from tests.client.gpu_reader import block, names
from tests.client.gpu_store import BLOCK, SPACE, Reader, bring_up, put, reader, storm
from tests.cuda_reading import CudaReader
from tests.real_gpu import NEEDS_GPU
from tests.running import DaemonProcess, daemon_process, make_config, wait_for

ROOM = 64
"""Blocks that the GPU has room for, in two segments."""
HELD = ROOM // 2
PROMPT = 1


pytestmark = NEEDS_GPU


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DaemonProcess]:
    hbm = {"capacity": ROOM * BLOCK, "segment": ROOM // 2 * BLOCK}
    config = make_config(tmp_path, dram={"capacity": "64MiB", "segment": "8MiB"}, hbm=hbm)
    with daemon_process(config) as running:
        yield running


@pytest.fixture
def other(store: DaemonProcess) -> Iterator[kvstore.Client]:
    with kvstore.connect(store.url, SPACE, gpu=0, deadline=20.0) as client:
        put(client, PROMPT, HELD)
        bring_up(client, PROMPT, HELD)
        yield client


@pytest.fixture
def holder(store: DaemonProcess, other: kvstore.Client) -> Iterator[Reader]:
    with reader(store, "cuda") as process:
        yield process


def look(holder: Reader) -> list[str]:
    codes, digests = holder.ask("view", HELD, PROMPT)
    assert bytes.fromhex(codes) == bytes([HBM]) * HELD
    assert len(set(digests)) == HELD
    found: list[str] = digests
    return found


def all_room_is_back(other: kvstore.Client) -> None:
    put(other, 500, ROOM)
    bring_up(other, 500, ROOM)


def test_blocks_are_what_was_put(other: kvstore.Client) -> None:
    read = CudaReader()
    with other.view(names(HELD, PROMPT), device=True) as views:
        for at, view in enumerate(views):
            assert isinstance(view, GpuView)
            assert read(view.address, view.length) == block(PROMPT, at, BLOCK)
        assert views.valid


def test_blocks_stay_as_long_as_the_lease(holder: Reader, other: kvstore.Client) -> None:
    seen = look(holder)
    storm(other, ROOM - HELD)
    assert holder.ask("digests") == seen
    assert holder.ask("valid")
    holder.ask("release")
    all_room_is_back(other)


def test_a_client_that_is_closed_under_its_copies_waits_for_them(
    holder: Reader, other: kvstore.Client
) -> None:
    seen = look(holder)
    holder.ask("close")
    storm(other, ROOM - HELD)
    assert holder.ask("digests") == seen
    holder.ask("release")
    all_room_is_back(other)


def test_a_process_that_outlives_its_connection_reads_on(
    holder: Reader, other: kvstore.Client
) -> None:
    seen = look(holder)
    holder.ask("drop")
    wait_for(lambda: not holder.ask("valid"), 20.0)
    storm(other, ROOM - HELD)
    assert holder.ask("digests") == seen
    holder.kill()
    all_room_is_back(other)


def test_a_killed_process_gives_its_room_back(holder: Reader, other: kvstore.Client) -> None:
    look(holder)
    holder.signal(signal.SIGKILL)
    all_room_is_back(other)


def test_a_killed_node_leaves_no_fault_behind(holder: Reader, store: DaemonProcess) -> None:
    look(holder)
    store.kill()
    wait_for(lambda: not holder.ask("valid"), 20.0)
    holder.ask("digests")  # of whatever is there now; the process must live
    holder.ask("release")
