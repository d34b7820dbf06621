"""The ledger's events as vLLM publishes them, and vLLM's requests as the ledger takes them.

Routers see one form: hashes, extra keys and adapters stand in our events as vLLM's block pool
writes them in its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from client.vllm.events import Announced, Event, StoredEvent

OWNER: Final = "kvstore"
"""Tells our blocks from those that another connector of the same engine keeps in storage."""

LOCAL: Final = "LOCAL"
REMOTE: Final = "REMOTE"

_GROUP: Final = 0
"""Of the engine's KV cache groups: the connector takes engines that have one only."""


def locality_of(url: str) -> str:
    """Whether a node is on the engine's host: of the two kinds of address only ``unix`` says so."""
    return LOCAL if url.startswith("unix:") else REMOTE


def announced(
    request: Any, first: int, hashes: Sequence[bytes], parent: bytes, block_tokens: int, pool: Any
) -> list[Announced]:
    """Blocks of one of vLLM's requests as the ledger takes them.

    Args:
        request: vLLM's own object. It has at least the tokens of these blocks.
        first: number of the first block in the request.
        hashes: prefix hashes of the blocks.
        parent: prefix hash of the block before the first.
        block_tokens: tokens in one block, the engine's and ours.
        pool: vLLM's block pool, which knows how many tokens its hashes are of.
    """
    names = resolve_block_hashes(request.block_hashes, pool.hash_block_size, block_tokens)
    adapter = request.lora_request
    blocks = []
    for number, block in enumerate(hashes, start=first):
        begin, end = number * block_tokens, (number + 1) * block_tokens
        blocks.append(
            Announced(
                hash=block,
                parent=parent,
                engine_hash=names[number],
                engine_parent=names[number - 1] if number else None,
                tokens=request.all_token_ids[begin:end],
                extra_keys=generate_block_hash_extra_keys(request, begin, end, 0)[0],
                lora_id=adapter.adapter_id if adapter else None,
                lora_name=adapter.name if adapter else None,
            )
        )
        parent = block
    return blocks


class Publishing:
    """Turns events into vLLM's.

    Args:
        spec: of the engine's one KV cache group.
        locality: ``LOCAL`` or ``REMOTE``, as seen from the engine.
    """

    def __init__(self, spec: Any, locality: str) -> None:
        self._kind: str = get_kv_cache_spec_kind(spec).value
        self._window: int | None = get_kv_cache_spec_sliding_window(spec)
        self._locality = locality

    def published(self, events: Iterable[Event]) -> list[BlockStored | BlockRemoved]:
        """The events, in their order, as ``take_events`` of a connector returns them."""
        return [
            self._stored(event.blocks)
            if isinstance(event, StoredEvent)
            else self._removed(event.engine_hashes)
            for event in events
        ]

    def _stored(self, blocks: Sequence[Announced]) -> BlockStored:
        first = blocks[0]
        parent = first.engine_parent
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block.engine_hash) for block in blocks],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=[token for block in blocks for token in block.tokens],
            block_size=len(first.tokens),
            lora_id=first.lora_id,
            medium=MEDIUM_STORAGE,
            lora_name=first.lora_name,
            extra_keys=to_event_extra_keys([block.extra_keys for block in blocks]),
            group_idx=_GROUP,
            kv_cache_spec_kind=self._kind,
            kv_cache_spec_sliding_window=self._window,
            locality=self._locality,
            ownership=OWNER,
        )

    def _removed(self, engine_hashes: Sequence[bytes]) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(each) for each in engine_hashes],
            medium=MEDIUM_STORAGE,
            group_idx=_GROUP,
            locality=self._locality,
            ownership=OWNER,
        )
