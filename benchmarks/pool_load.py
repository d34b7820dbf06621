"""Bytes that other processes move while something is measured, at the same pace whoever moves them.

``python -m benchmarks.pool_load pool HOME OWNER`` has a home pull chains from an owner over and
over; ``... raw`` has two processes move as many bytes over a plain socket. Each goes on and off as
lines of standard input say, repeats the line when it does, and ends with the input.
"""

from __future__ import annotations

import itertools
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import numpy as np

from benchmarks.chains import chain, session, store
from benchmarks.memory import blocks
from benchmarks.peer import COMMAND, connected, receive_exactly
from benchmarks.pool_nodes import wait_until_known

MIB: Final = 1 << 20
BATCH: Final = 32
BATCHES_PER_SECOND: Final = 8
"""A quarter of a GiB a second: what another node may want while this one serves its own."""
CHAINS: Final = 24


@contextmanager
def load(*arguments: str) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Run this module beside what is measured; yields a context in which it moves bytes.

    Raises:
        RuntimeError: it did not begin.
    """
    command = [sys.executable, "-m", "benchmarks.pool_load", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def tell(what: str) -> None:
            stdin.write(what + "\n")
            stdin.flush()
            if stdout.readline().strip() != what:
                raise RuntimeError(f"the load did not go {what}")

        @contextmanager
        def going() -> Iterator[None]:
            tell("on")
            try:
                yield
            finally:
                tell("off")

        try:
            yield going
        finally:
            stdin.close()


def _paced(batch: Callable[[], None]) -> None:
    """Move a batch so many times a second while it is on, until standard input ends."""
    batch()
    on = False
    due = time.monotonic()
    while True:
        left = max(0.0, due - time.monotonic()) if on else None
        if select.select([sys.stdin], [], [], left)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            on, due = line == "on\n", time.monotonic()
            print(line, end="", flush=True)
        elif on:
            batch()
            due = max(due + 1 / BATCHES_PER_SECOND, time.monotonic() - 1.0)


def _pool(home_url: str, owner_url: str) -> None:
    names = [chain(BATCH) for _ in range(CHAINS)]
    memory = blocks(BATCH, MIB)
    with session(owner_url, MIB, "tcp") as owner, session(home_url, MIB, "shm") as home:
        for one in names:
            store(owner, one, memory)
        for one in names:
            wait_until_known(home, one)
        onward = itertools.cycle(names)

        def batch() -> None:
            one = next(onward)
            home.match(one)
            if home.get(one, memory).found != BATCH:
                raise RuntimeError("a block that the owner holds did not come")

        _paced(batch)


def _raw() -> None:
    memory = np.zeros(BATCH * MIB, dtype=np.uint8)
    with connected("stream", "tcp") as connection:

        def batch() -> None:
            connection.sendall(COMMAND.pack(b"G", BATCH, MIB))
            receive_exactly(connection, memory.data.cast("B"))

        _paced(batch)


def main() -> None:
    """Do as the command line says."""
    if sys.argv[1] == "raw":
        _raw()
    else:
        _pool(*sys.argv[2:])


if __name__ == "__main__":
    main()
