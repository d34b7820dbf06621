import gc
import weakref

import numpy
import pytest

from rdma.errors import RegionError
from rdma.region import RegionCache, address_of


class Recorder:
    def __init__(self) -> None:
        self.live: dict[int, tuple[int, int, bool]] = {}
        self.total = 0

    def register(self, address: int, length: int, writable: bool) -> object:
        self.total += 1
        self.live[self.total] = (address, length, writable)
        return self.total

    def deregister(self, registration: object) -> None:
        assert isinstance(registration, int)
        del self.live[registration]


def test_a_range_is_registered_once() -> None:
    recorder = Recorder()
    cache = RegionCache(recorder)
    memory = memoryview(bytearray(100))
    first, second = cache.acquire(memory), cache.acquire(memory[:])
    assert first is second
    assert recorder.live == {1: (address_of(memory), 100, True)}
    cache.release(first)
    assert len(cache) == 1
    cache.release(second)
    assert not recorder.live
    assert len(cache) == 0


def test_ranges_and_rights_are_told_apart() -> None:
    recorder = Recorder()
    cache = RegionCache(recorder)
    memory = memoryview(bytearray(100))
    regions = [
        cache.acquire(view) for view in (memory, memory[:50], memory[50:], memory.toreadonly())
    ]
    assert len(set(map(id, regions))) == 4
    assert [region.writable for region in regions] == [True, True, True, False]
    cache.close()
    assert not recorder.live


def test_a_region_keeps_its_memory_alive() -> None:
    cache = RegionCache()
    array = numpy.zeros(100, numpy.uint16)
    watch = weakref.ref(array)
    region = cache.acquire(memoryview(array))
    assert region.length == 200
    del array
    gc.collect()
    assert watch() is not None
    cache.release(region)
    del region
    gc.collect()
    assert watch() is None


def test_slices_stay_within_their_region() -> None:
    region = RegionCache().acquire(memoryview(bytearray(b"0123456789")))
    assert region.slice(2, 3) == b"234"
    assert region.slice(10, 0) == b""
    for offset, length in ((-1, 2), (0, 11), (10, 1), (2, -1)):
        with pytest.raises(RegionError):
            region.slice(offset, length)


def test_what_cannot_be_registered_is_refused() -> None:
    cache = RegionCache()
    for memory in (memoryview(b""), memoryview(bytearray(10))[::2]):
        with pytest.raises(RegionError):
            cache.acquire(memory)


def test_releasing_what_is_not_registered_is_an_error() -> None:
    cache = RegionCache()
    memory = memoryview(bytearray(10))
    region = cache.acquire(memory)
    cache.release(region)
    with pytest.raises(RegionError):
        cache.release(region)
    cache.acquire(memory)
    with pytest.raises(RegionError):
        cache.release(region)


def test_a_registration_that_fails_leaves_nothing() -> None:
    class Broken(Recorder):
        def register(self, address: int, length: int, writable: bool) -> object:
            raise RegionError("no more")

    cache = RegionCache(Broken())
    with pytest.raises(RegionError, match="no more"):
        cache.acquire(memoryview(bytearray(10)))
    assert len(cache) == 0
