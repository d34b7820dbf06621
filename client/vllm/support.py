"""Which engines the connector can serve; the others are told why not, when they start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvstore.errors import ConfigError

_WITHOUT_DRAFT_KV: Final = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods of speculative decoding that keep no KV of their own."""

_KINDS: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""The kinds of KV cache that hold every token of a request in blocks that stay."""

_PREFIXLESS: Final = frozenset({"CPU_MLA"})
"""Attention backends for which vLLM turns its own prefix caching off."""

_WITHOUT: Final = "serve it without a KV connector"


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Accept an engine whose every block is the KV of a fixed run of tokens and stays as it is.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        kv_cache_config: its ``KVCacheConfig``, or None where that isn't known yet.

    Raises:
        ConfigError: it is another one; each reason stands on a line, with what to do instead.
    """
    reasons = [*_configured(vllm_config)]
    if kv_cache_config is not None:
        reasons += _cached(vllm_config, kv_cache_config.kv_cache_groups)
    if reasons:
        raise ConfigError("\n".join(f"KVStoreConnector: {reason}" for reason in reasons))


def check_backends(vllm_config: Any) -> None:
    """Accept attention backends that can go on after a prefix which they have not computed.

    Args:
        vllm_config: the engine's ``VllmConfig``, in a worker whose model is loaded.

    Raises:
        ConfigError: one of them can't.
    """
    for name in sorted(set(backends(vllm_config).values()) & _PREFIXLESS):
        raise ConfigError(
            f"KVStoreConnector: the attention backend {name} is not supported, because it has to "
            f"compute all of a prompt at once; on CPUs with AMX, --dtype bfloat16 gets you AMX_MLA"
        )


def check_company(outer: Any, handshake: object | None) -> None:
    """Accept a connector of connectors (``MultiConnector``) in which ours can do its work.

    Args:
        outer: the ``KVTransferConfig`` that it was made by.
        handshake: what another of its connectors tells the scheduler's process; ``None`` if none.

    Raises:
        ConfigError: loads of ours that fail would end requests, or the scheduler's side of ours
            would not hear of the workers.
    """
    if outer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"KVStoreConnector: {outer.kv_connector} ends requests whose blocks can't be loaded; "
            'put "kv_load_failure_policy":"recompute" beside its name in --kv-transfer-config'
        )
    if handshake is not None:
        raise ConfigError(
            f"KVStoreConnector: {outer.kv_connector} passes on what one of its connectors tells "
            f"the scheduler, and {type(handshake).__name__} comes before ours; name "
            "KVStoreConnector first"
        )


def backends(vllm_config: Any) -> dict[str, str]:
    """The name of the attention backend of each layer with KV that the engine has loaded."""
    compiled = getattr(vllm_config, "compilation_config", None)
    layers = getattr(compiled, "static_forward_context", None) or {}
    return {
        name: str(layer.get_attn_backend().get_name())
        for name, layer in layers.items()
        if hasattr(layer, "get_attn_backend")
    }


def _configured(vllm_config: Any) -> Iterator[str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for kind in ("decode", "prefill"):
        size = getattr(parallel, f"{kind}_context_parallel_size", 1)
        if size > 1:
            option = f"--{kind}-context-parallel-size"
            yield (
                f"context parallelism ({option} {size}) is not supported, because it spreads the "
                f"tokens of a block over ranks; use tensor parallelism alone"
            )
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method not in _WITHOUT_DRAFT_KV:
        yield (
            f"speculative decoding by {speculative.method} is not supported, because the draft "
            f"keeps KV of its own; use ngram or suffix, or none"
        )
    if getattr(model, "is_encoder_decoder", False):
        yield f"encoder-decoder models are not supported; {_WITHOUT}"
    if getattr(model, "runner_type", "") == "pooling" and not model.is_prefix_caching_supported:
        yield (
            "this pooling is not supported, because it needs all of a prompt to be computed at "
            f"once; pool the last token (seq_pooling_type LAST), or {_WITHOUT}"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        yield (
            "weights that are replaced while the engine runs (weight_transfer_config) are not "
            f"supported, because KV of the old ones would be reused; {_WITHOUT}"
        )
    yield from _unnamed_items(model, vllm_config.cache_config)


def _unnamed_items(model: Any, cache: Any) -> Iterator[str]:
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None or getattr(multimodal, "language_model_only", False):
        return
    if multimodal.mm_processor_cache_gb == 0 and not cache.enable_prefix_caching:
        yield (
            "a multimodal model with neither prefix caching nor processor cache is not supported, "
            "because vLLM then numbers images and the like instead of hashing them; use "
            "--enable-prefix-caching, or --mm-processor-cache-gb above 0"
        )


def _cached(vllm_config: Any, groups: Sequence[Any]) -> Iterator[str]:
    specs = [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]
    kinds = {type(spec).__name__ for spec in specs}
    if not groups:
        yield f"a model that keeps no KV has nothing to store; {_WITHOUT}"
    elif any(getattr(group, "host_resident", False) for group in groups) or any(
        kind.startswith("HiSparse") for kind in kinds
    ):
        yield "KV that lives in host memory (HiSparse) is not supported; turn it off"
    elif any("Mamba" in kind for kind in kinds):
        yield (
            "models with Mamba or linear attention layers are not supported, because their state "
            f"is not made of blocks of tokens; {_WITHOUT}"
        )
    elif len(groups) > 1:
        folded = getattr(vllm_config.scheduler_config, "disable_hybrid_kv_cache_manager", True)
        instead = _WITHOUT if folded else "start it with --disable-hybrid-kv-cache-manager"
        yield f"a model with {len(groups)} groups of KV caches is not supported; {instead}"
    elif any(kind.startswith("SlidingWindow") for kind in kinds):
        yield (
            "models whose layers all have a sliding window are not supported, because vLLM frees "
            "blocks of a running request; use --disable-sliding-window, which shortens the context"
        )
    else:
        for kind in sorted(kinds - _KINDS):
            yield f"KV caches of the kind {kind} are not supported; {_WITHOUT}"
    if any(getattr(spec, "non_causal", False) for spec in specs):
        yield (
            "attention that looks ahead (non_causal) is not supported, because the KV of a block "
            f"then depends on what comes after it; {_WITHOUT}"
        )
    if any(_has_scales(spec) for spec in specs):
        yield (
            "KV with scales by token and head (--kv-cache-dtype ..._per_token_head) is not "
            "supported, because vLLM overwrites the scales of blocks that are loaded before its "
            "first forward; use --kv-cache-dtype fp8 or auto"
        )


def _has_scales(spec: Any) -> bool:
    return bool(getattr(getattr(spec, "kv_quant_mode", None), "is_per_token_head", False))


def layer_specs(spec: Any) -> list[Any]:
    """The layers' own specifications within that of a group."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
