"""Memory for the KV of a few sequences that a model fills and a store reads and writes by block."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

from client.paged import PagedMemory
from client.transformers import layout_of
from kvstore.errors import ConfigError, MissingExtra
from kvstore.identity import Namespace


class KVMemory:
    """The KV of several sequences, one behind the other: ``[layers, 2, tokens, KV heads, dim]``.

    In a block the tokens are outermost within a layer's keys, and within its values: runs of bytes
    as long as they can be, which is what a bus likes. Another order than ``layout_of`` has means
    another name, so ``PrefixCache`` and ``PagedPrefixCache`` don't share blocks.

    Args:
        model: a causal language model of Transformers. The memory is on its device.
        tokens: of the longest sequence, prompt and output; rounded up to full blocks.
        sequences: how many there is room for: with two, one is saved while the next is computed.
        block_tokens: tokens in one block.

    Attributes:
        paged: the memory by block.
        tokens: room for each sequence.
        sequences: how many.

    Raises:
        InvalidRequest: the model keeps something else than one full attention cache per layer.
        ConfigError: a size is not positive.
        MissingExtra: torch is not installed.
    """

    def __init__(
        self, model: Any, tokens: int, *, sequences: int = 2, block_tokens: int = 16
    ) -> None:
        try:
            torch = import_module("torch")
        except ImportError as error:
            raise MissingExtra.named("transformers", "the Transformers prefix cache") from error
        layout = layout_of(model, block_tokens)
        if min(tokens, sequences) < 1:
            raise ConfigError("there must be room for at least one token of one sequence")
        blocks = math.ceil(tokens / block_tokens)
        self.tokens = blocks * block_tokens
        self.sequences = sequences
        rows = (sequences * blocks, block_tokens, layout.kv_heads, layout.head_dim)
        self._tensors = torch.empty(
            (layout.layers, 2, *rows), dtype=model.dtype, device=model.device
        )
        self.paged = PagedMemory.of(
            {str(number): layer for number, layer in enumerate(self._tensors)},
            sequences * blocks,
            block_tokens,
            block_axis=1,
        )

    @property
    def block_tokens(self) -> int:
        """Tokens in one block."""
        return self.paged.layout.block_tokens

    @property
    def gpu(self) -> int | None:
        """Number of the GPU that reads and writes it by itself, for ``kvstore.connect``.

        ``None`` where none does.
        """
        return self.paged.gpu

    def namespace(self, model: str, **fields: Any) -> Namespace:
        """The namespace of its blocks.

        Args:
            model: name or path of the model.
            fields: other fields of ``Namespace``, such as ``revision``, ``tenant`` or ``salt``.
        """
        layout = self.paged.layout
        return Namespace(
            model=model,
            dtype=layout.dtype,
            layout=layout.name,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            **fields,
        )

    def blocks_of(self, sequence: int) -> range:
        """The ids of the blocks that a sequence has."""
        each = self.tokens // self.block_tokens
        return range(sequence * each, (sequence + 1) * each)

    def rows_of(self, sequence: int) -> list[tuple[Any, Any]]:
        """Keys and values of each layer as attention sees them: ``[1, KV heads, tokens, dim]``."""
        blocks = self.blocks_of(sequence)
        mine = self._tensors[:, :, blocks.start : blocks.stop].flatten(2, 3)
        return [
            (keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0))
            for keys, values in mine
        ]
