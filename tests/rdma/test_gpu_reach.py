"""The GPU that a process computes on, with a stand-in for CUDA's driver."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from rdma.errors import SegmentError
from rdma.gpu_reach import CudaGpu
from tests.rdma.test_gpu_segments import Driver

HANDLE = bytes(64)


class Host(Driver):
    """Three GPUs, of which the last two reach each other."""

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 3

    def cuDeviceGet(self, number: int) -> tuple[int, int]:
        return (0, number) if number < 3 else (101, -1)

    def cuDeviceCanAccessPeer(self, own: int, other: int) -> tuple[int, int]:
        assert own != other
        return 0, int({own, other} == {1, 2})


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Host:
    driver = Host()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


@pytest.mark.parametrize(("number", "reaches"), [(0, [0]), (1, [1, 2]), (2, [2, 1])])
def test_a_gpu_reaches_itself_and_its_peers(driver: Host, number: int, reaches: list[int]) -> None:
    gpu = CudaGpu(number)
    assert gpu.uuid() == bytes([number] * 16)
    assert gpu.reaches() == [bytes([each] * 16) for each in reaches]


def test_what_it_maps_it_reads_itself(driver: Host) -> None:
    gpu = CudaGpu(1)
    gpu.mapper(bytes([2] * 16)).open(HANDLE)
    assert driver.opened == [("of 1", HANDLE, 1)]


def test_a_gpu_that_is_not_there(driver: Host) -> None:
    with pytest.raises(SegmentError, match="GPU 7 can't be used: it went wrong"):
        CudaGpu(7)


def test_without_cuda_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(SegmentError, match="GPU 0 can't be used"):
        CudaGpu(0)
