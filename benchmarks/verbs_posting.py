"""``python -m benchmarks.verbs_posting``: CPU time of the node's ``rdma`` transport for a block.

What is measured is everything from the call with a batch of blocks to its return, event loop and
completions included, over a device that does nothing. Needs pyverbs and no device.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import time
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.stub_device import REMOTE, stub_adapter
from rdma.region import NoRegistration
from rdma.transport import place_of
from rdma.verbs.driver import Driver
from rdma.verbs.handshake import describe
from rdma.verbs.memory import Arena, Registration
from rdma.verbs.node import VerbsNodeTransport

BATCHES: Final = ((1 << 20, 32), (64 << 10, 128))
APART: Final = 64
"""Bytes between the client's buffers, so that none can be joined with the next."""


class Keys(NoRegistration):
    """Gives keys and registers nothing."""

    def register(self, address: int, length: int, writable: bool) -> Registration:
        """Return keys."""
        return Registration(1, 2, address, None)


class Segment(NamedTuple):
    """A segment of the node's memory."""

    view: memoryview


class Segments:
    """One small segment: nothing reads or writes it."""

    def segment(self, number: int, /) -> Segment:
        """Return it."""
        return Segment(memoryview(bytearray(4096)))


async def cpu_per_block(size: int, count: int, gap: int, rounds: int) -> float:
    """Seconds of CPU time that a block takes.

    Args:
        size: bytes of a block.
        count: blocks of a batch.
        gap: bytes between two of the client's buffers.
        rounds: batches.
    """
    driver = Driver(stub_adapter())
    driver.start()
    arena = Arena(Keys(), Segments())
    transport = VerbsNodeTransport(driver, arena, describe(REMOTE))
    places = [place_of(1, 2 * i * size) for i in range(count)]
    named = [n for i in range(count) for n in (0x7F00_0000_0000 + i * (size + gap), 7, size)]
    loop = asyncio.get_running_loop()
    began = time.process_time()
    for _ in range(rounds):
        await transport.push(places, size, named, loop.time() + 10)
    took = time.process_time() - began
    transport.close()
    driver.close()
    return took / rounds / count


def main() -> None:
    """Print the table, and with ``--profile`` where the time goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    table = Table("blocks", "batch", "client's buffers", "µs a block", "GB/s of one process")
    for size, count in BATCHES:
        for gap, buffers in ((APART, "apart"), (0, "side by side")):
            took = min(
                asyncio.run(cpu_per_block(size, count, gap, arguments.rounds)) for _ in range(3)
            )
            figures = f"{took * 1e6:.2f}", f"{size / took / 1e9:.0f}"
            table.add_row(f"{size >> 10} KiB", str(count), buffers, *figures)
    Console(width=100).print(table)
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(asyncio.run, cpu_per_block(*BATCHES[0], APART, arguments.rounds))
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
