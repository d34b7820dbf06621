"""Both ends of sessions over a real device, for the tests here."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from rdma.transport import place_of
from rdma.verbs.client import ClientDevice, VerbsClientTransport
from rdma.verbs.driver import Driver
from rdma.verbs.memory import Arena, VerbsRegistrar
from rdma.verbs.node import VerbsNodeTransport
from rdma.verbs.settings import QueueSettings
from tests.rdma.node_memory import NodeMemory

LITTLE_AT_ONCE = QueueSettings(bytes_in_flight=256 << 10, work_bytes=64 << 10)
"""Soft-RoCE moves what is posted while it is posted, so that a call with little under way at once
is the only one that something can happen to."""


class Segment:
    """What an arena has to know of a segment."""

    def __init__(self, view: memoryview) -> None:
        self.view = view


class Segments:
    """The segments of a :class:`NodeMemory`, as the DRAM tier would have them."""

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory

    def segment(self, number: int) -> Segment:
        return Segment(self._memory.view(place_of(number, 0), self._memory.size))


class Session:
    """One session's two ends."""

    def __init__(self, node: VerbsNodeTransport, client: VerbsClientTransport) -> None:
        self.node = node
        self.client = client

    async def get(
        self, places: Sequence[int], buffers: Sequence[memoryview], seconds: float = 5
    ) -> None:
        named = self.client.destinations(buffers)
        try:
            await self.node.push(places, len(buffers[0]), named, soon(seconds))
        finally:
            self.client.done(named)

    async def put(
        self, places: Sequence[int], buffers: Sequence[memoryview], seconds: float = 5
    ) -> None:
        named = self.client.sources(buffers)
        try:
            await self.node.pull(places, len(buffers[0]), named, soon(seconds))
        finally:
            self.client.done(named)

    def close(self) -> None:
        self.client.close()
        self.node.close()


class Node:
    """A node's device and memory, and the sessions on it."""

    def __init__(self, driver: Driver, memory: NodeMemory, device: ClientDevice) -> None:
        self.driver = driver
        self.memory = memory
        self.device = device
        self.arena = Arena(VerbsRegistrar(driver.adapter, shared=False), Segments(memory))
        self._sessions: list[Session] = []

    def session(self) -> Session:
        client = VerbsClientTransport(self.device)
        node = VerbsNodeTransport(self.driver, self.arena, client.offer())
        client.accept(node.welcome())
        return self.adopt(node, client)

    def adopt(self, node: VerbsNodeTransport, client: VerbsClientTransport) -> Session:
        """Close these ends at the end of the test, too."""
        session = Session(node, client)
        self._sessions.append(session)
        return session

    def blocks(self, number: int, size: int) -> tuple[list[int], list[memoryview]]:
        """Return places of blocks of random bytes, and as many empty buffers."""
        places = self.memory.places(number, size)
        for place in places:
            self.memory.view(place, size)[:] = os.urandom(size)
        pool = memoryview(bytearray(number * size))
        return places, [pool[i * size : i * size + size] for i in range(number)]

    def same(self, places: Sequence[int], buffers: Sequence[memoryview]) -> bool:
        """Whether the buffers have the bytes of the blocks."""
        return all(
            buffer == self.memory.view(place, len(buffer))
            for place, buffer in zip(places, buffers, strict=True)
        )

    def close(self) -> None:
        for session in self._sessions:
            session.close()
        self.arena.close()


def soon(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


class Stopwatch:
    """Seconds spent within."""

    def __enter__(self) -> Stopwatch:
        self.seconds = -time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic()
