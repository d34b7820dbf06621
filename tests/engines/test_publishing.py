"""Our events beside those of vLLM's own block pool: needs vLLM to be there, no engine."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.v1.metrics.loggers")  # what its imports warn of is not ours to mend

import msgspec
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from client.vllm.events import Ledger, RemovedEvent
from client.vllm.publishing import OWNER, Publishing, announced, locality_of
from kvstore.identity import ROOT_PARENT, prefix_hashes

TOKENS = 4
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
PUBLISHING = Publishing(SPEC, "LOCAL")


@pytest.fixture(autouse=True)
def none_hash() -> None:
    init_none_hash(sha256)


def image(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


POET = LoRARequest(lora_name="poet", lora_int_id=7, lora_path="/adapters/poet")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": {"lora_request": POET},
    "salt": {"cache_salt": "pepper"},
    "images": {"mm_features": [image("cat", 2, 5), image("dog", 8, 3)]},
    "all": {"lora_request": POET, "cache_salt": "pepper", "mm_features": [image("cat", 2, 5)]},
}


def make_request(hash_tokens: int = TOKENS, **options: Any) -> Request:
    return Request(
        "r",
        list(range(100, 119)),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(hash_tokens, sha256),
        **options,
    )


def pool_event(request: Request, first: int, last: int, hash_tokens: int) -> BlockStored:
    """What vLLM publishes itself when these blocks are full."""
    pool = BlockPool(16, True, hash_tokens, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(last)
    pool.cache_full_blocks(request, blocks, first, last, TOKENS, 0)
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    return event


def our_event(request: Request, first: int, last: int, hash_tokens: int) -> BlockStored:
    chain = [ROOT_PARENT, *prefix_hashes(list(request.all_token_ids), TOKENS)]
    pool = BlockPool(16, True, hash_tokens)
    blocks = announced(request, first, chain[first + 1 : last + 1], chain[first], TOKENS, pool)
    assert [block.parent for block in blocks] == chain[first:last]
    (event,) = PUBLISHING.published(Ledger().announce(blocks))
    assert isinstance(event, BlockStored)
    return event


@pytest.mark.parametrize("as_int", ["0", "1"], ids=["bytes", "integers"])
@pytest.mark.parametrize("hash_tokens", [TOKENS, TOKENS // 2])
@pytest.mark.parametrize(("first", "last"), [(0, 4), (2, 4), (1, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_told_of_as_vllm_tells_of_its_own(
    kind: str, first: int, last: int, hash_tokens: int, as_int: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_int)
    request = make_request(hash_tokens, **KINDS[kind])
    theirs = msgspec.to_builtins(pool_event(request, first, last, hash_tokens))
    ours = msgspec.to_builtins(our_event(request, first, last, hash_tokens))
    theirs |= {
        "medium": "STORAGE",
        "kv_cache_spec_kind": "full_attention",
        "locality": "LOCAL",
        "ownership": OWNER,
    }
    assert ours == theirs


def test_they_travel_as_vllm_s_own() -> None:
    request = make_request(**KINDS["all"])
    stored = our_event(request, 0, 4, TOKENS)
    removed = PUBLISHING.published([RemovedEvent((request.block_hashes[0],))])
    batch = KVEventBatch(ts=1.0, events=[stored, *removed])
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    assert [type(event) for event in back.events] == [BlockStored, BlockRemoved]
    assert back.events[0].block_hashes == stored.block_hashes


def test_what_is_gone_has_the_names_under_which_it_came() -> None:
    request = make_request()
    stored = our_event(request, 0, 2, TOKENS)
    (removed,) = PUBLISHING.published([RemovedEvent(tuple(request.block_hashes[:2]))])
    assert isinstance(removed, BlockRemoved)
    for fact in ("block_hashes", "medium", "group_idx", "locality", "ownership"):
        assert getattr(removed, fact) == getattr(stored, fact)


def test_only_a_unix_socket_is_on_this_host_for_certain() -> None:
    assert locality_of("unix:///run/kvstore.sock") == "LOCAL"
    assert locality_of("tcp://127.0.0.1:9400") == "REMOTE"
