"""What the node's half gives its driver to do."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from ipaddress import IPv6Address
from types import SimpleNamespace
from typing import cast

import pytest

from rdma.transport import place_of
from rdma.verbs.driver import Driver
from rdma.verbs.handshake import Endpoint, describe
from rdma.verbs.memory import Arena, Registration
from rdma.verbs.node import VerbsNodeTransport
from rdma.verbs.plan import Work
from rdma.verbs.schedule import READ, WRITE
from rdma.verbs.settings import QueueSettings

PEER = Endpoint(17, 0, IPv6Address("::ffff:192.0.2.1"), 4096, 16)
SIZE = 4096


class Registrar:
    def register(self, address: int, length: int, writable: bool) -> Registration:
        return Registration(1, 2, address, None)

    def deregister(self, registration: object) -> None:
        pass


class Segments:
    def segment(self, number: int, /) -> SimpleNamespace:
        return SimpleNamespace(view=memoryview(mmap.mmap(-1, 2 * SIZE)))


class Queue:
    def __init__(self) -> None:
        self.moved: list[tuple[str, list[Work]]] = []
        self.pair = SimpleNamespace(pieces=1, local=PEER)

    async def move(self, kind: str, works: Sequence[Work], deadline: float) -> None:
        self.moved.append((kind, list(works)))


@pytest.fixture
def queue() -> Queue:
    return Queue()


def transport(queue: Queue, peer: Endpoint) -> VerbsNodeTransport:
    driver = SimpleNamespace(settings=QueueSettings(), connect=lambda _: queue)
    arena = Arena(Registrar(), Segments())
    return VerbsNodeTransport(cast(Driver, driver), arena, describe(peer))


PLACES = [place_of(1, 0), place_of(1, SIZE)]
NAMED = [1 << 20, 7, SIZE, 3 << 20, 8, SIZE]


@pytest.mark.parametrize(
    ("own", "read"), [(None, ((3 << 20) + SIZE - 1, 8)), ((1 << 30, 9), (1 << 30, 9))]
)
async def test_bytes_written_are_proved_to_have_arrived_before_the_answer(
    queue: Queue, own: tuple[int, int] | None, read: tuple[int, int]
) -> None:
    await transport(queue, PEER._replace(proof=own)).push(PLACES, SIZE, NAMED, 1e9)
    ((kind, works),) = queue.moved
    assert kind == WRITE
    assert [(work.remote, work.key, work.proves) for work in works] == [
        (1 << 20, 7, False),
        (3 << 20, 8, False),
        (*read, True),
    ]


async def test_bytes_read_need_no_proof(queue: Queue) -> None:
    await transport(queue, PEER).pull(PLACES, SIZE, NAMED, 1e9)
    ((kind, works),) = queue.moved
    assert kind == READ
    assert not any(work.proves for work in works)


async def test_nothing_found_is_nothing_to_prove(queue: Queue) -> None:
    await transport(queue, PEER).push([], SIZE, [], 1e9)
    assert queue.moved == [(WRITE, [])]
