"""Names of blocks and namespaces over vLLM's own requests and configurations; needs no engine."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.request")  # what its imports warn of is not ours to mend

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from client.vllm.keys import PrefixChain, extra_keys_of
from client.vllm.namespace import model_identity
from client.vllm.replicas import replicas
from client.vllm.settings import Settings
from client.vllm.support import check_supported
from kvstore.errors import ConfigError
from kvstore.identity import prefix_hashes

pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK = 4


def request(tokens: list[int] | None, **fields: Any) -> Request:
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request("r", tokens, SamplingParams(max_tokens=8), None, block_hasher=hasher, **fields)


def chain_of(asked: Request) -> PrefixChain:
    extra = extra_keys_of(asked, BLOCK)
    assert extra is not None
    return PrefixChain(BLOCK, extra)


def hashes(asked: Request) -> list[bytes]:
    return chain_of(asked).extend(asked.all_token_ids)


@pytest.fixture(scope="module", autouse=True)
def none_hash() -> None:
    init_none_hash(sha256)


def test_growing_request() -> None:
    asked = request(list(range(10)))
    chain = chain_of(asked)
    assert chain.extend(asked.all_token_ids) == prefix_hashes(list(range(10)), BLOCK)
    asked.append_output_token_ids([10, 11, 12])
    assert chain.extend(asked.all_token_ids) == prefix_hashes(list(range(13)), BLOCK)
    assert len(asked.block_hashes) == 3


def test_requests_that_cannot_be_named() -> None:
    assert extra_keys_of(request(None, prompt_embeds=torch.zeros(8, 4)), BLOCK) is None
    assert extra_keys_of(request([1, 2, 3], resumable=True), BLOCK) is None


def _item(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


_items = st.tuples(st.sampled_from("ij"), st.integers(0, 3), st.integers(1, 6)).map(
    lambda found: [_item(*found)]
)
_fields = st.fixed_dictionaries(
    {},
    optional={
        "cache_salt": st.sampled_from(["s", "t"]),
        "lora_request": st.sampled_from(
            [LoRARequest("a", 1, "/a"), LoRARequest("a", 2, "/b"), LoRARequest("b", 3, "/a")]
        ),
        "mm_features": st.tuples(
            st.tuples(st.sampled_from("ij"), st.integers(0, 5), st.integers(1, 6)),
            st.tuples(st.sampled_from("ij"), st.integers(11, 13), st.integers(1, 3)),
        ).map(lambda found: [_item(*each) for each in found]),
    },
)


@given(_fields, _fields, st.lists(st.integers(0, 1), min_size=13, max_size=17))
@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
def test_what_vllm_tells_apart_is_told_apart(
    one: dict[str, Any], other: dict[str, Any], tokens: list[int]
) -> None:
    a, b = request(tokens, **one), request(tokens, **other)
    theirs = [x == y for x, y in zip(a.block_hashes, b.block_hashes, strict=True)]
    assert [x == y for x, y in zip(hashes(a), hashes(b), strict=True)] == theirs


def configuration(model: Path, **options: Any) -> Any:
    arguments = {"dtype": "float32", "max_model_len": 256, "block_size": 32} | options
    return EngineArgs(model=str(model), **arguments).create_engine_config()


def identity(model: Path, **options: Any) -> Any:
    return model_identity(configuration(model, **options), Settings.read({}, {}), {})


def test_engines_that_share(llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    base = identity(llama)
    assert base.model == "LlamaForCausalLM"
    assert base.revision.startswith("sha256:")
    for same in (
        identity(copy),
        identity(llama, max_model_len=128, max_num_seqs=2, enforce_eager=True, seed=5),
        identity(llama, enable_prefix_caching=False, served_model_name="x"),
    ):
        assert same == base


def test_engines_that_do_not(llama: Path, other_llama: Path) -> None:
    found = [
        identity(llama),
        identity(other_llama),
        identity(llama, dtype="bfloat16"),
        identity(
            llama, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
        ),
        identity(llama, hf_overrides=_other_theta),
        identity(llama, load_format="dummy"),
        identity(llama, load_format="dummy", seed=1),
        identity(llama, kv_cache_dtype="fp8"),
    ]
    assert len(set(found)) == len(found)


def test_long_rope_goes_by_the_longest_sequence(llama: Path) -> None:
    scaled = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 32,
        "long_factor": [4.0] * 32,
        "original_max_position_embeddings": 128,
    }
    short, shorter, long, longer = (
        identity(llama, hf_overrides={"rope_parameters": scaled}, max_model_len=longest)
        for longest in (128, 64, 129, 256)
    )
    assert short == shorter
    assert long == longer
    assert short != long


def _other_theta(config: Any) -> Any:
    config.rope_parameters = {"rope_type": "default", "rope_theta": 7e5}
    return config


def _caches(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec) for spec in specs])


def test_ranks_that_hold_the_same(llama: Path) -> None:
    """Of a model with two KV heads."""
    shape = {"block_size": 32, "head_size": 64, "dtype": torch.float32}
    head = FullAttentionSpec(num_kv_heads=1, **shape)
    for ranks, expected in ((1, 1), (2, 1), (4, 2)):
        config = configuration(llama, tensor_parallel_size=ranks)
        assert config.model_config.model_arch_config.per_layer_overrides is None
        assert replicas(config, _caches(head)) == expected
    latent = _caches(MLAAttentionSpec(num_kv_heads=1, max_tp_shards=1, **shape))
    assert replicas(configuration(llama, tensor_parallel_size=4), latent) == 1


def test_kinds_of_caches(llama: Path) -> None:
    config = configuration(llama)
    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    full = FullAttentionSpec(**shape)
    latent = MLAAttentionSpec(**(shape | {"num_kv_heads": 1}))
    check_supported(config, _caches(full))
    check_supported(config, _caches(latent))
    check_supported(
        config, _caches(UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": latent}))
    )
    check_supported(config, _caches(replace(full, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)))
    sliding = SlidingWindowSpec(**shape, sliding_window=64)
    scaled = replace(full, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)
    for refused in (_caches(sliding), _caches(full, sliding), _caches(), _caches(scaled)):
        with pytest.raises(ConfigError):
            check_supported(config, refused)
