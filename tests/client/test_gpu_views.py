"""Blocks shown where they lie on a node's GPU, by both clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from client.connect import prepare
from kvstore.departures import DepartureReason
from kvstore.errors import ConfigError
from kvstore.protocol.messages import DRAM, HBM, SSD
from rdma.errors import SegmentError
from rdma.gpu_segments import GpuView
from rdma.shm import ShmClientTransport
from tests.client.gpu_reader import block, names
from tests.client.gpu_store import (
    BLOCK,
    SPACE,
    Store,
    bring_up,
    is_right,
    open_store,
    put,
)
from tests.running import wait_for
from tests.shared_gpu import SharedGpu

COUNT = 6


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as running:
        yield running


@pytest.fixture
def client(store: Store) -> Iterator[kvstore.Client]:
    with store.connect(0) as connected:
        put(connected, 1, COUNT)
        yield connected


def test_blocks_are_shown_on_the_gpu_once_they_are_there(client: kvstore.Client) -> None:
    with client.view(names(COUNT, 1), device=True) as views:
        assert views.codes == bytes([DRAM]) * COUNT
        assert all(isinstance(view, memoryview) for view in views)
        assert all(is_right(view, 1, at) for at, view in enumerate(views))
    bring_up(client, 1, COUNT)
    with client.view(names(COUNT, 1), device=True) as views:
        assert all(isinstance(view, GpuView) and len(view) == BLOCK for view in views)
        assert all(is_right(view, 1, at) for at, view in enumerate(views))
        assert views.valid
    assert list(views) == [None] * COUNT


def test_what_lies_elsewhere_comes_in_its_place(client: kvstore.Client) -> None:
    put(client, 2, COUNT)
    bring_up(client, 1, COUNT)
    wanted = [names(COUNT, 1)[0], bytes(32), names(COUNT, 2)[1], names(COUNT, 1)[2]]
    with client.view(wanted, device=True) as views:
        assert views.codes == bytes([HBM, 0, DRAM, HBM])
        assert [type(view) for view in views] == [GpuView, type(None), memoryview, GpuView]
        assert is_right(views[0], 1, 0)
        assert is_right(views[2], 2, 1)
        assert is_right(views[3], 1, 2)
        assert (views.found, views.prefix) == (3, 1)


def test_who_does_not_ask_for_it_sees_memory(client: kvstore.Client, store: Store) -> None:
    bring_up(client, 1, COUNT)
    with client.view(names(COUNT, 1)) as views:
        assert views.codes == bytes([DRAM]) * COUNT
        assert all(is_right(view, 1, at) for at, view in enumerate(views))
    into = np.zeros((COUNT, BLOCK), np.uint8)
    assert client.get(names(COUNT, 1), into).codes == bytes([DRAM]) * COUNT
    assert bytes(into[1]) == block(1, 1, BLOCK)
    for settings in ({"gpu": None}, {"gpu": SharedGpu(7)}, {"transport": "tcp"}):
        with store.connect(0, **settings) as plain:
            assert plain.exists(names(COUNT, 1)).codes == bytes([HBM]) * COUNT
            with plain.view(names(COUNT, 1), device=True) as shown:
                assert shown.codes == bytes([DRAM]) * COUNT
                assert all(is_right(view, 1, at) for at, view in enumerate(shown))


def test_a_closed_client_has_nothing_mapped(store: Store) -> None:
    gpu = SharedGpu(0)
    with store.connect(gpu=gpu) as client:
        put(client, 1, COUNT)
        bring_up(client, 1, COUNT)
        assert gpu.mapped == store.sharers == 1
    assert gpu.mapped == 0
    wait_for(lambda: not store.sharers)
    assert not store.departing


def test_views_in_use_hold_up_what_a_close_unmaps(store: Store) -> None:
    gpu = SharedGpu(0)
    with store.connect(gpu=gpu) as client:
        put(client, 1, COUNT)
        bring_up(client, 1, COUNT)
        first = client.view(names(COUNT, 1), device=True)
        second = client.view(names(COUNT, 1), device=True)
        addresses = list(first)
    assert gpu.mapped == 1
    assert not first.valid
    first.release()
    first.release()
    assert gpu.mapped == store.sharers == 1
    assert all(is_right(view, 1, at) for at, view in enumerate(addresses))
    second.release()
    assert gpu.mapped == 0
    wait_for(lambda: not store.sharers)
    assert not store.departing


def test_what_cannot_be_mapped_is_read_from_memory(store: Store) -> None:
    gpu = SharedGpu(0)
    with store.connect(0) as other:
        put(other, 1, COUNT)
        bring_up(other, 1, COUNT)
        gpu.refused.add("open")
        with store.connect(gpu=gpu) as client:
            for _ in range(2):
                with client.view(names(COUNT, 1), device=True) as views:
                    assert views.codes == bytes([DRAM]) * COUNT
                    assert all(is_right(view, 1, at) for at, view in enumerate(views))
            wait_for(lambda: not store.daemon.node.metrics.pins)
            assert len(gpu.mappers) == 1


def test_what_cannot_be_unmapped_stays_the_process(store: Store) -> None:
    gpu = SharedGpu(0)
    with store.connect(gpu=gpu) as client:
        put(client, 1, COUNT)
        bring_up(client, 1, COUNT)
        gpu.refused.add("close")
    wait_for(lambda: store.departing == 1)
    assert store.sharers == 1


def test_a_gpu_that_shares_nothing_is_out_of_use(client: kvstore.Client, store: Store) -> None:
    store.devices[0].refused.add("handle")

    def failed() -> bool:
        with client.view(names(COUNT, 1), device=True) as views:
            assert views.codes == bytes([DRAM]) * COUNT
            assert all(is_right(view, 1, at) for at, view in enumerate(views))
        return bool(store.gpus.failed())

    wait_for(failed, 20.0)


def test_where_blocks_are_compared_none_is_shown_on_a_gpu(tmp_path: Path) -> None:
    with (
        open_store(tmp_path, policy={"integrity": "always"}) as store,
        store.connect(0) as client,
    ):
        put(client, 1, COUNT)
        for _ in range(3):
            with client.view(names(COUNT, 1), device=True) as views:
                assert views.codes == bytes([DRAM]) * COUNT
        assert len(store.gpus.copies) == 0


def test_each_client_sees_the_gpus_that_it_reaches(tmp_path: Path) -> None:
    with (
        open_store(tmp_path, 2) as store,
        store.connect(0) as first,
        store.connect(1) as second,
        store.connect(1, 0) as both,
    ):
        put(first, 1, COUNT)
        put(first, 2, COUNT)
        bring_up(first, 1, COUNT)
        bring_up(second, 2, COUNT)
        wanted = [names(COUNT, 1)[0], names(COUNT, 2)[0]]
        for client, codes in ((first, [HBM, DRAM]), (second, [DRAM, HBM]), (both, [HBM, HBM])):
            with client.view(wanted, device=True) as views:
                assert list(views.codes) == codes
                assert is_right(views[0], 1, 0)
                assert is_right(views[1], 2, 0)


def test_blocks_come_from_ssd_and_gpu_together(tmp_path: Path) -> None:
    with (
        open_store(
            tmp_path,
            dram={"capacity": "4MiB", "segment": "2MiB"},
            ssd={"capacity": "64MiB", "directory": str(tmp_path / "ssd"), "region": "2MiB"},
        ) as store,
        store.connect(0) as client,
    ):
        put(client, 1, COUNT)
        bring_up(client, 1, 3)
        node, movement = store.daemon.node, store.daemon.movement
        assert movement is not None
        store.call(movement.flush, float("inf"))

        def leave_dram() -> None:
            (shard,) = node.index.shards
            for name in reversed(names(COUNT, 1)):
                node.evict(shard.committed[name], DepartureReason.CAPACITY)

        wait_for(lambda: not node.metrics.pins)
        store.call(leave_dram)
        with client.view(names(COUNT, 1), device=True) as views:
            assert list(views.codes) == [HBM] * 3 + [SSD] * 3
            assert all(is_right(view, 1, at) for at, view in enumerate(views))
        wait_for(lambda: not node.metrics.pins)


def test_a_gpu_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="GPU 99"):
        prepare("unix:///nowhere", SPACE, gpu=99)


@pytest.mark.parametrize("gpu", ["cuda:0", "0", b"0", True, 0.0, object()])
def test_a_gpu_is_named_by_its_number_alone(gpu: Any) -> None:
    with pytest.raises(ConfigError, match="gpu must be the number of a GPU, such as 0 for cuda:0"):
        prepare("unix:///nowhere", SPACE, gpu=gpu)


async def test_the_asyncio_client_shows_them_too(client: kvstore.Client, store: Store) -> None:
    bring_up(client, 1, COUNT)
    gpu = SharedGpu(0)
    twin = await kvstore.aconnect(store.url, SPACE, gpu=gpu, deadline=20.0)
    async with twin, twin.view(names(COUNT, 1), device=True) as views:
        assert views.codes == bytes([HBM]) * COUNT
        assert all(is_right(view, 1, at) for at, view in enumerate(views))
        async with twin.view(names(COUNT, 1)) as plain:
            assert plain.codes == bytes([DRAM]) * COUNT
        await twin.close()
        assert not views.valid
        assert gpu.mapped == 1
        assert all(is_right(view, 1, at) for at, view in enumerate(views))
    assert gpu.mapped == 0
    client.close()
    wait_for(lambda: not store.sharers)
    assert not store.departing


@pytest.mark.parametrize("gpus", ["none", [b"short"], [bytes(16)] * 65, {}])
def test_names_that_are_none_are_refused(gpus: Any) -> None:
    transport = ShmClientTransport(SharedGpu(0))
    with pytest.raises(SegmentError):
        transport.accept({"gpus": gpus})
    transport.close()
