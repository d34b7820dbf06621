"""One GPU by way of CUDA: the driver's calls, with their errors as exceptions.

All calls name their context, so that a node which uses GPU 3 takes no memory on GPU 0, and the
thread that calls is left as it was. The context is the device's primary one, which PyTorch in the
same process uses too; it stays until the process ends, since that may not be done with it.
"""

from __future__ import annotations

import errno
import weakref
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from tiers.device import HANDLE_BYTES, Event
from tiers.errors import TierConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_OUT_OF_MEMORY: Final = 2
_NOT_READY: Final = 600
_PORTABLE: Final = 1
_NON_BLOCKING: Final = 1
_SLEEP_AND_NO_TIMES: Final = 3


class CudaDevice:
    """A device of :class:`tiers.device.Device`, by the number that this process sees it under.

    Args:
        number: from 0.
    """

    granularity: int = 2 << 20
    """The driver cuts smaller allocations from pieces of this size, which a handle maps whole."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._driver: Any = None
        self._device: Any = None
        self._current: _Current | None = None

    def __repr__(self) -> str:
        return f"<CudaDevice {self._number}>"

    def open(self) -> None:
        """See :meth:`tiers.device.Device.open`."""
        if self._current is not None:
            return
        try:
            driver = import_module("cuda.bindings.driver")
            check(driver, driver.cuInit(0))
            count = check(driver, driver.cuDeviceGetCount())
        except ImportError as error:
            raise TierConfigError(
                "there is no GPU: CUDA is reached through the package cuda-bindings, which comes "
                f"with PyTorch for CUDA ({error})"
            ) from error
        except OSError as error:
            raise TierConfigError(f"there is no GPU: {error.strerror}") from error
        except RuntimeError as error:
            # As cuda-bindings says it where there is no driver to load.
            raise TierConfigError(f"there is no GPU: {error}") from error
        if not 0 <= self._number < count:
            raise TierConfigError(f"there is no GPU {self._number}: this process sees {count}")
        try:
            self._device = check(driver, driver.cuDeviceGet(self._number))
            context = check(driver, driver.cuDevicePrimaryCtxRetain(self._device))
        except OSError as error:
            raise TierConfigError(f"GPU {self._number} can't be used: {error.strerror}") from error
        self._driver = driver
        self._current = _Current(driver, context)

    def uuid(self) -> bytes:
        """See :meth:`tiers.device.Device.uuid`."""
        return bytes(self._call("cuDeviceGetUuid", self._device).bytes)

    # Memory.

    def free_bytes(self) -> int:
        """See :meth:`tiers.device.Device.free_bytes`."""
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def allocate(self, size: int) -> int:
        """See :meth:`tiers.device.Device.allocate`."""
        return int(self._call("cuMemAlloc", size))

    def release(self, address: int) -> None:
        """See :meth:`tiers.device.Device.release`."""
        self._call("cuMemFree", address)

    def handle(self, address: int) -> bytes:
        """See :meth:`tiers.device.Device.handle`."""
        handle = bytes(self._call("cuIpcGetMemHandle", address).reserved)
        if len(handle) != HANDLE_BYTES:
            raise OSError(errno.EPROTO, f"CUDA gave a handle of {len(handle)} bytes")
        return handle

    def register(self, address: int, size: int) -> None:
        """See :meth:`tiers.device.Device.register`."""
        self._call("cuMemHostRegister", address, size, _PORTABLE)

    def unregister(self, address: int) -> None:
        """See :meth:`tiers.device.Device.unregister`."""
        self._call("cuMemHostUnregister", address)

    def allocate_host(self, size: int) -> int:
        """See :meth:`tiers.device.Device.allocate_host`."""
        return int(self._call("cuMemHostAlloc", size, _PORTABLE))

    def release_host(self, address: int) -> None:
        """See :meth:`tiers.device.Device.release_host`."""
        self._call("cuMemFreeHost", address)

    # Streams.

    def stream(self) -> int:
        """See :meth:`tiers.device.Device.stream`."""
        return int(self._call("cuStreamCreate", _NON_BLOCKING))

    def end_stream(self, stream: int) -> None:
        """See :meth:`tiers.device.Device.end_stream`."""
        self._call("cuStreamDestroy", stream)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """See :meth:`tiers.device.Device.copy`."""
        self._call("cuMemcpyAsync", to, source, size, stream)

    def copy_all(self, moves: Iterable[tuple[int, int, int]], stream: int) -> None:
        """See :meth:`tiers.device.Device.copy_all`."""
        with self._context():
            queue = self._driver.cuMemcpyAsync
            for to, source, size in moves:
                check(self._driver, queue(to, source, size, stream))

    def zero(self, address: int, size: int, stream: int) -> None:
        """See :meth:`tiers.device.Device.zero`."""
        self._call("cuMemsetD8Async", address, 0, size, stream)

    def record(self, stream: int) -> Event:
        """See :meth:`tiers.device.Device.record`."""
        event = CudaEvent(self, int(self._call("cuEventCreate", _SLEEP_AND_NO_TIMES)))
        self._call("cuEventRecord", event.handle, stream)
        return event

    def _context(self) -> _Current:
        if self._current is None:
            raise OSError(errno.EBADF, "the GPU is not open")
        return self._current

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._context():
            return check(self._driver, getattr(self._driver, name)(*arguments))

    def _finished(self, event: int) -> bool:
        with self._context():
            answer = self._driver.cuEventQuery(event)
        if int(answer[0]) == _NOT_READY:
            return False
        check(self._driver, answer)
        return True

    def _destroy(self, event: int) -> None:
        if self._current is not None:
            with self._current:
                self._driver.cuEventDestroy(event)


class CudaEvent:
    """An event of CUDA. It goes when nobody has it any more.

    Attributes:
        handle: CUDA's, for a stream that is to wait for it.
    """

    __slots__ = ("__weakref__", "_device", "handle")

    def __init__(self, device: CudaDevice, handle: int) -> None:
        self._device = device
        self.handle = handle
        weakref.finalize(self, device._destroy, handle).atexit = False

    def done(self) -> bool:
        """See :meth:`tiers.device.Event.done`."""
        return self._device._finished(self.handle)

    def wait(self) -> None:
        """See :meth:`tiers.device.Event.wait`."""
        self._device._call("cuEventSynchronize", self.handle)


class _Current:
    """Makes a context the thread's for the time of a ``with``; any number of threads at once."""

    __slots__ = ("_context", "_driver")

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        check(self._driver, self._driver.cuCtxPushCurrent(self._context))

    def __exit__(self, *error: object) -> None:
        self._driver.cuCtxPopCurrent()


def check(driver: Any, answer: tuple[Any, ...]) -> Any:
    """What a call of CUDA's driver answered, beside its status.

    Raises:
        OSError: the status is an error; ``errno`` is ``ENOMEM`` where there is not enough memory.
    """
    status, *rest = answer
    code = int(status)
    if code:
        said, text = driver.cuGetErrorString(status)
        words = f"CUDA error {code}" if int(said) or not text else text.decode()
        raise OSError(errno.ENOMEM if code == _OUT_OF_MEMORY else errno.EIO, words)
    return rest[0] if len(rest) == 1 else rest
