"""NIXL with UCX: what the transport alone does, without a store around it.

The other side is `benchmarks.peers.nixl_target`, a process with registered memory. A put writes to
the next free place there, a get reads from it; which block lies where, only this client knows.

Settings: ``agent``, the other side's metadata in base64; ``address`` of its memory.
"""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from nixl_cu12 import nixl_agent, nixl_agent_config

from benchmarks.peers import adapter

DEADLINE: Final = 30.0
_PAGE: Final = 4096


class Adapter(adapter.Adapter):
    """One agent, its descriptors prepared once, as NIXL's guide asks of whoever repeats them."""

    def __init__(self) -> None:
        self._memory: list[tuple[mmap.mmap, Any]] = []
        self._pieces: list[tuple[int, int, int]] = []
        self._index: dict[int, int] = {}
        self._place_of: dict[bytes, int] = {}
        self._key_at: dict[int, bytes] = {}
        self._next = 0
        self._slots = 0
        self._local: Any = None

    def open(self, settings: Mapping[str, str]) -> None:
        """Meet the other side.

        Without a thread for progress: `_move` makes it, and a second one would take the core that
        copies.
        """
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl_agent(f"client-{os.getpid()}", config)
        name = self._agent.add_remote_agent(base64.b64decode(settings["agent"]))
        self._target = name.decode() if isinstance(name, bytes) else name
        size, start = int(settings["block_bytes"]), int(settings["address"])
        self._slots = int(settings["capacity"]) // size
        places = [(start + slot * size, size, 0) for slot in range(self._slots)]
        self._remote = self._agent.prep_xfer_dlist(self._target, places, "DRAM")

    def close(self) -> None:
        """Give up the descriptors and the agent."""
        if self._local is not None:
            self._agent.release_dlist_handle(self._local)
        self._agent.release_dlist_handle(self._remote)
        for _, registered in self._memory:
            self._agent.deregister_memory(registered)
        self._agent.remove_remote_agent(self._target)
        del self._agent
        self.__init__()  # type: ignore[misc]

    def buffers(self, count: int, size: int) -> list[memoryview]:
        """Registered memory, and descriptors anew for it with all that there was."""
        stride = -(-size // _PAGE) * _PAGE
        memory = mmap.mmap(-1, count * stride)
        whole = memoryview(memory)
        whole[::_PAGE] = bytes([1]) * len(range(0, len(whole), _PAGE))
        start = _address(whole)
        registered = self._agent.register_memory([(start, len(whole), 0, "")], "DRAM")
        self._memory.append((memory, registered))
        blocks = [whole[at : at + size] for at in range(0, count * stride, stride)]
        for block in blocks:
            self._index[_address(block)] = len(self._pieces)
            self._pieces.append((_address(block), size, 0))
        if self._local is not None:
            self._agent.release_dlist_handle(self._local)
        self._local = self._agent.prep_xfer_dlist("", self._pieces, "DRAM")
        return blocks

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Write to the places after those of the last put; what was there is gone."""
        places = [(self._next + n) % self._slots for n in range(len(keys))]
        self._next = (self._next + len(keys)) % self._slots
        for key, place in zip(keys, places, strict=True):
            self._place_of.pop(self._key_at.get(place, b""), None)
            self._key_at[place] = key
        self._move("WRITE", blocks, places)
        self._place_of.update(zip(keys, places, strict=True))
        return len(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Read what this client has written."""
        found = [
            (place, block)
            for key, block in zip(keys, into, strict=True)
            if (place := self._place_of.get(key)) is not None
        ]
        if found:
            self._move("READ", [block for _, block in found], [place for place, _ in found])
        return len(found)

    def exists(self, keys: Sequence[bytes]) -> int:
        """Not a thing that a transport knows.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a transport keeps no keys")

    def remove_all(self) -> None:
        """Forget where the blocks lie."""
        self._place_of.clear()
        self._key_at.clear()

    def _move(self, operation: str, blocks: Sequence[memoryview], places: list[int]) -> None:
        handle = self._agent.make_prepped_xfer(
            operation,
            self._local,
            [self._index[_address(block)] for block in blocks],
            self._remote,
            places,
        )
        until = time.monotonic() + DEADLINE
        state = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < until:
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ends as {state}")


def _address(block: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
