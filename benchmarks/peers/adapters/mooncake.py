"""Mooncake Store, by its Python client.

Settings: ``mode``, and what goes with it:

- ``local``: the blocks lie in this process. ``master``: address of the master.
- ``tcp``: they lie in another, over TCP. ``master``.
- ``dummy``: the process with the blocks shares its memory. ``client``: address of that process.
- ``hot``: as ``dummy``, with its hot cache, whose blocks are seen without a copy. Instead of
  ``client`` there is one for each size, ``client_65536`` and so on.
- ``ssd``: as ``local``, offloaded to the directory ``path``.

Besides, for `Adapter.memory`, ``master_pid``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from mooncake.store import MooncakeDistributedStore

from benchmarks.peers import adapter

ROOM: Final = 30.0
"""Seconds that a put to the SSD is tried again for."""
_PAUSE: Final = 0.02
_SPARE_BUFFERS: Final = 96
"""Buffers of the client's own that there is room for: one batch to put, one to get, and spare."""
_LEAST_POOL: Final = 64 << 20
_PAGE: Final = 4096


class Adapter(adapter.Adapter):
    """One client of a Mooncake master."""

    blocks_apart = True

    def __init__(self) -> None:
        self._store = MooncakeDistributedStore()
        self._memory: list[mmap.mmap] = []
        self._files = ""
        self._mode = ""
        self._master = 0

    def open(self, settings: Mapping[str, str]) -> None:
        """Connect, and give the store its segment where that is ours."""
        self._mode, self._master = settings["mode"], int(settings["master_pid"])
        self.zero_copy = self._mode == "hot"
        pool = max(_LEAST_POOL, _SPARE_BUFFERS * int(settings["block_bytes"]))
        if self._shared:
            name = f"client_{settings['block_bytes']}" if self._mode == "hot" else "client"
            code = self._store.setup_dummy(pool, pool, settings[name])
        else:
            code = self._setup(settings, pool)
        if code != 0:
            raise RuntimeError(f"its setup answers {code}")

    def close(self) -> None:
        """Leave the master."""
        self._store.close()
        for memory in self._memory:
            # Views of it that a work still holds keep it until they are gone.
            memory.madvise(mmap.MADV_DONTNEED)
        self._memory.clear()
        if self._files:
            shutil.rmtree(self._files, ignore_errors=True)

    def buffers(self, count: int, size: int) -> list[memoryview]:
        """Registered memory; of the pool that the two processes share, where they do."""
        stride = -(-size // _PAGE) * _PAGE
        if self._shared:
            address = self._store.alloc_from_mem_pool(count * stride)
            if not address:
                raise MemoryError("its pool is used up")
            raw = (ctypes.c_char * (count * stride)).from_address(address)
            whole = memoryview(raw).cast("B")
        else:
            self._memory.append(mmap.mmap(-1, count * stride))
            whole = memoryview(self._memory[-1])
        _touch(whole)
        if self._store.register_buffer(_address(whole), len(whole)) != 0:
            raise RuntimeError("it doesn't register a buffer")
        return [whole[start : start + size] for start in range(0, count * stride, stride)]

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Put from registered memory.

        What finds no room is refused. In the mode ``ssd`` it is tried again, as there will be room
        once the store has written other blocks to its files. In the mode ``hot`` blocks are asked
        for at once, since the cache takes them at their first get.
        """
        left = {key.hex(): block for key, block in zip(keys, blocks, strict=True)}
        left = self._refused(left)
        until = time.monotonic() + ROOM
        while left and self._mode == "ssd" and time.monotonic() < until:
            time.sleep(_PAUSE)
            left = self._refused(left)
        if self._mode == "hot":
            self._store.batch_get_buffer([key.hex() for key in keys])
        return len(keys) - len(left)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Get into registered memory."""
        names = [key.hex() for key in keys]
        if len(names) == 1:
            got = self._store.get_into(names[0], _address(into[0]), len(into[0]))
            return int(got == len(into[0]))
        lengths = self._store.batch_get_into(
            names, [_address(block) for block in into], [len(block) for block in into]
        )
        return sum(got == len(block) for got, block in zip(lengths, into, strict=True))

    def exists(self, keys: Sequence[bytes]) -> int:
        """One call for all."""
        found = self._store.batch_is_exist([key.hex() for key in keys])
        return sum(each == 1 for each in found)

    @contextmanager
    def view(self, keys: Sequence[bytes], size: int) -> Iterator[Sequence[memoryview | None]]:
        """Buffers of the hot cache; what isn't there yet the store copies to a buffer."""
        handles = self._store.batch_get_buffer([key.hex() for key in keys])
        views = [None if handle is None else memoryview(handle).cast("B") for handle in handles]
        try:
            yield views
        finally:
            # The last reference to a buffer gives it back to the store.
            del handles
            for each in views:
                if each is not None:
                    each.release()

    def remove_all(self) -> None:
        """Also what a get has leased a moment ago."""
        self._store.remove_all(True)

    def memory(self) -> int:
        """Of the master, which keeps all keys."""
        return resident(self._master)

    def _refused(self, blocks: Mapping[str, memoryview]) -> dict[str, memoryview]:
        if len(blocks) == 1:
            ((name, block),) = blocks.items()
            codes = [self._store.put_from(name, _address(block), len(block))]
        else:
            addresses = [_address(block) for block in blocks.values()]
            sizes = [len(block) for block in blocks.values()]
            codes = self._store.batch_put_from(list(blocks), addresses, sizes)
        if not any(codes):
            return {}
        return {name: blocks[name] for name, code in zip(blocks, codes, strict=True) if code != 0}

    @property
    def _shared(self) -> bool:
        return self._mode in ("dummy", "hot")

    def _setup(self, settings: Mapping[str, str], pool: int) -> int:
        segment = 0 if self._mode == "tcp" else int(settings["capacity"])
        extra: dict[str, Any] = {}
        if self._mode == "ssd":
            self._files = tempfile.mkdtemp(dir=settings["path"])
            os.environ["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] = self._files
            extra = {"enable_ssd_offload": True, "ssd_offload_path": self._files}
        code: int = self._store.setup(
            f"127.0.0.1:{_free_port()}",
            "P2PHANDSHAKE",
            segment,
            pool,
            "tcp",
            "",
            settings["master"],
            **extra,
        )
        return code


def resident(pid: int) -> int:
    """Bytes of a process that lie in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def _address(block: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def _touch(memory: memoryview) -> None:
    memory[::_PAGE] = bytes([1]) * len(range(0, len(memory), _PAGE))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
