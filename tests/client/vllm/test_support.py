"""Engines that the connector can't serve are refused with what to do instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from client.vllm.support import check_backends, check_company, check_supported
from kvstore.errors import ConfigError


class FullAttentionSpec:
    non_causal = False


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec:
    pass


class SlidingWindowSpec:
    pass


class SlidingWindowMLASpec(SlidingWindowSpec):
    pass


class ChunkedLocalAttentionSpec:
    pass


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class HiSparseHotSpec:
    pass


class LooksAhead(FullAttentionSpec):
    non_causal = True


class HasScales(FullAttentionSpec):
    kv_quant_mode = SimpleNamespace(is_per_token_head=True)


LooksAhead.__name__ = HasScales.__name__ = "FullAttentionSpec"


class UniformTypeKVCacheSpecs:
    def __init__(self, *specs: Any) -> None:
        self.kv_cache_specs = {str(number): spec for number, spec in enumerate(specs)}


def engine(**changes: Any) -> Any:
    parts: dict[str, dict[str, Any]] = {
        "model_config": {"is_encoder_decoder": False, "multimodal_config": None},
        "parallel_config": {
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "cache_config": {"enable_prefix_caching": True},
        "scheduler_config": {"disable_hybrid_kv_cache_manager": True},
    }
    top: dict[str, Any] = {"speculative_config": None, "weight_transfer_config": None}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            top[part] = value
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()} | top)


def caches(*specs: Any, host_resident: bool = False) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, host_resident=host_resident) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


@pytest.mark.parametrize(
    "specs",
    [
        FullAttentionSpec(),
        MLAAttentionSpec(),
        UniformTypeKVCacheSpecs(MLAAttentionSpec(), MLAAttentionSpec()),
    ],
)
def test_plain_models_are_accepted(specs):
    check_supported(engine(), caches(specs))
    check_supported(engine(), None)


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_drafts_without_kv_are_accepted(method):
    config = engine(speculative_config=SimpleNamespace(method=method))
    check_supported(config, caches(FullAttentionSpec()))


def items(gigabytes: float, text_only: bool = False) -> Any:
    return SimpleNamespace(mm_processor_cache_gb=gigabytes, language_model_only=text_only)


@pytest.mark.parametrize(
    ("prefix_caching", "multimodal"),
    [(True, items(0)), (False, items(4)), (False, items(0, text_only=True))],
)
def test_items_that_have_content_hashes_are_accepted(prefix_caching, multimodal):
    config = engine(
        cache_config__enable_prefix_caching=prefix_caching,
        model_config__multimodal_config=multimodal,
    )
    check_supported(config, caches(FullAttentionSpec()))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (engine(parallel_config__decode_context_parallel_size=2), "--decode-context-parallel-size"),
        (
            engine(parallel_config__prefill_context_parallel_size=2),
            "--prefill-context-parallel-size 2.*use tensor parallelism",
        ),
        (engine(speculative_config=SimpleNamespace(method="eagle3")), "by eagle3.*use ngram"),
        (engine(speculative_config=SimpleNamespace(method="mtp")), "by mtp"),
        (engine(speculative_config=SimpleNamespace(method="draft_model")), "by draft_model"),
        (engine(speculative_config=SimpleNamespace(method="not known yet")), "not known yet"),
        (engine(model_config__is_encoder_decoder=True), "encoder-decoder.*without a KV connector"),
        (engine(weight_transfer_config=object()), "weight_transfer_config"),
        (
            engine(
                cache_config__enable_prefix_caching=False,
                model_config__multimodal_config=items(0),
            ),
            "--enable-prefix-caching, or --mm-processor-cache-gb",
        ),
    ],
)
def test_configurations_that_are_refused(config, expected):
    with pytest.raises(ConfigError, match=expected):
        check_supported(config, caches(FullAttentionSpec()))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (caches(), "keeps no KV"),
        (caches(FullAttentionSpec(), MambaSpec()), "Mamba or linear attention"),
        (caches(MambaSpec()), "Mamba or linear attention"),
        (caches(FullAttentionSpec(), FullAttentionSpec()), "2 groups.*without a KV connector"),
        (caches(SlidingWindowSpec()), "use --disable-sliding-window"),
        (caches(UniformTypeKVCacheSpecs(SlidingWindowMLASpec())), "use --disable-sliding-window"),
        (caches(ChunkedLocalAttentionSpec()), "of the kind ChunkedLocalAttentionSpec"),
        (caches(SinkFullAttentionSpec()), "of the kind SinkFullAttentionSpec"),
        (caches(LooksAhead()), "looks ahead"),
        (caches(UniformTypeKVCacheSpecs(FullAttentionSpec(), LooksAhead())), "looks ahead"),
        (caches(HasScales()), "_per_token_head.*use --kv-cache-dtype fp8"),
        (caches(UniformTypeKVCacheSpecs(FullAttentionSpec(), HasScales())), "_per_token_head"),
        (caches(MLAAttentionSpec(), HiSparseHotSpec()), "HiSparse"),
        (caches(MLAAttentionSpec(), host_resident=True), "HiSparse"),
    ],
)
def test_caches_that_are_refused(groups, expected):
    with pytest.raises(ConfigError, match=expected):
        check_supported(engine(), groups)


def test_pooling():
    def pooling(of_suffixes: bool) -> Any:
        return engine(
            model_config__runner_type="pooling",
            model_config__is_prefix_caching_supported=of_suffixes,
        )

    check_supported(pooling(True), caches(FullAttentionSpec()))
    with pytest.raises(ConfigError, match="this pooling is not supported"):
        check_supported(pooling(False), caches(FullAttentionSpec()))


def test_several_groups_that_could_be_one():
    config = engine(scheduler_config__disable_hybrid_kv_cache_manager=False)
    with pytest.raises(ConfigError, match="start it with --disable-hybrid-kv-cache-manager"):
        check_supported(config, caches(FullAttentionSpec(), SlidingWindowSpec()))


def test_every_reason_is_told():
    config = engine(
        parallel_config__decode_context_parallel_size=2, model_config__is_encoder_decoder=True
    )
    with pytest.raises(ConfigError) as error:
        check_supported(config, caches(MambaSpec()))
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("KVStoreConnector: ") for line in lines)


def test_a_backend_that_takes_no_prefix():
    def loaded(*names):
        layers = {
            f"layers.{number}": SimpleNamespace(
                get_attn_backend=lambda name=name: SimpleNamespace(get_name=lambda: name)
            )
            for number, name in enumerate(names)
        }
        return SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context=layers | {"experts": object()}
            )
        )

    check_backends(loaded("AMX_MLA", "CPU_ATTN"))
    check_backends(SimpleNamespace())
    with pytest.raises(ConfigError, match="CPU_MLA is not supported.*--dtype bfloat16"):
        check_backends(loaded("CPU_ATTN", "CPU_MLA"))


def test_company():
    outer = SimpleNamespace(kv_connector="MultiConnector", kv_load_failure_policy="recompute")
    check_company(outer, None)
    with pytest.raises(ConfigError, match="MultiConnector.* int comes before ours"):
        check_company(outer, 1)
    outer.kv_load_failure_policy = "fail"
    with pytest.raises(ConfigError, match="MultiConnector ends requests.*beside its name"):
        check_company(outer, None)
