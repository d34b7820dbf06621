import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from rdma.errors import BadPlace, SegmentError
from rdma.segments import SegmentMap
from rdma.transport import place_of
from tests.rdma.node_memory import NodeMemory

SIZE = 32 << 20


@pytest.fixture
def memory() -> Iterator[NodeMemory]:
    with NodeMemory(segments=2, size=SIZE) as memory:
        yield memory


@pytest.fixture
def segments() -> Iterator[SegmentMap]:
    segments = SegmentMap()
    yield segments
    segments.close()


def add(segments: SegmentMap, memory: NodeMemory, number: int, *, populate: bool = False) -> None:
    segments.add(number, os.dup(memory.fds[number]), memory.size, populate=populate)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:segment-")


def test_a_mapping_shows_what_the_node_writes(segments: SegmentMap, memory: NodeMemory) -> None:
    add(segments, memory, 2)
    memory.view(place_of(2, 64), 5)[:] = b"bytes"
    (view,) = segments.views([place_of(2, 64)], 5)
    assert view == b"bytes"
    assert view.readonly
    segments.writable(place_of(2, 64), 5)[:] = b"other"
    assert memory.view(place_of(2, 64), 5) == b"other"


def test_places_outside_are_refused(segments: SegmentMap, memory: NodeMemory) -> None:
    add(segments, memory, 1)
    for place in (place_of(2, 0), place_of(1, SIZE - 63), place_of(1, 1 << 43)):
        with pytest.raises(BadPlace):
            segments.views([place_of(1, 0), place], 64)
        with pytest.raises(BadPlace):
            segments.writable(place, 64)


def test_one_call_shows_places_of_several_segments(
    segments: SegmentMap, memory: NodeMemory
) -> None:
    add(segments, memory, 1)
    add(segments, memory, 2)
    places = [place_of(2, 64), place_of(1, SIZE - 64), place_of(2, 0)]
    for number, place in enumerate(places):
        memory.view(place, 64)[:] = bytes([number]) * 64
    assert [bytes(view) for view in segments.views(places, 64)] == [
        bytes([number]) * 64 for number in range(3)
    ]
    assert segments.views([], 64) == []
    with pytest.raises(BadPlace):
        segments.views([*places, place_of(1, SIZE - 63)], 64)


def test_a_segment_that_is_shorter_than_said_is_refused(segments: SegmentMap) -> None:
    fd = os.memfd_create("short", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    before = descriptors()
    with pytest.raises(SegmentError, match="shorter"):
        segments.add(1, fd, 8192)
    assert descriptors() == before - 1
    assert len(segments) == 0


def test_what_cannot_be_mapped_is_refused(segments: SegmentMap) -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(SegmentError):
        segments.add(1, read, 4096)


def test_adding_a_segment_twice_keeps_the_first(segments: SegmentMap, memory: NodeMemory) -> None:
    add(segments, memory, 1)
    before = descriptors()
    add(segments, memory, 1)
    assert len(segments) == 1
    assert descriptors() == before


def test_closing_leaves_nothing_behind(memory: NodeMemory) -> None:
    before = (mapped(), descriptors(), threading.active_count())
    segments = SegmentMap()
    for number in memory.fds:
        add(segments, memory, number, populate=True)
    assert segments.close() == 0
    assert (mapped(), descriptors(), threading.active_count()) == before
    assert segments.close() == 0
    with pytest.raises(SegmentError, match="closed"):
        add(segments, memory, 1)
    assert descriptors() == before[1]


def test_views_in_use_outlive_the_map(memory: NodeMemory) -> None:
    before = mapped()
    segments = SegmentMap()
    add(segments, memory, 1)
    memory.view(place_of(1, 0), 5)[:] = b"alive"
    (view,) = segments.views([place_of(1, 0)], 5)
    array = numpy.frombuffer(view, numpy.uint8)
    assert segments.close() == 1
    assert bytes(array) == b"alive"
    assert mapped() == before + 1
    del view, array
    assert mapped() == before


def resident(start: int, memory: NodeMemory) -> int:
    """Return how many KiB of the mapping at ``start`` have page tables."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(f"{start:x}-"):
            inside = True
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError("not mapped")


def test_page_tables_are_made_for_pages_that_exist(memory: NodeMemory) -> None:
    written = 20 << 20
    memory.view(place_of(1, 0), written)[:] = bytes(written)
    segments = SegmentMap()
    add(segments, memory, 1, populate=True)
    (view,) = segments.views([place_of(1, 0)], SIZE)
    start = numpy.frombuffer(view, numpy.uint8).__array_interface__["data"][0]
    patience = time.monotonic() + 10
    while resident(start, memory) < written >> 10 and time.monotonic() < patience:
        time.sleep(0.01)
    assert written >> 10 <= resident(start, memory) < SIZE >> 10
    assert os.fstat(memory.fds[1]).st_blocks * 512 < SIZE
    del view
    segments.close()
    assert not [t for t in threading.enumerate() if t.name == "kvstore-populate"]
