"""The client's mappings of a node's segments on a GPU, with a mapper that maps nothing."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rdma.errors import BadPlace, SegmentError
from rdma.gpu_segments import HANDLE_BYTES, CudaMapper, GpuSegmentMap
from rdma.transport import SEGMENT_SHIFT

SIZE = 1 << 21


def handle(number: int) -> bytes:
    return number.to_bytes(HANDLE_BYTES, "little")


class FakeMapper:
    """Gives out addresses. `opened` are those that are mapped; `refused` what it does not do."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.refused: set[str] = set()

    def ask(self, what: str) -> None:
        if what in self.refused:
            raise OSError(f"{what} refused")

    def open(self, handle: bytes) -> int:
        self.ask("open")
        address = int.from_bytes(handle, "little") << 32
        self.opened.append(address)
        return address

    def length(self, address: int) -> int:
        self.ask("length")
        return SIZE

    def close(self, address: int) -> None:
        self.opened.remove(address)
        self.ask("close")


@pytest.fixture
def mapper() -> FakeMapper:
    return FakeMapper()


@pytest.fixture
def segments(mapper: FakeMapper) -> GpuSegmentMap:
    return GpuSegmentMap(mapper)


def test_places_are_addresses(segments: GpuSegmentMap, mapper: FakeMapper) -> None:
    assert segments.add(3, handle(7), SIZE) == 7 << 32
    assert segments.add(3, handle(7), SIZE) == 7 << 32
    segments.add(4, handle(9), SIZE // 2)
    assert len(mapper.opened) == len(segments) == 2
    assert segments.address((3 << SEGMENT_SHIFT) + 100, SIZE - 100) == (7 << 32) + 100
    assert segments.address(4 << SEGMENT_SHIFT, SIZE // 2) == 9 << 32


@pytest.mark.parametrize(
    ("place", "length"),
    [
        (3 << SEGMENT_SHIFT, SIZE + 1),
        ((3 << SEGMENT_SHIFT) + SIZE, 1),
        ((3 << SEGMENT_SHIFT) + 1, SIZE),
        (3 << SEGMENT_SHIFT, 0),
        (3 << SEGMENT_SHIFT, -1),
        (2 << SEGMENT_SHIFT, 1),
        (-1, 1),
    ],
)
def test_what_lies_outside_is_refused(segments: GpuSegmentMap, place: int, length: int) -> None:
    segments.add(3, handle(7), SIZE)
    with pytest.raises(BadPlace):
        segments.address(place, length)


@pytest.mark.parametrize("length", [0, 63, 65, 1 << 20])
def test_a_handle_has_one_length(segments: GpuSegmentMap, mapper: FakeMapper, length: int) -> None:
    with pytest.raises(SegmentError, match="64 bytes"):
        segments.add(1, bytes(length), SIZE)
    assert not mapper.opened


@pytest.mark.parametrize("step", ["open", "length"])
def test_what_can_not_be_mapped_is_not_kept(
    segments: GpuSegmentMap, mapper: FakeMapper, step: str
) -> None:
    mapper.refused.add(step)
    with pytest.raises(SegmentError, match="refused"):
        segments.add(1, handle(1), SIZE)
    assert not mapper.opened
    assert len(segments) == 0
    mapper.refused.clear()
    assert segments.add(1, handle(1), SIZE) == 1 << 32


def test_a_segment_shorter_than_the_node_says_is_refused(
    segments: GpuSegmentMap, mapper: FakeMapper
) -> None:
    with pytest.raises(SegmentError, match="shorter"):
        segments.add(1, handle(1), SIZE + 1)
    assert not mapper.opened


def test_removing_unmaps_once(segments: GpuSegmentMap, mapper: FakeMapper) -> None:
    segments.add(1, handle(1), SIZE)
    segments.add(2, handle(2), SIZE)
    segments.remove(1)
    segments.remove(1)
    assert mapper.opened == [2 << 32]
    assert list(segments.numbers()) == [2]
    with pytest.raises(BadPlace):
        segments.address(1 << SEGMENT_SHIFT, 1)


def test_closing_unmaps_all_even_after_an_error(
    segments: GpuSegmentMap, mapper: FakeMapper
) -> None:
    for number in range(1, 4):
        segments.add(number, handle(number), SIZE)
    mapper.refused.add("close")
    with pytest.raises(SegmentError, match="close refused"):
        segments.close()
    assert not mapper.opened
    segments.close()
    with pytest.raises(SegmentError, match="closed"):
        segments.add(4, handle(4), SIZE)


# CUDA's calls.


class Driver(ModuleType):
    """Two GPUs, as `cuda.bindings.driver` shows them; `context` is the one that is current."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.context: str | None = None
        self.opened: list[tuple[str | None, bytes, int]] = []
        self.closed: list[int] = []
        self.status = 0

    def CUipcMemHandle(self) -> SimpleNamespace:
        return SimpleNamespace(reserved=b"")

    def cuInit(self, flags: int) -> tuple[int]:
        return (self.status,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 2

    def cuDeviceGet(self, number: int) -> tuple[int, int]:
        return 0, number

    def cuDeviceGetUuid(self, device: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(bytes=bytes([device] * 16))

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, str]:
        return 0, f"of {device}"

    def cuCtxPushCurrent(self, context: str) -> tuple[int]:
        self.context = context
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, str | None]:
        self.context, popped = None, self.context
        return 0, popped

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[int, int]:
        self.opened.append((self.context, handle.reserved, flags))
        return self.status, 1 << 40

    def cuIpcCloseMemHandle(self, address: int) -> tuple[int]:
        self.closed.append(address)
        return (0,)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        return 0, address - 100, 1100

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, b"it went wrong"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


@pytest.mark.parametrize(("number", "context"), [(None, "of 1"), (0, "of 0")])
def test_cuda_maps_for_the_gpu_that_computes(
    driver: Driver, number: int | None, context: str
) -> None:
    mapper = CudaMapper(bytes([1] * 16), number)
    assert mapper.open(handle(5)) == 1 << 40
    assert driver.opened == [(context, handle(5), 1)]
    assert mapper.length(1 << 40) == 1000
    mapper.close(1 << 40)
    assert driver.closed == [1 << 40]
    assert driver.context is None


def test_a_gpu_that_is_not_seen_can_not_be_reached(driver: Driver) -> None:
    with pytest.raises(SegmentError, match="0505.* none that this process sees"):
        CudaMapper(bytes([5] * 16))


def test_cudas_errors_are_said(driver: Driver) -> None:
    mapper = CudaMapper(bytes(16))
    driver.status = 1
    with pytest.raises(SegmentError, match="it went wrong"):
        GpuSegmentMap(mapper).add(1, handle(1), 1000)
    assert driver.context is None
    with pytest.raises(SegmentError, match="it went wrong"):
        CudaMapper(bytes(16))


def test_no_package_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SegmentError, match="can't be reached"):
        CudaMapper(bytes(16))
