"""Who is measured: the connector, the servers beside the engine, and what to know of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.node import node
from benchmarks.vllm.process import free_port, server

STORE_BYTES = 1 << 30
"""What every store may hold in memory: all that one run saves."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine needs to be started with.

    Attributes:
        transfer: vLLM's ``KVTransferConfig``; None is no connector.
        environment: variables of the engine.
        paths: directories with packages that it imports.
    """

    transfer: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a contender finds what it runs and puts what it writes.

    Attributes:
        python: an interpreter that has vLLM and this package.
        peers: the directory that ``scripts/setup-vllm-peers`` fills: one of packages for each peer.
        scratch: an empty directory.
    """

    python: Path
    peers: Path
    scratch: Path


class Prepare(Protocol):
    """Starts a contender's servers."""

    def __call__(self, place: Place, /) -> AbstractContextManager[Setup]:
        """A context in which they run, and what engines need meanwhile."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to answer the prompts.

    Attributes:
        key: short name.
        title: as the table calls it.
        prepare: starts its servers.
        note: what a reader of its figures should know.
        external: its own memory is emptied before every turn, so that the tier below answers.
    """

    key: str
    title: str
    prepare: Prepare
    note: str = ""
    external: bool = False


def _connector(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextmanager
def _nothing(_place: Place) -> Iterator[Setup]:
    yield Setup()


def _ours(url: str) -> Setup:
    transfer = _connector("KVStoreConnector", url=url)
    return Setup(transfer | {"kv_connector_module_path": "client.vllm.connector"})


@contextmanager
def _store(place: Place) -> Iterator[Setup]:
    with node(place.scratch, dram__capacity=STORE_BYTES) as running:
        yield _ours(running.unix)


@contextmanager
def _absent_store(place: Place) -> Iterator[Setup]:
    yield _ours(f"unix://{place.scratch}/kvstore.sock")


@contextmanager
def _native(_place: Place) -> Iterator[Setup]:
    yield Setup(_offloading("CopyingCPUOffloadingSpec"))


@contextmanager
def _native_files(place: Place) -> Iterator[Setup]:
    tiers = [{"type": "fs", "root_dir": str(place.scratch)}]
    name = f"benchmark-{os.getpid()}"
    transfer = _offloading("CopyingTieringOffloadingSpec", secondary_tiers=tiers)
    try:
        yield Setup(transfer | {"engine_id": name})
    finally:
        # vLLM's name for its shared memory, which it leaves there where the engine is killed.
        Path(f"/dev/shm/vllm_offload_{name}.mmap").unlink(missing_ok=True)


def _offloading(spec: str, **extra: Any) -> dict[str, Any]:
    return _connector(
        "OffloadingConnector",
        spec_name=spec,
        spec_module_path="benchmarks.vllm.offload",
        cpu_bytes_to_use=STORE_BYTES,
        **extra,
    )


@contextmanager
def _mooncake(place: Place) -> Iterator[Setup]:
    port, path = free_port(), place.peers / "mooncake"
    configuration = place.scratch / "mooncake.json"
    configuration.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"127.0.0.1:{port}",
                "protocol": "tcp",
                "device_name": "",
                "global_segment_size": STORE_BYTES,
                "local_buffer_size": 256 << 20,
            }
        )
    )
    command: list[str | Path] = [
        path / "mooncake" / "mooncake_master",
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--rpc_thread_num=2",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={free_port()}",
        "--logtostderr",
    ]
    environment = {
        "MOONCAKE_CONFIG_PATH": str(configuration),
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    }
    with server(command, place.scratch / "master.log", ("127.0.0.1", port)):
        yield Setup(_connector("MooncakeStoreConnector"), environment, (path,))


@contextmanager
def _lmcache(place: Place) -> Iterator[Setup]:
    port, path = free_port(), place.peers / "lmcache"
    command: list[str | Path] = [
        *(place.python, "-m", "lmcache.cli.main", "server", "--disable-metrics"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(free_port())),
        *("--l1-size-gb", str(STORE_BYTES >> 30), "--eviction-policy", "LRU"),
        *("--max-workers", "1", "--supported-transfer-mode", "auto"),
    ]
    environment = {"LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": str(path)}
    with server(command, place.scratch / "server.log", ("127.0.0.1", port), environment):
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        yield Setup(_connector("LMCacheMPConnector", **extra), environment, (path,))


STAND_IN = "its worker is a stand-in: vLLM's own refuses CPUs"
RECOMPUTE = Contender("recompute", "no connector", _nothing)
OURS = Contender("kvstore", "kvstore", _store, "over shm, the daemon in its own process")
ABSENT = Contender("absent", "kvstore, no daemon", _absent_store)
PEERS = (
    Contender("native", "vLLM's CPU offloading", _native, f"in the engine's process; {STAND_IN}"),
    Contender(
        "native-fs",
        "vLLM's file-system tier",
        _native_files,
        f"its CPU tier emptied before each turn; {STAND_IN}",
        external=True,
    ),
    Contender("mooncake", "Mooncake", _mooncake, "its segment in the engine's process, TCP"),
    Contender(
        "lmcache", "LMCache", _lmcache, "its server in its own process, chunks of 256 tokens"
    ),
)
