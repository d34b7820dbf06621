"""What the locations of blocks cost in Redis's memory.

``python -m benchmarks.directory_memory`` starts a redis-server of its own for each case, tells it
of blocks through the script that nodes use, and prints bytes a block: all that Redis's memory grew
by. Cases: one root for all chains (every request has the same system prompt) or one for every 32
blocks; one owner or three; one shard or eight.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import redis
from rich.console import Console
from rich.table import Table

from kvstore.directory.changes import Batch
from kvstore.directory.interface import Place
from kvstore.directory.names import name, tag
from kvstore.directory.scripts import MOST_RECORDS, PUBLISH

CHAIN = 32
NAMESPACE = bytes(32)
FIRST_NUMBER = 1_796_000_000


class Case(NamedTuple):
    """One of them.

    Attributes:
        blocks: different ones.
        single: whether all chains have the same first block.
        owners: of each block.
        shards: of each block, each of which has a location.
    """

    blocks: int
    single: bool
    owners: int = 1
    shards: int = 1


def cases(most: int) -> Iterator[Case]:
    """All of them, up to so many locations."""
    for blocks in (10_000, 100_000, 1_000_000):
        if blocks <= most:
            yield Case(blocks, True)
            yield Case(blocks, False)
    middle = min(most, 100_000)
    yield Case(middle, False, owners=3)
    yield Case(middle, False, shards=8)


@contextmanager
def server() -> Iterator[redis.Redis]:
    """An empty Redis."""
    with tempfile.TemporaryDirectory(prefix="kvbench-") as directory:
        path = Path(directory) / "redis.sock"
        options = {"port": "0", "unixsocket": str(path), "save": "", "dir": directory}
        command = ["redis-server"]
        for option, value in options.items():
            command += [f"--{option}", value]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(unix_socket_path=str(path), protocol=2)
            _wait(client)
            with client:
                yield client
        finally:
            process.kill()
            process.wait()


def _wait(client: redis.Redis) -> None:
    for _ in range(500):
        try:
            client.ping()
        except redis.ConnectionError:
            time.sleep(0.01)
        else:
            return
    raise RuntimeError("redis-server does not start")


def fill(client: redis.Redis, case: Case) -> float:
    """Tell Redis of all blocks; seconds that Redis took for it."""
    waiting: dict[bytes, dict[tuple[bytes, int], bool]] = defaultdict(dict)
    root = os.urandom(32)
    for number in range(case.blocks):
        block = os.urandom(32)
        if number % CHAIN == 0 and not case.single:
            root = block
        key = tag("pool", NAMESPACE, root)
        for shard in range(case.shards):
            place = Place(NAMESPACE, shard, root, block)
            for owner in range(case.owners):
                waiting[key][name(place), FIRST_NUMBER + owner] = True
        if len(waiting[key]) + case.shards * case.owners > MOST_RECORDS:
            _tell(client, key, waiting.pop(key))
    for key, changes in waiting.items():
        _tell(client, key, changes)
    spent: Any = client.info("commandstats")
    return sum(float(spent[kind]["usec"]) for kind in spent if "eval" in kind) / 1e6


def _tell(client: redis.Redis, key: bytes, changes: dict[tuple[bytes, int], bool]) -> None:
    client.eval(PUBLISH.text, 1, key, Batch(key, changes, 0).records(0))


def measure(case: Case) -> tuple[float, float, int]:
    """Bytes that Redis grew by, seconds it took, and how many keys there are."""
    with server() as client:
        client.eval(PUBLISH.text, 1, b"warm", b"")
        client.flushall()
        before = _used(client)
        seconds = fill(client, case)
        return _used(client) - before, seconds, int(client.dbsize())


def _used(client: redis.Redis) -> float:
    return float(client.info("memory")["used_memory"])  # type: ignore[index,unused-ignore]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.directory_memory")
    parser.add_argument("--most", type=int, default=1_000_000, help="blocks of the largest case")
    arguments = parser.parse_args()
    if shutil.which("redis-server") is None:
        print("redis-server is not installed", file=sys.stderr)
        return 1
    table = Table("blocks", "roots", "owners", "shards", "keys", "MB", "bytes/block")
    for column in ("bytes/location", "us/location"):
        table.add_column(column)
    for case in cases(arguments.most):
        grown, seconds, keys = measure(case)
        roots = 1 if case.single else -(-case.blocks // CHAIN)
        locations = case.blocks * case.owners * case.shards
        table.add_row(
            *(f"{value:,}" for value in (case.blocks, roots, case.owners, case.shards, keys)),
            f"{grown / 1e6:.1f}",
            f"{grown / case.blocks:.0f}",
            f"{grown / locations:.0f}",
            f"{seconds / locations * 1e6:.1f}",
        )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
