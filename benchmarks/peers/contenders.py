"""Everybody who takes part: ourselves, Redis, the machine's limits; other peers by `servers`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from benchmarks.node import node
from benchmarks.peers.contender import Contender, PeerFailed, Place, Scene, Setup
from benchmarks.peers.isolation import REPOSITORY, server
from benchmarks.peers.servers import PEERS
from benchmarks.tcp import free_port
from benchmarks.vllm.process import end_group

_REDIS_OVERHEAD: Final = 1.1
"""Memory that Redis may take for each byte of blocks, so that it evicts no earlier than others."""
_NO_VIEW: Final = frozenset({"view"})


@contextmanager
def ours_shm(place: Place) -> Iterator[Setup]:
    """A daemon in a process of its own; clients come over its Unix socket."""
    with node(place.directory, **_tiers(place)) as daemon:
        settings = {"url": daemon.unix, "transport": "shm", "pid": str(daemon.pid)}
        yield Setup(settings, pids={"daemon": daemon.pid})


@contextmanager
def ours_tcp(place: Place) -> Iterator[Setup]:
    """The same; clients come over TCP."""
    tiers = _tiers(place) | {"listen__tcp": f"127.0.0.1:{free_port()}"}
    with node(place.directory, **tiers) as daemon:
        settings = {"url": daemon.tcp, "transport": "tcp", "pid": str(daemon.pid)}
        yield Setup(settings, pids={"daemon": daemon.pid})


def _tiers(place: Place) -> dict[str, object]:
    found: dict[str, object] = {"dram__capacity": place.capacity}
    if place.disk:
        found |= {"ssd__capacity": place.disk, "ssd__directory": place.directory / "ssd"}
    return found


@contextmanager
def redis_unix(place: Place) -> Iterator[Setup]:
    """A Redis whose clients come over a Unix socket."""
    path = str(place.directory / "redis.sock")
    with _redis(place, "--unixsocket", path) as (_, pid):
        yield Setup({"socket": path}, python=_redis_python(place), pids={"server": pid})


@contextmanager
def redis_tcp(place: Place) -> Iterator[Setup]:
    """A Redis whose clients come over TCP."""
    with _redis(place) as (port, pid):
        yield Setup({"port": str(port)}, python=_redis_python(place), pids={"server": pid})


@contextmanager
def _redis(place: Place, *more: str) -> Iterator[tuple[int, int]]:
    port = free_port()
    options = {
        "--bind": "127.0.0.1",
        "--port": str(port),
        "--save": "",
        "--appendonly": "no",
        "--maxmemory": str(round(place.capacity * _REDIS_OVERHEAD)),
        "--maxmemory-policy": "allkeys-lru",
        "--dir": str(place.directory),
    }
    words = [word for option in options.items() for word in option]
    with server(["redis-server", *words, *more], place.directory / "redis.log", port) as pid:
        yield port, pid


def _redis_python(place: Place) -> str:
    """The environment that has hiredis, if it was made; redis-py works without."""
    python = place.environments.absolute() / "redis" / "bin" / "python"
    return str(python) if python.exists() else sys.executable


@contextmanager
def memcpy_1(_: Place) -> Iterator[Setup]:
    """One thread."""
    yield Setup({"threads": "1"})


@contextmanager
def memcpy_2(_: Place) -> Iterator[Setup]:
    """Two threads."""
    yield Setup({"threads": "2"})


@contextmanager
def sockets(_: Place) -> Iterator[Setup]:
    """The process at the other end of a raw socket.

    Raises:
        PeerFailed: it ended.
    """
    command = [sys.executable, "-m", "benchmarks.peers.adapters.sockets"]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise PeerFailed("its process ended")
        yield Setup({"port": port}, pids={"server": process.pid})
    finally:
        end_group(process)


OURS: Final = (
    Contender(
        "ours-shm",
        "this store, shared memory",
        "ours",
        "ours",
        frozenset({Scene.LOCAL, Scene.VIEWS, Scene.DISK}),
        ours_shm,
        "the daemon in a process of its own, the client over its Unix socket; as installed",
    ),
    Contender(
        "ours-tcp",
        "this store, TCP",
        "ours",
        "ours",
        frozenset({Scene.TCP}),
        ours_tcp,
        "the daemon in a process of its own, one connection; as installed",
    ),
)
REDIS: Final = (
    Contender(
        "redis-raw-unix",
        "Redis by its protocol, Unix socket",
        "redis_raw",
        "peer",
        frozenset({Scene.LOCAL}),
        redis_unix,
        "sendmsg and recvmsg_into on the caller's buffers; EXISTS in a pipeline",
        _NO_VIEW,
    ),
    Contender(
        "redis-py-unix",
        "Redis by redis-py, Unix socket",
        "redis_py",
        "peer",
        frozenset({Scene.LOCAL}),
        redis_unix,
        "with hiredis; pipelines without transactions, MGET",
        _NO_VIEW,
    ),
    Contender(
        "redis-raw",
        "Redis by its protocol, TCP",
        "redis_raw",
        "peer",
        frozenset({Scene.TCP}),
        redis_tcp,
        "sendmsg and recvmsg_into on the caller's buffers; EXISTS in a pipeline",
        _NO_VIEW,
    ),
    Contender(
        "redis-py",
        "Redis by redis-py, TCP",
        "redis_py",
        "peer",
        frozenset({Scene.TCP}),
        redis_tcp,
        "with hiredis; pipelines without transactions, MGET",
        _NO_VIEW,
    ),
)
LIMITS: Final = (
    Contender(
        "memcpy-1",
        "memcpy (numpy), one thread",
        "memory",
        "limit",
        frozenset({Scene.LOCAL}),
        memcpy_1,
        "within one process; a put is to new memory each time",
    ),
    Contender(
        "memcpy-2",
        "memcpy (numpy), two threads",
        "memory",
        "limit",
        frozenset({Scene.LOCAL}),
        memcpy_2,
        "within one process, half of the bytes by each thread",
    ),
    Contender(
        "sockets",
        "raw blocking sockets, TCP",
        "sockets",
        "limit",
        frozenset({Scene.TCP}),
        sockets,
        "two processes, one connection; the other one keeps blocks in an array",
    ),
)
CONTENDERS: Final = (*OURS, *PEERS, *REDIS, *LIMITS)
