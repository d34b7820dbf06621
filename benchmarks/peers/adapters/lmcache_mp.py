"""LMCache's multiprocess server, by the protocol that its engines' workers speak, on shared memory.

The server names blocks by the tokens of a prompt up to their end: a list of keys is a prompt here,
each key being the tokens of one chunk. The client remembers for each key in which prompt it put it.

Settings: ``url`` of the server, and its ``server_pid``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import zmq
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.transfer_context.base import (
    EngineDrivenContextMetadata,
    create_engine_driven_context,
)
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from benchmarks.peers import adapter

TOKENS: Final = 16
"""Of a chunk: two bytes of a key each. The server is started with as many."""
DEADLINE: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Run:
    """Chunks ``start`` to ``end`` of a prompt, for the keys from ``first`` on."""

    prompt: tuple[int, ...]
    start: int
    end: int
    first: int


class Adapter(adapter.Adapter):
    """One worker of an engine."""

    def open(self, settings: Mapping[str, str]) -> None:
        """Register the layout of blocks of this size, and map the server's memory."""
        size = int(settings["block_bytes"])
        self._pid = int(settings["server_pid"])
        self._model = f"benchmark-{size}"
        self._instance = os.getpid()
        self._number = itertools.count()
        self._prompts: dict[bytes, tuple[tuple[int, ...], int]] = {}
        self._zmq = zmq.Context()
        self._server = RequestClientFactory.create(settings["url"], context=self._zmq)
        answer = self._server.register_kv_cache_engine_driven_context(
            RegisterEngineDrivenContextPayload(
                instance_id=self._instance,
                model_name=self._model,
                world_size=1,
                block_size=TOKENS,
                num_layers=1,
                hidden_dim_size=size // TOKENS,
                dtype_str="uint8",
                use_mla=True,
                num_physical_slots=TOKENS,
            )
        ).result(timeout=DEADLINE)
        if not answer.shm_name:
            raise RuntimeError("the server shares no memory")
        shape = torch.Size([1, TOKENS, size // TOKENS])
        layout = MemoryLayoutDesc(shapes=[shape], dtypes=[torch.uint8])
        self._memory = create_engine_driven_context(
            EngineDrivenContextMetadata(layout_desc=layout, block_size=TOKENS, use_mla=True),
            self._server,
            DEADLINE,
            shm_name=answer.shm_name,
            pool_size=answer.pool_size,
        )
        self.zero_copy = True

    def close(self) -> None:
        """Say goodbye."""
        self._server.unregister_kv_cache_engine_driven_context(self._instance).result(
            timeout=DEADLINE
        )
        self._memory.close()
        self._server.close()
        self._zmq.term()

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Reserve chunks, copy to them, commit them."""
        prompt = _prompt(keys)
        key = self._key(prompt, 0, len(keys), worker=0)
        slots, indices = self._memory.prepare_store(key, self._instance)
        for slot, index in zip(slots, indices, strict=True):
            np.copyto(_array(slot), np.frombuffer(blocks[index], np.uint8))
        stored = not slots or self._memory.commit_store(key, self._instance, [])
        self._server.end_session(key.request_id)
        if not stored:
            return 0
        self._prompts.update((key, (prompt, at)) for at, key in enumerate(keys))
        # What it gave no room for it either has already, or has no room for.
        return len(keys) if len(slots) == len(keys) else self.exists(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Look up, copy, and give back."""
        found = 0
        with self.view(keys, len(into[0])) as views:
            for each, block in zip(views, into, strict=True):
                if each is not None:
                    np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(each, np.uint8))
                    found += 1
        return found

    @contextmanager
    def view(self, keys: Sequence[bytes], size: int) -> Iterator[Sequence[memoryview | None]]:
        """Chunks in the memory that the server shares, read-locked."""
        views: list[memoryview | None] = [None] * len(keys)
        locked = [self._lock(run, views) for run in self._looked_up(keys)]
        try:
            yield views
        finally:
            views.clear()
            for key in locked:
                if key is not None:
                    self._memory.commit_retrieve(key, self._instance)
                    self._server.end_session(key.request_id)

    def exists(self, keys: Sequence[bytes]) -> int:
        """How many chunks of the prompts there are, each up to its first that isn't."""
        found = 0
        for key, run, held in self._looked_up(keys):
            found += max(0, held - run.start)
            if held:
                self._free(key, run, 0, held)
            self._server.end_session(key.request_id)
        return found

    def remove_all(self) -> None:
        """All that nobody reads."""
        self._server.clear(False).result(timeout=DEADLINE)
        self._prompts.clear()

    def memory(self) -> int:
        """Of the server."""
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def _looked_up(self, keys: Sequence[bytes]) -> list[tuple[IPCCacheServerKey, _Run, int]]:
        """Each run of the keys with how many chunks of its prompt the server found and locked."""
        asked = []
        for run in self._runs(keys):
            key = self._key(run.prompt, 0, run.end, worker=None)
            asked.append((key, run, self._server.lookup(key, 1)))
        found = []
        for key, run, lookup in asked:
            lookup.result(timeout=DEADLINE)
            answer = self._server.wait_prefetch_status(key.request_id, DEADLINE)
            found.append((key, run, min(run.end, answer.result(timeout=DEADLINE) or 0)))
        return found

    def _lock(
        self, looked_up: tuple[IPCCacheServerKey, _Run, int], views: list[memoryview | None]
    ) -> IPCCacheServerKey | None:
        """Fill in the views of one run; the key that holds them, if there are any."""
        asked, run, held = looked_up
        if held and min(run.start, held):
            self._free(asked, run, 0, min(run.start, held))
        if held <= run.start:
            self._server.end_session(asked.request_id)
            return None
        key = self._key(run.prompt, run.start, held, worker=0, request=asked.request_id)
        slots = self._memory.prepare_retrieve(key, self._instance)
        for at, slot in enumerate(slots or ()):
            views[run.first + at] = _array(slot).data
        return key

    def _free(self, asked: IPCCacheServerKey, run: _Run, start: int, end: int) -> None:
        key = self._key(run.prompt, start, end, worker=None, request=asked.request_id)
        self._server.free_lookup_locks(key, 1)

    def _runs(self, keys: Sequence[bytes]) -> list[_Run]:
        """The keys as stretches of the prompts that they were put in; unknown ones are a prompt."""
        unknown = _prompt(keys)
        runs: list[_Run] = []
        for first, key in enumerate(keys):
            prompt, at = self._prompts.get(key, (unknown, first))
            last = runs[-1] if runs else None
            if last is not None and last.prompt is prompt and last.end == at:
                runs[-1] = _Run(prompt, last.start, at + 1, last.first)
            else:
                runs.append(_Run(prompt, at, at + 1, first))
        return runs

    def _key(
        self,
        prompt: tuple[int, ...],
        start: int,
        end: int,
        worker: int | None,
        request: str = "",
    ) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=worker,
            token_ids=prompt[: end * TOKENS],
            start=start * TOKENS,
            end=end * TOKENS,
            request_id=request or f"{self._instance}-{next(self._number)}",
            num_kv_readers=1,
        )


def _prompt(keys: Sequence[bytes]) -> tuple[int, ...]:
    return tuple(np.frombuffer(b"".join(keys), "<u2").tolist())


def _array(slot: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return slot.view(-1).numpy()
