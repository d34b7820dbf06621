"""The calls of CUDA's driver, against a driver that is not one: contexts, statuses, errors."""

from __future__ import annotations

import errno
import gc
import sys
from types import ModuleType
from typing import Any

import pytest

from tiers import TierConfigError
from tiers.cuda import CudaDevice

HANDLE = bytes(range(64))


class Bytes:
    def __init__(self, data: bytes) -> None:
        self.bytes = self.reserved = data


class Driver(ModuleType):
    """Answers as `cuda.bindings.driver` does: a status first.

    Attributes:
        statuses: what calls answer that do not succeed.
        calls: names and arguments of the calls made within the context.
        depth: contexts pushed and not popped.
    """

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.statuses: dict[str, int] = {}
        self.answers: dict[str, Any] = {
            "cuDeviceGetCount": 2,
            "cuDeviceGet": "device",
            "cuDevicePrimaryCtxRetain": "context",
            "cuDeviceGetUuid": Bytes(b"u" * 16),
            "cuMemAlloc": 4096,
            "cuMemHostAlloc": 8192,
            "cuStreamCreate": 5,
            "cuEventCreate": 7,
            "cuIpcGetMemHandle": Bytes(HANDLE),
        }
        self.calls: list[tuple[Any, ...]] = []
        self.depth = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            if self.depth:
                self.calls.append((name, *arguments))
            status = self.statuses.get(name, 0)
            if status or name not in self.answers:
                return (status,)
            return 0, self.answers[name]

        return call

    def cuCtxPushCurrent(self, context: str) -> tuple[int]:
        assert context == "context"
        self.depth += 1
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int]:
        self.depth -= 1
        return (0,)

    def cuMemGetInfo(self) -> tuple[int, int, int]:
        assert self.depth
        return 0, 100, 200

    def cuGetErrorString(self, status: int) -> tuple[int, bytes | None]:
        return (0, b"it went wrong") if status < 900 else (1, None)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


@pytest.fixture
def device(driver: Driver) -> CudaDevice:
    device = CudaDevice(1)
    device.open()
    device.open()
    return device


def test_everything_runs_in_the_devices_context(device: CudaDevice, driver: Driver) -> None:
    assert device.uuid() == b"u" * 16
    assert device.free_bytes() == 100
    assert device.handle(device.allocate(10)) == HANDLE
    device.release(4096)
    device.register(1, 2)
    device.unregister(1)
    device.release_host(device.allocate_host(3))
    stream = device.stream()
    device.copy(1, 2, 3, stream)
    device.copy_all([(1, 2, 3), (4, 5, 6)], stream)
    device.zero(1, 2, stream)
    event = device.record(stream)
    event.wait()
    assert event.done()
    device.end_stream(stream)
    assert driver.depth == 0
    assert driver.calls == [
        ("cuDeviceGetUuid", "device"),
        ("cuMemAlloc", 10),
        ("cuIpcGetMemHandle", 4096),
        ("cuMemFree", 4096),
        ("cuMemHostRegister", 1, 2, 1),
        ("cuMemHostUnregister", 1),
        ("cuMemHostAlloc", 3, 1),
        ("cuMemFreeHost", 8192),
        ("cuStreamCreate", 1),
        ("cuMemcpyAsync", 1, 2, 3, 5),
        ("cuMemcpyAsync", 1, 2, 3, 5),
        ("cuMemcpyAsync", 4, 5, 6, 5),
        ("cuMemsetD8Async", 1, 0, 2, 5),
        ("cuEventCreate", 3),
        ("cuEventRecord", 7, 5),
        ("cuEventSynchronize", 7),
        ("cuEventQuery", 7),
        ("cuStreamDestroy", 5),
    ]


def test_a_copy_that_is_refused_ends_the_rest(device: CudaDevice, driver: Driver) -> None:
    driver.statuses["cuMemcpyAsync"] = 1
    with pytest.raises(OSError, match="it went wrong"):
        device.copy_all([(1, 2, 3), (4, 5, 6)], 5)
    assert driver.calls == [("cuMemcpyAsync", 1, 2, 3, 5)]
    assert driver.depth == 0


def test_an_event_is_not_done_or_done_or_fails(device: CudaDevice, driver: Driver) -> None:
    event = device.record(5)
    driver.statuses["cuEventQuery"] = 600
    assert not event.done()
    driver.statuses["cuEventQuery"] = 700
    with pytest.raises(OSError, match="it went wrong"):
        event.done()
    assert driver.depth == 0


def test_an_event_goes_with_the_last_who_has_it(device: CudaDevice, driver: Driver) -> None:
    event = device.record(5)
    assert ("cuEventDestroy", 7) not in driver.calls
    del event
    gc.collect()
    assert ("cuEventDestroy", 7) in driver.calls


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(2, errno.ENOMEM, "it went wrong"), (1, errno.EIO, "it went wrong"), (999, errno.EIO, "999")],
)
def test_a_status_is_an_error(
    device: CudaDevice, driver: Driver, status: int, code: int, words: str
) -> None:
    driver.statuses["cuMemAlloc"] = status
    with pytest.raises(OSError, match=words) as caught:
        device.allocate(1)
    assert caught.value.errno == code
    assert driver.depth == 0


def test_a_handle_of_another_length_is_an_error(device: CudaDevice, driver: Driver) -> None:
    driver.answers["cuIpcGetMemHandle"] = Bytes(b"short")
    with pytest.raises(OSError, match="5 bytes"):
        device.handle(4096)


def test_a_device_that_is_not_open_can_do_nothing() -> None:
    for use in (
        CudaDevice(0).uuid,
        CudaDevice(0).stream,
        lambda: CudaDevice(0).copy_all([], 1),
        lambda: CudaDevice(0)._finished(7),
    ):
        with pytest.raises(OSError, match="not open"):
            use()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("cuInit", "there is no GPU: it went wrong"),
        ("cuDeviceGetCount", "there is no GPU: it went wrong"),
        ("cuDevicePrimaryCtxRetain", "GPU 1 can't be used: it went wrong"),
    ],
)
def test_what_is_wrong_at_the_start_is_said(driver: Driver, call: str, words: str) -> None:
    driver.statuses[call] = 100
    with pytest.raises(TierConfigError, match=words):
        CudaDevice(1).open()


@pytest.mark.parametrize("number", [2, -1])
def test_a_number_of_no_gpu_is_refused(driver: Driver, number: int) -> None:
    with pytest.raises(TierConfigError, match=f"no GPU {number}: this process sees 2"):
        CudaDevice(number).open()


def test_no_driver_is_no_gpu(driver: Driver) -> None:
    def cuInit(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    driver.cuInit = cuInit
    with pytest.raises(TierConfigError, match="there is no GPU: Failed to dlopen"):
        CudaDevice(0).open()


def test_no_package_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(TierConfigError, match=r"there is no GPU: .*cuda-bindings"):
        CudaDevice(0).open()
