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
    """The node's half: it only says where blocks lie."""

    name: ClassVar[str] = "shm"

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

    Attributes:
        segments: the segments mapped so far.
    """

    name: ClassVar[str] = "shm"
    shares_memory: ClassVar[bool] = True

    def __init__(self) -> None:
        self.segments = SegmentMap()
        self._copier = Copier()

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
        """Unmap all segments, and end what copied."""
        self._copier.close()
        self.segments.close()


def _given(locations: Sequence[int] | None) -> Sequence[int]:
    if locations is None:
        raise BadPlace("the node did not say where the blocks lie")
    return locations
