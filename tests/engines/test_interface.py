"""The connector fits the installed vLLM: what breaks here would break for a user.

A new vLLM fails these tests first. A method that is new in its interface has to be thought about
and then goes into `LEFT` or the connector.
"""

from __future__ import annotations

import dataclasses
import dis
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest

from client.vllm import namespace
from kvstore.errors import ConfigError

LEFT = {
    "bind_connector_metadata": "keeps the step's metadata",
    "bind_kv_cache_manager": "calls bind_gpu_block_pool",
    "clear_connector_metadata": "drops the step's metadata",
    "finish_forward": "saves wait for the device themselves",
    "get_finished_count": "each worker reports for itself",
    "get_kv_connector_kv_cache_events": "events come from the scheduler's side",
    "get_loaded_kv_cache_group_ids": "there is one group",
    "get_mem_pool_context": "vLLM's memory is right",
    "get_transfer_results": "calls get_finished",
    "handle_preemptions": "blocks under a copy are pinned",
    "has_connector_metadata": "says whether there is metadata",
    "has_pending_block_frees": "pinned blocks are few",
    "register_finished_partial_tail": "only full blocks are saved",
    "reset_capture_state": "graphs capture nothing of ours",
    "role": "says which side it is",
    "set_host_xfer_buffer_ops": "vLLM's host buffer is not used",
    "set_xfer_handshake_metadata": "the one with pipeline stages is overridden",
    "supports_divergent_local_hybrid_hits": "there is one group",
}
"""Of the interface, what stays as vLLM has it, and why."""

V1 = "vllm.v1"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"

CALLED = {
    f"{CONNECTOR}.factory:KVConnectorFactory.register_connector": (
        "name",
        "module_path",
        "class_name",
    ),
    f"{V1}.core.block_pool:BlockPool.touch": ("blocks",),
    f"{V1}.core.block_pool:BlockPool.free_blocks": ("ordered_blocks",),
    f"{V1}.core.kv_cache_manager:KVCacheManager.get_block_ids": ("request_id",),
    f"{V1}.core.kv_cache_manager:KVCacheBlocks.get_block_ids": (),
    "vllm.config:ModelConfig.get_total_num_kv_heads": (),
    "vllm.distributed.parallel_state:get_pp_group": (),
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": (),
    f"{V1}.metrics.utils:create_metric_per_engine": ("metric", "per_engine_labelvalues"),
}
"""Functions and methods of vLLM that are called with so many arguments."""

FIELDS = {
    "vllm.config:AttentionConfig": {*namespace._ATTENTION_FACTS},
    "vllm.config:CacheConfig": {*namespace._CACHE_FACTS, "enable_prefix_caching"},
    "vllm.config:CompilationConfig": {"static_forward_context"},
    "vllm.config:KVTransferConfig": {
        "kv_connector_extra_config",
        "kv_load_failure_policy",
        "kv_role",
    },
    "vllm.config:LoadConfig": {"download_dir", "load_format"},
    "vllm.config:LoRAConfig": {"lora_dtype"},
    "vllm.config:ModelConfig": {
        *(*namespace._MODEL_FACTS, *namespace._QUANTIZATION_FACTS),
        *("hf_config", "hf_config_path", "max_model_len", "model", "model_weights"),
        *("multimodal_config", "revision", "seed"),
    },
    "vllm.config:MultiModalConfig": {*namespace._MULTIMODAL_FACTS, "mm_processor_cache_gb"},
    "vllm.config:ParallelConfig": {
        "decode_context_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "tensor_parallel_size",
    },
    "vllm.config:VllmConfig": {
        "attention_config",
        "cache_config",
        "compilation_config",
        "kv_transfer_config",
        "load_config",
        "lora_config",
        "model_config",
        "parallel_config",
        "scheduler_config",
        "speculative_config",
        "weight_transfer_config",
    },
    "vllm.config.model_arch:ModelArchitectureConfig": {"per_layer_overrides"},
    f"{V1}.core.sched.output:SchedulerOutput": {"num_scheduled_tokens"},
    f"{V1}.kv_cache_interface:KVCacheConfig": {
        "kv_cache_groups",
        "kv_tp_replicas",
        "num_blocks",
    },
    f"{V1}.kv_cache_interface:KVCacheGroupSpec": {"host_resident", "kv_cache_spec"},
    f"{V1}.kv_cache_interface:FullAttentionSpec": {
        *("block_size", "kv_quant_mode", "max_tp_shards", "non_causal", "num_kv_heads"),
    },
    f"{V1}.kv_cache_interface:MLAAttentionSpec": {"block_size", "kv_quant_mode", "max_tp_shards"},
    f"{V1}.kv_cache_interface:UniformTypeKVCacheSpecs": {"kv_cache_specs"},
    f"{V1}.outputs:KVConnectorOutput": {
        "finished_recving",
        "invalid_block_ids",
        "kv_connector_worker_meta",
    },
}
"""Fields of vLLM's dataclasses that are read or set.

Where one of the namespace's is gone, engines that differ in it would share.
"""

REQUEST = (
    *("request_id", "num_prompt_tokens", "num_tokens", "num_computed_tokens", "all_token_ids"),
    *("kv_transfer_params", "lora_request", "cache_salt", "mm_features", "prompt_embeds"),
    "resumable",
)
"""Attributes of vLLM's `Request` that are read."""

# What vLLM's imports warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


def _find(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.fixture(scope="module")
def base() -> Any:
    return _find(f"{CONNECTOR}.v1.base:KVConnectorBase_V1")


@pytest.fixture(scope="module")
def ours() -> Any:
    return _find("client.vllm.connector:KVStoreConnector")


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def _overridden(ours: Any, base: Any) -> set[str]:
    return {
        name
        for name in _public(base)
        if inspect.getattr_static(ours, name) is not inspect.getattr_static(base, name)
    }


def _function(member: Any) -> Callable[..., Any]:
    """What is behind a property, a class method or a plain one."""
    if isinstance(member, property):
        assert member.fget is not None
        return member.fget
    found: Callable[..., Any] = getattr(member, "__func__", member)
    return found


def _binds(signature: inspect.Signature, interface: inspect.Signature) -> None:
    """Whether every call that the interface allows can be made; TypeError says which can't."""
    parameters = [
        each
        for each in interface.parameters.values()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    positional = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    named = {each.name: each for each in parameters if each.kind is not each.POSITIONAL_ONLY}
    needed = [each for each in positional if each.default is each.empty]
    signature.bind(*positional, **{each.name: each for each in parameters[len(positional) :]})
    signature.bind(*needed)
    signature.bind(**named)


def test_every_method_of_the_interface_is_known(ours: Any, base: Any) -> None:
    assert _public(base) == LEFT.keys() | _overridden(ours, base)
    assert not LEFT.keys() & _overridden(ours, base)


def test_nothing_that_must_be_written_is_missing(ours: Any) -> None:
    assert not ours.__abstractmethods__
    assert not inspect.isabstract(ours)


def test_nothing_public_is_added(ours: Any, base: Any) -> None:
    assert _public(ours) == _public(base)


def test_each_method_takes_every_call_that_vllm_may_make(ours: Any, base: Any) -> None:
    wrong = []
    for name in sorted(_overridden(ours, base)):
        mine, theirs = (inspect.getattr_static(kind, name) for kind in (ours, base))
        if type(mine) is not type(theirs):
            wrong.append(f"{name}: a {type(mine).__name__}, not a {type(theirs).__name__}")
            continue
        try:
            _binds(*(inspect.signature(_function(each)) for each in (mine, theirs)))
        except TypeError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong


def test_the_constructor_is_one_that_vllm_takes(ours: Any, base: Any) -> None:
    # vLLM looks for the name: a connector without it would be one of the old interface.
    assert "kv_cache_config" in inspect.signature(ours.__init__).parameters
    _binds(inspect.signature(ours.__init__), inspect.signature(base.__init__))


def test_no_attribute_of_the_base_is_overwritten(ours: Any, base: Any) -> None:
    assert len(_assigned(base)) > 3
    assert not _assigned(ours) & _assigned(base)


def _assigned(kind: Any) -> set[str]:
    code = dis.get_instructions(kind.__init__)
    return {str(each.argval) for each in code if each.opname == "STORE_ATTR"}


def test_vllm_folds_groups_of_layers_into_one_for_us(ours: Any) -> None:
    assert not _find(f"{CONNECTOR}.v1.base:supports_hma")(ours)


def test_the_plugin_is_found_and_registers_the_class(ours: Any) -> None:
    plugins = _find("vllm.plugins:load_plugins_by_group")("vllm.general_plugins")
    plugins["kvstore"]()
    plugins["kvstore"]()  # vLLM may do so more than once
    factory = _find(f"{CONNECTOR}.factory:KVConnectorFactory")
    assert factory.get_connector_class_by_name("KVStoreConnector") is ours


@pytest.mark.parametrize("path", CALLED)
def test_what_is_called_takes_our_arguments(path: str) -> None:
    function = _find(path)
    owner = _find(path.rpartition(".")[0]) if "." in path.partition(":")[2] else None
    own = () if owner is None or inspect.ismethod(function) else (owner,)
    bound = inspect.signature(function).bind(*own, *CALLED[path])
    assert set(CALLED[path]) <= set(bound.arguments)


@pytest.mark.parametrize("path", FIELDS)
def test_what_is_read_is_there(path: str) -> None:
    assert FIELDS[path] <= {each.name for each in dataclasses.fields(_find(path))}


def test_what_else_is_read_is_there() -> None:
    assert isinstance(_find("vllm.config:ModelConfig.architecture"), property)
    assert isinstance(_find(f"{V1}.kv_cache_interface:KVQuantMode.is_per_token_head"), property)
    assert str(_find("vllm.platforms:current_platform").fp8_dtype()) == "torch.float8_e4m3fn"


def test_a_request_has_what_is_read() -> None:
    params = _find("vllm:SamplingParams")(extra_args={"kv_transfer_params": {"kvstore": {}}})
    request = _find(f"{V1}.request:Request")("r", [1, 2, 3], params, None, cache_salt="salt")
    assert not [name for name in REQUEST if not hasattr(request, name)]
    assert request.kv_transfer_params == {"kvstore": {}}
    assert list(request.all_token_ids) == [1, 2, 3]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_computed_tokens) == (3, 3, 0)


def test_a_pinned_block_is_not_free() -> None:
    """What `Pins` counts on: one more user keeps a block from being given to somebody else."""
    pool = _find(f"{V1}.core.block_pool:BlockPool")(4, True, 32)
    (block,) = pool.get_new_blocks(1)
    assert pool.blocks[block.block_id] is block
    pool.touch([block])
    pool.free_blocks([block])
    free = pool.get_num_free_blocks()
    assert block not in pool.get_new_blocks(free)
    pool.free_blocks(reversed([block]))
    assert pool.get_num_free_blocks() == 1


def test_a_failed_load_can_be_made_a_recomputed_one() -> None:
    policy = next(
        each
        for each in dataclasses.fields(_find("vllm.config:KVTransferConfig"))
        if each.name == "kv_load_failure_policy"
    )
    assert "recompute" in str(policy.type)


def test_options_are_checked_while_vllm_builds_its_configuration(ours: Any) -> None:
    multi = _find(f"{CONNECTOR}.v1.multi_connector:MultiConnector")
    child = {"kv_connector": "KVStoreConnector", "kv_role": "kv_both"}
    for given, wrong in (({}, False), ({"urll": "unix:///x"}, True)):
        whole = {"connectors": [child | {"kv_connector_extra_config": given}]}
        for ask in (
            lambda given=given: ours.requires_piecewise_for_cudagraph(given),
            lambda whole=whole: multi.requires_piecewise_for_cudagraph(whole),
        ):
            if not wrong:
                assert ask() is False
                continue
            with pytest.raises(ConfigError, match="urll: unknown option; did you mean url"):
                ask()


def test_options_are_checked_before_memory_is_measured(ours: Any) -> None:
    layout = _find(f"{CONNECTOR}.utils:get_kv_connector_cache_layout")
    transfer = _find("vllm.config:KVTransferConfig")
    config = types.SimpleNamespace(
        kv_transfer_config=transfer(kv_connector="KVStoreConnector", kv_role="kv_both"),
        parallel_config=types.SimpleNamespace(),
        model_config=types.SimpleNamespace(),
        cache_config=None,
    )
    assert layout(config) is None
    config.kv_transfer_config.kv_connector_extra_config = {"urll": "unix:///x"}
    with pytest.raises(ConfigError, match="urll: unknown option; did you mean url"):
        layout(config)
    config.kv_transfer_config.kv_connector_extra_config = {}
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigError, match="context parallelism"):
        layout(config)


def test_on_gpus_a_wrong_option_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = type(_find("vllm.platforms:current_platform"))
    monkeypatch.setattr(platform, "support_static_graph_mode", classmethod(lambda cls: True))
    options = {"urll": "unix:///x"}
    transfer = _find("vllm.config:KVTransferConfig")(
        kv_connector="KVStoreConnector", kv_role="kv_both", kv_connector_extra_config=options
    )
    with pytest.raises(ConfigError, match="urll: unknown option"):
        _find("vllm.config:VllmConfig")(kv_transfer_config=transfer)
