"""The node's half of the ``rdma`` transport: it writes to the client's memory and reads from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rdma.errors import BadPlace, TransportError
from rdma.transport import Delivery, NodeTransport
from rdma.verbs.driver import Driver
from rdma.verbs.errors import QueueBroken
from rdma.verbs.handshake import describe, parse
from rdma.verbs.memory import Arena
from rdma.verbs.plan import Work, plan, proof, select
from rdma.verbs.schedule import READ, WRITE

__all__ = ["VerbsNodeTransport"]


class VerbsNodeTransport(NodeTransport):
    """The node's half; one queue pair.

    Args:
        driver: the device.
        arena: the node's memory, registered with it.
        offer: what the client said in HELLO (``VerbsClientTransport.offer``).

    Raises:
        HandshakeError: the offer makes no sense, or the client can't be reached.
        DeviceError: the device refused.
    """

    name: ClassVar[str] = "rdma"
    waits: ClassVar[bool] = True

    def __init__(self, driver: Driver, arena: Arena, offer: Mapping[str, object]) -> None:
        self._arena = arena
        self._settings = driver.settings
        remote = parse(offer)
        self._proof = remote.proof
        self._queue = driver.connect(remote)

    @property
    def broken(self) -> TransportError | None:
        """Why the queue pair is no more, if so."""
        return self._queue.error

    def welcome(self) -> dict[str, object]:
        """Return what the client needs to connect its end."""
        return describe(self._queue.pair.local)

    def select(
        self, destinations: Sequence[int] | None, length: int, found: Sequence[int]
    ) -> Sequence[int] | None:
        """Return the triples of the blocks found; see :meth:`NodeTransport.select`."""
        return select(_given(destinations), length, found)

    async def push(
        self,
        places: Sequence[int],
        length: int,
        destinations: Sequence[int] | None,
        deadline: float,
    ) -> Delivery:
        """Write the blocks to the client's memory; see :meth:`NodeTransport.push`."""
        works = await self._plan(places, length, destinations, deadline)
        if works:
            works.append(proof(works, self._arena.landing, self._proof))
        await self._queue.move(WRITE, works, deadline)
        return Delivery(None, (), holds=False)

    def landing(self, places: Sequence[int], length: int) -> list[memoryview] | None:
        """Return ``None``: no payload follows a request."""
        return None

    async def pull(
        self,
        places: Sequence[int],
        length: int,
        sources: Sequence[int] | None,
        deadline: float,
    ) -> None:
        """Read the blocks from the client's memory; see :meth:`NodeTransport.pull`."""
        works = await self._plan(places, length, sources, deadline)
        await self._queue.move(READ, works, deadline)

    def close(self) -> None:
        """Destroy the queue pair: nothing touches either side's memory for it any more."""
        self._queue.fail(QueueBroken("the session is closed"))

    async def _plan(
        self, places: Sequence[int], length: int, named: Sequence[int] | None, deadline: float
    ) -> list[Work]:
        located = self._arena.locate(places)
        if located is None:
            located = await self._arena.prepare(places, deadline)
        return plan(
            located,
            length,
            _given(named),
            most_pieces=self._queue.pair.pieces,
            most_bytes=self._settings.work_bytes,
        )


def _given(named: Sequence[int] | None) -> Sequence[int]:
    if named is None:
        raise BadPlace("the rdma transport has to be told the client's memory")
    return named
