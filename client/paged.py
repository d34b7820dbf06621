"""An engine's paged KV tensors as the bytes of blocks, and back.

Engines keep the KV of all requests in one tensor for each layer, cut into blocks. Here the layers
of one block become one run of bytes: layers outermost, so that a run of layers is one byte range,
and inside a layer the engine's own order, densely packed. Engines that only differ in how they
interleave layers and blocks, or in padding, thus make the same bytes under the same name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np

from client.buffers import writable_bytes
from client.paged_copies import Copies, DirectCopies, HostCopies, LayersLoading, Queued
from client.paged_layers import Group, Layer, Span, Strided, describe, fuse, layer_of, spans
from client.paged_sources import Source, Sources, arrays_of, parted
from client.paged_staging import STAGE_BYTES, StagedCopies
from client.pinning import pinned_segments
from kvstore.errors import ConfigError, InvalidRequest

logger = logging.getLogger("kvstore.client.paged")


@dataclass(frozen=True)
class PagedLayout:
    """What the bytes of a block are.

    Attributes:
        name: the name that enters the namespace: equal where the bytes are.
        dtype: element type; several, joined by ``+``, where layers differ.
        block_tokens: tokens in one block.
        layer_bytes: bytes of each layer of a block, in their order.
    """

    name: str
    dtype: str
    block_tokens: int
    layer_bytes: tuple[int, ...]

    @property
    def layers(self) -> int:
        """Layers in a block; those that share memory count once."""
        return len(self.layer_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(self.layer_bytes)

    def layer_range(self, first: int, count: int = 1) -> tuple[int, int]:
        """Where consecutive layers lie in every block.

        Args:
            first: number of the first layer.
            count: how many.

        Returns:
            Offset and length in bytes.

        Raises:
            InvalidRequest: there are no such layers.
        """
        if first < 0 or count < 1 or first + count > self.layers:
            raise InvalidRequest(f"layers {first} to {first + count} are not in {self.layers}")
        ends = [0, *accumulate(self.layer_bytes)]
        return ends[first], ends[first + count] - ends[first]


class PagedMemory:
    """The KV tensors of an engine, read and written by block.

    Several threads may use one at once, for different blocks. The tensors are kept alive.

    Attributes:
        layout: what the bytes of a block are.
        blocks: how many blocks the tensors hold.
        layer_numbers: the number of each layer in the layout by its name; layers that share
            memory have the same.
    """

    def __init__(
        self,
        layout: PagedLayout,
        blocks: int,
        layer_numbers: Mapping[str, int],
        groups: Sequence[Group],
        copies: Copies,
    ) -> None:
        self.layout = layout
        self.blocks = blocks
        self.layer_numbers = layer_numbers
        self._groups = groups
        self._copies = copies

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Any],
        blocks: int,
        block_tokens: int,
        *,
        block_axis: int = 0,
        staged: bool | None = None,
        stage_bytes: int = STAGE_BYTES,
    ) -> PagedMemory:
        """Find out how an engine's KV tensors lie in memory.

        Args:
            tensors: the KV tensor of each layer by its name, numpy or torch, with any strides.
                Their order becomes that of the layers in a block. Layers that are the same memory
                are stored once.
            blocks: how many blocks they hold.
            block_tokens: tokens in one block.
            block_axis: the axis that counts blocks, or the pieces that kernels split blocks into:
                0 for ``[blocks, heads, tokens, content]`` and ``[blocks, 2, tokens, heads, dim]``,
                1 for ``[2, blocks, tokens, heads, dim]``.
            staged: whether to copy through torch and staging memory, as tensors on a device need;
                decided by where the tensors lie if left out.
            stage_bytes: size of each staging buffer; at least one block always fits.

        Raises:
            ConfigError: the tensors can't be laid out; the message says which and why.
        """
        if not tensors or min(blocks, block_tokens) < 1:
            raise ConfigError("layers, blocks and block_tokens must be at least 1")
        numbers: dict[str, int] = {}
        layers: dict[Layer, int] = {}
        for name, tensor in tensors.items():
            layer = layer_of(name, _strided(name, tensor), blocks, block_axis)
            numbers[name] = layers.setdefault(layer, len(layers))
        _check_distinct(layers)
        groups = fuse(list(layers))
        layout = PagedLayout(
            describe(list(layers)),
            "+".join(dict.fromkeys(layer.element for layer in layers)),
            block_tokens,
            tuple(layer.nbytes for layer in layers),
        )
        devices = {_device(tensor) for tensor in tensors.values()}
        if len(devices) > 1:
            raise ConfigError(f"the KV tensors lie on several devices: {sorted(devices)}")
        kept = tuple(tensors.values())
        copies: Copies
        if staged if staged is not None else devices != {"cpu"}:
            room = max(stage_bytes, layout.block_bytes)
            copies = _without_the_cpu(kept, groups, room, StagedCopies(kept, groups, blocks, room))
        else:
            copies = HostCopies(kept, groups, blocks)
        return cls(layout, blocks, numbers, groups, copies)

    @property
    def gpu(self) -> int | None:
        """Number of the GPU that copies blocks by itself, also those given by a ``GpuView``.

        ``None`` where none does: the tensors lie elsewhere, or there is no Triton.
        """
        return self._copies.gpu if isinstance(self._copies, DirectCopies) else None

    def mark(self) -> object | None:
        """Note what the engine has asked of the device so far; call it on the engine's thread.

        Returns:
            What ``after=`` of the other calls takes; ``None`` for host memory, where nothing is
            done later than it is asked for.
        """
        return self._copies.mark()

    def gather(
        self,
        block_ids: Sequence[int],
        into: Sequence[memoryview],
        *,
        layers: tuple[int, int] | None = None,
        after: object | None = None,
    ) -> None:
        """Copy blocks out of the KV tensors.

        Args:
            block_ids: the engine's ids of the blocks.
            into: one writable buffer for each, as large as a block, or as the layers asked for.
            layers: first layer and number of layers; all if left out.
            after: wait for what was asked of the device before this mark. Without it, the caller
                knows that the blocks have been computed.

        Raises:
            InvalidRequest: there is no such block or layer, a buffer is read-only, or their number
                is not that of the blocks.
            NamespaceMismatch: a buffer has another size.
        """
        covered, length = self._range(layers)
        targets = arrays_of([writable_bytes(buffer) for buffer in into], length)
        self._check_ids(block_ids, len(targets))
        self._copies.gather(block_ids, targets, covered, after)

    def scatter(
        self,
        blocks: Sequence[Source],
        block_ids: Sequence[int],
        *,
        layers: tuple[int, int] | None = None,
        after: object | None = None,
    ) -> None:
        """Copy blocks into the KV tensors; when this returns, they are there.

        Args:
            blocks: the bytes of each block, or of the layers given; a ``GpuView`` only where
                there is a ``gpu``.
            block_ids: the engine's ids of the blocks, no two the same.
            layers: first layer and number of layers; all if left out.
            after: wait for what was asked of the device before this mark, as where the engine may
                still be reading what the blocks held before.

        Raises:
            InvalidRequest: there is no such block or layer, the number of buffers is not that of
                the blocks, or a ``GpuView`` can't be read.
            NamespaceMismatch: a buffer has another size.
        """
        covered, length = self._range(layers)
        self._check_ids(block_ids, len(blocks))
        sources = parted(blocks, block_ids, length)
        with ExitStack() as queued:
            if (near := self._near(sources, covered, after)) is not None:
                # Also after an error: what is read must not go before that.
                queued.callback(near.finish)
            self._copies.scatter(sources.arrays, sources.ids, covered, after)

    def load_layers(
        self, blocks: Sequence[Source], block_ids: Sequence[int], *, after: object | None = None
    ) -> LayersLoading:
        """Begin to copy blocks into the KV tensors, layer by layer.

        The model may be run at once, each layer behind ``wait`` of what is returned. Where the
        device can't read the blocks by itself, they are there when this returns.

        Args:
            blocks: the bytes of each block, as for ``scatter``; they must stay what they are until
                ``finish`` of what is returned.
            block_ids: the engine's ids of the blocks, no two the same.
            after: as for ``scatter``.

        Raises:
            InvalidRequest: there is no such block, the number of buffers is not that of the
                blocks, or a ``GpuView`` can't be read.
            NamespaceMismatch: a buffer has another size.
        """
        self._check_ids(block_ids, len(blocks))
        sources = parted(blocks, block_ids, self.layout.block_bytes)
        covered, _ = self._range(None)
        with ExitStack() as failed:
            # A GPU's own memory is so fast that nothing is gained by its layers one by one.
            if (near := self._near(sources, covered, after)) is not None:
                failed.callback(near.finish)
            loading = self._load_layers(sources, after, near)
            failed.pop_all()
        return loading

    def _load_layers(
        self, sources: Sources, after: object | None, near: Queued | None
    ) -> LayersLoading:
        """Queue what lies on the host behind what does not."""
        if len(sources.arrays) and isinstance(self._copies, DirectCopies):
            loading = self._copies.scatter_layers(
                sources.arrays, sources.ids, self._by_layer, after, near
            )
            if loading is not None:
                return loading
        self._copies.scatter(sources.arrays, sources.ids, self._range(None)[0], after)
        if near is None:
            return LayersLoading()
        return LayersLoading([near.event] * self.layout.layers, near)

    def _near(self, sources: Sources, covered: list[Span], after: object | None) -> Queued | None:
        """Queue the copies of what lies on a GPU, if anything does."""
        if not sources.near:
            return None
        if not isinstance(self._copies, DirectCopies):
            raise InvalidRequest("blocks on a GPU are only copied to tensors on one, by Triton")
        return self._copies.scatter_near(sources.near, sources.near_ids, covered, after)

    @cached_property
    def _by_layer(self) -> list[list[Span]]:
        """Each layer in the buffer of a whole block."""
        found = []
        for number in range(self.layout.layers):
            start, _ = self.layout.layer_range(number)
            part = spans(self._groups, number, 1)
            found.append([replace(span, offset=start + span.offset) for span in part])
        return found

    def _range(self, layers: tuple[int, int] | None) -> tuple[list[Span], int]:
        first, count = (0, self.layout.layers) if layers is None else layers
        return spans(self._groups, first, count), self.layout.layer_range(first, count)[1]

    def _check_ids(self, block_ids: Sequence[int], buffers: int) -> None:
        if len(block_ids) != buffers:
            raise InvalidRequest(f"{len(block_ids)} blocks need as many buffers, not {buffers}")
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.blocks):
            wrong = next(block for block in block_ids if not 0 <= block < self.blocks)
            raise InvalidRequest(f"block {wrong} is not one of {self.blocks}")


def _without_the_cpu(
    tensors: Sequence[Any], groups: Sequence[Group], room: int, staged: Copies
) -> Copies:
    """Copies by the GPU itself, where there is one and Triton; otherwise those given."""
    if tensors[0].device.type != "cuda":
        return staged
    try:
        kernels = import_module("client.paged_cuda")
        pinned = pinned_segments()
    except ImportError as error:
        logger.warning("blocks are copied by way of the CPU: %s", error)
        return staged
    direct: Copies = kernels.CudaCopies(sys.modules["torch"], tensors, groups, pinned, staged, room)
    return direct


def _strided(name: str, tensor: Any) -> Strided:
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.writeable:
            raise ConfigError(f"layer {name}: the array is read-only")
        address = tensor.__array_interface__["data"][0]
        return Strided(
            0, address, tensor.shape, tensor.strides, str(tensor.dtype), tensor.dtype.itemsize
        )
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"layer {name}: {type(tensor).__name__} is no numpy array or tensor")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"layer {name}: a tensor with layout {tensor.layout} has no strides")
    size = tensor.element_size()
    return Strided(
        tensor.untyped_storage().data_ptr(),
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(stride * size for stride in tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
        size,
    )


def _device(tensor: Any) -> str:
    return "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device)


def _check_distinct(layers: Mapping[Layer, int]) -> None:
    """Accept layers that are each other's memory wholly or not at all."""
    if len({layer.address for layer in layers}) < len(layers):
        raise ConfigError("two layers begin at the same address but are not alike")
