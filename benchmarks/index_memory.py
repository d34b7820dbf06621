"""What one block costs the node's index in memory, at a million blocks.

``python -m benchmarks.index_memory BLOCKS`` builds the index in its own process and prints bytes a
block: all that the process grew by, so the hash and both extents are in it.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Row, Settings
from kvstore.identity import ROOT_PARENT
from kvstore.index import Index
from tiers.policies import make_policy

BLOCKS = 1_000_000
CHAIN = 32
BUDGET = 400.0


def measure(settings: Settings) -> Iterator[Row]:
    """The row of the index's memory."""
    blocks = settings.calls(BLOCKS)
    command = [sys.executable, "-m", "benchmarks.index_memory", str(blocks)]
    rounds = []
    for _ in range(min(3, settings.rounds)):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rounds.append((float(done.stdout), BUDGET))
    yield Row(
        "index-memory",
        f"index memory a block, at {blocks:,} blocks",
        "400 bytes",
        "B",
        "under",
        1.0,
        tuple(rounds),
        f"growth of the process; chains of {CHAIN}, an extent in DRAM and on SSD each",
    )


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _build(blocks: int) -> Index:
    index = Index(make_policy("lru", blocks))
    shard = index.shard(bytes(32), 0, 1 << 20)
    for start in range(0, blocks, CHAIN):
        # As in a node: what arrives in one request has one time.
        reserved, committed = float(start), float(start + 1)
        parent = ROOT_PARENT
        for number in range(start, min(start + CHAIN, blocks)):
            name = os.urandom(32)
            entry = index.reserve(shard, name, parent, reserved)
            index.place(entry, "dram", number >> 10 << 44 | (number & 1023) << 20)
            index.commit([entry], committed)
            index.place(entry, "ssd", number << 20 | 4096)
            parent = name
    return index


def main() -> None:
    """Build the index and print what a block of it took."""
    blocks = int(sys.argv[1])
    _build(CHAIN)
    gc.collect()
    before = _resident()
    index = _build(blocks)
    gc.collect()
    print((_resident() - before) / blocks)
    del index


if __name__ == "__main__":
    main()
