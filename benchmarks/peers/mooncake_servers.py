"""Mooncake's servers, in its best configuration for one machine without RDMA or GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.peers.contender import PeerFailed, Place, Setup
from benchmarks.peers.environments import interpreter
from benchmarks.peers.isolation import loopback, server

MASTER_PORT: Final = 50051
CLIENT_PORT: Final = 50071
_METRICS_PORT: Final = 9003
"""Those of the first of several; nobody else is in the same network."""
LEASE: Final = 500
"""Milliseconds for which what was read or written a moment ago can't be evicted. With Mooncake's
own 10 s a full segment refuses every put for as long: a fifth of the rate of puts to its SSD."""
HOT_BLOCKS: Final = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of the blocks that there is a hot cache for."""
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
    with loopback() as prefix, _store(place, prefix, {}) as (python, master, _):
        yield _setup("tcp", python, prefix, master)


@contextmanager
def shared_memory(place: Place) -> Iterator[Setup]:
    """A master, and a process that holds the blocks and shares memory with the client."""
    with loopback() as prefix, _store(place, prefix, {}) as (python, master, address):
        setup = _setup("dummy", python, prefix, master)
        yield replace(setup, settings=dict(setup.settings) | {"client": address})


@contextmanager
def hot_cache(place: Place) -> Iterator[Setup]:
    """As `shared_memory`, with a hot cache that clients map.

    Its blocks all have one size, so there is one store for each that is asked for.
    """
    with ExitStack() as stack:
        prefix = stack.enter_context(loopback())
        clients = {}
        for number, size in enumerate(HOT_BLOCKS):
            cache = {
                "MC_STORE_LOCAL_HOT_CACHE_SIZE": str(place.capacity // 2),
                "MC_STORE_LOCAL_HOT_BLOCK_SIZE": str(size),
            }
            store = _store(place, prefix, _HOT_CACHE | cache, number)
            python, master, address = stack.enter_context(store)
            clients[f"client_{size}"] = address
        setup = _setup("hot", python, prefix, master)
        yield replace(setup, settings=dict(setup.settings) | clients)


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
    with loopback() as prefix, _master(place, prefix, *options) as (python, pid):
        setup = _setup("ssd", python, prefix, pid)
        yield replace(
            setup,
            settings=dict(setup.settings) | {"path": str(path)},
            environment=dict(setup.environment) | environment,
        )


def _program(python: str, name: str) -> Path:
    """The binary itself: what the package puts into ``bin`` is a Python process around it."""
    found = sorted(Path(python).parents[1].glob(f"lib/python*/site-packages/mooncake/{name}"))
    if not found:
        raise PeerFailed(f"its package has no {name}")
    return found[0]


@contextmanager
def _master(
    place: Place, prefix: tuple[str, ...], *options: str, number: int = 0
) -> Iterator[tuple[str, int]]:
    python = interpreter(place, "mooncake")
    command: list[str | Path] = [
        *prefix,
        _program(python, "mooncake_master"),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={MASTER_PORT + number}",
        "--rpc_thread_num=2",
        f"--default_kv_lease_ttl={LEASE}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={_METRICS_PORT + number}",
        "--logtostderr",
        *options,
    ]
    log = place.directory / f"master-{number}.log"
    with server(command, log, MASTER_PORT + number) as pid:
        yield python, pid


@contextmanager
def _store(
    place: Place, prefix: tuple[str, ...], environment: Mapping[str, str], number: int = 0
) -> Iterator[tuple[str, int, str]]:
    """A master, and a process that holds blocks: its interpreter, the master, and its address."""
    port = CLIENT_PORT + number
    with _master(place, prefix, number=number) as (python, master):
        command: list[str | Path] = [
            *prefix,
            _program(python, "mooncake_client"),
            "--host=127.0.0.1",
            f"--port={port}",
            f"--global_segment_size={place.capacity}",
            f"--local_buffer_size={512 << 20}",
            f"--master_server_address=127.0.0.1:{MASTER_PORT + number}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            "--threads=2",
            "--logtostderr",
        ]
        log = place.directory / f"client-{number}.log"
        with server(command, log, port, _CLIENT | dict(environment)):
            yield python, master, f"127.0.0.1:{port}"


def _setup(mode: str, python: str, prefix: tuple[str, ...], master: int) -> Setup:
    settings = {
        "mode": mode,
        "master": f"127.0.0.1:{MASTER_PORT}",
        "master_pid": str(master),
    }
    return Setup(settings, _CLIENT, prefix, python, {"master": master})
