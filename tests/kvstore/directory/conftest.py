"""Pools of every kind that the contract holds for."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.directory.address import Address
from kvstore.directory.interface import Directory
from kvstore.directory.memory import MemoryDirectory, MemoryPool
from kvstore.directory.pace import Pace
from kvstore.directory.redis import RedisDirectory
from tests.kvstore.directory.pools import member
from tests.kvstore.directory.servers import RedisServer, cluster, require_redis

Make = Callable[[str], Directory]
"""Makes a node's view of the pool, not yet opened; it is closed when the test ends."""

QUICK = Pace(heartbeat=0.3, flush=0.001, full=0.3, sweep=0.2, grace=5.0)

_pools = itertools.count()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """For tests that leave it as it was, save for their own pools."""
    require_redis()
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    """Three masters; likewise."""
    require_redis()
    with cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
async def keep() -> AsyncIterator[Callable[[Directory], Directory]]:
    """Closes what it is given when the test ends."""
    kept: list[Directory] = []

    def take(directory: Directory) -> Directory:
        kept.append(directory)
        return directory

    yield take
    for directory in kept:
        await directory.close()


@pytest.fixture(params=["memory", "redis", "cluster"])
def make(request: pytest.FixtureRequest, keep: Callable[[Directory], Directory]) -> Make:
    if request.param == "memory":
        pool = MemoryPool()
        return lambda node: keep(MemoryDirectory(pool, member(node)))
    if request.param == "redis":
        url = request.getfixturevalue("shared_redis").url
    else:
        ports = [server.port for server in request.getfixturevalue("shared_cluster")]
        url = f"redis+cluster://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
    name = f"contract{next(_pools)}"
    return lambda node: keep(RedisDirectory(Address.parse(url), name, member(node), pace=QUICK))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One of the test's own, running."""
    require_redis()
    own = RedisServer(tmp_path / "redis")
    own.start()
    yield own
    own.kill()


Join = Callable[..., RedisDirectory]
"""Makes a node's view of the pool in ``server``; keywords go to ``RedisDirectory``."""


@pytest.fixture
def node(server: RedisServer, keep: Callable[[Directory], Directory]) -> Join:
    def build(name: str, **options: Any) -> RedisDirectory:
        address = Address.parse(options.pop("url", server.url))
        directory = RedisDirectory(address, "pool", member(name), **({"pace": QUICK} | options))
        keep(directory)
        return directory

    return build
