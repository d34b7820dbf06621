"""The model that all engines run: a Llama with seeded random weights, as vLLM loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.vllm.shape import (
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LONGEST,
    VOCABULARY,
)

SEED = 20_240


def make(directory: Path) -> Path:
    """Write weights and configuration to ``directory/model``; the same at every call.

    The weights are spread wide enough for outputs to depend on the whole prompt: a wrong block
    then shows in the tokens.
    """
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2_048,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=LONGEST,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    path = directory / "model"
    model: Any = LlamaForCausalLM
    model(config).save_pretrained(path)
    return path
