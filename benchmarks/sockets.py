"""A raw blocking socket pair that moves the same bytes: the limit for a payload on a stream."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.measure import Sample, median_time
from benchmarks.memory import Blocks
from benchmarks.peer import COMMAND, connected, receive_exactly


@contextmanager
def raw_stream(blocks: Blocks, calls: int) -> Iterator[tuple[Sample, Sample]]:
    """Samples of bytes a second over one TCP connection: into ``blocks``, and out of them."""
    views = [block.data.cast("B") for block in blocks]
    total = sum(len(view) for view in views)
    with connected("stream", "tcp") as connection:
        yield (
            lambda: total / median_time(lambda: _receive(connection, views), calls),
            lambda: total / median_time(lambda: _send(connection, views), calls),
        )


def _receive(connection: socket.socket, views: list[memoryview]) -> None:
    connection.sendall(COMMAND.pack(b"G", len(views), len(views[0])))
    for view in views:
        receive_exactly(connection, view)


def _send(connection: socket.socket, views: list[memoryview]) -> None:
    connection.sendall(COMMAND.pack(b"P", len(views), len(views[0])))
    for view in views:
        connection.sendall(view)
    receive_exactly(connection, memoryview(bytearray(1)))
