"""Loads that the model waits for layer by layer, from a node's memory that is registered with CUDA.

There are two ways. A kernel reads over the bus straight into the tensors: wherever the blocks lie,
and with nothing staged, but its programs take multiprocessors from the model beside them. Or the
device's copy engine fetches one layer of all blocks into staging and a kernel spreads it on the
device, which leaves the model alone; blocks that are not neighbours in memory cost it a call each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from client.addresses import Addresses
from client.paged_device import (
    Kernels,
    Part,
    Stage,
    alignment_of,
    common,
    follow,
    neighbours,
    rows_of,
)
from client.paged_layers import Span
from client.pinning import PinnedSegments

BUS_PROGRAMS: Final = 16
"""Programs of a kernel that reads over the bus: enough to fill it, few enough to leave the device
to the model."""

MOST_PIECES: Final = 64
"""Runs of neighbours from which on a kernel reads the blocks in any case: each costs the host a
call of some microseconds for every layer."""


class KernelLayers:
    """Layers fetched by a kernel of few programs that reads over the bus.

    Args:
        kernels: move blocks.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._lock = threading.Lock()
        self._stream = kernels.torch.cuda.Stream(kernels.device)

    def queue(
        self,
        addresses: Addresses,
        block_ids: Sequence[int],
        covered: Sequence[Sequence[Span]],
        after: Sequence[object | None],
    ) -> tuple[list[Any], object]:
        """Queue all layers.

        Args:
            addresses: of the blocks in registered memory.
            block_ids: where they go.
            covered: the spans of each layer, offsets counted from the beginning of a block.
            after: what to wait for before the first.

        Returns:
            An event for each layer, and what must live until the last.
        """
        events, alignment = [], alignment_of(addresses)
        with self._lock, _ended(self._stream):
            part = self._kernels.part(addresses, block_ids, self._stream)
            for mark in after:
                follow(self._stream, mark)
            for spans in covered:
                self._kernels.move(
                    part, spans, alignment, self._stream, to_tensors=True, programs=BUS_PROGRAMS
                )
                events.append(self._stream.record_event())
        return events, part


class EngineLayers:
    """Layers fetched by the device's copy engine, by way of staging.

    Args:
        kernels: move blocks.
        pinned: says where segments begin.
        stage_bytes: size of each of two staging buffers.
    """

    def __init__(self, kernels: Kernels, pinned: PinnedSegments, stage_bytes: int) -> None:
        self._kernels = kernels
        self._pinned = pinned
        self._stage = Stage(kernels.torch, kernels.device, stage_bytes)
        self._copy = RowCopies()

    def queue(
        self,
        addresses: Addresses,
        block_ids: Sequence[int],
        length: int,
        covered: Sequence[Sequence[Span]],
        after: Sequence[object | None],
    ) -> tuple[list[Any], object] | None:
        """Queue all layers; as ``KernelLayers.queue``.

        Args:
            addresses: of the blocks in registered memory.
            block_ids: where they go.
            length: bytes of a block.
            covered: the spans of each layer, offsets counted from the beginning of a block.
            after: what to wait for before the first.

        Returns:
            An event for each layer, and what must live until the last; None where the blocks lie
            in too many pieces.
        """
        pieces = neighbours(addresses, length, self._pinned)
        if len(pieces) > MOST_PIECES:
            return None
        stage, events = self._stage, []
        parts: dict[tuple[int, int, int], Part] = {}
        with stage.lock, _ended(stage.copies), _ended(stage.kernels):
            for mark in after:
                follow(stage.kernels, mark)
            for spans in covered:
                self._layer(addresses, block_ids, length, pieces, spans, parts)
                events.append(stage.kernels.record_event())
        return events, parts

    def _layer(
        self,
        addresses: Addresses,
        block_ids: Sequence[int],
        pitch: int,
        pieces: Sequence[tuple[int, int]],
        spans: Sequence[Span],
        parts: dict[tuple[int, int, int], Part],
    ) -> None:
        """Queue one layer, as many blocks at once as a staging buffer holds of it."""
        stage, start = self._stage, spans[0].offset
        width = sum(span.length for span in spans)
        near_spans = [replace(span, offset=span.offset - start) for span in spans]
        step = stage.fits(width)
        for first in range(0, len(addresses), step):
            last = min(first + step, len(addresses))
            near, free = stage.next()
            rows = rows_of(near, last - first, width)
            stage.copies.wait_event(free)
            for begin, end in _within(pieces, first, last):
                source = int(addresses[begin]) + start
                to = int(rows[begin - first])
                self._copy(to, source, pitch, width, end - begin, stage.copies)
            stage.kernels.wait_event(stage.copies.record_event())
            name = int(rows[0]), first, width
            if name not in parts:
                parts[name] = self._kernels.part(rows, block_ids[first:last], stage.kernels)
            self._kernels.move(
                parts[name], near_spans, common(width), stage.kernels, to_tensors=True
            )
            stage.used(stage.kernels.record_event())


class RowCopies:
    """Copies of the same piece of several blocks, one behind the other, from the host in one call.

    Raises:
        ImportError: the package cuda-bindings is not installed.
    """

    def __init__(self) -> None:
        self._runtime = import_module("cuda.bindings.runtime")

    def __call__(
        self, to: int, source: int, pitch: int, width: int, rows: int, stream: Any
    ) -> None:
        """Queue copies.

        Args:
            to: where they go, densely.
            source: the first piece.
            pitch: bytes from one piece to the next.
            width: bytes of a piece.
            rows: how many there are.
            stream: where they are queued.

        Raises:
            OSError: CUDA refuses.
        """
        runtime = self._runtime
        kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        (status,) = runtime.cudaMemcpy2DAsync(
            to, width, source, pitch, width, rows, kind, stream.cuda_stream
        )
        if int(status):
            raise OSError(f"a copy over the bus can't be queued: CUDA error {int(status)}")


@contextmanager
def _ended(stream: Any) -> Iterator[None]:
    """Wait for a stream where queueing fails, for then nobody else does."""
    with ExitStack() as failed:
        failed.callback(stream.synchronize)
        yield
        failed.pop_all()


def _within(pieces: Sequence[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """The parts of pieces that lie in a range."""
    for begin, end in pieces:
        if begin < last and first < end:
            yield max(begin, first), min(end, last)
