"""A client process that stops half-way: ``python -m tests.kvstore.victim SOCKET STAGE``.

It says ``ready`` when it has come to the stage, waits for a line, and goes on from there. The test
kills it or stops it at that point.
"""

from __future__ import annotations

import hashlib
import sys

from kvstore.identity import ROOT_PARENT
from kvstore.protocol.messages import Get, Reserve, Write, request_header
from tests.kvstore.peer import BLOCK, Peer, content
from tests.kvstore.shared_peer import SharedPeer

CHAIN = [hashlib.sha256(b"victim %d" % depth).digest() for depth in range(4)]
"""The blocks that a victim works on."""


def _pause() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def _reserves(path: str) -> None:
    with Peer(path) as peer:
        peer.hello()
        peer.ask(Reserve(ROOT_PARENT, CHAIN))
        _pause()


def _sends_half(path: str) -> None:
    with Peer(path) as peer:
        peer.hello()
        number = peer.ask(Reserve(ROOT_PARENT, CHAIN))[0].reservation
        peer.ask(Write(number, [0], 0, BLOCK), content(CHAIN[0]))
        payload = b"".join(map(content, CHAIN[1:]))
        write = request_header(9, 0, Write(number, [1, 2, 3], 0, BLOCK))
        peer.send(write, payload[: len(payload) // 2], len(payload))
        _pause()


def _leases(path: str) -> None:
    with SharedPeer(path) as peer:
        peer.put(CHAIN)
        assert peer.get(CHAIN).lease
        _pause()


def _waits(path: str) -> None:
    with Peer(path) as peer:
        peer.hello()
        peer.send(request_header(9, 60_000, Get(CHAIN, wait=True)))
        _pause()


def _does_not_read(path: str) -> None:
    with Peer(path) as peer:
        peer.hello()
        peer.put(CHAIN)
        for number in range(100, 120):
            peer.send(request_header(number, 60_000, Get(CHAIN)))
        _pause()


def _writes_late(path: str) -> None:
    with SharedPeer(path) as peer:
        answer = peer.reserve(CHAIN)
        places = answer.locations or ()
        for place in places:
            peer.write(place, b"early" * 10)
        _pause()
        for place in places:
            peer.write(place, b"late" * (BLOCK // 4))
        print(peer.commit(answer.reservation, list(range(len(CHAIN)))).hex(), flush=True)
        sys.stdin.readline()


STAGES = {
    "reserves": _reserves,
    "sends half": _sends_half,
    "leases": _leases,
    "waits": _waits,
    "does not read": _does_not_read,
    "writes late": _writes_late,
}

if __name__ == "__main__":
    STAGES[sys.argv[2]](sys.argv[1])
