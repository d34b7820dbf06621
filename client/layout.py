"""How the KV tensors of a model become the bytes of blocks, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from client.buffers import flat_bytes, tensor_bytes, writable_bytes
from kvstore.errors import InvalidRequest, NamespaceMismatch
from kvstore.identity import Namespace

ELEMENT_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element by the name of its type."""

KVTensors: TypeAlias = Sequence[tuple[Any, Any]]
"""The key and value tensor of each layer: numpy arrays or torch tensors on the CPU."""


class BlockShape(Protocol):
    """What a layout says to the namespace of its blocks."""

    @property
    def name(self) -> str:
        """The name that enters the namespace: another arrangement of bytes has another name."""

    @property
    def dtype(self) -> str:
        """Element type, by its common name."""

    @property
    def block_tokens(self) -> int:
        """Tokens in one block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""


class Layout(BlockShape, Protocol):
    """What the prefix level needs to know about KV tensors."""

    def check(self, tensors: KVTensors, tokens: int) -> None:
        """Accept tensors that hold at least ``tokens`` tokens.

        Raises:
            NamespaceMismatch: they are not of this layout.
        """

    def pack(self, tensors: KVTensors, first_block: int, blocks: Sequence[memoryview]) -> None:
        """Copy consecutive blocks out of tensors, the first of them ``first_block``."""

    def unpack(self, blocks: Sequence[memoryview], tensors: KVTensors, first_block: int) -> None:
        """Copy consecutive blocks into tensors, the first of them as ``first_block``."""


@dataclass(frozen=True)
class HeadMajorLayout:
    """Tensors ``[kv heads, tokens, head dim]``; a block is ``[layers, 2, kv heads, tokens, dim]``.

    This is how Hugging Face Transformers holds them. Because the layers come first, one layer of a
    block is one byte range of it. A leading batch axis of one is accepted.

    Attributes:
        layers: layers of this rank.
        kv_heads: key/value heads of this rank.
        head_dim: elements of one head.
        dtype: element type, one of ``ELEMENT_BYTES``.
        block_tokens: tokens in one block.

    Raises:
        InvalidRequest: a size is not positive or the element type is unknown.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int = 16

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim, self.block_tokens) < 1:
            raise InvalidRequest("every size of a layout must be at least 1")
        if self.dtype not in ELEMENT_BYTES:
            raise InvalidRequest(f"unknown element type {self.dtype!r}")

    @property
    def name(self) -> str:
        """Arrangement and sizes, for example ``head-major/1:8x2x4x16x64``."""
        sizes = (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)
        return "head-major/1:" + "x".join(map(str, sizes))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.layers * 2 * self.kv_heads * self.block_tokens * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.head_dim * ELEMENT_BYTES[self.dtype]

    def layer_range(self, layer: int) -> tuple[int, int]:
        """Where one layer lies in every block.

        Returns:
            Offset and length in bytes.

        Raises:
            InvalidRequest: there is no such layer.
        """
        if not 0 <= layer < self.layers:
            raise InvalidRequest(f"layer {layer} is not one of {self.layers}")
        length = self.block_bytes // self.layers
        return layer * length, length

    def namespace(self, model: str, **fields: Any) -> Namespace:
        """The namespace of blocks in this layout.

        Args:
            model: name or path of the model.
            fields: other fields of ``Namespace``, such as ``revision``, ``tenant`` or ``salt``.
        """
        return Namespace(
            model=model,
            dtype=self.dtype,
            layout=self.name,
            block_tokens=self.block_tokens,
            block_bytes=self.block_bytes,
            **fields,
        )

    def check(self, tensors: KVTensors, tokens: int) -> None:
        """Accept tensors that hold at least ``tokens`` tokens.

        Raises:
            NamespaceMismatch: the number of layers, the element type or a shape differs.
        """
        if len(tensors) != self.layers:
            raise NamespaceMismatch(f"{len(tensors)} layers given, the layout has {self.layers}")
        for pair in tensors:
            for tensor in pair:
                self._check_tensor(tensor, tokens)

    def _check_tensor(self, tensor: Any, tokens: int) -> None:
        element = str(tensor.dtype).removeprefix("torch.")
        if element != self.dtype:
            raise NamespaceMismatch(f"the tensors are {element}, the layout is {self.dtype}")
        shape = tuple(tensor.shape)
        heads, held, dim = shape[-3:] if len(shape) >= 3 else (0, 0, 0)
        if len(shape) - (shape[:1] == (1,) and len(shape) == 4) != 3 or (heads, dim) != (
            self.kv_heads,
            self.head_dim,
        ):
            raise NamespaceMismatch(
                f"a tensor has shape {shape}, not [{self.kv_heads}, tokens, {self.head_dim}]"
            )
        if held < tokens:
            raise NamespaceMismatch(f"a tensor holds {held} tokens, not {tokens}")

    def pack(self, tensors: KVTensors, first_block: int, blocks: Sequence[memoryview]) -> None:
        """Copy consecutive blocks out of tensors.

        Args:
            tensors: key and value of every layer.
            first_block: which block of the tensors is the first to copy.
            blocks: one writable buffer of ``block_bytes`` for each.
        """
        self._check_blocks(tensors, first_block, blocks)
        rows = self._rows(tensors)
        for index, block in enumerate(blocks, first_block):
            target = self._as_array(writable_bytes(block))
            for number, row in enumerate(rows):
                target[number] = row[:, self._tokens_of(index)]

    def unpack(self, blocks: Sequence[memoryview], tensors: KVTensors, first_block: int) -> None:
        """Copy consecutive blocks into tensors.

        Args:
            blocks: the bytes of each block.
            tensors: key and value of every layer, to be filled.
            first_block: which block of the tensors the first one becomes.
        """
        self._check_blocks(tensors, first_block, blocks)
        rows = self._rows(tensors)
        for index, block in enumerate(blocks, first_block):
            source = self._as_array(flat_bytes(block))
            for number, row in enumerate(rows):
                row[:, self._tokens_of(index)] = source[number]

    def _check_blocks(
        self, tensors: KVTensors, first_block: int, blocks: Sequence[memoryview]
    ) -> None:
        self.check(tensors, (first_block + len(blocks)) * self.block_tokens)
        for block in blocks:
            if block.nbytes != self.block_bytes:
                raise NamespaceMismatch(
                    f"a block has {block.nbytes} bytes, the layout {self.block_bytes}"
                )

    def _tokens_of(self, block: int) -> slice:
        return slice(block * self.block_tokens, (block + 1) * self.block_tokens)

    def _rows(self, tensors: KVTensors) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Byte arrays ``[kv heads, tokens, bytes]``: key and value of layer 0, of layer 1, ..."""
        arrays = (tensor_bytes(tensor) for pair in tensors for tensor in pair)
        return [array[0] if array.ndim == 4 else array for array in arrays]

    def _as_array(self, block: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
        shape = (self.layers * 2, self.kv_heads, self.block_tokens, self._row_bytes)
        return np.frombuffer(block, np.uint8).reshape(shape)
