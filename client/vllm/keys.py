"""What names the blocks of a vLLM request: prefix hashes over its tokens and extra keys.

vLLM hashes blocks itself, but those hashes depend on its settings and leave out the model. Ours are
those of ``kvstore.identity``, equal in every process and engine. What distinguishes two requests in
vLLM's hashes distinguishes them here too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.errors import InvalidRequest
from kvstore.identity import (
    MAX_TEXT_BYTES,
    ROOT_PARENT,
    ExtraKey,
    ExtraKind,
    prefix_hashes,
)

_DIGESTED: Final = b"sha256:"
_OFFSET_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """The extra keys of one request's blocks.

    Attributes:
        always: those of every block: LoRA adapter and cache salt.
        by_block: those of single blocks besides, by the block's number: multimodal items.
    """

    always: tuple[ExtraKey, ...] = ()
    by_block: Mapping[int, tuple[ExtraKey, ...]] = field(default_factory=dict)

    def __call__(self, block: int) -> tuple[ExtraKey, ...]:
        """All extra keys of one block."""
        return self.always + self.by_block.get(block, ())

    @property
    def uniform_from(self) -> int:
        """Number of the first block from which on every block has the same extra keys."""
        return max(self.by_block, default=-1) + 1


class PrefixChain:
    """The prefix hashes of a token sequence that grows; no block is hashed twice.

    Args:
        block_tokens: tokens in one block.
        extra_keys: what else shapes the blocks.
    """

    __slots__ = ("_block_tokens", "_extra_keys", "_hashes", "_uniform_from")

    def __init__(self, block_tokens: int, extra_keys: RequestKeys | None = None) -> None:
        self._block_tokens = block_tokens
        self._extra_keys = RequestKeys() if extra_keys is None else extra_keys
        self._uniform_from = self._extra_keys.uniform_from
        self._hashes: list[bytes] = []

    @property
    def hashes(self) -> list[bytes]:
        """One hash for each full block so far. It is the chain's own list: not to be changed."""
        return self._hashes

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash the blocks that have become full.

        Args:
            tokens: all tokens of the sequence so far; those of blocks already hashed are not read.

        Returns:
            ``hashes``.

        Raises:
            InvalidRequest: the sequence is shorter than what is hashed, or a token id is no
                integer of 32 bits.
        """
        full = len(tokens) // self._block_tokens
        if full < len(self._hashes):
            raise InvalidRequest(f"{full} full blocks of a sequence that had {len(self._hashes)}")
        self._hash(tokens, min(full, self._uniform_from))
        self._hash(tokens, full)
        return self._hashes

    def _hash(self, tokens: Sequence[int], end: int) -> None:
        first = len(self._hashes)
        if end <= first:
            return
        keys = self._extra_keys
        self._hashes += prefix_hashes(
            tokens[first * self._block_tokens : end * self._block_tokens],
            self._block_tokens,
            keys.always if first >= self._uniform_from else lambda block: keys(first + block),
            parent=self._hashes[-1] if self._hashes else ROOT_PARENT,
        )


def extra_keys_of(
    request: Any, block_tokens: int, *, adapter_revision: str = ""
) -> RequestKeys | None:
    """What besides its tokens shapes the KV of a request.

    Args:
        request: a ``vllm.v1.request.Request``; read are its LoRA request, cache salt and
            multimodal items.
        block_tokens: tokens in one block.
        adapter_revision: what tells the contents of its LoRA adapter from others at the same path;
            see ``client.vllm.weights.Adapters``.

    Returns:
        None where no hash can name the blocks: the prompt has embeddings instead of token ids, an
        item has no identifier, or the request is a streaming session, whose last tokens may yet be
        replaced.
    """
    if getattr(request, "prompt_embeds", None) is not None or getattr(request, "resumable", False):
        return None
    items = getattr(request, "mm_features", None) or ()
    if any(not item.identifier for item in items):
        return None
    always = []
    if adapter := getattr(request, "lora_request", None):
        always.append(_lora(adapter, adapter_revision))
    if salt := getattr(request, "cache_salt", None):
        always.append(ExtraKey(ExtraKind.CACHE_SALT, _bounded(_encoded(salt))))
    return RequestKeys(tuple(always), _items_by_block(items, block_tokens))


def _lora(adapter: Any, revision: str) -> ExtraKey:
    """The adapter as a JSON list, so that ``kvstore explain --lora`` can be given the same."""
    parts = [adapter.lora_name, adapter.lora_path, *([revision] if revision else [])]
    text = json.dumps(parts, separators=(",", ":"))
    return ExtraKey(ExtraKind.LORA, _bounded(_encoded(text)))


def _items_by_block(items: Sequence[Any], block_tokens: int) -> dict[int, tuple[ExtraKey, ...]]:
    found: dict[int, list[ExtraKey]] = {}
    for item in items:
        name = _bounded(_encoded(item.identifier), MAX_TEXT_BYTES - _OFFSET_BYTES)
        start = item.mm_position.offset
        end = start + max(item.mm_position.length, 1)
        for block in range(start // block_tokens, (end - 1) // block_tokens + 1):
            key = ExtraKey.multimodal(name, start - block * block_tokens)
            found.setdefault(block, []).append(key)
    return {block: tuple(keys) for block, keys in found.items()}


def _encoded(text: str) -> bytes:
    """UTF-8; lone surrogates, which JSON can smuggle in, keep a form of their own."""
    return text.encode("utf-8", "surrogatepass")


def _bounded(value: bytes, most: int = MAX_TEXT_BYTES) -> bytes:
    """The value, or its digest where it is too long or could be taken for a digest."""
    if len(value) <= most and not value.startswith(_DIGESTED):
        return value
    return _DIGESTED + hashlib.sha256(value).hexdigest().encode()
