"""What every transport has to do, whichever way the bytes go.

A transport's own test module inherits :class:`TransportContract` and says how to make a pair of
ends. The suite plays the session between them: it carries what the ends say to each other, and
the payload where they send it inline.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import pytest

from rdma.errors import BadPlace
from rdma.transport import ClientTransport, NodeTransport
from tests.rdma.node_memory import NodeMemory

GUARD = 0xA5


@dataclass
class Pair:
    """The two ends of a session and the node's memory."""

    memory: NodeMemory
    node: NodeTransport
    client: ClientTransport

    def share(self, segment: int) -> None:
        """Give the client what it asked for with ``SEGMENTS``."""
        raise AssertionError(f"{self.client.name} asked for segment {segment}")

    def deadline(self) -> float:
        return asyncio.get_running_loop().time() + 5

    def locate(self, locations: Sequence[int] | None) -> None:
        for segment in self.client.missing(locations):
            self.share(segment)
        assert self.client.missing(locations) == []

    async def get(
        self, places: Sequence[int], buffers: Sequence[memoryview], offset: int = 0
    ) -> None:
        """Do what a client and a node do for a ``GET``."""
        length = len(buffers[0]) if buffers else 0
        delivery = await self.node.push(
            [place + offset for place in places],
            length,
            self.client.destinations(buffers),
            self.deadline(),
        )
        carry(delivery.payload, buffers if delivery.payload else ())
        self.locate(delivery.locations)
        self.client.place(delivery.locations, buffers)

    async def put(
        self, places: Sequence[int], buffers: Sequence[memoryview], offset: int = 0
    ) -> None:
        """Do what a client and a node do for a ``RESERVE`` and a ``WRITE``."""
        length = len(buffers[0]) if buffers else 0
        granted = self.node.grant(places)
        self.locate(granted)
        payload = self.client.fill(granted, offset, buffers)
        landing_places = [place + offset for place in places]
        landing = self.node.landing(landing_places, length)
        if payload:
            assert landing is not None
            carry(payload, landing)
        await self.node.pull(landing_places, length, self.client.sources(buffers), self.deadline())


def carry(payload: Sequence[memoryview], views: Sequence[memoryview]) -> None:
    """Do what the stream does with inline payload: order counts, borders don't."""
    data = b"".join(payload)
    assert len(data) == sum(map(len, views))
    for view in views:
        view[:] = data[: len(view)]
        data = data[len(view) :]


def buffers_of(number: int, size: int) -> tuple[list[bytearray], list[memoryview]]:
    """Return memory with a guard byte on either side of each buffer, and the buffers."""
    memory = [bytearray([GUARD]) * (size + 2) for _ in range(number)]
    return memory, [memoryview(item)[1 : size + 1] for item in memory]


class TransportContract:
    """The suite; a subclass provides the fixture ``pair``."""

    @pytest.fixture
    def memory(self) -> Iterator[NodeMemory]:
        with NodeMemory() as memory:
            yield memory

    def test_both_ends_have_one_name(self, pair: Pair) -> None:
        assert pair.node.name == pair.client.name
        assert isinstance(pair.node.welcome(), dict)

    @pytest.mark.parametrize("size", [1, 63, 64, 4096, 100_001])
    @pytest.mark.parametrize("number", [0, 1, 5])
    async def test_get_brings_the_bytes_and_nothing_else(
        self, pair: Pair, number: int, size: int
    ) -> None:
        places = pair.memory.places(number, size)
        for place in places:
            pair.memory.view(place, size)[:] = os.urandom(size)
        memory, buffers = buffers_of(number, size)
        await pair.get(places, buffers)
        for place, buffer, guarded in zip(places, buffers, memory, strict=True):
            assert buffer == pair.memory.view(place, size)
            assert guarded[0] == guarded[-1] == GUARD

    @pytest.mark.parametrize("size", [1, 63, 64, 4096, 100_001])
    @pytest.mark.parametrize("number", [0, 1, 5])
    async def test_put_brings_the_bytes_and_nothing_else(
        self, pair: Pair, number: int, size: int
    ) -> None:
        places = pair.memory.places(2 * number, size)[::2]
        around = pair.memory.places(2 * number, size)[1::2]
        for place in around:
            pair.memory.view(place, size)[:] = bytes([GUARD]) * size
        data = [os.urandom(size) for _ in places]
        await pair.put(places, [memoryview(item) for item in data])
        assert [bytes(pair.memory.view(place, size)) for place in places] == data
        for place in around:
            assert pair.memory.view(place, size) == bytes([GUARD]) * size

    async def test_byte_ranges_touch_their_range_only(self, pair: Pair) -> None:
        (place,) = pair.memory.places(1, 4096)
        block = pair.memory.view(place, 4096)
        block[:] = bytes([GUARD]) * 4096
        await pair.put([place], [memoryview(b"0123456789")], offset=100)
        assert block == bytes([GUARD]) * 100 + b"0123456789" + bytes([GUARD]) * 3986
        _, buffers = buffers_of(1, 4)
        await pair.get([place], buffers, offset=103)
        assert buffers[0] == b"3456"

    async def test_what_was_got_stays_when_the_node_reuses_its_memory(self, pair: Pair) -> None:
        (place,) = pair.memory.places(1, 4096)
        pair.memory.view(place, 4096)[:] = b"a" * 4096
        _, buffers = buffers_of(1, 4096)
        await pair.get([place], buffers)
        pair.memory.view(place, 4096)[:] = b"b" * 4096
        assert buffers[0] == b"a" * 4096

    async def test_many_transfers_at_once(self, pair: Pair) -> None:
        places = pair.memory.places(16, 1000)
        for number, place in enumerate(places):
            pair.memory.view(place, 1000)[:] = bytes([number]) * 1000
        batches = [buffers_of(4, 1000)[1] for _ in range(4)]
        await asyncio.gather(
            *(pair.get(places[4 * n : 4 * n + 4], batch) for n, batch in enumerate(batches))
        )
        got = [bytes(buffer) for batch in batches for buffer in batch]
        assert got == [bytes([number]) * 1000 for number in range(16)]

    async def test_any_buffer_will_do(self, pair: Pair) -> None:
        (place,) = pair.memory.places(1, 4096)
        source = numpy.arange(1024, dtype=numpy.uint32)
        await pair.put([place], [memoryview(source).cast("B")])
        target = numpy.zeros(1024, numpy.uint32)
        await pair.get([place], [memoryview(target).cast("B")])
        assert (target == source).all()

    async def test_destinations_and_sources_that_make_no_sense_are_refused(
        self, pair: Pair
    ) -> None:
        places = pair.memory.places(1, 64)
        with pytest.raises(BadPlace):
            await pair.node.push(places, 64, [1], pair.deadline())
        with pytest.raises(BadPlace):
            await pair.node.pull(places, 64, [1], pair.deadline())

    async def test_closing_twice_is_closing_once(self, pair: Pair) -> None:
        places = pair.memory.places(1, 64)
        _, buffers = buffers_of(1, 64)
        await pair.get(places, buffers)
        for _ in range(2):
            pair.client.close()
            pair.node.close()
