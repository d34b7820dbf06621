"""Copies between KV tensors on a GPU and a node's memory that is registered with CUDA: no CPU copy.

Whole blocks cross the bus by the device's copy engines, between the node's memory and two staging
buffers on the device; a kernel moves them between these and the paged tensors meanwhile. That
leaves the device to the model beside it. A load that the model waits for, layer by layer, is done
by the kernel alone, which reads over the bus: any range of layers is as fast as all of them. On an
H200 that is nearly as fast, but slows down a model beside it by 18 %.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from client.paged_copies import ByteArray, Copies, LayersLoading
from client.paged_kernels import Launch
from client.paged_layers import Group, Span
from client.paged_runs import WORDS, batches, runs_of
from client.pinning import Addresses, PinnedSegments

BUS_PROGRAMS: Final = 16
"""Programs of a kernel that reads over the bus: enough to fill it, few enough to leave the device
to the model."""

_MOST_SHAPES: Final = 256
"""Ranges of layers whose tables are kept on the device."""


@dataclass(slots=True)
class _Part:
    """Some blocks to copy: the addresses of their buffers and their numbers, on the device."""

    buffers: Any
    blocks: Any
    count: int


class _Stage:
    """The staging buffers on the device and the streams of one direction.

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


class CudaCopies:
    """Copies of KV tensors on a GPU. Memory that is not registered goes the staged way.

    Args:
        torch: the module.
        tensors: the KV tensors, all on one device.
        groups: where the layers lie.
        pinned: what memory the device reaches.
        otherwise: copies what it does not reach.
        stage_bytes: size of each of two staging buffers on the device, at least one block.
    """

    def __init__(
        self,
        torch: Any,
        tensors: Sequence[Any],
        groups: Sequence[Group],
        pinned: PinnedSegments,
        otherwise: Copies,
        stage_bytes: int,
    ) -> None:
        self._torch = torch
        self._tensors = tuple(tensors)
        self._groups = groups
        self._pinned = pinned
        self._otherwise = otherwise
        self._device = tensors[0].device
        self._launches: dict[tuple[tuple[Span, ...], int], list[Launch]] = {}
        self._layers = threading.Lock()
        self._reading = torch.cuda.Stream(self._device)
        self._loads, self._saves = (_Stage(torch, self._device, stage_bytes) for _ in range(2))

    def mark(self) -> object | None:
        """An event on the current stream of the calling thread."""
        mark: object = self._torch.cuda.current_stream(self._device).record_event()
        return mark

    # --- whole blocks ----------------------------------------------------------------------------

    def gather(
        self,
        block_ids: Sequence[int],
        targets: Sequence[ByteArray],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy out of the tensors; see ``PagedMemory.gather``."""
        moved = self._staged(self._saves, block_ids, targets, covered, after)
        if moved < len(targets):
            self._otherwise.gather(block_ids[moved:], targets[moved:], covered, after)

    def scatter(
        self,
        sources: Sequence[ByteArray],
        block_ids: Sequence[int],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy into the tensors; see ``PagedMemory.scatter``."""
        moved = self._staged(self._loads, block_ids, sources, covered, after)
        if moved < len(sources):
            self._otherwise.scatter(sources[moved:], block_ids[moved:], covered, after)

    def _staged(
        self,
        stage: _Stage,
        block_ids: Sequence[int],
        buffers: Sequence[ByteArray],
        covered: Sequence[Span],
        after: object | None,
    ) -> int:
        """Copy as many blocks as are registered, up to the first that is not; how many that are."""
        if not buffers:
            return 0
        step, first = stage.fits(buffers[0].nbytes), 0
        with ExitStack() as held, self._torch.cuda.device(self._device), stage.lock:
            self._follow(stage.kernels, after)
            while first < len(buffers):
                some, ids = buffers[first : first + step], block_ids[first : first + step]
                addresses = _addresses(some)
                if not held.enter_context(self._pinned.using(addresses, some[0].nbytes)):
                    break
                # Waited for before the memory is let go of, also after an error.
                held.callback(self._queue(stage, addresses, some[0].nbytes, ids, covered))
                first += len(some)
        return min(first, len(buffers))

    def _queue(
        self,
        stage: _Stage,
        addresses: Addresses,
        length: int,
        block_ids: Sequence[int],
        covered: Sequence[Span],
    ) -> Callable[[], object]:
        """Queue the copies of some blocks by way of one staging buffer; what waits for their end.

        A kernel uses a buffer when its copies are done, and the other way about.
        """
        near, free = stage.next()
        rows = near.data_ptr() + np.arange(len(addresses), dtype=np.int64) * length
        part = self._part(rows, block_ids, stage.kernels)
        loading = stage is self._loads
        first, then = (stage.copies, stage.kernels) if loading else (stage.kernels, stage.copies)
        first.wait_event(free)
        if loading:
            self._cross(near, addresses, length, first, to_device=True)
            then.wait_event(first.record_event())
            self._move(part, covered, _common(length), then, to_tensors=True)
        else:
            self._move(part, covered, _common(length), first, to_tensors=False)
            then.wait_event(first.record_event())
            self._cross(near, addresses, length, then, to_device=False)
        return stage.used(then.record_event())

    def _cross(
        self, near: Any, addresses: Addresses, length: int, stream: Any, *, to_device: bool
    ) -> None:
        """Queue copies over the bus, in as few pieces as the buffers lie in."""
        with self._torch.cuda.stream(stream):
            for first, last in self._neighbours(addresses, length):
                size = (last - first) * length
                host = self._torch.from_numpy(np.asarray(_Memory(int(addresses[first]), size)))
                device = near[first * length : last * length]
                if to_device:
                    device.copy_(host, non_blocking=True)
                else:
                    host.copy_(device, non_blocking=True)

    def _neighbours(self, addresses: Addresses, length: int) -> Iterator[tuple[int, int]]:
        """Buffers that follow one another in one segment, as first and one after the last."""
        first = 0
        ends = np.flatnonzero(np.diff(addresses) != length) + 1
        for last in [*ends.tolist(), len(addresses)]:
            while first < last:
                # Memory of two segments is not copied at once, even if they lie side by side.
                inner = range(first + 1, last)
                cut = next((at for at in inner if self._pinned.begins(int(addresses[at]))), last)
                yield first, cut
                first = cut

    # --- layer by layer --------------------------------------------------------------------------

    def scatter_layers(
        self,
        sources: Sequence[ByteArray],
        block_ids: Sequence[int],
        covered: Sequence[Sequence[Span]],
        after: object | None,
    ) -> LayersLoading | None:
        """Queue copies into the tensors, layer by layer; see ``PagedMemory.load_layers``.

        Args:
            sources: the bytes of whole blocks.
            block_ids: where they go.
            covered: the spans of each layer, offsets counted from the beginning of a block.
            after: what to wait for before the first.

        Returns:
            What the layers can be waited for with; None where the sources are not registered.
        """
        addresses = _addresses(sources)
        with ExitStack() as held:
            if not held.enter_context(self._pinned.using(addresses, sources[0].nbytes)):
                return None
            events, alignment = [], _alignment(addresses)
            with self._layers, self._torch.cuda.device(self._device):
                part = self._part(addresses, block_ids, self._reading)
                self._follow(self._reading, after)
                for spans in covered:
                    self._move(part, spans, alignment, self._reading, to_tensors=True)
                    events.append(self._reading.record_event())
            return LayersLoading(events, part, held.pop_all().close)

    # --- both ------------------------------------------------------------------------------------

    def _move(
        self,
        part: _Part,
        covered: Sequence[Span],
        alignment: int,
        stream: Any,
        *,
        to_tensors: bool,
    ) -> None:
        """Queue the kernel."""
        programs = BUS_PROGRAMS if stream is self._reading else 0
        with self._torch.cuda.stream(stream):
            for launch in self._launches_of(covered, alignment):
                launch(
                    part.buffers,
                    part.blocks,
                    part.count,
                    to_tensors=to_tensors,
                    programs=programs,
                )

    @staticmethod
    def _follow(stream: Any, after: object | None) -> None:
        if after is not None:
            stream.wait_event(after)

    def _launches_of(self, covered: Sequence[Span], alignment: int) -> list[Launch]:
        name = (tuple(covered), alignment)
        made = self._launches.get(name)
        if made is None:
            if len(self._launches) >= _MOST_SHAPES:
                self._launches.clear()
            cut = batches(runs_of(self._groups, covered), alignment)
            made = [Launch(self._torch, self._device, batch) for batch in cut]
            # Their tables are used on other streams from now on.
            self._torch.cuda.current_stream(self._device).synchronize()
            self._launches[name] = made
        return made

    def _part(self, addresses: Addresses, block_ids: Sequence[int], stream: Any) -> _Part:
        torch = self._torch
        named = torch.empty((2, len(addresses)), dtype=torch.int64, pin_memory=True)
        named.numpy()[:] = addresses, block_ids
        with torch.cuda.stream(stream):
            table = named.to(self._device, non_blocking=True)
        return _Part(table[0], table[1], len(addresses))


def _addresses(buffers: Sequence[ByteArray]) -> Addresses:
    return np.array([buffer.__array_interface__["data"][0] for buffer in buffers], np.int64)


def _common(value: int) -> int:
    return next(word for word in WORDS if value % word == 0)


def _alignment(addresses: Addresses) -> int:
    return _common(int(np.bitwise_or.reduce(addresses))) if len(addresses) else 1


class _Memory:
    """Shows numpy memory by its address."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": (size,),
        }
