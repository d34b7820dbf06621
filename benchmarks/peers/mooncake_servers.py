"""Mooncake's servers, in its best configuration for one machine without RDMA or GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.peers.contender import PeerFailed, Place, Setup
from benchmarks.peers.environments import interpreter
from benchmarks.peers.isolation import loopback, server

MASTER_PORT: Final = 50051
CLIENT_PORT: Final = 50052
_METRICS_PORT: Final = 9003
LEASE: Final = 500
"""Milliseconds for which what was read or written a moment ago can't be evicted. With Mooncake's
own 10 s a full segment refuses every put for as long: a fifth of the rate of puts to its SSD."""
HOT_BLOCK: Final = 4 << 20
"""Bytes that each block takes in the hot cache: as many as the largest of any row."""
_CLIENT = {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
_HOT_CACHE = {
    "MC_STORE_LOCAL_HOT_CACHE_USE_SHM": "1",
    # With the first get, where the default waits for more of them.
    "MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD": "1",
}


@contextmanager
def in_process(place: Place) -> Iterator[Setup]:
    """A master; the client's process holds the blocks itself."""
    with loopback() as prefix, _master(place, prefix) as (python, pid):
        yield _setup("local", python, prefix, pid)


@contextmanager
def over_tcp(place: Place) -> Iterator[Setup]:
    """A master, and a process that holds the blocks and is reached over TCP."""
    with _store(place, {}) as (python, prefix, pid):
        yield _setup("tcp", python, prefix, pid)


@contextmanager
def shared_memory(place: Place) -> Iterator[Setup]:
    """A master, and a process that holds the blocks and shares memory with the client."""
    with _store(place, {}) as (python, prefix, pid):
        yield _setup("dummy", python, prefix, pid)


@contextmanager
def hot_cache(place: Place) -> Iterator[Setup]:
    """As `shared_memory`, with a hot cache that clients map: room for all blocks in it."""
    cache = {
        "MC_STORE_LOCAL_HOT_CACHE_SIZE": str(place.capacity),
        "MC_STORE_LOCAL_HOT_BLOCK_SIZE": str(HOT_BLOCK),
    }
    with _store(place, _HOT_CACHE | cache) as (python, prefix, pid):
        yield _setup("hot", python, prefix, pid)


@contextmanager
def offloaded(place: Place) -> Iterator[Setup]:
    """As `in_process`; what the segment has no room for goes to files."""
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
        _master(place, prefix, *options) as (python, pid),
    ):
        setup = _setup("ssd", python, prefix, pid)
        yield Setup(
            dict(setup.settings) | {"path": str(path)},
            dict(setup.environment) | environment,
            prefix,
            python,
            setup.pids,
        )


def _program(python: str, name: str) -> Path:
    """The binary itself: what the package puts into ``bin`` is a Python process around it."""
    found = sorted(Path(python).parents[1].glob(f"lib/python*/site-packages/mooncake/{name}"))
    if not found:
        raise PeerFailed(f"its package has no {name}")
    return found[0]


@contextmanager
def _master(place: Place, prefix: tuple[str, ...], *options: str) -> Iterator[tuple[str, int]]:
    python = interpreter(place, "mooncake")
    command: list[str | Path] = [
        *prefix,
        _program(python, "mooncake_master"),
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
def _store(
    place: Place, environment: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, ...], int]]:
    with loopback() as prefix, _master(place, prefix) as (python, pid):
        command: list[str | Path] = [
            *prefix,
            _program(python, "mooncake_client"),
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
        with server(command, log, CLIENT_PORT, _CLIENT | dict(environment)):
            yield python, prefix, pid


def _setup(mode: str, python: str, prefix: tuple[str, ...], master: int) -> Setup:
    settings = {
        "mode": mode,
        "master": f"127.0.0.1:{MASTER_PORT}",
        "client": f"127.0.0.1:{CLIENT_PORT}",
        "master_pid": str(master),
    }
    return Setup(settings, _CLIENT, prefix, python, {"master": master})
