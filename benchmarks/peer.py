"""The other process of the raw socket baselines: plain blocking sockets and nothing else.

``python -m benchmarks.peer echo|stream unix:PATH|tcp`` prints the address it listens on, serves one
connection and ends with it.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

COMMAND: Final = struct.Struct("<cQQ")
"""Direction (``G``: peer sends, ``P``: peer receives), pieces, bytes of one piece."""


@contextmanager
def connected(role: str, address: str) -> Iterator[socket.socket]:
    """Start a peer process and connect to it; it ends with the connection."""
    command = [sys.executable, "-m", "benchmarks.peer", role, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        where = process.stdout.readline().strip()
        with connect(where) as connection:
            yield connection


def connect(where: str) -> socket.socket:
    """Connect to ``unix:PATH`` or ``tcp:PORT`` on this machine."""
    kind, _, rest = where.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(rest)
    else:
        connection = socket.create_connection(("127.0.0.1", int(rest)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive_exactly(connection: socket.socket, view: memoryview) -> bool:
    """Fill ``view``; False where the other side has closed."""
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if not count:
            return False
        done += count
    return True


def _listen(address: str) -> tuple[socket.socket, str]:
    kind, _, path = address.partition(":")
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        return listener, address
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"tcp:{listener.getsockname()[1]}"


def _echo(connection: socket.socket) -> None:
    buffer = bytearray(1 << 16)
    view = memoryview(buffer)
    while count := connection.recv_into(buffer):
        connection.sendall(view[:count])


def _stream(connection: socket.socket) -> None:
    command = memoryview(bytearray(COMMAND.size))
    memory: list[memoryview] = []
    while receive_exactly(connection, command):
        direction, pieces, size = COMMAND.unpack(command)
        if len(memory) != pieces or len(memory[0]) != size:
            memory = [memoryview(bytearray(os.urandom(size))) for _ in range(pieces)]
        if direction == b"G":
            for piece in memory:
                connection.sendall(piece)
        else:
            for piece in memory:
                receive_exactly(connection, piece)
            connection.sendall(b"+")


def main() -> None:
    """Serve one connection in the role that the command line names."""
    role, address = sys.argv[1:]
    listener, where = _listen(address)
    with listener:
        listener.listen(1)
        print(where, flush=True)
        connection, _ = listener.accept()
    with connection:
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        {"echo": _echo, "stream": _stream}[role](connection)


if __name__ == "__main__":
    main()
