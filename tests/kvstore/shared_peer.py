"""A client by hand that looks at the node's memory over ``shm``."""

from __future__ import annotations

import array
import mmap
import socket
from collections.abc import Sequence
from pathlib import Path

from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.protocol.messages import (
    Get,
    GetAnswer,
    Release,
    Reserve,
    ReserveAnswer,
    Segments,
    Welcome,
    Write,
    request_header,
)
from rdma.shm import close_fds
from rdma.transport import split_place
from tests.kvstore.peer import BLOCK, NAMESPACE, Peer, content


class SharedPeer(Peer):
    """A session of the ``shm`` transport."""

    def __init__(self, path: Path | str, namespace: Namespace = NAMESPACE, shard: int = 0) -> None:
        super().__init__(path)
        self._maps: dict[int, mmap.mmap] = {}
        self.welcome: Welcome = self.hello(namespace, "shm", shard)

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def _segment(self, number: int) -> mmap.mmap:
        if number not in self._maps:
            self.send(request_header(0xFFFF, 5000, Segments([number])))
            # A look at the first byte takes the descriptors; the bytes are received as ever.
            fds = peek_fds(self.sock)
            header, _ = self.receive()
            assert header[:2] == [0xFFFF, 0], header
            self._maps[number] = mmap.mmap(fds[0], header[2][1])
            close_fds(fds)
        return self._maps[number]

    def read(self, place: int, size: int = BLOCK) -> bytes:
        """The bytes at a place of the node's memory."""
        number, offset = split_place(place)
        return self._segment(number)[offset : offset + size]

    def write(self, place: int, data: bytes) -> None:
        """Change the bytes at a place of the node's memory."""
        number, offset = split_place(place)
        self._segment(number)[offset : offset + len(data)] = data

    def reserve(self, hashes: Sequence[bytes], parent: bytes = ROOT_PARENT) -> ReserveAnswer:
        """Reserve a chain."""
        answer: ReserveAnswer = self.ask(Reserve(parent, hashes))[0]
        return answer

    def commit(self, reservation: int, indexes: list[int]) -> bytes:
        """Commit blocks that are filled."""
        committed: bytes = self.ask(Write(reservation, indexes))[0].committed
        return committed

    def put(self, hashes: Sequence[bytes], parent: bytes = ROOT_PARENT, size: int = BLOCK) -> bytes:
        """Put a chain of blocks, each filled with its hash; the verdicts."""
        answer = self.reserve(hashes, parent)
        wanted = [index for index, verdict in enumerate(answer.verdicts) if verdict == 0]
        for index, place in zip(wanted, answer.locations or (), strict=True):
            self.write(place, content(hashes[index], size))
        if wanted:
            self.commit(answer.reservation, wanted)
        return answer.verdicts

    def get(self, hashes: Sequence[bytes], *, wait: bool = False) -> GetAnswer:
        """Get a lease on blocks."""
        answer: GetAnswer = self.ask(Get(hashes, wait=wait))[0]
        return answer

    def release(self, *leases: int) -> None:
        """Give leases back."""
        self.send([0, Release.op, 0, list(leases)])


def peek_fds(sock: socket.socket) -> list[int]:
    """Take the descriptors that come with the next byte, and leave the byte."""
    size = socket.CMSG_SPACE(array.array("i").itemsize * 8)
    _, ancillary, _, _ = sock.recvmsg(1, size, socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for _, kind, rights in ancillary:
        assert kind == socket.SCM_RIGHTS
        fds.extend(array.array("i", rights))
    return fds
