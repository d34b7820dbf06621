"""The peers' servers, each in its best configuration for one machine without RDMA or GPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.peers.contender import Contender, PeerFailed, Place, Scene, Setup
from benchmarks.peers.isolation import first_line, loopback, running, server

MASTER_PORT: Final = 50051
CLIENT_PORT: Final = 50052
LMCACHE_PORT: Final = 65432
_METRICS_PORT: Final = 9003
_HTTP_PORT: Final = 58080
"""Nobody else can have these: each peer runs in a network of its own."""

LEASE: Final = 500
"""Milliseconds for which what was read or written a moment ago can't be evicted. With Mooncake's
own 10 s a full segment refuses every put for as long: a fifth of the rate of puts to its SSD."""
HOT_BLOCK: Final = 4 << 20
"""Bytes that each block takes in the hot cache: as many as the largest of any row."""

_LOCAL = frozenset({Scene.LOCAL})
_MOONCAKE_CLIENT = {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
_LMCACHE = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
_HOT_CACHE = {
    "MC_STORE_LOCAL_HOT_CACHE_USE_SHM": "1",
    # With the first get, where the default waits for more of them.
    "MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD": "1",
}


@contextmanager
def mooncake_local(place: Place) -> Iterator[Setup]:
    """A master; the client's process holds the blocks itself."""
    with loopback() as prefix, _mooncake_master(place, prefix) as (python, pid):
        yield _mooncake_setup("local", python, prefix, pid)


@contextmanager
def mooncake_tcp(place: Place) -> Iterator[Setup]:
    """A master, and a process that holds the blocks and is reached over TCP."""
    with _mooncake_store(place, {}) as (python, prefix, pid):
        yield _mooncake_setup("tcp", python, prefix, pid)


@contextmanager
def mooncake_dummy(place: Place) -> Iterator[Setup]:
    """A master, and a process that holds the blocks and shares memory with the client."""
    with _mooncake_store(place, {}) as (python, prefix, pid):
        yield _mooncake_setup("dummy", python, prefix, pid)


@contextmanager
def mooncake_hot(place: Place) -> Iterator[Setup]:
    """As `mooncake_dummy`, with a hot cache that clients map: room for all blocks in it."""
    cache = {
        "MC_STORE_LOCAL_HOT_CACHE_SIZE": str(place.capacity),
        "MC_STORE_LOCAL_HOT_BLOCK_SIZE": str(HOT_BLOCK),
    }
    with _mooncake_store(place, _HOT_CACHE | cache) as (python, prefix, pid):
        yield _mooncake_setup("hot", python, prefix, pid)


@contextmanager
def mooncake_ssd(place: Place) -> Iterator[Setup]:
    """As `mooncake_local`; what the segment has no room for goes to files."""
    path = place.directory / "offload"
    path.mkdir()
    environment = {
        # Its buckets have headers, and it evicts before the limit is reached.
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(place.disk * 5 // 4),
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(64 << 20),
        "MOONCAKE_OFFLOAD_USE_URING": "1",
    }
    options = ("--enable_offload=true", "--eviction_ratio=0.3")
    with (
        loopback() as prefix,
        _mooncake_master(place, prefix, *options) as (python, pid),
    ):
        setup = _mooncake_setup("ssd", python, prefix, pid)
        yield Setup(
            dict(setup.settings) | {"path": str(path)},
            dict(setup.environment) | environment,
            prefix,
            python,
            setup.pids,
        )


@contextmanager
def lmcache_cpu(place: Place) -> Iterator[Setup]:
    """Nothing: the client's process holds the blocks itself."""
    with loopback() as prefix:
        yield Setup({"mode": "cpu"}, _LMCACHE, prefix, _python(place, "lmcache"))


@contextmanager
def lmcache_disk(place: Place) -> Iterator[Setup]:
    """Nothing but a directory."""
    path = place.directory / "lmcache"
    path.mkdir()
    # Clients give each other's files no room.
    settings = {"mode": "disk", "path": str(path), "disk": str(place.disk)}
    with loopback() as prefix:
        yield Setup(settings, _LMCACHE, prefix, _python(place, "lmcache"))


@contextmanager
def lmcache_server(place: Place) -> Iterator[Setup]:
    """The server of ``lm://``."""
    python = _python(place, "lmcache")
    log = place.directory / "server.log"
    with loopback() as prefix:
        command = [
            *prefix,
            python,
            "-m",
            "lmcache.v1.server",
            "127.0.0.1",
            str(LMCACHE_PORT),
            "cpu",
        ]
        with server(command, log, LMCACHE_PORT, _LMCACHE) as pid:
            url = f"lm://127.0.0.1:{LMCACHE_PORT}"
            settings = {"mode": "server", "url": url, "server_pid": str(pid)}
            yield Setup(settings, _LMCACHE, prefix, python, {"server": pid})


@contextmanager
def nixl_ucx(place: Place) -> Iterator[Setup]:
    """A process with registered memory."""
    python = _python(place, "nixl")
    log = place.directory / "target.log"
    with loopback() as prefix:
        command = [*prefix, python, "-m", "benchmarks.peers.nixl_target", str(place.capacity)]
        with running(command, log, output=subprocess.PIPE) as process:
            settings: dict[str, str] = json.loads(first_line(process, log, b"{"))
            pids = {"target": process.pid}
            yield Setup(settings, {}, prefix, python, pids)


def _python(place: Place, peer: str) -> str:
    # Absolute, but not resolved: the link is what tells an interpreter its environment.
    python = place.environments.absolute() / peer / "bin" / "python"
    if not python.exists():
        raise PeerFailed(f"{place.environments / peer} is not there: scripts/setup-peers makes it")
    return str(python)


def _mooncake_program(python: str, name: str) -> Path:
    """The binary itself: what the package puts into ``bin`` is a Python process around it."""
    found = sorted(Path(python).parents[1].glob(f"lib/python*/site-packages/mooncake/{name}"))
    if not found:
        raise PeerFailed(f"its package has no {name}")
    return found[0]


@contextmanager
def _mooncake_master(
    place: Place, prefix: tuple[str, ...], *options: str
) -> Iterator[tuple[str, int]]:
    python = _python(place, "mooncake")
    command: list[str | Path] = [
        *prefix,
        _mooncake_program(python, "mooncake_master"),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={MASTER_PORT}",
        "--rpc_thread_num=2",
        f"--default_kv_lease_ttl={LEASE}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={_METRICS_PORT}",
        "--logtostderr",
        *options,
    ]
    with server(command, place.directory / "master.log", MASTER_PORT) as pid:
        yield python, pid


@contextmanager
def _mooncake_store(
    place: Place, environment: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, ...], int]]:
    with loopback() as prefix, _mooncake_master(place, prefix) as (python, pid):
        command: list[str | Path] = [
            *prefix,
            _mooncake_program(python, "mooncake_client"),
            "--host=127.0.0.1",
            f"--port={CLIENT_PORT}",
            f"--global_segment_size={place.capacity}",
            f"--local_buffer_size={512 << 20}",
            f"--master_server_address=127.0.0.1:{MASTER_PORT}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            "--threads=2",
            "--logtostderr",
        ]
        log = place.directory / "client.log"
        with server(command, log, CLIENT_PORT, _MOONCAKE_CLIENT | dict(environment)):
            yield python, prefix, pid


def _mooncake_setup(mode: str, python: str, prefix: tuple[str, ...], master: int) -> Setup:
    settings = {
        "mode": mode,
        "master": f"127.0.0.1:{MASTER_PORT}",
        "client": f"127.0.0.1:{CLIENT_PORT}",
        "master_pid": str(master),
    }
    return Setup(settings, _MOONCAKE_CLIENT, prefix, python, {"master": master})


PEERS: Final = (
    Contender(
        "mooncake-local",
        "Mooncake, in process",
        "mooncake",
        "peer",
        _LOCAL,
        mooncake_local,
        "segment in the client's own process, registered buffers, put_from and get_into",
    ),
    Contender(
        "mooncake-tcp",
        "Mooncake, TCP",
        "mooncake",
        "peer",
        frozenset({Scene.TCP}),
        mooncake_tcp,
        "segment in another process, registered buffers, put_from and get_into",
    ),
    Contender(
        "mooncake-shm",
        "Mooncake, shared memory",
        "mooncake",
        "peer",
        _LOCAL,
        mooncake_dummy,
        "dummy client, buffers of the pool that it shares with the store's process",
    ),
    Contender(
        "mooncake-hot",
        "Mooncake, hot cache",
        "mooncake",
        "peer",
        frozenset({Scene.VIEWS}),
        mooncake_hot,
        "dummy client, get_buffer from the hot cache in shared memory, admission at once",
    ),
    Contender(
        "mooncake-ssd",
        "Mooncake, SSD",
        "mooncake",
        "peer",
        frozenset({Scene.DISK}),
        mooncake_ssd,
        "SSD offload by io_uring and O_DIRECT, heartbeat every second, buckets of 64 MiB; a put "
        "that finds no room is tried again, and returns once the block is in memory",
    ),
    Contender(
        "lmcache-cpu",
        "LMCache, in process",
        "lmcache",
        "peer",
        frozenset({Scene.LOCAL, Scene.VIEWS}),
        lmcache_cpu,
        "the storage manager of its engines in the client's own process: no other can see a block",
    ),
    Contender(
        "lmcache-disk",
        "LMCache, local disk",
        "lmcache",
        "peer",
        frozenset({Scene.DISK}),
        lmcache_disk,
        "in the client's own process, one O_DIRECT file a block; a put ends when it is written",
    ),
    Contender(
        "lmcache-server",
        "LMCache, lm:// server",
        "lmcache",
        "peer",
        frozenset({Scene.TCP}),
        lmcache_server,
        "one connection; the server never removes a block: past its capacity the client writes "
        "over the oldest of its own",
    ),
    Contender(
        "nixl-ucx",
        "NIXL, UCX",
        "nixl",
        "peer",
        _LOCAL,
        nixl_ucx,
        "a transport alone: keys stay with the client; descriptors prepared, no progress thread",
        frozenset({"exists", "view", "mingle", "traffic", "replay", "keys"}),
    ),
)
"""Every mode of every peer that has servers or an environment of its own."""
