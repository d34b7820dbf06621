"""The payload step: what every way of moving blocks has to do, on the node and on the client.

The node drives. It names its memory by *places*: a place is ``segment number << 44 | offset``.
A client is told places only by ``shm``, where it maps the segments itself; otherwise it names
its own memory (``destinations``, ``sources``) and the node moves the bytes. What these sequences
of integers mean is the transport's own matter; the protocol carries them unread.

A transport is chosen once for a session and never switched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple, Protocol

from rdma.errors import TransportError

__all__ = [
    "OFFSET_MASK",
    "SEGMENT_SHIFT",
    "ClientTransport",
    "Delivery",
    "Memory",
    "NodeTransport",
    "place_of",
    "split_place",
]

SEGMENT_SHIFT: Final = 44
OFFSET_MASK: Final = (1 << SEGMENT_SHIFT) - 1


def place_of(segment: int, offset: int) -> int:
    """Return the place of the byte at ``offset`` of ``segment``."""
    return segment << SEGMENT_SHIFT | offset


def split_place(place: int) -> tuple[int, int]:
    """Return the segment number and the offset that ``place`` names."""
    return place >> SEGMENT_SHIFT, place & OFFSET_MASK


class Memory(Protocol):
    """The node's memory, as far as a transport has to know it."""

    def view(self, place: int, size: int, /) -> memoryview:
        """Return ``size`` writable bytes at ``place``."""


class Delivery(NamedTuple):
    """What the node has to answer to a ``GET``.

    Attributes:
        locations: for the client to find the blocks by, or ``None``.
        payload: to be sent behind the answer; the blocks stay pinned until it has left.
        holds: whether the client goes on reading the node's memory after the answer, so that
            the blocks stay pinned until it releases them.
    """

    locations: Sequence[int] | None
    payload: Sequence[memoryview]
    holds: bool


class NodeTransport(ABC):
    """The node's half; one for each session.

    The caller pins what it names for the time of the call, and longer as :class:`Delivery` says.
    """

    name: ClassVar[str]
    waits: ClassVar[bool] = False
    """Whether ``push`` and ``pull`` may wait; otherwise they are over at their first step."""

    @property
    def broken(self) -> TransportError | None:
        """Why nothing can be moved in this session any more; ``None`` while it can.

        A transport whose ``push`` or ``pull`` raised may be broken by it; the session then has
        to end, and the client to open another.
        """
        return None

    def welcome(self) -> dict[str, object]:
        """Return what the client must know to use the transport."""
        return {}

    def select(
        self, destinations: Sequence[int] | None, length: int, found: Sequence[int]
    ) -> Sequence[int] | None:
        """Return what of ``destinations`` is for the blocks found.

        Args:
            destinations: what the client said about the memory for all blocks it asked for.
            length: how many bytes of each block.
            found: for each of those blocks, whether it was found (anything true).

        Raises:
            BadPlace: the destinations make no sense.
        """
        return destinations

    @abstractmethod
    async def push(
        self,
        places: Sequence[int],
        length: int,
        destinations: Sequence[int] | None,
        deadline: float,
    ) -> Delivery:
        """Bring ``length`` bytes from each of ``places`` to the client.

        Args:
            places: where the bytes wanted of each block begin.
            length: how many bytes of each block.
            destinations: what the client said about its memory.
            deadline: when to give up, on the clock of the event loop.

        Raises:
            BadPlace: the destinations make no sense.
            TransportError: the bytes could not be moved.
        """

    def grant(self, places: Sequence[int]) -> Sequence[int] | None:
        """Return what the answer to ``RESERVE`` says about the blocks at ``places``."""
        return None

    @abstractmethod
    def landing(self, places: Sequence[int], length: int) -> list[memoryview] | None:
        """Return the memory that the payload behind a ``WRITE`` lands in.

        Returns:
            ``length`` writable bytes at each of ``places``; ``None`` if this transport sends no
            payload behind the request, so that one that comes is refused.
        """

    @abstractmethod
    async def pull(
        self,
        places: Sequence[int],
        length: int,
        sources: Sequence[int] | None,
        deadline: float,
    ) -> None:
        """Bring ``length`` bytes for each of ``places`` from the client, if not there yet.

        Raises:
            BadPlace: the sources make no sense.
            TransportError: the bytes could not be moved.
        """

    @abstractmethod
    def close(self) -> None:
        """End all access to the client's memory and to the node's for this session."""


class ClientTransport(ABC):
    """The client's half; one for each connection.

    All buffers are contiguous views of single bytes.
    """

    name: ClassVar[str]
    shares_memory: ClassVar[bool] = False
    """Whether blocks can be looked at where they lie (``views``)."""
    exposes_memory: ClassVar[bool] = False
    """Whether the node itself reads or writes the buffers named in a call. If such a call ends
    unanswered, only :meth:`close` makes sure that the node leaves them alone from then on."""

    def offer(self) -> dict[str, object]:
        """Return what the node must know to use the transport; travels in HELLO."""
        return {}

    def accept(self, details: dict[str, object]) -> None:  # noqa: B027 - most have nothing to do
        """Take what the node's half said of itself (``welcome``); the node has chosen this one.

        Raises:
            TransportError: the details make no sense, or the two halves cannot be joined.
        """

    def destinations(self, buffers: Sequence[memoryview]) -> Sequence[int] | None:
        """Return what ``GET`` says about the memory that the blocks are to land in."""
        return None

    @abstractmethod
    def place(self, locations: Sequence[int] | None, buffers: Sequence[memoryview]) -> None:
        """Finish a ``GET``: see to it that the bytes are in ``buffers``.

        Args:
            locations: as answered, one for each block found.
            buffers: one for each block found.

        Raises:
            BadPlace: the locations make no sense.
        """

    def sources(self, buffers: Sequence[memoryview]) -> Sequence[int] | None:
        """Return what ``WRITE`` says about the memory that the blocks come from."""
        return None

    @abstractmethod
    def fill(
        self, locations: Sequence[int] | None, offset: int, buffers: Sequence[memoryview]
    ) -> Sequence[memoryview]:
        """Begin a ``WRITE``.

        Args:
            locations: as ``RESERVE`` answered, for the blocks to be written.
            offset: first byte written of each block.
            buffers: the bytes to write, one for each block.

        Returns:
            The payload to send behind the request; empty where the bytes go another way.

        Raises:
            BadPlace: the locations make no sense.
        """

    def missing(self, locations: Sequence[int] | None) -> list[int]:
        """Return the segments that must be asked for before ``locations`` can be used."""
        return []

    def views(self, locations: Sequence[int] | None, length: int) -> list[memoryview]:
        """Return read-only views of ``length`` bytes at each of ``locations``.

        Raises:
            TransportError: this transport shares no memory.
            BadPlace: the locations make no sense.
        """
        raise TransportError(f"the {self.name} transport shares no memory")

    def extents(self, locations: Sequence[int] | None, length: int) -> list[memoryview]:
        """Return ``length`` writable bytes at each of ``locations``, to be filled for a ``WRITE``.

        Raises:
            TransportError: this transport shares no memory.
            BadPlace: the locations make no sense.
        """
        raise TransportError(f"the {self.name} transport shares no memory")

    def done(self, named: Sequence[int] | None) -> None:  # noqa: B027 - most have nothing to do
        """Take back the memory of a call that has been answered.

        Args:
            named: what :meth:`destinations` or :meth:`sources` returned for the call, itself.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back all memory and everything else that was held; may be called again."""
