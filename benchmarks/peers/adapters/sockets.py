"""A raw blocking socket and a process that keeps what it is sent: the limit of TCP.

``python -m benchmarks.peers.adapters.sockets`` is that process: it prints its port, serves one
connection after the other, and ends with its stdin.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Final

import numpy as np

from benchmarks.peer import receive_exactly
from benchmarks.peers import adapter

_ORDER: Final = struct.Struct("<cQQQ")
"""``P`` or ``G``, first slot, number of slots, bytes of one."""
_DONE: Final = b"+"
SLOT_BYTES: Final = 1 << 30
"""Memory of the process that keeps; the slots begin anew where it ends."""


class Adapter(adapter.Adapter):
    """Knows itself which slots of the other side hold a key.

    Settings: ``port``, where that listens.
    """

    def open(self, settings: Mapping[str, str]) -> None:
        """Connect."""
        self._connection = socket.create_connection(("127.0.0.1", int(settings["port"])))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._size = int(settings["block_bytes"])
        self._slots = cycle(range(SLOT_BYTES // self._size))
        self._held: dict[bytes, int] = {}
        self._done = memoryview(bytearray(1))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Send all, then wait for one byte."""
        slots = [next(self._slots) for _ in keys]
        self._order(b"P", slots)
        for block in blocks:
            self._connection.sendall(block)
        receive_exactly(self._connection, self._done)
        self._held.update(zip(keys, slots, strict=True))
        return len(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Receive straight into the buffers."""
        self._order(b"G", [self._held[key] for key in keys])
        return sum(receive_exactly(self._connection, block) for block in into)

    def exists(self, keys: Sequence[bytes]) -> int:
        """Look into a dict of its own."""
        return sum(key in self._held for key in keys)

    def _order(self, direction: bytes, slots: Sequence[int]) -> None:
        self._connection.sendall(_ORDER.pack(direction, slots[0], len(slots), self._size))


def _serve(connection: socket.socket, memory: memoryview) -> None:
    order = memoryview(bytearray(_ORDER.size))
    while receive_exactly(connection, order):
        direction, first, count, size = _ORDER.unpack(order)
        capacity = len(memory) // size
        for slot in range(first, first + count):
            place = memory[slot % capacity * size :][:size]
            if direction == b"P":
                receive_exactly(connection, place)
            else:
                connection.sendall(place)
        if direction == b"P":
            connection.sendall(_DONE)


def main() -> None:
    """Keep what comes until stdin ends."""
    memory = np.ones(SLOT_BYTES, np.uint8).data.cast("B")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _serve(connection, memory)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
