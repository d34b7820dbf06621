"""The ``shm`` transport: client and node on one host look at the same memory.

The node's segments are memfds. The client receives their file descriptors over the Unix socket
and maps them shared; from then on an answer only has to say where a block lies. The node keeps
a block pinned until the client releases it.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence
from typing import ClassVar, Final

from rdma.copy import Copier
from rdma.errors import BadPlace, SegmentError
from rdma.gpu_mappings import GpuMappings
from rdma.gpu_reach import ComputeGpu
from rdma.segments import SegmentMap
from rdma.transport import (
    SEGMENT_SHIFT,
    ClientTransport,
    Delivery,
    NodeTransport,
)

__all__ = [
    "MAX_FDS",
    "SegmentMap",
    "ShmClientTransport",
    "ShmNodeTransport",
    "close_fds",
    "receive_with_fds",
]

MAX_FDS: Final = 253
"""Most file descriptors that the kernel passes in one message."""

_ANCILLARY: Final = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
_MAX_GPUS: Final = 64
_GPU_NAME_BYTES: Final = 16


def close_fds(fds: Sequence[int]) -> None:
    """Close ``fds``."""
    for fd in fds:
        socket.close(fd)


def receive_with_fds(sock: socket.socket, buffer: memoryview) -> tuple[int, list[int]]:
    """Receive bytes and the file descriptors that came with them.

    Args:
        sock: a Unix stream socket; its timeout applies.
        buffer: where the bytes go.

    Returns:
        How many bytes came (0 at the end of the stream), and the descriptors, close-on-exec and
        the caller's to close.

    Raises:
        SegmentError: more descriptors came than could be taken; all are closed.
        OSError: as ``recvmsg`` raises it.
    """
    number, ancillary, flags, _ = sock.recvmsg_into([buffer], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
            fds.extend(received)
    if flags & socket.MSG_CTRUNC:
        close_fds(fds)
        raise SegmentError("more file descriptors came than can be taken")
    return number, fds


class ShmNodeTransport(NodeTransport):
    """The node's half: it only says where blocks lie.

    Attributes:
        gpus: names of the node's GPUs, in the order of their numbers, where the client is to be
            shown blocks on them.
    """

    name: ClassVar[str] = "shm"

    def __init__(self) -> None:
        self.gpus: list[bytes] = []

    def welcome(self) -> dict[str, object]:
        """Name the GPUs; see :meth:`NodeTransport.welcome`."""
        return {"gpus": self.gpus} if self.gpus else {}

    async def push(
        self,
        places: Sequence[int],
        length: int,
        destinations: Sequence[int] | None,
        deadline: float,
    ) -> Delivery:
        """Tell the client the places; see :meth:`NodeTransport.push`."""
        if destinations is not None:
            raise BadPlace("the shm transport takes no destinations")
        return Delivery(places, (), holds=True)

    def grant(self, places: Sequence[int]) -> Sequence[int] | None:
        """Tell the client where to write."""
        return places

    def landing(self, places: Sequence[int], length: int) -> list[memoryview] | None:
        """Return ``None``: the client writes to the segment itself."""
        return None

    async def pull(
        self,
        places: Sequence[int],
        length: int,
        sources: Sequence[int] | None,
        deadline: float,
    ) -> None:
        """Do nothing: the client has written to the segment by now."""
        if sources is not None:
            raise BadPlace("the shm transport takes no sources")

    def close(self) -> None:
        """Do nothing: what the client has mapped ends with the client."""


class ShmClientTransport(ClientTransport):
    """The client's half: it maps the node's segments.

    Args:
        gpu: that the client computes on, if it does and is to read blocks that lie on GPUs.

    Attributes:
        segments: the segments mapped so far.
        gpus: likewise of the segments on GPUs; None where the client reaches none of the node's.
    """

    name: ClassVar[str] = "shm"
    shares_memory: ClassVar[bool] = True

    def __init__(self, gpu: ComputeGpu | None = None) -> None:
        self.segments = SegmentMap()
        self.gpus: GpuMappings | None = None
        self._gpu = gpu
        self._copier = Copier()

    def offer(self) -> dict[str, object]:
        """Name the GPU; see :meth:`ClientTransport.offer`."""
        if self._gpu is None:
            return {}
        return {"gpu": self._gpu.uuid(), "gpus": list(self._gpu.reaches())}

    def accept(self, details: dict[str, object]) -> None:
        """Take the names of the node's GPUs; see :meth:`ClientTransport.accept`."""
        names = _names(details.get("gpus", []))
        if self._gpu is not None and not set(names).isdisjoint(self._gpu.reaches()):
            self.gpus = GpuMappings(self._gpu, names)

    def missing(self, locations: Sequence[int] | None) -> list[int]:
        """Return the segments among ``locations`` that are not mapped yet."""
        if locations is None:
            return []
        segments = self.segments
        return sorted(
            {place >> SEGMENT_SHIFT for place in locations}.difference(segments.numbers())
        )

    def views(self, locations: Sequence[int] | None, length: int) -> list[memoryview]:
        """Return read-only views of ``length`` bytes at each of ``locations``."""
        return self.segments.views(_given(locations), length)

    def extents(self, locations: Sequence[int] | None, length: int) -> list[memoryview]:
        """Return ``length`` writable bytes at each of ``locations``."""
        writable = self.segments.writable
        return [writable(place, length) for place in _given(locations)]

    def place(self, locations: Sequence[int] | None, buffers: Sequence[memoryview]) -> None:
        """Copy the blocks at ``locations`` to ``buffers``."""
        writable = self.segments.writable
        self._copier.copy_all(
            [
                (buffer, writable(place, len(buffer)))
                for place, buffer in zip(_given(locations), buffers, strict=True)
            ]
        )

    def fill(
        self, locations: Sequence[int] | None, offset: int, buffers: Sequence[memoryview]
    ) -> Sequence[memoryview]:
        """Copy ``buffers`` to the blocks at ``locations``; nothing is sent inline."""
        writable = self.segments.writable
        self._copier.copy_all(
            [
                (writable(place + offset, len(buffer)), buffer)
                for place, buffer in zip(_given(locations), buffers, strict=True)
            ]
        )
        return ()

    def close(self) -> None:
        """Unmap all segments, and end what copied. On GPUs, what is in use stays until it isn't."""
        self._copier.close()
        self.segments.close()
        if self.gpus is not None:
            self.gpus.close()


def _names(names: object) -> list[bytes]:
    if type(names) is not list or len(names) > _MAX_GPUS:
        raise SegmentError("the node's GPUs have no names")
    if not all(type(name) is bytes and len(name) == _GPU_NAME_BYTES for name in names):
        raise SegmentError(f"a GPU is named by {_GPU_NAME_BYTES} bytes")
    return names


def _given(locations: Sequence[int] | None) -> Sequence[int]:
    if locations is None:
        raise BadPlace("the node did not say where the blocks lie")
    return locations
