"""What copies on a GPU are made of: kernels for ranges of layers, staging, and addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from client.addresses import Addresses
from client.paged_kernels import Launch
from client.paged_layers import Group, Span
from client.paged_runs import WORDS, batches, runs_of
from client.pinning import PinnedSegments

_MOST_SHAPES: Final = 4096
"""Ranges of layers whose tables are kept on the device."""


@dataclass(slots=True)
class Part:
    """Some blocks to copy: the addresses of their buffers and their numbers, on the device."""

    buffers: Any
    blocks: Any
    count: int


class Kernels:
    """The kernel that moves blocks between KV tensors and buffers, ready for ranges of layers.

    Args:
        torch: the module.
        device: where the tensors lie.
        groups: where the layers lie.

    Attributes:
        torch: as above.
        device: as above.
    """

    def __init__(self, torch: Any, device: Any, groups: Sequence[Group]) -> None:
        self.torch = torch
        self.device = device
        self._groups = groups
        self._launches: dict[tuple[tuple[Span, ...], int], list[Launch]] = {}
        self._making = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        self._used: set[Any] = set()

    def part(self, addresses: Addresses, block_ids: Sequence[int], stream: Any) -> Part:
        """Bring the places of blocks to the device, on a stream."""
        torch = self.torch
        named = torch.empty((2, len(addresses)), dtype=torch.int64, pin_memory=True)
        named.numpy()[:] = addresses, block_ids
        with torch.cuda.stream(stream):
            table = named.to(self.device, non_blocking=True)
        return Part(table[0], table[1], len(addresses))

    def move(
        self,
        part: Part,
        covered: Sequence[Span],
        alignment: int,
        stream: Any,
        *,
        to_tensors: bool,
        programs: int = 0,
    ) -> None:
        """Queue copies of blocks.

        Args:
            part: the blocks, and their buffers.
            covered: the spans of the layers, offsets counted from where the buffers begin.
            alignment: what divides the addresses of the buffers.
            stream: where they are queued.
            to_tensors: the direction.
            programs: how many programs share the work; 0 for as many as there is work for.
        """
        name = (tuple(covered), alignment)
        with self._lock, self.torch.cuda.stream(stream):
            launches = self._launches.get(name)
            if launches is None:
                launches = self._make(name)
            self._used.add(stream)
            for launch in launches:
                launch(
                    part.buffers, part.blocks, part.count, to_tensors=to_tensors, programs=programs
                )

    def _make(self, name: tuple[tuple[Span, ...], int]) -> list[Launch]:
        """Bring the tables of a range of layers to the device.

        That is waited for, so that any stream can use them; on a stream with nothing else to do,
        because others may be waiting for the engine.
        """
        covered, alignment = name
        cut = batches(runs_of(self._groups, covered), alignment)
        with self.torch.cuda.stream(self._making):
            if len(self._launches) >= _MOST_SHAPES:
                for stream in self._used:  # their tables must not go before they have been used
                    stream.synchronize()
                self._launches.clear()
            made = [Launch(self.torch, self.device, batch) for batch in cut]
            self._making.synchronize()
            self._launches[name] = made
        return made


class Stage:
    """Two staging buffers on the device, used in turn, and the streams of one direction.

    Args:
        torch: the module.
        device: where they are.
        nbytes: of each buffer.

    Attributes:
        lock: to be held while it is used.
        copies: stream of the copies over the bus.
        kernels: stream of the kernels.
    """

    def __init__(self, torch: Any, device: Any, nbytes: int) -> None:
        self.lock = threading.Lock()
        self.copies, self.kernels = (torch.cuda.Stream(device) for _ in range(2))
        self._torch = torch
        self._device = device
        self._nbytes = nbytes
        self._buffers: list[Any] = []
        self._free: list[Any] = []
        self._turn = 0

    def fits(self, length: int) -> int:
        """How many blocks of a length a buffer holds."""
        return max(self._nbytes // length, 1)

    def next(self) -> tuple[Any, Any]:
        """The buffer whose turn it is, and the event after which it is free."""
        if not self._buffers:
            torch, device = self._torch, self._device
            self._buffers = [
                torch.empty(self._nbytes, dtype=torch.uint8, device=device) for _ in range(2)
            ]
            # Their memory may have been used on the current stream.
            self._free = [torch.cuda.current_stream(device).record_event() for _ in range(2)]
        self._turn ^= 1
        return self._buffers[self._turn], self._free[self._turn]

    def used(self, event: Any) -> Callable[[], object]:
        """Take note of when the buffer will be free again; what waits for that."""
        self._free[self._turn] = event
        wait: Callable[[], object] = event.synchronize
        return wait


def common(value: int) -> int:
    """The most bytes that can be copied at once where all addresses are multiples of a value."""
    return next(word for word in WORDS if value % word == 0)


def alignment_of(addresses: Addresses) -> int:
    """The most bytes that can be copied at once at some addresses."""
    return common(int(np.bitwise_or.reduce(addresses))) if len(addresses) else 1


def rows_of(near: Any, count: int, length: int) -> Addresses:
    """Addresses of buffers that lie one after the other on the device."""
    rows: Addresses = near.data_ptr() + np.arange(count, dtype=np.int64) * length
    return rows


def neighbours(addresses: Addresses, length: int, pinned: PinnedSegments) -> list[tuple[int, int]]:
    """Buffers that follow one another in one segment, as first and one after the last.

    Memory of two segments is not copied at once, even if they lie side by side.
    """
    apart = (np.diff(addresses) != length) | pinned.begin_at(addresses[1:])
    cuts = (np.flatnonzero(apart) + 1).tolist()
    return list(pairwise([0, *cuts, len(addresses)]))


def follow(stream: Any, after: object | None) -> None:
    """Have a stream wait for a mark, if there is one."""
    if after is not None:
        stream.wait_event(after)
