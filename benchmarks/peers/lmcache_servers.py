"""LMCache's servers, in its best configuration for one machine without RDMA or GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.peers.contender import GIB, Place, Setup
from benchmarks.peers.environments import interpreter
from benchmarks.peers.isolation import loopback, server

PORT: Final = 65432
_HTTP_PORT: Final = 58080
_ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}


@contextmanager
def in_process(place: Place) -> Iterator[Setup]:
    """Nothing: the client's process holds the blocks itself."""
    with loopback() as prefix:
        yield Setup({"mode": "cpu"}, _ENVIRONMENT, prefix, interpreter(place, "lmcache"))


@contextmanager
def local_disk(place: Place) -> Iterator[Setup]:
    """Nothing but a directory."""
    path = place.directory / "lmcache"
    path.mkdir()
    settings = {"mode": "disk", "path": str(path), "disk": str(place.disk)}
    with loopback() as prefix:
        yield Setup(settings, _ENVIRONMENT, prefix, interpreter(place, "lmcache"))


@contextmanager
def lm_server(place: Place) -> Iterator[Setup]:
    """The server of ``lm://``."""
    python = interpreter(place, "lmcache")
    log = place.directory / "server.log"
    with loopback() as prefix:
        command = [
            *prefix,
            python,
            "-m",
            "lmcache.v1.server",
            "127.0.0.1",
            str(PORT),
            "cpu",
        ]
        with server(command, log, PORT, _ENVIRONMENT) as pid:
            url = f"lm://127.0.0.1:{PORT}"
            settings = {"mode": "server", "url": url, "server_pid": str(pid)}
            yield Setup(settings, _ENVIRONMENT, prefix, python, {"server": pid})


@contextmanager
def mp_server(place: Place) -> Iterator[Setup]:
    """The server that LMCache's multiprocess mode is about, its memory shared with workers."""
    python = interpreter(place, "lmcache")
    log = place.directory / "server.log"
    name = f"lmcache_l1_pool_kvb{os.getpid()}"
    with loopback() as prefix:
        command = [
            *(*prefix, python, "-m", "lmcache.cli.main", "server"),
            *("--host", "127.0.0.1", "--port", str(PORT)),
            *("--http-host", "127.0.0.1", "--http-port", str(_HTTP_PORT)),
            *("--l1-size-gb", str(place.capacity / GIB), "--no-l1-use-lazy"),
            *("--supported-transfer-mode", "engine_driven", "--shm-name", name),
            *("--eviction-policy", "LRU", "--chunk-size", "16", "--max-workers", "1"),
            *("--disable-metrics", "--disable-observability"),
        ]
        try:
            with server(command, log, PORT, _ENVIRONMENT) as pid:
                settings = {"url": f"tcp://127.0.0.1:{PORT}", "server_pid": str(pid)}
                yield Setup(settings, _ENVIRONMENT, prefix, python, {"server": pid})
        finally:
            # Its name for the memory, which it leaves there where it is killed.
            Path(f"/dev/shm/{name}").unlink(missing_ok=True)
