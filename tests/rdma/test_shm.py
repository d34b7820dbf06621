import os
import socket
from collections.abc import Iterator

import pytest

from rdma.errors import BadPlace, SegmentError
from rdma.shm import (
    ShmClientTransport,
    ShmNodeTransport,
    close_fds,
    receive_with_fds,
)
from rdma.transport import place_of
from tests.rdma.node_memory import NodeMemory
from tests.rdma.transport_contract import Pair, TransportContract


class ShmPair(Pair):
    client: ShmClientTransport

    def share(self, segment: int) -> None:
        self.client.segments.add(segment, os.dup(self.memory.fds[segment]), self.memory.size)


class TestShm(TransportContract):
    @pytest.fixture
    def pair(self, memory: NodeMemory) -> Iterator[ShmPair]:
        pair = ShmPair(memory, ShmNodeTransport(), ShmClientTransport())
        yield pair
        pair.client.close()
        pair.node.close()

    async def test_views_are_the_nodes_memory_itself(self, pair: Pair) -> None:
        places = pair.memory.places(3, 64)
        delivery = await pair.node.push(places, 64, None, pair.deadline())
        assert delivery.holds
        assert not delivery.payload
        pair.locate(delivery.locations)
        views = pair.client.views(delivery.locations, 64)
        pair.memory.view(places[1], 64)[0] = 7
        assert views[1][0] == 7
        assert all(view.readonly for view in views)

    def test_extents_are_the_nodes_memory_itself(self, pair: Pair) -> None:
        places = pair.memory.places(3, 64)
        locations = pair.node.grant(places)
        pair.locate(locations)
        pair.client.extents(locations, 64)[1][:] = bytes([7]) * 64
        assert [bytes(pair.memory.view(place, 64)) == b"\7" * 64 for place in places] == [
            False,
            True,
            False,
        ]
        with pytest.raises(BadPlace):
            pair.client.extents(None, 64)

    def test_no_payload_follows_a_write(self, pair: Pair) -> None:
        assert pair.node.landing([1], 64) is None

    def test_a_client_has_to_be_told_places(self, pair: Pair) -> None:
        assert pair.client.missing(None) == []
        with pytest.raises(BadPlace):
            pair.client.place(None, [])
        with pytest.raises(BadPlace):
            pair.client.fill(None, 0, [])
        with pytest.raises(BadPlace):
            pair.client.views(None, 64)

    def test_missing_segments_are_named_once(self, pair: ShmPair) -> None:
        locations = [place_of(2, 0), place_of(1, 0), place_of(2, 64)]
        assert pair.client.missing(locations) == [1, 2]
        pair.share(1)
        assert pair.client.missing(locations) == [2]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for sock in pair:
        sock.close()


Sockets = tuple[socket.socket, socket.socket]


def test_file_descriptors_come_with_their_bytes(sockets: Sockets) -> None:
    left, right = sockets
    read, write = os.pipe()
    socket.send_fds(left, [b"hello"], [read, write])
    buffer = bytearray(100)
    number, fds = receive_with_fds(right, memoryview(buffer))
    assert buffer[:number] == b"hello"
    assert len(fds) == 2
    assert not any(map(os.get_inheritable, fds))
    os.write(fds[1], b"x")
    assert os.read(read, 1) == b"x"
    close_fds([*fds, read, write])


def test_bytes_come_without_file_descriptors_too(sockets: Sockets) -> None:
    left, right = sockets
    left.send(b"hi")
    assert receive_with_fds(right, memoryview(bytearray(9))) == (2, [])
    left.close()
    assert receive_with_fds(right, memoryview(bytearray(9))) == (0, [])


def test_no_descriptor_is_left_where_they_cannot_be_taken(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = sockets
    monkeypatch.setattr("rdma.shm._ANCILLARY", socket.CMSG_SPACE(8))
    read, write = os.pipe()
    socket.send_fds(left, [b"hello"], [read, write, read, write, read])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SegmentError):
        receive_with_fds(right, memoryview(bytearray(9)))
    assert len(os.listdir("/proc/self/fd")) == before
    close_fds([read, write])
