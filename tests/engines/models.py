"""Tiny models with random weights, as directories that vLLM loads: no download, no training.

Weights are large enough for what a prompt's first tokens were to decide about the last, so that a
wrong block changes the answer. The tokenizer's words are `t0` to `t1023`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 1024
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD = 64
_HIDDEN = 256
_INNER = 512
_POSITIONS = 16384
_LATENT = 512
_ROPE = 64
_NOPE = 64
_VALUE = 64
_RANK = 8

MLA_OPTIONS: dict[str, Any] = {"attention_config": {"backend": "CPU_MLA"}}
"""What the engine of `make_mla`'s model takes: its other backend needs AMX and 16-bit weights."""

Shapes = dict[str, tuple[int, ...]]


def make_llama(directory: Path, seed: int = 0, kv_heads: int = KV_HEADS) -> Path:
    """A Llama: 4 layers, 4 heads over 1, 2 or 4 heads of keys and values, full attention."""
    config = _common("LlamaForCausalLM", "llama") | {
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return _make(directory, seed, config, lambda: _attention(kv_heads) | _norms("post_attention"))


def make_adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter of `make_llama`'s model, on its keys and values."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(seed)
    weights = {}
    for name in ("k_proj", "v_proj"):
        for layer in range(LAYERS):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (_RANK, _HIDDEN)), ("B", (KV_HEADS * HEAD, _RANK))):
                weights[f"{path}.lora_{part}.weight"] = random.standard_normal(
                    shape, np.float32
                ) / np.sqrt(shape[1], dtype=np.float32)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": ["k_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def make_sliding(directory: Path, seed: int = 0) -> Path:
    """A Gemma 3: three layers that see 64 tokens back, one that sees everything."""
    config = _common("Gemma3ForCausalLM", "gemma3_text") | {
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD,
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in (("sliding_attention", 10000.0), ("full_attention", 1e6))
        },
    }

    def layer() -> Shapes:
        own = {f"self_attn.{name}_norm.weight": (HEAD,) for name in ("q", "k")}
        around = ("post_attention", "pre_feedforward", "post_feedforward")
        return _attention() | own | _norms(*around)

    return _make(directory, seed, config, layer)


def make_mla(directory: Path, seed: int = 0) -> Path:
    """A DeepSeek V2 without experts: every head reads the same latent of each token."""
    config = _common("DeepseekV2ForCausalLM", "deepseek_v2") | {
        "num_key_value_heads": HEADS,
        "hidden_act": "silu",
        "q_lora_rank": None,
        "kv_lora_rank": _LATENT,
        "qk_rope_head_dim": _ROPE,
        "qk_nope_head_dim": _NOPE,
        "v_head_dim": _VALUE,
        "n_routed_experts": 2,  # in none of the layers
        "first_k_dense_replace": LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }

    def layer() -> Shapes:
        attention = {
            "self_attn.q_proj.weight": (HEADS * (_NOPE + _ROPE), _HIDDEN),
            "self_attn.kv_a_proj_with_mqa.weight": (_LATENT + _ROPE, _HIDDEN),
            "self_attn.kv_a_layernorm.weight": (_LATENT,),
            "self_attn.kv_b_proj.weight": (HEADS * (_NOPE + _VALUE), _LATENT),
            "self_attn.o_proj.weight": (_HIDDEN, HEADS * _VALUE),
        }
        return attention | _norms("post_attention")

    return _make(directory, seed, config, layer)


def _common(architecture: str, kind: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": kind,
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": _POSITIONS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _attention(kv_heads: int = KV_HEADS) -> Shapes:
    return {
        "self_attn.q_proj.weight": (HEADS * HEAD, _HIDDEN),
        "self_attn.k_proj.weight": (kv_heads * HEAD, _HIDDEN),
        "self_attn.v_proj.weight": (kv_heads * HEAD, _HIDDEN),
        "self_attn.o_proj.weight": (_HIDDEN, HEADS * HEAD),
    }


def _norms(*names: str) -> Shapes:
    return {f"{name}_layernorm.weight": (_HIDDEN,) for name in ("input", *names)}


def _shapes(layer: Callable[[], Shapes]) -> Shapes:
    inner: Shapes = {
        "mlp.gate_proj.weight": (_INNER, _HIDDEN),
        "mlp.up_proj.weight": (_INNER, _HIDDEN),
        "mlp.down_proj.weight": (_HIDDEN, _INNER),
    }
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (VOCABULARY, _HIDDEN),
    }
    for number in range(LAYERS):
        each = layer() | inner
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in each.items()}
    return shapes


def _make(directory: Path, seed: int, config: dict[str, Any], layer: Callable[[], Shapes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    # Gemma's norms scale by one more than their weight.
    unit = 0.0 if config["model_type"] == "gemma3_text" else 1.0
    random = np.random.default_rng(seed)
    weights = {
        name: np.full(shape, unit, np.float32)
        if len(shape) == 1
        else (random.standard_normal(shape, np.float32) * 1.5 / np.sqrt(shape[1], dtype=np.float32))
        for name, shape in _shapes(layer).items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _make_tokenizer(directory)
    return directory


def _make_tokenizer(directory: Path) -> None:
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": _POSITIONS}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
