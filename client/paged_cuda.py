"""Copies between KV tensors on a GPU and a node's memory: no CPU copy.

In a node's DRAM, which is registered with CUDA, whole blocks cross the bus by the device's copy
engines, between the node's memory and two staging buffers on the device; a kernel moves them
between these and the paged tensors meanwhile. That leaves the device to the model beside it. A load
that the model waits for, layer by layer, is done by the kernel alone, which reads over the bus: any
range of layers is as fast as all of them. On an H200 that is nearly as fast, but slows down a model
beside it by 18 %.

Blocks that lie on a GPU are read from there by the same kernel, on all of the device at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from client.addresses import Addresses
from client.paged_by_layer import EngineLayers, KernelLayers
from client.paged_copies import Arrays, Copies, LayersLoading, Queued
from client.paged_device import (
    Kernels,
    Stage,
    alignment_of,
    common,
    follow,
    neighbours,
    rows_of,
)
from client.paged_layers import Group, Span
from client.pinning import PinnedSegments
from rdma.gpu_segments import GpuView

logger = logging.getLogger("kvstore.client.paged")


class CudaCopies:
    """Copies of KV tensors on a GPU. Memory that is not registered goes the staged way.

    Args:
        torch: the module.
        tensors: the KV tensors, all on one device.
        groups: where the layers lie.
        pinned: what memory the device reaches.
        otherwise: copies what it does not reach.
        stage_bytes: size of each of two staging buffers on the device, at least one block.

    Attributes:
        by_engine: whether a load layer by layer is left to the copy engine, where the blocks lie in
            few pieces. Which way is better has not been measured yet.
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
        self.by_engine = False
        self._torch = torch
        self._tensors = tuple(tensors)
        self._pinned = pinned
        self._otherwise = otherwise
        self._device = tensors[0].device
        self._kernels = Kernels(torch, self._device, groups)
        self._layers = KernelLayers(self._kernels)
        self._engine_layers: EngineLayers | None = None
        self._stage_bytes = stage_bytes
        self._near = torch.cuda.Stream(self._device)
        self._near_lock = threading.Lock()
        self._loads, self._saves = (Stage(torch, self._device, stage_bytes) for _ in range(2))

    @property
    def gpu(self) -> int:
        """Number of the device in this process."""
        number: int = self._device.index
        return number

    def mark(self) -> object | None:
        """An event on the current stream of the calling thread."""
        mark: object = self._torch.cuda.current_stream(self._device).record_event()
        return mark

    # --- whole blocks ----------------------------------------------------------------------------

    def gather(
        self,
        block_ids: Sequence[int],
        targets: Arrays,
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy out of the tensors; see ``PagedMemory.gather``."""
        moved = self._staged(self._saves, block_ids, targets, covered, after)
        if moved < len(targets):
            self._otherwise.gather(block_ids[moved:], targets[moved:], covered, after)

    def scatter(
        self,
        sources: Arrays,
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
        stage: Stage,
        block_ids: Sequence[int],
        buffers: Arrays,
        covered: Sequence[Span],
        after: object | None,
    ) -> int:
        """Copy as many blocks as are registered, up to the first that is not; how many that are."""
        if not buffers:
            return 0
        step, first = stage.fits(buffers[0].nbytes), 0
        with ExitStack() as held, self._torch.cuda.device(self._device), stage.lock:
            follow(stage.kernels, after)
            while first < len(buffers):
                some, ids = buffers[first : first + step], block_ids[first : first + step]
                addresses = some.addresses
                if not held.enter_context(self._pinned.using(addresses, some[0].nbytes)):
                    break
                # Waited for before the memory is let go of, also after an error.
                held.callback(self._queue(stage, addresses, some[0].nbytes, ids, covered))
                first += len(some)
        return min(first, len(buffers))

    def _queue(
        self,
        stage: Stage,
        addresses: Addresses,
        length: int,
        block_ids: Sequence[int],
        covered: Sequence[Span],
    ) -> Callable[[], object]:
        """Queue the copies of some blocks by way of one staging buffer; what waits for their end.

        A kernel uses a buffer when its copies are done, and the other way about.
        """
        near, free = stage.next()
        rows = rows_of(near, len(addresses), length)
        part = self._kernels.part(rows, block_ids, stage.kernels)
        loading = stage is self._loads
        first, then = (stage.copies, stage.kernels) if loading else (stage.kernels, stage.copies)
        first.wait_event(free)
        if loading:
            self._cross(near, addresses, length, first, to_device=True)
            then.wait_event(first.record_event())
            self._kernels.move(part, covered, common(length), then, to_tensors=True)
        else:
            self._kernels.move(part, covered, common(length), first, to_tensors=False)
            then.wait_event(first.record_event())
            self._cross(near, addresses, length, then, to_device=False)
        return stage.used(then.record_event())

    def _cross(
        self, near: Any, addresses: Addresses, length: int, stream: Any, *, to_device: bool
    ) -> None:
        """Queue copies over the bus, in as few pieces as the buffers lie in."""
        with self._torch.cuda.stream(stream):
            for first, last in neighbours(addresses, length, self._pinned):
                size = (last - first) * length
                host = self._torch.from_numpy(np.asarray(_Memory(int(addresses[first]), size)))
                device = near[first * length : last * length]
                if to_device:
                    device.copy_(host, non_blocking=True)
                else:
                    host.copy_(device, non_blocking=True)

    # --- what is queued and not waited for -------------------------------------------------------

    def scatter_near(
        self,
        sources: Sequence[GpuView],
        block_ids: Sequence[int],
        covered: Sequence[Span],
        after: object | None,
    ) -> Queued:
        """Queue copies of blocks that lie on a GPU into the tensors.

        Args:
            sources: the blocks, or the layers covered of each.
            block_ids: where they go.
            covered: the spans of the layers.
            after: what to wait for before.

        Returns:
            What has to be waited for before the blocks are let go of.
        """
        addresses = np.array([source.address for source in sources], np.int64)
        with ExitStack() as failed, self._torch.cuda.device(self._device), self._near_lock:
            failed.callback(self._near.synchronize)
            part = self._kernels.part(addresses, block_ids, self._near)
            follow(self._near, after)
            self._kernels.move(part, covered, alignment_of(addresses), self._near, to_tensors=True)
            event = self._near.record_event()
            failed.pop_all()
        return Queued(event, part)

    def scatter_layers(
        self,
        sources: Arrays,
        block_ids: Sequence[int],
        covered: Sequence[Sequence[Span]],
        after: object | None,
        near: Queued | None,
    ) -> LayersLoading | None:
        """Queue copies into the tensors, layer by layer; see ``PagedMemory.load_layers``.

        Args:
            sources: the bytes of whole blocks.
            block_ids: where they go.
            covered: the spans of each layer, offsets counted from the beginning of a block.
            after: what to wait for before the first.
            near: what has been queued of the same load.

        Returns:
            What the layers can be waited for with, ``near`` included; None where the sources are
            not registered.
        """
        addresses = sources.addresses
        marks = (after, None if near is None else near.event)
        with ExitStack() as held:
            if not held.enter_context(self._pinned.using(addresses, sources[0].nbytes)):
                return None
            queued = None
            with self._torch.cuda.device(self._device):
                if (engine := self._engine()) is not None:
                    length = sources[0].nbytes
                    queued = engine.queue(addresses, block_ids, length, covered, marks)
                if queued is None:
                    queued = self._layers.queue(addresses, block_ids, covered, marks)
            events, keep = queued
            return LayersLoading(events, (keep, near), held.pop_all().close)

    def _engine(self) -> EngineLayers | None:
        """The way by the copy engine, where it is chosen and can be gone."""
        if self.by_engine and self._engine_layers is None:
            try:
                made = EngineLayers(self._kernels, self._pinned, self._stage_bytes)
            except ImportError as error:
                logger.warning("layers are fetched by a kernel: %s", error)
                self.by_engine = False
            else:
                self._engine_layers = made
        return self._engine_layers if self.by_engine else None


class _Memory:
    """Shows numpy memory by its address."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": (size,),
        }
