"""What the model that all engines run looks like."""

from __future__ import annotations

VOCABULARY = 8_192
LONGEST = 8_448
"""Tokens of the longest request, prompt and output."""
LAYERS = 8
HIDDEN = 768
HEADS = 12
KV_HEADS = 4
HEAD_SIZE = 64
BLOCK_TOKENS = 32
"""The smallest block that vLLM has on the CPU, so that nine tenths of a prompt round down to little
less."""
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_SIZE * 4
"""KV bytes of one token in float32."""
DESCRIPTION = (
    f"Llama, random weights, {LAYERS} layers, hidden size {HIDDEN}, {HEADS} heads over {KV_HEADS} "
    f"KV heads, float32: {TOKEN_BYTES >> 10} KiB of KV a token, blocks of {BLOCK_TOKENS} tokens"
)
