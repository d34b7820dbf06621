"""A session's mappings on GPUs: they stay as long as views are in use, however it ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest

from rdma.errors import BadPlace, SegmentError
from rdma.gpu_mappings import GPU_SHIFT, GpuMappings
from rdma.gpu_segments import GpuView
from rdma.transport import place_of
from tests.rdma.test_gpu_segments import SIZE, FakeMapper, handle

NAMES = [bytes([number] * 16) for number in range(2)]
SECOND = 1 << GPU_SHIFT | 5
"""Segment 5 of GPU 1."""


class Gpu:
    """Maps with a mapper for each GPU."""

    def __init__(self) -> None:
        self.mappers = {name: FakeMapper() for name in NAMES}

    def uuid(self) -> bytes:
        return NAMES[0]

    def reaches(self) -> Sequence[bytes]:
        return NAMES

    def mapper(self, uuid: bytes) -> FakeMapper:
        return self.mappers[uuid]

    @property
    def opened(self) -> int:
        return sum(len(mapper.opened) for mapper in self.mappers.values())


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def mappings(gpu: Gpu) -> GpuMappings:
    """With a segment mapped on each GPU."""
    found = GpuMappings(gpu, NAMES)
    places = [place_of(3, 0), place_of(SECOND, 100), place_of(3, 100)]
    assert found.missing(places) == [3, SECOND]
    found.add(3, SIZE, handle(7))
    found.add(SECOND, SIZE, handle(8))
    assert found.missing(places) == []
    return found


def test_places_are_addresses_on_their_gpus(mappings: GpuMappings, gpu: Gpu) -> None:
    views = mappings.take([place_of(SECOND, 100), place_of(3, 0)], 10)
    assert views == [GpuView((8 << 32) + 100, 10), GpuView(7 << 32, 10)]
    assert [mapper.opened for mapper in gpu.mappers.values()] == [[7 << 32], [8 << 32]]


@pytest.mark.parametrize(
    "place", [place_of(3, SIZE - 9), place_of(4, 0), place_of(1 << GPU_SHIFT | 3, 0), 9 << 60]
)
def test_what_lies_outside_is_refused_and_takes_nothing(
    mappings: GpuMappings, gpu: Gpu, place: int
) -> None:
    with pytest.raises(BadPlace):
        mappings.take([place_of(3, 0), place], 10)
    mappings.close()
    assert gpu.opened == 0


def test_a_gpu_that_the_node_does_not_have(mappings: GpuMappings) -> None:
    with pytest.raises(SegmentError, match="GPU 2 of a node that has 2"):
        mappings.add(2 << GPU_SHIFT, SIZE, handle(1))


def test_nothing_is_unmapped_while_a_view_is_in_use(mappings: GpuMappings, gpu: Gpu) -> None:
    told: list[list[int]] = []
    mappings.take([place_of(3, 0)], 10)
    mappings.take([place_of(3, 0)], 10)
    mappings.close()
    mappings.when_unmapped(lambda: told.append(mappings.over))
    mappings.give_back()
    assert (gpu.opened, told, mappings.over) == (2, [], [])
    mappings.close()
    mappings.give_back()
    assert (gpu.opened, told) == (0, [[3, SECOND]])


def test_without_views_a_close_unmaps_at_once(mappings: GpuMappings, gpu: Gpu) -> None:
    told: list[list[int]] = []
    mappings.take([place_of(3, 0)], 10)
    mappings.give_back()
    mappings.close()
    assert gpu.opened == 0
    mappings.when_unmapped(lambda: told.append(mappings.over))
    assert told == [[3, SECOND]]


def test_a_closed_session_maps_and_shows_nothing(mappings: GpuMappings) -> None:
    mappings.close()
    with pytest.raises(SegmentError, match="closed"):
        mappings.take([place_of(3, 0)], 10)
    with pytest.raises(SegmentError, match="closed"):
        mappings.add(4, SIZE, handle(1))


def test_what_was_asked_for_and_never_came_is_over_too(gpu: Gpu) -> None:
    mappings = GpuMappings(gpu, NAMES)
    mappings.missing([place_of(9, 0)])
    mappings.close()
    assert mappings.over == [9]


def test_what_may_be_mapped_still_is_not_over(mappings: GpuMappings, gpu: Gpu) -> None:
    gpu.mappers[NAMES[1]].refused.add("close")
    mappings.close()
    assert mappings.over == [3]


def test_any_thread_may_give_back_the_last(mappings: GpuMappings, gpu: Gpu) -> None:
    for _ in range(64):
        mappings.take([place_of(3, 0)], 10)
    ended: list[int] = []
    mappings.close()
    mappings.when_unmapped(lambda: ended.append(gpu.opened))
    threads = [
        threading.Thread(target=lambda: [mappings.give_back() for _ in range(16)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [0]


@pytest.mark.parametrize("in_use", [True, False])
def test_the_child_of_a_fork_unmaps_nothing(mappings: GpuMappings, gpu: Gpu, in_use: bool) -> None:
    if in_use:
        mappings.take([place_of(3, 0)], 10)
    child = os.fork()
    if not child:
        mappings.close()
        if in_use:
            mappings.give_back()
        os._exit(0 if gpu.opened == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mappings.close()
    assert gpu.opened == (2 if in_use else 0)
    if in_use:
        mappings.give_back()
    assert gpu.opened == 0
