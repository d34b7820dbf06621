"""What makes two engines share their blocks, and what keeps them apart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from client.vllm.namespace import _canonical, make_namespace, model_identity
from client.vllm.settings import Settings
from kvstore.errors import ConfigError
from kvstore.identity import Namespace

COMMIT = "0123456789abcdef0123456789abcdef01234567"


_ORIGINAL = "original_max_position_embeddings"


class HfConfig:
    """As much of a PretrainedConfig as is looked at."""

    def __init__(self, **fields: Any) -> None:
        self.fields = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "_name_or_path": "/somewhere",
            "transformers_version": "5.0",
        } | fields
        self._commit_hash = fields.get("_commit_hash")
        self.architectures = self.fields["architectures"]

    def to_dict(self) -> dict[str, Any]:
        return self.fields


@dataclass(frozen=True)
class Layout:
    name: str = "paged LBHNC"
    dtype: str = "bfloat16"
    block_tokens: int = 16
    block_bytes: int = 4096


class Layer:
    def __init__(self, backend: str, isa: str | None = None) -> None:
        self.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: backend)
        if isa is not None:
            self.isa = isa


def engine(model: object, **changes: Any) -> Any:
    """A stand-in of a VllmConfig; ``changes`` are named ``part__field``."""
    parts: dict[str, Any] = {
        "model_config": {
            "model": str(model),
            "model_weights": "",
            "revision": None,
            "hf_config_path": None,
            "hf_config": HfConfig(),
            "dtype": "torch.bfloat16",
            "quantization": None,
            "quantization_config": None,
            "model_impl": "auto",
            "model_class_overrides": {},
            "disable_sliding_window": False,
            "code_revision": None,
            "seed": 0,
            "max_model_len": 4096,
            "multimodal_config": None,
        },
        "cache_config": {
            "cache_dtype": "auto",
            "kv_cache_dtype_skip_layers": [],
            "gpu_memory_utilization": 0.9,
        },
        "load_config": {"load_format": "auto", "download_dir": None},
        "attention_config": {"indexer_kv_dtype": "auto", "use_non_causal": False},
        "scheduler_config": {"max_num_seqs": 8},
        "compilation_config": {
            "static_forward_context": {"layers.0.attn": Layer("CPU_ATTN"), "moe": object()}
        },
    }
    top: dict[str, Any] = {"lora_config": None}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            top[part] = value
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()} | top)


def settings(**extra: Any) -> Settings:
    return Settings.read(extra, {})


def namespace(config: Any, **changes: Any) -> Namespace:
    given: dict[str, Any] = {"tp_size": 1, "stage": 0, "stages": 1, "settings": settings()}
    given |= {"environ": {}} | changes
    return make_namespace(config, given.pop("layout", Layout()), **given)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "Tiny-1"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


class TestLocalModel:
    def test_copy_under_another_name_shares(self, model, tmp_path):
        copy = shutil.copytree(model, tmp_path / "elsewhere" / "Other-2")
        moved = engine(copy, model_config__hf_config=HfConfig(_name_or_path=str(copy)))
        assert namespace(engine(model)) == namespace(moved)

    def test_other_weights_at_the_same_path_do_not(self, model):
        before = namespace(engine(model))
        (model / "model.safetensors").write_bytes(b"WEIGHTS")
        assert namespace(engine(model)).difference(before) == ["revision"]

    def test_name_is_for_people(self, model):
        assert namespace(engine(model)).model == "LlamaForCausalLM"
        chosen = namespace(engine(model), settings=settings(model="mine"))
        assert chosen.model == "mine"
        assert chosen.difference(namespace(engine(model))) == ["model"]

    def test_relative_path(self, model, monkeypatch):
        monkeypatch.chdir(model.parent)
        assert namespace(engine("Tiny-1")) == namespace(engine(model))

    def test_without_weights_it_must_be_named(self, model):
        (model / "model.safetensors").unlink()
        with pytest.raises(
            ConfigError, match=r"cannot be told which weights .*Tiny-1.*option model"
        ):
            namespace(engine(model))
        assert namespace(engine(model), settings=settings(model="mine v1")).revision == ""

    @pytest.mark.parametrize(
        "change",
        [{"load_config__load_format": "tensorizer"}, {"model_config__model_weights": "s3://x"}],
    )
    def test_weights_from_elsewhere_are_not_those_of_the_directory(self, model, change):
        with pytest.raises(ConfigError, match="cannot be told"):
            namespace(engine(model, **change))

    def test_random_weights_go_by_seed(self, model):
        one = namespace(engine(model, load_config__load_format="dummy"))
        other = namespace(engine(model, load_config__load_format="dummy", model_config__seed=1))
        real = namespace(engine(model))
        assert one.revision == "random weights, seed 0"
        assert len({one.fingerprint, other.fingerprint, real.fingerprint}) == 3


class TestHubModel:
    name = "org/Tiny-1"

    @pytest.mark.parametrize(
        "change",
        [
            {"model_config__revision": COMMIT},
            {"model_config__hf_config": HfConfig(_commit_hash=COMMIT)},
        ],
    )
    def test_commit_is_the_revision(self, change):
        got = namespace(engine(self.name, **change))
        assert (got.model, got.revision) == (self.name, COMMIT)

    def test_revision_that_the_hub_resolved(self):
        class Resolved(str):
            resolved = COMMIT

        got = namespace(engine(self.name, model_config__revision=Resolved("main")))
        assert got.revision == COMMIT
        assert type(got.revision) is str

    def test_commit_of_another_repository_does_not_count(self):
        config = engine(
            self.name,
            model_config__hf_config=HfConfig(_commit_hash=COMMIT),
            model_config__hf_config_path="org/other",
        )
        with pytest.raises(ConfigError, match="no commit on the hub"):
            namespace(config)

    def test_cache_of_this_machine(self, tmp_path):
        references = tmp_path / "hub" / "models--org--Tiny-1" / "refs"
        references.mkdir(parents=True)
        (references / "main").write_text(COMMIT + "\n")
        (references / "dev").write_text("nonsense")
        environ = {"HF_HOME": str(tmp_path)}
        assert namespace(engine(self.name), environ=environ).revision == COMMIT
        environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
        assert namespace(engine(self.name), environ=environ).revision == COMMIT
        downloads = {"load_config__download_dir": str(tmp_path / "hub")}
        assert namespace(engine(self.name, **downloads)).revision == COMMIT
        for revision in ("dev", "absent", "../../x"):
            with pytest.raises(ConfigError, match="cannot be told"):
                namespace(engine(self.name, model_config__revision=revision, **downloads))

    def test_offline_engine_shares(self, tmp_path):
        snapshot = tmp_path / "models--org--Tiny-1" / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        online = engine(self.name, model_config__revision=COMMIT)
        assert namespace(engine(snapshot)) == namespace(online)


def _facts() -> list[dict[str, Any]]:
    hf = "model_config__hf_config"
    return [
        {"model_config__dtype": "torch.float16"},
        {"model_config__quantization": "fp8"},
        {"model_config__quantization_config": {"linear": "fp8_per_token"}},
        {"model_config__model_impl": "transformers"},
        {"model_config__model_class_overrides": {"A": "b:C"}},
        {"model_config__disable_sliding_window": True},
        {"model_config__multimodal_config": SimpleNamespace(language_model_only=True)},
        {"model_config__multimodal_config": SimpleNamespace(mm_processor_kwargs={"fps": 1})},
        {hf: HfConfig(rope_theta=500000.0)},
        {hf: HfConfig(rope_scaling={"type": "yarn", "factor": 4.0})},
        {hf: HfConfig(text_config={"hidden_size": 1})},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"attention_config__indexer_kv_dtype": "fp8"},
        {"load_config__load_format": "pt"},
        {"lora_config": SimpleNamespace(lora_dtype="torch.float32")},
        {"compilation_config__static_forward_context": {"layers.0.attn": Layer("FLASH_ATTN")}},
        {"compilation_config__static_forward_context": {"layers.1.attn": Layer("CPU_ATTN")}},
        {
            "compilation_config__static_forward_context": {
                "layers.0.attn": Layer("CPU_ATTN", isa="amx")
            }
        },
    ]


@pytest.mark.parametrize("change", _facts(), ids=lambda change: next(iter(change)))
def test_what_changes_the_bytes_keeps_apart(model, change):
    assert namespace(engine(model, **change)).difference(namespace(engine(model))) == ["salt"]


@pytest.mark.parametrize(
    "change",
    [
        {"model_config__max_model_len": 128},
        {"model_config__seed": 7},
        {"cache_config__gpu_memory_utilization": 0.1},
        {"scheduler_config__max_num_seqs": 1},
        {"model_config__hf_config": HfConfig(transformers_version="6.0", _commit_hash="x")},
        {"load_config__load_format": "safetensors"},
        {"lora_config": SimpleNamespace(lora_dtype="torch.bfloat16")},
        {"lora_config": SimpleNamespace(lora_dtype="auto")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_change_them_shares(model, change):
    assert namespace(engine(model, **change)) == namespace(engine(model))


@pytest.mark.parametrize(
    "found",
    [
        HfConfig(rope_parameters={"rope_type": "longrope", _ORIGINAL: 4096}),
        HfConfig(rope_scaling={"type": "su"}, original_max_position_embeddings=4096),
        HfConfig(text_config={"rope_parameters": {"full": {"type": "longrope", _ORIGINAL: 4096}}}),
    ],
)
def test_long_rope_goes_by_the_longest_sequence(model, found):
    """vLLM takes the long factors for all sequences where one of them could need these."""
    base, shorter, longer = (
        namespace(engine(model, model_config__hf_config=found, model_config__max_model_len=longest))
        for longest in (4096, 1000, 4097)
    )
    assert shorter == base
    assert longer.difference(base) == ["salt"]
    assert longer == namespace(
        engine(model, model_config__hf_config=found, model_config__max_model_len=100_000)
    )


def test_long_rope_of_an_unknown_length(model):
    found = HfConfig(rope_scaling={"rope_type": "longrope"})
    one, other = (
        namespace(engine(model, model_config__hf_config=found, model_config__max_model_len=longest))
        for longest in (4096, 4097)
    )
    assert one.difference(other) == ["salt"]


def test_what_the_caller_gives(model):
    base = namespace(engine(model))
    for field, value in {
        "name": "other",
        "dtype": "float32",
        "block_tokens": 32,
        "block_bytes": 8192,
    }.items():
        changed = namespace(engine(model), layout=Layout(**{field: value}))
        assert changed.difference(base) == [{"name": "layout"}.get(field, field)]
    assert namespace(engine(model), tp_size=2).difference(base) == ["tp_size"]
    assert namespace(engine(model), engine="0.32.0").difference(base) == ["salt"]
    assert namespace(engine(model), float8="torch.float8_e4m3fnuz") == base
    bytewise = Layout(dtype="bfloat16+uint8")
    one, other = (
        namespace(engine(model), layout=bytewise, float8=f"torch.float8_e4m3{kind}")
        for kind in ("fn", "fnuz")
    )
    assert one.difference(other) == ["salt"]
    assert namespace(engine(model), settings=settings(tenant="t")).difference(base) == ["tenant"]
    shuffled = {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1"}
    assert namespace(engine(model), environ=shuffled).difference(base) == ["salt"]


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("config", {"model_config__hf_config": HfConfig(rope_theta=500000.0)}),
        ("model", {"model_config__disable_sliding_window": True}),
        ("quantization", {"model_config__quantization": "fp8"}),
        ("cache", {"cache_config__cache_dtype": "fp8"}),
        ("loader", {"load_config__load_format": "pt"}),
        ("backend", {"compilation_config__static_forward_context": {"a": Layer("FLASH_ATTN")}}),
    ],
)
def test_the_salt_shows_in_what_engines_differ(model, part, change):
    own, other = (
        set(namespace(each).salt.split(", ")) for each in (engine(model), engine(model, **change))
    )
    assert {each.split()[0] for each in own ^ other} == {part}


def test_pipeline_stages_are_apart_and_readable(model):
    first, second = (namespace(engine(model), stage=stage, stages=2) for stage in (0, 1))
    assert first.difference(second) == ["salt"]
    assert first.salt.startswith("stage 1 of 2, ")
    assert first.shards == 1
    assert namespace(engine(model), stage=0, stages=3).difference(first) == ["salt"]


@pytest.mark.parametrize("given", ["m" * 5000, "ü" * 600, "m\udcff"])
def test_names_that_do_not_fit_are_shortened(model, given):
    got = namespace(engine(model), settings=settings(model=given))
    other = namespace(engine(model), settings=settings(model=given + "x"))
    assert got.model.startswith(given[:1])
    assert got.difference(other) == ["model"]


_ELSEWHERE = """
import sys
from tests.client.vllm.test_namespace import engine, namespace
print(namespace(engine(sys.argv[1], model_config__model_class_overrides={"s": {"a", "b", "c"}},
                cache_config__kv_cache_dtype_skip_layers=frozenset("xyz"))).fingerprint.hex())
"""


def test_every_process_finds_the_same(model):
    found = {
        subprocess.run(
            [sys.executable, "-c", _ELSEWHERE, str(model)],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


class Colour(Enum):
    RED = 1


@dataclass
class Part:
    colour: Colour
    names: frozenset[str]


class Opaque:
    __slots__ = ()


def _canonical_text(value: Any) -> str:
    return json.dumps(_canonical(value), sort_keys=True)


def test_values_of_all_kinds_have_one_form():
    def build() -> list[Any]:
        part = Part(Colour.RED, frozenset({"b", "a"}))
        opaque = Opaque()
        return [part, opaque, Opaque, len, test_pipeline_stages_are_apart_and_readable, {1: None}]

    assert _canonical_text(build()) == _canonical_text(build())
    distinct: list[Any] = [1, "1", True, None, Colour.RED, Opaque, Opaque(), [], {}, (1,), Part]
    assert len({_canonical_text(value) for value in distinct}) == len(distinct)


def test_identity_without_a_worker(model):
    got = model_identity(engine(model), settings(), {})
    assert got.model == "LlamaForCausalLM"
    assert got.revision == namespace(engine(model)).revision
