"""Copies between KV tensors on a device and host memory, through staging buffers.

All that is CUDA's own is in ``CudaQueue``; CI, which has no GPU, tests the rest with tensors on the
CPU. On an H200, ``tests/client/test_paged_gpu.py`` passed, also under compute-sanitizer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Final, Protocol

from client.paged_copies import Arrays, ByteArray
from client.paged_layers import Group, Span
from kvstore.errors import ConfigError

STAGE_BYTES: Final = 64 << 20
"""Size of a staging buffer, of which each direction has one on the host and one on the device."""


class Queue(Protocol):
    """Where the copies of one direction are queued."""

    def host_buffer(self, nbytes: int) -> Any:
        """Memory of the host that the device copies from and to."""

    def mark(self) -> object | None:
        """What the calling thread has asked of the device so far."""

    def running(self, after: object | None) -> AbstractContextManager[Any]:
        """Queue what is asked for within, behind a mark."""

    def finish(self) -> None:
        """Wait for what was queued, and for nothing else."""


class HostQueue:
    """Copies of tensors on the CPU, done at once."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def host_buffer(self, nbytes: int) -> Any:
        """Ordinary memory."""
        return self._torch.empty(nbytes, dtype=self._torch.uint8)

    def mark(self) -> None:
        """Nothing: all has been done."""

    def running(self, after: object | None) -> AbstractContextManager[Any]:
        """Nothing to wait for."""
        return nullcontext()

    def finish(self) -> None:
        """Nothing to wait for."""


class CudaQueue:
    """Copies on a CUDA stream of their own, beside the engine's."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def host_buffer(self, nbytes: int) -> Any:
        """Pinned memory, which the device reaches without the CPU."""
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)

    def mark(self) -> object:
        """An event on the current stream of the calling thread."""
        return self._torch.cuda.current_stream(self._device).record_event()

    def running(self, after: object | None) -> AbstractContextManager[Any]:
        """Make the stream current, behind an event."""
        if after is not None:
            self._stream.wait_event(after)
        context: AbstractContextManager[Any] = self._torch.cuda.stream(self._stream)
        return context

    def finish(self) -> None:
        """Wait for the stream, not for the device."""
        self._stream.synchronize()


class StagedCopies:
    """Copies of KV tensors through torch and staging buffers of bounded size.

    Args:
        tensors: the KV tensors, all on one device.
        groups: where the layers lie.
        blocks: how many blocks there are.
        stage_bytes: size of each staging buffer, at least one block.

    Raises:
        ConfigError: the tensors are not torch's, or on a kind of device that is not supported.
    """

    def __init__(
        self, tensors: Sequence[Any], groups: Sequence[Group], blocks: int, stage_bytes: int
    ) -> None:
        torch = import_module("torch")
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ConfigError("only torch tensors can be copied through staging memory")
        device = tensors[0].device
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"KV tensors on {device} are not supported, only on CPU and CUDA")
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        views = [_view(torch, storages[g.lead.storage], device, g, blocks) for g in groups]
        self._gathering = _Stage(torch, device, views, stage_bytes)
        self._scattering = _Stage(torch, device, views, stage_bytes)

    def mark(self) -> object | None:
        """Note what the calling thread has asked of the device so far."""
        return self._gathering.queue.mark()

    def gather(
        self,
        block_ids: Sequence[int],
        targets: Arrays,
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy out of the tensors; see ``PagedMemory.gather``."""
        with self._gathering.lock:
            for part in self._gathering.parts(len(block_ids), covered):
                self._gathering.gather(block_ids[part], targets[part], covered, after)

    def scatter(
        self,
        sources: Arrays,
        block_ids: Sequence[int],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy into the tensors; see ``PagedMemory.scatter``."""
        with self._scattering.lock:
            for part in self._scattering.parts(len(block_ids), covered):
                self._scattering.scatter(sources[part], block_ids[part], covered, after)


class _Stage:
    """The staging buffers and the queue of one direction.

    In staging the bytes lie span by span, each with its blocks one after the other, so that the
    device writes and reads every span in one piece.

    Attributes:
        lock: to be held while it is used.
        queue: of its copies.
    """

    def __init__(self, torch: Any, device: Any, views: Sequence[Any], nbytes: int) -> None:
        self.lock = threading.Lock()
        self.queue: Queue = CudaQueue(torch, device) if device.type == "cuda" else HostQueue(torch)
        self._torch = torch
        self._views = views
        self._near = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._host = self.queue.host_buffer(nbytes)
        self._bytes: ByteArray = self._host.numpy()

    def parts(self, blocks: int, covered: Sequence[Span]) -> Iterator[slice]:
        """Cut blocks into parts that fit into staging."""
        step = max(1, len(self._bytes) // sum(span.length for span in covered))
        return (slice(start, start + step) for start in range(0, blocks, step))

    def gather(
        self,
        block_ids: Sequence[int],
        targets: Sequence[ByteArray],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy one part out of the tensors."""
        total = len(block_ids) * sum(span.length for span in covered)
        with self.queue.running(after):
            ids = self._ids(block_ids)
            for view, near in self._device_side(len(block_ids), covered):
                self._torch.index_select(view, 0, ids, out=near)
            self._host[:total].copy_(self._near[:total], non_blocking=True)
        self.queue.finish()
        for span, rows in self._host_side(len(block_ids), covered):
            for target, row in zip(targets, rows, strict=True):
                target[span.offset : span.offset + span.length] = row

    def scatter(
        self,
        sources: Sequence[ByteArray],
        block_ids: Sequence[int],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy one part into the tensors."""
        total = len(block_ids) * sum(span.length for span in covered)
        for span, rows in self._host_side(len(block_ids), covered):
            for source, row in zip(sources, rows, strict=True):
                row[:] = source[span.offset : span.offset + span.length]
        with self.queue.running(after):
            ids = self._ids(block_ids)
            self._near[:total].copy_(self._host[:total], non_blocking=True)
            for view, near in self._device_side(len(block_ids), covered):
                view.index_copy_(0, ids, near)
        self.queue.finish()

    def _ids(self, block_ids: Sequence[int]) -> Any:
        return self._torch.tensor(block_ids, dtype=self._torch.int64, device=self._near.device)

    def _device_side(self, blocks: int, covered: Sequence[Span]) -> Iterator[tuple[Any, Any]]:
        """Each span in the tensors, ``[all blocks, layers, ...]``, and the same in staging."""
        start = 0
        for span in covered:
            view = self._views[span.group][:, span.start : span.stop]
            end = start + blocks * span.length
            yield view, self._near[start:end].view(blocks, *view.shape[1:])
            start = end

    def _host_side(self, blocks: int, covered: Sequence[Span]) -> Iterator[tuple[Span, ByteArray]]:
        """Each span in staging on the host, ``[blocks, bytes]``."""
        start = 0
        for span in covered:
            end = start + blocks * span.length
            yield span, self._bytes[start:end].reshape(blocks, span.length)
            start = end


def _view(torch: Any, storage: Any, device: Any, group: Group, blocks: int) -> Any:
    """The memory of a group as a tensor of bytes ``[blocks, layers, ...]``."""
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    offset = group.lead.address - storage.data_ptr()
    return whole.as_strided(group.shape(blocks), group.strides, offset)
