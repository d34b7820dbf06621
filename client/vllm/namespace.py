"""The namespace of a vLLM engine: all that makes its KV bytes its own.

Left out is what changes no bytes of a block: the longest sequence (but for LongRoPE), memory and
scheduling, host names and paths. Engines that differ only there share their blocks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any, Final, NamedTuple, Protocol

from client.vllm.settings import Settings
from client.vllm.support import backends
from client.vllm.weights import fingerprint
from kvstore.errors import ConfigError
from kvstore.identity import MAX_TEXT_BYTES, Namespace

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT: Final = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})$")
"""Where the hub's cache keeps a commit. Offline, vLLM puts this path in a model's name's place."""
_READ_FROM_MODEL: Final = frozenset(
    {
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "pt",
        "npcache",
        "mistral",
        "gguf",
        "bitsandbytes",
        "sharded_state",
        "runai_streamer",
        "runai_streamer_sharded",
        "ipc_cache",
    }
)
"""The values of ``--load-format`` that load what lies under the model's name."""
_ALIKE: Final = frozenset({"auto", "hf", "safetensors", "fastsafetensors"})
"""Those that load the same files of a model."""
_VOLATILE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Parts of a Hugging Face configuration that say where it came from, not what it is."""
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_DIGEST_DIGITS: Final = 16


class PagedLayout(Protocol):
    """What the namespace takes from the layout of an engine's KV tensors."""

    @property
    def name(self) -> str:
        """How tensors become block bytes."""

    @property
    def dtype(self) -> str:
        """Element type of the KV tensors."""

    @property
    def block_tokens(self) -> int:
        """Tokens in one block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one shard."""


class ModelIdentity(NamedTuple):
    """Which model an engine runs.

    Attributes:
        model: a name for people: that of the hub, or the architecture of a local model, whose
            directory's name may not matter.
        revision: the commit on the hub, or a digest of the local files.
        salt: digests, by name, of what else changes KV bytes: types, quantization, overrides,
            positions.
    """

    model: str
    revision: str
    salt: str


def make_namespace(
    vllm_config: Any,
    layout: PagedLayout,
    *,
    tp_size: int,
    stage: int,
    stages: int,
    settings: Settings,
    engine: str = "",
    float8: str = "",
    environ: Mapping[str, str] = os.environ,
) -> Namespace:
    """The namespace of one pipeline stage of an engine.

    Call it in a worker whose model is loaded: only there is it known which attention backend each
    layer has, and which layers the stage has.

    Args:
        vllm_config: the engine's ``VllmConfig``.
        layout: of the KV tensors.
        tp_size: tensor parallel ranks with different bytes.
        stage: number of the pipeline stage, from 0.
        stages: how many there are.
        settings: of the connector.
        engine: version of the engine, where blocks of other versions are not to be used.
        float8: what the hardware takes an FP8 byte for; counts where elements have 8 bits.
        environ: the process's environment.

    Raises:
        ConfigError: it can't be told which weights the engine runs.
    """
    model, revision, salt = model_identity(vllm_config, settings, environ)
    shuffled = _flag(environ, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT")
    byte = float8 if "8" in layout.dtype else ""
    parts = [salt, f"backend {_digest([_attention(vllm_config), shuffled, byte])}"]
    if stages > 1:
        parts.insert(0, f"stage {stage + 1} of {stages}")
    if engine:
        parts.append(f"engine {_digest(engine)}")
    return Namespace(
        model=model,
        revision=revision,
        dtype=layout.dtype,
        layout=layout.name,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        tp_size=tp_size,
        tenant=settings.tenant,
        salt=", ".join(parts),
    )


def model_identity(
    vllm_config: Any, settings: Settings, environ: Mapping[str, str] = os.environ
) -> ModelIdentity:
    """Which model an engine runs, the same for copies of its files at any path.

    Raises:
        ConfigError: it can't be told which weights the engine runs, and the settings name none.
    """
    config = vllm_config.model_config
    facts = _facts(vllm_config)
    # Apart, so that those who compare two namespaces see in what they differ.
    salt = ", ".join(f"{name} {_digest(fact)}" for name, fact in facts.items() if fact)
    name, revision = _weights(vllm_config, environ)
    if not revision and not settings.model:
        raise ConfigError(
            f"it cannot be told which weights {config.model} has: there are no files of weights "
            f"and no commit on the hub; name them yourself, with their version, by the option model"
        )
    return ModelIdentity(_bounded(settings.model or name), revision, salt)


def _weights(vllm_config: Any, environ: Mapping[str, str]) -> tuple[str, str]:
    """Name and revision of the weights; the revision is empty where it can't be told."""
    config, load = vllm_config.model_config, vllm_config.load_config
    path = Path(config.model)
    snapshot = _SNAPSHOT.search(str(path.absolute()))
    local = path.exists()
    name = _architecture(config) if local else config.model
    if local and snapshot:
        name = snapshot[1].replace("--", "/")
    if load.load_format == "dummy":
        return name, f"random weights, seed {config.seed}"
    streamed = bool(getattr(config, "model_weights", ""))
    if streamed or load.load_format not in _READ_FROM_MODEL:
        return name, ""
    if local:
        return name, snapshot[2] if snapshot else fingerprint(path) or ""
    return name, _commit(config) or _cached_commit(config, load, environ)


def _commit(config: Any) -> str:
    """The commit that the engine resolved a name on the hub to, if it did."""
    revision = getattr(config, "revision", None)
    candidates = [getattr(revision, "resolved", None), revision]
    if not getattr(config, "hf_config_path", None):
        candidates.append(getattr(config.hf_config, "_commit_hash", None))
    return next((str(each) for each in candidates if each and _COMMIT.fullmatch(str(each))), "")


def _cached_commit(config: Any, load: Any, environ: Mapping[str, str]) -> str:
    """The commit of a name on the hub according to the hub's cache on this machine."""
    home = environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    root = load.download_dir or environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    folder = "models--" + config.model.replace("/", "--")
    reference = Path(root, folder, "refs", str(getattr(config, "revision", None) or "main"))
    try:
        found = reference.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return found if _COMMIT.fullmatch(found) else ""


def _architecture(config: Any) -> str:
    hf_config = config.hf_config
    names = getattr(hf_config, "architectures", None) or [getattr(hf_config, "model_type", "")]
    return names[0] or "local model"


def _facts(vllm_config: Any) -> dict[str, object]:
    """What besides the weights changes the KV bytes of every layer; empty what is not set."""
    config, cache = vllm_config.model_config, vllm_config.cache_config
    load, lora = vllm_config.load_config.load_format, getattr(vllm_config, "lora_config", None)
    lora_dtype = getattr(lora, "lora_dtype", None)
    return {
        "config": config.hf_config,
        "positions": _long_rope(config),
        "model": _some(config, _MODEL_FACTS),
        "quantization": _some(config, _QUANTIZATION_FACTS),
        "cache": _some(cache, _CACHE_FACTS),
        "attention": _some(getattr(vllm_config, "attention_config", None), _ATTENTION_FACTS),
        "multimodal": _some(getattr(config, "multimodal_config", None), _MULTIMODAL_FACTS),
        "loader": "" if load in _ALIKE else load,
        "lora": None if lora_dtype in ("auto", config.dtype) else lora_dtype,
    }


def _long_rope(config: Any) -> list[tuple[int, bool]]:
    """Which factors LongRoPE scales all positions by: vLLM takes the longest sequence's.

    It is the one way in which the longest sequence that an engine allows changes its KV.
    """
    parts = list(_mappings(_canonical(config.hf_config)))
    if not any(part.get(key) in _LONG_ROPE for part in parts for key in ("rope_type", "type")):
        return []
    lengths = {part[_ORIGINAL] for part in parts if isinstance(part.get(_ORIGINAL), int)}
    longest = config.max_model_len
    return [(length, longest > length) for length in sorted(lengths)] or [(longest, True)]


def _mappings(value: object) -> Iterator[dict[str, Any]]:
    """All mappings within canonical JSON."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _mappings(each)


_LONG_ROPE: Final = ("longrope", "su")
"""The scaling's name, now and before."""
_ORIGINAL: Final = "original_max_position_embeddings"
_MODEL_FACTS: Final = (
    "dtype",
    "model_impl",
    "model_class_overrides",
    "disable_sliding_window",
    "code_revision",
)
"""The Hugging Face configuration apart: it is the one in force, with overrides and rope scaling."""
_QUANTIZATION_FACTS: Final = ("quantization", "quantization_config")
_CACHE_FACTS: Final = ("cache_dtype", "kv_cache_dtype_skip_layers")
_ATTENTION_FACTS: Final = ("indexer_kv_dtype", "use_non_causal")
_MULTIMODAL_FACTS: Final = (
    "language_model_only",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)


def _some(config: Any, names: Sequence[str]) -> dict[str, Any]:
    """Those that are set."""
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _attention(vllm_config: Any) -> dict[str, object]:
    """Each attention layer of this stage with its backend, and its CPU kernel's instruction set.

    Backends may order the bytes of a block in their own way under the same shape; the CPU backend
    does, by instruction set.
    """
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: [backend, str(getattr(layers[name], "isa", ""))]
        for name, backend in backends(vllm_config).items()
    }


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("1", "true")


def _bounded(text: str) -> str:
    """The text, or its beginning and its digest where it is too long for a namespace."""
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) <= MAX_TEXT_BYTES and encoded == text.encode("utf-8", "replace"):
        return text
    head = encoded[: MAX_TEXT_BYTES // 2].decode("utf-8", "replace")[: MAX_TEXT_BYTES // 8]
    return f"{head}... sha256:{hashlib.sha256(encoded).hexdigest()}"


def _digest(value: object) -> str:
    text = json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_DIGITS]


def _canonical(value: Any) -> Any:
    """JSON that is the same in every process for the same configuration."""
    if isinstance(value, Enum):
        return [type(value).__name__, value.name]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _canonical(each) for key, each in value.items() if key not in _VOLATILE}
    if isinstance(value, Set):
        return sorted(json.dumps(_canonical(each), sort_keys=True) for each in value)
    if isinstance(value, list | tuple):
        return [_canonical(each) for each in value]
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return [type(value).__qualname__, _canonical_object(value)]


def _canonical_object(value: Any) -> Any:
    if callable(to_dict := getattr(value, "to_dict", None)):
        return _canonical(to_dict())
    if is_dataclass(value):
        return _canonical({each.name: getattr(value, each.name) for each in fields(value)})
    if hasattr(value, "__dict__"):
        return _canonical(vars(value))
    return _ADDRESS.sub("", str(value))
