"""Where the blocks of an engine's KV tensors lie: pure arithmetic on shapes and strides."""

from __future__ import annotations

import hashlib
import math
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from kvstore.errors import ConfigError

MAX_NAME_BYTES: Final = 512
"""A layout whose description is longer is named by its hash instead."""

_KERNEL: Final = "B"
"""Names the axis of kernel blocks within a block; the other axes are named from ``a`` on."""


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor as it lies in memory.

    Attributes:
        storage: identifies the allocation: tensors of different ones are never seen as one.
        address: of its first byte.
        shape: entries of each axis.
        strides: bytes between two entries of each axis.
        element: name of the element type.
        element_bytes: bytes of one element.
    """

    storage: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: str
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of all blocks.

    Attributes:
        storage: as in ``Strided``.
        address: of the first byte of block 0.
        block_stride: bytes from one block to the next.
        shape: what one block holds, outermost first, the last axis contiguous bytes.
        strides: bytes between two entries of each axis.
        element: name of the element type.
        form: all that decides the bytes of this layer, as text.
    """

    storage: int
    address: int
    block_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: str
    form: str

    @property
    def nbytes(self) -> int:
        """Bytes of this layer in one block."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive layers that lie at equal distances, so that one strided view shows them all.

    Attributes:
        first: number of its first layer.
        layers: how many there are.
        step: bytes from one layer to the next.
        lead: the first layer, which all others resemble.
    """

    first: int
    layers: int
    step: int
    lead: Layer

    def shape(self, blocks: int) -> tuple[int, ...]:
        """Of the view ``[blocks, layers, ...]`` of bytes."""
        return (blocks, self.layers, *self.lead.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the same view, in bytes."""
        return (self.lead.block_stride, self.step, *self.lead.strides)


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a group that a range of layers covers.

    Attributes:
        group: which group.
        start: first layer, counted within the group.
        stop: layer after the last, likewise.
        offset: where its bytes begin in the buffer of a block.
        length: how many they are.
    """

    group: int
    start: int
    stop: int
    offset: int
    length: int


def layer_of(name: str, tensor: Strided, blocks: int, block_axis: int) -> Layer:
    """Find the blocks in a tensor.

    Args:
        name: of the layer, for messages.
        tensor: the KV of one layer.
        blocks: how many blocks it holds.
        block_axis: which axis counts them; where the engine's kernels split blocks, this axis has
            a multiple of ``blocks`` entries.

    Raises:
        ConfigError: there is no such axis, it has another length, or entries share memory.
    """
    shape, strides = tensor.shape, tensor.strides
    if not 0 <= block_axis < len(shape):
        raise ConfigError(f"layer {name}: shape {shape} has no axis {block_axis}")
    if min(shape) < 1 or shape[block_axis] % blocks:
        raise ConfigError(
            f"layer {name}: axis {block_axis} of shape {shape} is not {blocks} blocks"
        )
    _check_apart(name, tensor)
    split = shape[block_axis] // blocks
    axes = [(strides[block_axis], split, _KERNEL)] if split > 1 else []
    others = [axis for axis in range(len(shape)) if axis != block_axis and shape[axis] > 1]
    for letter, axis in zip(string.ascii_lowercase, others, strict=False):
        axes.append((strides[axis], shape[axis], letter))
    axes.sort(reverse=True)
    sizes = "x".join(str(size) for _, size, _ in axes)
    form = f"{''.join(letter for *_, letter in axes)}[{sizes}]{tensor.element}"
    inner = _collapse([*((size, stride) for stride, size, _ in axes), (tensor.element_bytes, 1)])
    return Layer(
        tensor.storage,
        tensor.address,
        strides[block_axis] * split,
        tuple(size for size, _ in inner),
        tuple(stride for _, stride in inner),
        tensor.element,
        form,
    )


def _check_apart(name: str, tensor: Strided) -> None:
    """Accept a tensor in which every entry has memory of its own."""
    axes = zip(tensor.strides, tensor.shape, strict=True)
    extent = tensor.element_bytes
    for stride, size in sorted((stride, size) for stride, size in axes if size > 1):
        if stride < extent:
            raise ConfigError(
                f"layer {name}: entries overlap in shape {tensor.shape}, strides {tensor.strides}"
            )
        extent = stride * size


def _collapse(axes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge axes ``(size, stride)`` that follow one another without a gap."""
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def fuse(layers: Sequence[Layer]) -> list[Group]:
    """Group consecutive layers that one strided view can show."""
    groups: list[Group] = []
    for number, layer in enumerate(layers):
        if groups and (joined := _joined(groups[-1], layer)) is not None:
            groups[-1] = joined
        else:
            groups.append(Group(number, 1, 0, layer))
    return groups


def _joined(group: Group, layer: Layer) -> Group | None:
    lead = group.lead
    step = layer.address - lead.address if group.layers == 1 else group.step
    alike = (layer.storage, layer.block_stride, layer.shape, layer.strides) == (
        lead.storage,
        lead.block_stride,
        lead.shape,
        lead.strides,
    )
    if not alike or step <= 0 or layer.address != lead.address + group.layers * step:
        return None
    return Group(group.first, group.layers + 1, step, lead)


def spans(groups: Sequence[Group], first: int, count: int) -> list[Span]:
    """What a range of layers covers of each group, in the order of the bytes."""
    covered: list[Span] = []
    offset = 0
    for number, group in enumerate(groups):
        start = max(first - group.first, 0)
        stop = min(first + count - group.first, group.layers)
        if start < stop:
            length = (stop - start) * group.lead.nbytes
            covered.append(Span(number, start, stop, offset, length))
            offset += length
    return covered


def describe(layers: Sequence[Layer]) -> str:
    """The name of a layout: equal where the bytes of blocks are.

    For example ``paged/1:4xabc[2x32x128]float32``: four layers, each with the axes besides that of
    the blocks in their own order and of these sizes. Axes of one entry are left out, for they
    decide nothing.
    """
    runs = ((form, len(list(run))) for form, run in groupby(layer.form for layer in layers))
    text = "+".join(f"{length}x{form}" for form, length in runs)
    if len(text) > MAX_NAME_BYTES:
        text = f"{len(layers)} layers sha256 {hashlib.sha256(text.encode()).hexdigest()}"
    return f"paged/1:{text}"
