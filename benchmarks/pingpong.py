"""The time to beat for anything that asks and waits: 64 bytes there and back between processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Sample, Settings, median_time
from benchmarks.peer import connected, receive_exactly


@contextmanager
def ping_pong(settings: Settings, directory: Path) -> Iterator[Sample]:
    """A sample of the round trip's median time over a Unix socket, in seconds."""
    message = bytes(64)
    view = memoryview(bytearray(64))
    with connected("echo", f"unix:{directory / 'ping'}") as connection:

        def once() -> None:
            connection.sendall(message)
            receive_exactly(connection, view)

        yield lambda: median_time(once, settings.calls(3000))
    (directory / "ping").unlink()
