"""A stand-in for a GPU whose memory other processes map: memfds, by handles as those of CUDA.

What is queued is done at once. Memory that has been given back is filled with dirt, so that who
still reads it finds out; what a process has unmapped, it can't read at all.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Sequence

from tests.tiers.cpu_device import DIRT, CpuDevice
from tiers.device import HANDLE_BYTES

_HANDLE = struct.Struct("<III")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _map(fd: int, size: int) -> int:
    """Map a file shared, without a descriptor that lives as long as Python's own mapping."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(address)


def name_of(number: int) -> bytes:
    """What names a stand-in by its number."""
    return b"stand-in GPU %03d" % number


class SharedDevice(CpuDevice):
    """The node's side."""

    def __init__(self, number: int = 0, total: int = 64 << 20) -> None:
        super().__init__(total)
        self.number = number
        self._fds: dict[int, int] = {}

    def uuid(self) -> bytes:
        return name_of(self.number)

    def handle(self, address: int) -> bytes:
        self.ask("handle")
        return _HANDLE.pack(os.getpid(), self._fds[address], self.live[address]).ljust(
            HANDLE_BYTES, b"\0"
        )

    def release(self, address: int) -> None:
        with self._lock:
            size = self.live[address]
            super().release(address)
            ctypes.memset(address, DIRT, size)
            os.close(self._fds.pop(address))

    def _new(self, size: int, where: dict[int, int]) -> int:
        if where is not self.live:
            return super()._new(size, where)
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, size)
        address = _map(fd, size)  # for good, so that no address is given out twice
        ctypes.memset(address, DIRT, size)
        self._fds[address] = fd
        where[address] = size
        return address

    def _queue(self, stream: int, do: Callable[[], None]) -> None:
        with self._lock:
            do()
            self._ended[stream] += 1


class SharedMapper:
    """The client's side of one GPU.

    Attributes:
        refused: names of what it refuses to do.
        opened: addresses of what is mapped, with the lengths.
    """

    def __init__(self, refused: set[str]) -> None:
        self.refused = refused
        self.opened: dict[int, int] = {}

    def open(self, handle: bytes) -> int:
        self._ask("open")
        pid, number, size = _HANDLE.unpack_from(handle)
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            address = _map(fd, size)
        finally:
            os.close(fd)
        self.opened[address] = size
        return address

    def length(self, address: int) -> int:
        return self.opened[address]

    def close(self, address: int) -> None:
        self._ask("close")
        assert _libc.munmap(address, self.opened.pop(address)) == 0

    def _ask(self, what: str) -> None:
        if what in self.refused:
            raise OSError(f"{what} refused")


class SharedGpu:
    """The GPU that a client computes on; it reaches those of ``numbers``."""

    def __init__(self, *numbers: int) -> None:
        self.refused: set[str] = set()
        self.mappers: list[SharedMapper] = []
        self._numbers = numbers or (0,)

    def uuid(self) -> bytes:
        return name_of(self._numbers[0])

    def reaches(self) -> Sequence[bytes]:
        return [name_of(number) for number in self._numbers]

    def mapper(self, uuid: bytes) -> SharedMapper:
        self.mappers.append(SharedMapper(self.refused))
        return self.mappers[-1]

    @property
    def mapped(self) -> int:
        """How many segments are mapped."""
        return sum(len(mapper.opened) for mapper in self.mappers)


def read(address: int, length: int) -> bytes:
    """What a copy from the GPU would bring now; kills the process where nothing is mapped."""
    return ctypes.string_at(address, length)
