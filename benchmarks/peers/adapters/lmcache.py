"""LMCache in the client's own process, by the storage manager that its engines use.

Settings: ``mode``, and what goes with it:

- ``cpu``: blocks lie in this process's memory.
- ``disk``: they lie in files below the directory ``path``, of ``disk`` bytes; memory only stages.
- ``server``: they lie in an ``lm://`` server. ``url``, and its ``server_pid``.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

from benchmarks.peers import adapter

MODEL: Final = "benchmark"
TOKENS: Final = 256
WRITTEN: Final = 60.0
"""Seconds that one put may take until it is written."""
_STAGED: Final = 96
_GIB: Final = 1 << 30
_LOCATIONS: Final = {
    "cpu": "LocalCPUBackend",
    "disk": "LocalDiskBackend",
    "server": "RemoteBackend",
}


class Adapter(adapter.Adapter):
    """One storage manager with one backend that keeps blocks."""

    def open(self, settings: Mapping[str, str]) -> None:
        """Make the storage manager."""
        self._mode, size = settings["mode"], int(settings["block_bytes"])
        self.zero_copy = self._mode == "cpu"
        self._files = tempfile.mkdtemp(dir=settings["path"]) if self._mode == "disk" else ""
        self._pid = int(settings.get("server_pid", os.getpid()))
        self._shape = torch.Size([1, 1, TOKENS, size // TOKENS])
        self._names = _Names(max(1, int(settings["capacity"]) // size))
        metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 1, TOKENS, 1, size // TOKENS),
            role="worker",
        )
        config = LMCacheEngineConfig.from_defaults(**self._options(settings, size))
        self._manager = StorageManager(config, metadata, EventManager())
        self._location = _LOCATIONS[self._mode]
        self._backend = self._manager.storage_backends[self._location]
        if self._mode == "server":
            connection = self._backend.connection.getWrappedConnector()
            # Otherwise a small request waits 40 ms for the answer to the one before it.
            connection.client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """End its threads, and give back memory and files."""
        if self._mode == "server":
            self._blank()
        self._manager.close()
        if self._files:
            shutil.rmtree(self._files, ignore_errors=True)

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Copy to memory of the manager's, and hand that over."""
        objects = []
        for block in blocks:
            item = self._allocate(self._shape)
            if item is None:
                break
            np.copyto(_array(item.byte_array), _array(block))
            objects.append(item)
        if self._mode == "cpu":
            names = [_name(key) for key in keys[: len(objects)]]
            self._manager.batched_put(names, objects)
            return len(objects)
        if self._mode == "disk":
            return self._write([_name(key) for key in keys[: len(objects)]], objects)
        names = [_name(self._names.new(key)) for key in keys[: len(objects)]]
        self._write(names, objects)
        # A put is not answered; what is asked for after it on the same connection is.
        return len(objects) if self._backend.contains(names[-1]) else 0

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Copy from memory of the manager's."""
        found = 0
        for item, block in zip(self._held(keys), into, strict=True):
            if item is not None:
                np.copyto(_array(block), _array(item.byte_array))
                item.ref_count_down()
                found += 1
        return found

    def exists(self, keys: Sequence[bytes]) -> int:
        """How many there are before the first that isn't."""
        names = [_name(self._names.of(key)) for key in keys]
        count: int = self._manager.batched_contains(names, [self._location])[0]
        return count

    @contextmanager
    def view(self, keys: Sequence[bytes], size: int) -> Iterator[Sequence[memoryview | None]]:
        """The manager's memory itself, held by its count of references."""
        items = self._held(keys)
        try:
            yield [None if item is None else item.byte_array for item in items]
        finally:
            for item in items:
                if item is not None:
                    item.ref_count_down()

    def remove_all(self) -> None:
        """Not of a server's: it knows no way, and names are used again instead."""
        if self._mode == "cpu":
            self._manager.clear()
        elif self._mode == "disk":
            for name in list(self._backend.dict):
                self._backend.remove(name)
            self._backend.current_cache_size = 0.0

    def memory(self) -> int:
        """Of the server, or of this process."""
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def _options(self, settings: Mapping[str, str], size: int) -> dict[str, Any]:
        memory = int(settings["capacity"])
        options: dict[str, Any] = {"chunk_size": TOKENS, "local_cpu": self._mode == "cpu"}
        if self._mode == "disk":
            options["local_disk"] = f"{self._files}/"
            options["max_local_disk_size"] = int(settings["disk"]) / _GIB
            options["extra_config"] = {"use_odirect": True}
        if self._mode == "server":
            memory = max(1 << 28, _STAGED * size)
            options |= {"remote_url": settings["url"], "remote_serde": "naive"}
        return options | {"max_local_cpu_size": memory / _GIB}

    def _allocate(self, shape: torch.Size) -> Any:
        return self._manager.allocate(
            shape, torch.uint8, MemoryFormat.KV_2LTD, eviction=True, busy_loop=False
        )

    def _held(self, keys: Sequence[bytes]) -> list[Any]:
        names = [_name(self._names.of(key)) for key in keys]
        found: list[Any] = self._manager.batched_get(names, location=self._location)
        return found

    def _write(self, names: Sequence[CacheEngineKey], objects: Sequence[Any]) -> int:
        """Hand over and wait: as such, a put ends before anything is written."""
        written = threading.Semaphore(0)
        self._backend.batched_submit_put_task(
            names, objects, on_complete_callback=lambda _: written.release()
        )
        for item in objects:
            item.ref_count_down()
        until = time.monotonic() + WRITTEN
        return sum(written.acquire(timeout=max(0.0, until - time.monotonic())) for _ in names)

    def _blank(self) -> None:
        """Write next to nothing over all blocks, so that the server gives their memory back."""
        item = self._allocate(torch.Size([1, 1, 1, 1]))
        for name in self._names.used:
            item.ref_count_up()
            self._write([_name(name)], [item])
        item.ref_count_down()


class _Names:
    """What a client calls its blocks on a server that never removes one.

    By their keys, until there are as many as the server is to hold; then by the name of the oldest
    block, which it so writes over.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: OrderedDict[bytes, bytes] = OrderedDict()

    def new(self, key: bytes) -> bytes:
        if key not in self._names:
            full = len(self._names) >= self._limit
            self._names[key] = self._names.popitem(last=False)[1] if full else key
        return self._names[key]

    def of(self, key: bytes) -> bytes:
        return self._names.get(key, key)

    @property
    def used(self) -> Sequence[bytes]:
        return list(self._names.values())


def _name(key: bytes) -> CacheEngineKey:
    return CacheEngineKey(MODEL, 1, 0, int.from_bytes(key, "big"), torch.uint8)


def _array(block: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(block, np.uint8)
