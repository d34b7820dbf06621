"""The ``tcp`` transport: payload travels on the session's own stream, behind the headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rdma.errors import BadPlace
from rdma.transport import ClientTransport, Delivery, Memory, NodeTransport

__all__ = ["TcpClientTransport", "TcpNodeTransport"]


def _no_places(places: Sequence[int] | None) -> None:
    if places is not None:
        raise BadPlace("the tcp transport names no memory")


class TcpNodeTransport(NodeTransport):
    """The node's half.

    Args:
        memory: where the blocks lie.
    """

    name: ClassVar[str] = "tcp"

    def __init__(self, memory: Memory) -> None:
        self._view = memory.view

    async def push(
        self,
        places: Sequence[int],
        length: int,
        destinations: Sequence[int] | None,
        deadline: float,
    ) -> Delivery:
        """Return the blocks as payload; see :meth:`NodeTransport.push`."""
        _no_places(destinations)
        view = self._view
        return Delivery(None, [view(place, length) for place in places], holds=False)

    def landing(self, places: Sequence[int], length: int) -> list[memoryview] | None:
        """Return the memory that the payload lands in."""
        view = self._view
        return [view(place, length) for place in places]

    async def pull(
        self,
        places: Sequence[int],
        length: int,
        sources: Sequence[int] | None,
        deadline: float,
    ) -> None:
        """Do nothing: the payload has landed by now."""
        _no_places(sources)

    def close(self) -> None:
        """Do nothing: the stream is the session's."""


class TcpClientTransport(ClientTransport):
    """The client's half."""

    name: ClassVar[str] = "tcp"

    def place(self, locations: Sequence[int] | None, buffers: Sequence[memoryview]) -> None:
        """Do nothing: the payload has been received into ``buffers`` by now."""
        _no_places(locations)

    def fill(
        self, locations: Sequence[int] | None, offset: int, buffers: Sequence[memoryview]
    ) -> Sequence[memoryview]:
        """Return ``buffers``, to be sent behind the request."""
        _no_places(locations)
        return buffers

    def close(self) -> None:
        """Do nothing: the stream is the client's."""
