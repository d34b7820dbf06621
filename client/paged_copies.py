"""Copies between KV tensors in host memory and the bytes of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, overload, runtime_checkable

import numpy as np

from client.addresses import Addresses, addresses_of
from client.paged_layers import Group, Span
from rdma.gpu_segments import GpuView

ByteArray: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Arrays(Sequence[ByteArray]):
    """Buffers as arrays, made when they are asked for: a device can begin with the first of many.

    Args:
        buffers: flat bytes, all of one length.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers

    def __len__(self) -> int:
        return len(self._buffers)

    @overload
    def __getitem__(self, index: int) -> ByteArray: ...
    @overload
    def __getitem__(self, index: slice) -> Arrays: ...
    def __getitem__(self, index: int | slice) -> ByteArray | Arrays:
        if isinstance(index, slice):
            return Arrays(self._buffers[index])
        return np.frombuffer(self._buffers[index], np.uint8)

    def __iter__(self) -> Iterator[ByteArray]:
        return (np.frombuffer(buffer, np.uint8) for buffer in self._buffers)

    @property
    def addresses(self) -> Addresses:
        """Where they begin."""
        return addresses_of(self._buffers)


class Copies(Protocol):
    """Moves the bytes of blocks between KV tensors and host memory."""

    def mark(self) -> object | None:
        """What has been asked of the device so far."""

    def gather(
        self,
        block_ids: Sequence[int],
        targets: Arrays,
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy out of the tensors."""

    def scatter(
        self,
        sources: Arrays,
        block_ids: Sequence[int],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy into the tensors."""


@runtime_checkable
class DirectCopies(Copies, Protocol):
    """Copies that a device does by itself, so that they can be queued."""

    @property
    def gpu(self) -> int:
        """Number of the device in this process."""

    def scatter_near(
        self,
        sources: Sequence[GpuView],
        block_ids: Sequence[int],
        covered: Sequence[Span],
        after: object | None,
    ) -> Queued:
        """Queue copies of blocks that lie on a GPU into the tensors."""

    def scatter_layers(
        self,
        sources: Arrays,
        block_ids: Sequence[int],
        covered: Sequence[Sequence[Span]],
        after: object | None,
        near: Queued | None,
    ) -> LayersLoading | None:
        """Queue copies into the tensors, layer by layer; None where it can't reach the sources."""


class Queued:
    """Copies that a device has been asked for.

    Args:
        event: recorded behind them.
        keep: what must live until their end.

    Attributes:
        event: as above.
    """

    def __init__(self, event: Any, keep: object) -> None:
        self.event = event
        self._keep = keep

    def finish(self) -> None:
        """Wait on the host for their end; may be called again."""
        self.event.synchronize()
        self._keep = None


class LayersLoading:
    """A load that layers of the model can be computed behind, one by one.

    Args:
        events: for each layer, what is recorded once it is there; empty where all are.
        keep: what must live until the end.
        release: lets go of what the load used.
    """

    def __init__(
        self,
        events: Sequence[Any] = (),
        keep: object = None,
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self._events = events
        self._keep = keep
        self._release: Callable[[], object] | None = release

    def wait(self, layer: int) -> None:
        """Have the current stream wait until a layer is there; the host does not wait."""
        if self._events:
            self._events[layer].wait()

    @property
    def done(self) -> bool:
        """Whether all layers are there."""
        return not self._events or bool(self._events[-1].query())

    def finish(self) -> None:
        """Wait on the host until all layers are there; may be called again, from any thread."""
        if self._events:
            self._events[-1].synchronize()
        release, self._release = self._release, None
        if release is not None:
            self._keep = None
            release()


class HostCopies:
    """Copies where the KV tensors lie in host memory: one call of numpy for each fused group.

    Args:
        tensors: whose memory it is, to be kept alive.
        groups: where the layers lie.
        blocks: how many blocks there are.
    """

    def __init__(self, tensors: Sequence[Any], groups: Sequence[Group], blocks: int) -> None:
        self._views = [np.asarray(_Window(tensors, group, blocks)) for group in groups]

    def mark(self) -> None:
        """Nothing: the host does what it is asked at once."""

    def gather(
        self,
        block_ids: Sequence[int],
        targets: Arrays,
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy out of the tensors; see ``PagedMemory.gather``."""
        shown = self._shown(covered)
        for block, target in zip(block_ids, targets, strict=True):
            for view, span in shown:
                part = target[span.offset : span.offset + span.length]
                np.copyto(part.reshape(view.shape[1:]), view[block])

    def scatter(
        self,
        sources: Arrays,
        block_ids: Sequence[int],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy into the tensors; see ``PagedMemory.scatter``."""
        shown = self._shown(covered)
        for block, source in zip(block_ids, sources, strict=True):
            for view, span in shown:
                part = source[span.offset : span.offset + span.length]
                np.copyto(view[block], part.reshape(view.shape[1:]))

    def _shown(self, covered: Sequence[Span]) -> list[tuple[ByteArray, Span]]:
        return [(self._views[span.group][:, span.start : span.stop], span) for span in covered]


class _Window:
    """Shows numpy the memory of a group, and keeps the tensors alive as long as it looks."""

    def __init__(self, tensors: Sequence[Any], group: Group, blocks: int) -> None:
        self._tensors = tensors
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (group.lead.address, False),
            "shape": group.shape(blocks),
            "strides": group.strides,
        }
