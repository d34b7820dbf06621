"""The client's mappings of a node's segments on a GPU, by the handles that CUDA shares them with.

A mapping is memory of the GPU in this process: the engine copies from it in its own streams. Who
closes it has waited for those copies. The node counts on that, and on the end of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol

from rdma.errors import BadPlace, SegmentError
from rdma.transport import OFFSET_MASK, SEGMENT_SHIFT

__all__ = ["HANDLE_BYTES", "CudaMapper", "GpuSegmentMap", "GpuView", "Mapper", "checked"]

HANDLE_BYTES: Final = 64
"""Length of a handle."""

_LAZY_PEER_ACCESS: Final = 1


@dataclass(frozen=True, slots=True)
class GpuView:
    """A block where it lies on a GPU, to be read by copies that this process queues.

    Attributes:
        address: of its first byte, in the address space of the GPU that this process computes on.
        length: number of bytes.
    """

    address: int
    length: int

    def __len__(self) -> int:
        return self.length


class Mapper(Protocol):
    """What maps memory of a device that another process shares. Any thread may call it."""

    def open(self, handle: bytes) -> int:
        """Map an allocation: its address in this process.

        Raises:
            OSError: it can't be mapped; the message says why.
        """

    def length(self, address: int) -> int:
        """Bytes of the allocation mapped at an address.

        Raises:
            OSError: nothing is mapped there.
        """

    def close(self, address: int) -> None:
        """Undo one ``open``.

        Raises:
            OSError: nothing is mapped there.
        """


class CudaMapper:
    """Maps memory of the GPU of a name, in the context that PyTorch uses.

    Where the engine computes on another GPU, that one reaches the mapping by NVLink or PCIe, if it
    can at all.

    Args:
        uuid: 16 bytes that name the GPU on which the segments are.
        number: the GPU that is to read and write them, as this process numbers it; None: the same.

    Raises:
        SegmentError: there is no CUDA here, or this process does not see the GPU.
    """

    def __init__(self, uuid: bytes, number: int | None = None) -> None:
        try:
            self._driver: Any = import_module("cuda.bindings.driver")
            self._check(self._driver.cuInit(0))
            own = self._find(uuid)
            device = own if number is None else self._check(self._driver.cuDeviceGet(number))
            self._context = self._check(self._driver.cuDevicePrimaryCtxRetain(device))
        except (ImportError, OSError, RuntimeError) as error:
            # A RuntimeError is how cuda-bindings says that there is no driver to load.
            raise SegmentError(f"a node's GPU can't be reached: {error}") from error

    def open(self, handle: bytes) -> int:
        """See ``Mapper.open``."""
        shared = self._driver.CUipcMemHandle()
        shared.reserved = handle
        return int(self._call("cuIpcOpenMemHandle", shared, _LAZY_PEER_ACCESS))

    def length(self, address: int) -> int:
        """See ``Mapper.length``."""
        start, length = self._call("cuMemGetAddressRange", address)
        return int(length) - (address - int(start))

    def close(self, address: int) -> None:
        """See ``Mapper.close``."""
        self._call("cuIpcCloseMemHandle", address)

    def _find(self, uuid: bytes) -> Any:
        for number in range(self._check(self._driver.cuDeviceGetCount())):
            device = self._check(self._driver.cuDeviceGet(number))
            if bytes(self._check(self._driver.cuDeviceGetUuid(device)).bytes) == uuid:
                return device
        raise OSError(f"GPU {uuid.hex()} is none that this process sees")

    def _call(self, name: str, *arguments: Any) -> Any:
        self._check(self._driver.cuCtxPushCurrent(self._context))
        try:
            return self._check(getattr(self._driver, name)(*arguments))
        finally:
            self._driver.cuCtxPopCurrent()

    def _check(self, answer: tuple[Any, ...]) -> Any:
        return checked(self._driver, answer)


def checked(driver: Any, answer: tuple[Any, ...]) -> Any:
    """What a call of CUDA's driver answered.

    Raises:
        OSError: an error.
    """
    status, *rest = answer
    if int(status):
        _, text = driver.cuGetErrorString(status)
        raise OSError(text.decode() if text else f"CUDA error {int(status)}")
    return rest[0] if len(rest) == 1 else rest


class GpuSegmentMap:
    """The segments of one node's GPU that this client has mapped, by number. Any thread may use it.

    Args:
        mapper: maps them.
    """

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper
        self._lock = threading.Lock()
        self._mapped: dict[int, tuple[int, int]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._mapped)

    def numbers(self) -> Sequence[int]:
        """The numbers of the segments mapped."""
        return list(self._mapped)

    def add(self, number: int, handle: bytes, size: int) -> int:
        """Map a segment, if it is not mapped yet; its address.

        Args:
            number: the node's number of it.
            handle: ``HANDLE_BYTES``.
            size: its size in bytes, as the node said.

        Raises:
            SegmentError: it can't be mapped, is shorter than ``size``, or the map is closed.
        """
        if len(handle) != HANDLE_BYTES:
            raise SegmentError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        with self._lock:
            if self._closed:
                raise SegmentError("the connection is closed")
            if number not in self._mapped:
                self._mapped[number] = self._open(handle, size), size
            return self._mapped[number][0]

    def address(self, place: int, length: int) -> int:
        """The address of ``length`` bytes at ``place``.

        Raises:
            BadPlace: they lie outside the segments mapped.
        """
        start, size = self._mapped.get(place >> SEGMENT_SHIFT, (0, 0))
        offset = place & OFFSET_MASK
        if not 0 < length <= size - offset:
            raise BadPlace("a block lies outside the segments mapped")
        return start + offset

    def remove(self, number: int) -> None:
        """Unmap a segment, from which no copy is under way any more; again does nothing.

        Raises:
            SegmentError: the GPU refuses; the mapping is not used any more all the same.
        """
        with self._lock:
            mapped = self._mapped.pop(number, None)
        if mapped is not None:
            try:
                self._mapper.close(mapped[0])
            except OSError as error:
                raise SegmentError(f"segment {number} is not unmapped: {error}") from error

    def close(self) -> None:
        """Unmap everything, and map nothing any more; may be called again.

        Raises:
            SegmentError: see ``remove``; the rest is unmapped.
        """
        with self._lock:
            self._closed = True
        failed: SegmentError | None = None
        for number in self.numbers():
            try:
                self.remove(number)
            except SegmentError as error:
                failed = error
        if failed is not None:
            raise failed

    def _open(self, handle: bytes, size: int) -> int:
        try:
            address = self._mapper.open(handle)
            try:
                # Beyond its end, the GPU would fail the whole engine.
                if self._mapper.length(address) < size:
                    raise SegmentError(f"a segment of {size} bytes is shorter than the node said")
            except BaseException:
                self._mapper.close(address)
                raise
        except OSError as error:
            raise SegmentError(f"a segment on a GPU can't be mapped: {error}") from error
        return address
