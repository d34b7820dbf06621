"""A Redis and two real daemons that share it, each in its own process, for the rows of a pool."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import redis

from benchmarks.node import Node, node
from benchmarks.tcp import free_port

if TYPE_CHECKING:
    from client.blocking import Client

START_SECONDS: Final = 10.0
REACH_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Who is there.

    Attributes:
        redis: port of the directory on loopback.
        owner: holds the blocks.
        home: where the client asks for them.
    """

    redis: int
    owner: Node
    home: Node


@contextmanager
def pool(directory: Path, owner_capacity: str, home_capacity: str) -> Iterator[Pool]:
    """Run both nodes until the end of the block.

    Args:
        directory: an existing, short path.
        owner_capacity: DRAM of the owner.
        home_capacity: DRAM of the other.

    Raises:
        RuntimeError: a process did not start.
    """
    with redis_server(directory) as port:

        def one(name: str, capacity: str) -> dict[str, object]:
            (directory / name).mkdir()
            return {
                "node__name": name,
                "listen__tcp": f"127.0.0.1:{free_port()}",
                "dram__capacity": capacity,
                "cluster__directory": f"redis://127.0.0.1:{port}",
                # A busy machine must not make misses of what is to be measured.
                "cluster__lookup_deadline": "1s",
            }

        with (
            node(directory / "owner", **one("owner", owner_capacity)) as owner,
            node(directory / "home", **one("home", home_capacity)) as home,
        ):
            yield Pool(port, owner, home)


@contextmanager
def redis_server(directory: Path) -> Iterator[int]:
    """Run an empty Redis that keeps nothing; yields its port on loopback.

    Raises:
        RuntimeError: it did not start, or there is no ``redis-server``.
    """
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--save", "", "--dir", str(directory)]
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise RuntimeError("there is no redis-server") from error
    try:
        _wait(port)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait(port: int) -> None:
    until = time.monotonic() + START_SECONDS
    with redis.Redis(port=port, protocol=2) as client:
        while time.monotonic() < until:
            try:
                client.ping()
            except redis.ConnectionError:
                time.sleep(0.01)
            else:
                return
    raise RuntimeError("redis-server does not answer")


def wait_until_known(client: Client, names: list[bytes]) -> None:
    """Wait until a node knows that another one holds a whole chain.

    Raises:
        RuntimeError: it does not within half a minute.
    """
    until = time.monotonic() + REACH_SECONDS
    while time.monotonic() < until:
        if client.match(names).blocks == len(names):
            return
        time.sleep(0.02)
    raise RuntimeError("the home node does not hear of what the owner holds")
