"""Which tensor parallel ranks hold the same KV.

vLLM says so for MLA alone. Where ranks outnumber KV heads, it gives each head to consecutive ranks,
but only if all layers have that many heads is the same split the right one for whole blocks.
"""

from __future__ import annotations

from typing import Any, Final

from client.vllm.support import layer_specs

_ALL_LAYERS_ALIKE: Final = frozenset(
    {
        "CohereForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "InternLM2ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Architectures whose layers in vLLM all have ``num_key_value_heads`` heads, split in one way.

Others are known to have layers of several kinds (MiMo, Step, Gemma 4) or have not been looked at:
for them each rank stores its own part, which is right in any case.
"""


def replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many consecutive tensor parallel ranks hold the same bytes.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        kv_cache_config: a worker's ``KVCacheConfig``.

    Returns:
        A divisor of the tensor parallel size; 1 where it isn't certain that any two do.
    """
    found = int(kv_cache_config.kv_tp_replicas)
    if found > 1:
        return found
    model, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    heads = model.get_total_num_kv_heads()
    if heads >= ranks or ranks % heads or model.architecture not in _ALL_LAYERS_ALIKE:
        return 1
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in layer_specs(group.kv_cache_spec)]
    alike = all(spec.num_kv_heads == 1 and spec.max_tp_shards is None for spec in specs)
    varied = getattr(model.model_arch_config, "per_layer_overrides", None)
    return ranks // heads if alike and not varied else 1
