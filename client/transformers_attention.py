"""Attention of a few new tokens to a long prefix, by kernels that read no mask.

Transformers' own ``sdpa`` makes a mask of every new token by every token before it where a prefix
is there already, which keeps the fast kernels away. On an H200, 128 tokens behind 16,256 take
0.79 ms a layer with it and 0.19 ms without. Many new tokens are twice as fast with cuDNN (540 and
280 TFLOP/s), which can't end a triangle at the last token: it gets the part of the prefix that all
new tokens see, and the scores of both parts are joined.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch.backends.cuda import SDPAParams
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

ATTENTION: Final = "kvstore_sdpa"
"""What a model's ``attn_implementation`` is to be."""

JOINED_PAIRS: Final = 1 << 25
"""Pairs of a new token and one before it from which on two kernels are used: 1,638 tokens behind
31,130 gain 1.1 ms a layer. cuDNN prepares for each pair of lengths anew, which takes 40 ms, so that
fewer are better done by one."""

FAR: Final = 4096
"""What the length of the part that cuDNN gets is a multiple of, so that few are prepared for."""

NEW: Final = 256
"""What the number of new tokens is filled up to a multiple of for it, likewise."""

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
            return _behind(query, key, value, dropout, scaling).transpose(1, 2).contiguous(), None
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


def _behind(query: Any, key: Any, value: Any, dropout: float, scaling: float | None) -> Any:
    """Attention of the last tokens, on a GPU."""
    new, tokens = query.shape[2], key.shape[2]
    far = (tokens - new) // FAR * FAR
    worth = far * new >= JOINED_PAIRS and new >= NEW
    if worth and not dropout and _cudnn_can(query, key, value):
        return _in_two_parts(query, key, value, far, scaling)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        causal_lower_right(new, tokens),
        dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _cudnn_can(query: Any, key: Any, value: Any) -> bool:
    if torch.is_grad_enabled() or query.shape[-1] not in (64, 128) or not _hopper(query.device):
        return False
    params = SDPAParams(query, key, value, None, 0.0, False, True)
    return bool(
        torch.backends.cuda.can_use_cudnn_attention(params)
        and torch.backends.cuda.can_use_flash_attention(params)
    )


@cache
def _hopper(device: Any) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _in_two_parts(query: Any, key: Any, value: Any, far: int, scaling: float | None) -> Any:
    """The first ``far`` tokens, which all new ones see, apart from the rest."""
    new = query.shape[2]
    filled = torch.nn.functional.pad(query, (0, 0, 0, -new % NEW))
    first, first_sum = torch.ops.aten._scaled_dot_product_cudnn_attention(
        filled, key[:, :, :far], value[:, :, :far], None, True, scale=scaling
    )[:2]
    # Of this operation the triangle ends at the last token.
    rest, rest_sum = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key[:, :, far:], value[:, :, far:], 0.0, True, scale=scaling
    )[:2]
    return joined(first[:, :, :new], first_sum[:, :, :new], rest, rest_sum)


def joined(first: Any, first_sum: Any, rest: Any, rest_sum: Any) -> Any:
    """The attention to two parts of the tokens at once.

    Args:
        first: attention to one part, ``[batch, heads, new tokens, dim]``.
        first_sum: logarithm of the sum of its exponentials, ``[batch, heads, new tokens]`` and
            perhaps an axis of one.
        rest: to the other part.
        rest_sum: likewise.
    """
    shape = (*first.shape[:3], 1)
    share = torch.sigmoid(first_sum.reshape(shape) - rest_sum.reshape(shape))
    return torch.lerp(rest.float(), first.float(), share).to(first.dtype)
