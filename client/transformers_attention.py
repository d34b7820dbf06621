"""Attention of a few new tokens to a long prefix, as one kernel does it that reads no mask.

Transformers' own ``sdpa`` makes a mask of every new token by every token before it where a prefix
is there already, which keeps the fast kernels away: on an H200, 128 tokens behind 16,384 took
110 ms.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

ATTENTION: Final = "kvstore_sdpa"
"""What a model's ``attn_implementation`` is to be."""

_FAST_TYPES: Final = (torch.float16, torch.bfloat16)
_MOST_HEAD_DIM: Final = 256


def register() -> None:
    """Make ``ATTENTION`` known to Transformers; may be called again."""
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Any = None,
    **options: Any,
) -> Any:
    """The mask for ``attend``: none where each token sees all tokens up to itself.

    Args:
        batch_size: sequences.
        q_length: new tokens of each.
        kv_length: all tokens of each.
        q_offset: tokens before the new ones, as the cache says; a tensor for some caches.
        kv_offset: what the first of all tokens is counted as.
        mask_function: which tokens see which.
        attention_mask: ``[batch, tokens]``, false for padding.
        options: what else ``sdpa_mask`` takes.
    """
    aligned = (
        mask_function is causal_mask_function
        and isinstance(q_offset, int)
        and (q_offset + q_length, kv_offset) == (kv_length, 0)
    )
    if aligned and (attention_mask is None or bool(attention_mask[:, :kv_length].all())):
        return None
    options["allow_is_causal_skip"] = False
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Any, None]:
    """Attend as Transformers' ``sdpa`` does; without a mask the last token sees all.

    Args:
        module: the attention layer of the model.
        query: ``[batch, heads, new tokens, dim]``.
        key: ``[batch, KV heads, tokens, dim]``, with any strides.
        value: likewise.
        attention_mask: as ``mask`` made it.
        dropout: probability.
        scaling: of the scores.
        is_causal: whether tokens see those up to themselves only; as the layer is if left out.
        options: what else the model hands on.

    Returns:
        The output ``[batch, new tokens, heads, dim]``, and nothing.
    """
    new, tokens = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and 1 < new < tokens:
        if _fast(query):
            gqa = query.shape[1] != key.shape[1]
            bias = causal_lower_right(new, tokens)
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, bias, dropout, scale=scaling, enable_gqa=gqa
            )
            return output.transpose(1, 2).contiguous(), None
        seen = torch.ones(new, tokens, dtype=torch.bool, device=query.device)
        attention_mask = seen.tril(tokens - new)
    found: tuple[Any, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **options
    )
    return found


def _fast(query: Any) -> bool:
    """Whether there is a kernel for it that needs no mask."""
    return (
        query.device.type == "cuda"
        and query.dtype in _FAST_TYPES
        and query.shape[-1] <= _MOST_HEAD_DIM
    )
