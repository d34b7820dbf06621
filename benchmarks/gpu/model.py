"""A model of 8 B parameters with random weights, and the least that a server does with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from client.transformers_attention import ATTENTION, register

VOCABULARY: Final = 128_256


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, and the device and type that it is made in."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    device: str
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV of one token."""
        size: int = self.dtype.itemsize
        return self.layers * 2 * self.kv_heads * (self.hidden // self.heads) * size


LLAMA_8B: Final = Shape(32, 4096, 32, 8, 14336, "cuda", torch.bfloat16)
"""The shape of Llama 3.1 8B."""

TINY: Final = Shape(2, 64, 4, 2, 128, "cpu", torch.float32)
"""To try a benchmark on, without a GPU."""


def made(shape: Shape) -> Any:
    """The model, with the attention of ``client.transformers_attention``."""
    register()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(5)
    with torch.device(shape.device):
        model = LlamaForCausalLM._from_config(
            config, dtype=shape.dtype, attn_implementation=ATTENTION
        )
    return model.eval()


def tokens(count: int, seed: int) -> Any:
    """Random token ids, ``[1, count]``, on the CPU."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (1, count), generator=random)


def logits(model: Any, ids: Any, cache: Any, held: int) -> Any:
    """Queue the computation of what a cache does not hold; the scores of the token after it."""
    new = ids[:, held:].to(model.device, non_blocking=True)
    found = model(new, past_key_values=cache, logits_to_keep=1).logits
    return found[0, -1]


def synchronize(device: str) -> None:
    """Wait for all that was asked of the device."""
    if device == "cuda":
        torch.cuda.synchronize()
