"""A copy of weights is the same weights; other weights at the same path are others."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from client.vllm import weights
from client.vllm.weights import Adapters, fingerprint
from kvstore.errors import ConfigError


def safetensors(tensors: dict[str, bytes]) -> bytes:
    header, offset = {}, 0
    for name, data in tensors.items():
        end = offset + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "model.safetensors").write_bytes(safetensors({"a": b"1" * 100, "b": b"2" * 50}))
    return directory


def test_copy_elsewhere_is_the_same(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "other name")
    os.utime(copy / "config.json", (1, 1))
    assert fingerprint(copy) == fingerprint(model)
    assert str(fingerprint(model)).startswith("sha256:")


def test_symbolic_links_count_as_what_they_point_to(model, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert fingerprint(linked) == fingerprint(model)


def test_what_does_not_shape_the_kv_does_not_count(model):
    before = fingerprint(model)
    (model / "tokenizer.json").write_text("{}")
    (model / "README.md").write_text("hello")
    (model / "generation_config.json").write_text("{}")
    (model / "original").mkdir()
    (model / "original" / "consolidated.safetensors").write_bytes(b"x")
    assert fingerprint(model) == before


def test_any_change_counts(model):
    seen = {fingerprint(model)}

    def changed() -> None:
        now = fingerprint(model)
        assert now not in seen
        seen.add(now)

    (model / "config.json").write_text('{"model_type": "qwen"}')
    changed()
    (model / "model.safetensors").write_bytes(safetensors({"a": b"1" * 99 + b"0", "b": b"2" * 50}))
    changed()
    (model / "model.safetensors").rename(model / "other.safetensors")
    changed()
    (model / "modeling.py").write_text("x = 1")
    changed()
    (model / "model.safetensors.index.json").write_text("{}")
    changed()


def test_directory_without_weights_has_none(model):
    (model / "model.safetensors").unlink()
    assert fingerprint(model) is None


def test_single_file(tmp_path):
    one, two = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(b"weights")
    two.write_bytes(b"weights")
    assert fingerprint(one) == fingerprint(two)
    two.write_bytes(b"weightz")
    assert fingerprint(one) != fingerprint(two)


def test_unreadable_file_is_said(model):
    shutil.rmtree(model)
    with pytest.raises(ConfigError, match="weights in .*model cannot be read"):
        fingerprint(model)


class TestLargeFiles:
    @pytest.fixture(autouse=True)
    def small_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(weights, "WHOLE_BYTES", 1 << 16)
        monkeypatch.setattr(weights, "PIECES", 4)
        monkeypatch.setattr(weights, "PIECE_BYTES", 64)

    def write(self, directory: Path, name: str, tensors: dict[str, bytes]) -> str | None:
        (directory / name).write_bytes(safetensors(tensors))
        return fingerprint(directory)

    def test_each_tensor_is_sampled(self, model):
        tensors = {f"layer {i}": bytes([i]) * 4096 for i in range(32)}
        before = self.write(model, "model.safetensors", tensors)
        for name in tensors:
            changed = tensors | {name: b"\xff" * 4096}
            assert self.write(model, "model.safetensors", changed) != before
        assert self.write(model, "model.safetensors", tensors) == before

    def test_header_is_read_whole(self, model):
        tensors = {f"layer {i:04}": b"x" * 200 for i in range(1000)}
        before = self.write(model, "model.safetensors", tensors)
        tensors["other 500"] = tensors.pop("layer 0500")
        assert self.write(model, "model.safetensors", tensors) != before

    def test_many_tensors_are_sampled_evenly(self, model, monkeypatch):
        monkeypatch.setattr(weights, "MAX_TENSORS", 8)
        tensors = {f"layer {i}": bytes([i]) * 4096 for i in range(32)}
        before = self.write(model, "model.safetensors", tensors)
        changed = tensors | {"layer 28": b"\xff" * 4096}
        assert self.write(model, "model.safetensors", changed) != before

    @pytest.mark.parametrize("where", [0, 99_999])
    def test_beginning_and_end_of_other_formats(self, tmp_path, where):
        file = tmp_path / "model.gguf"
        file.write_bytes(bytes(100_000))
        before = fingerprint(file)
        changed = bytearray(100_000)
        changed[where] = 1
        file.write_bytes(changed)
        assert fingerprint(file) != before

    def test_size_counts(self, tmp_path):
        file = tmp_path / "model.gguf"
        file.write_bytes(bytes(100_000))
        before = fingerprint(file)
        file.write_bytes(bytes(100_001))
        assert fingerprint(file) != before

    @pytest.mark.parametrize(
        "data",
        [
            b"\xff" * 100_000,
            struct.pack("<Q", 10) + b"not json!!" + bytes(100_000),
            struct.pack("<Q", 2) + b"[]" + bytes(100_000),
            struct.pack("<Q", 8) + b'{"a": 1}' + bytes(100_000),
            safetensors({"a": bytes(100_000)}).replace(b"100000]", b"900000]"),
        ],
    )
    def test_header_that_makes_no_sense_is_no_error(self, model, data):
        (model / "model.safetensors").write_bytes(data)
        assert fingerprint(model)


class TestAdapters:
    def adapter(self, path: object, **more: object) -> SimpleNamespace:
        fields = {"lora_name": "a", "lora_int_id": 1, "lora_path": str(path), "load_inplace": False}
        return SimpleNamespace(**fields | more)

    def test_contents_count(self, model, tmp_path):
        copy = shutil.copytree(model, tmp_path / "copy")
        first = Adapters().revision(self.adapter(model))
        assert first
        assert Adapters().revision(self.adapter(copy)) == first
        (copy / "model.safetensors").write_bytes(b"other")
        assert Adapters().revision(self.adapter(copy)) != first

    def test_what_the_engine_has_loaded_stays_until_it_loads_again(self, model):
        adapters = Adapters()
        first = adapters.revision(self.adapter(model))
        (model / "model.safetensors").write_bytes(b"other")
        assert adapters.revision(self.adapter(model)) == first
        second = adapters.revision(self.adapter(model, load_inplace=True))
        assert second != first
        assert adapters.revision(self.adapter(model)) == second
        assert adapters.revision(self.adapter(model, lora_int_id=2)) == second

    def test_no_adapter_and_none_at_hand(self, tmp_path):
        assert Adapters().revision(None) == ""
        assert Adapters().revision(self.adapter("org/name-on-the-hub")) is None
        assert Adapters().revision(self.adapter(tmp_path)) is None

    def test_one_that_is_not_at_hand_is_named_once(self, caplog):
        adapters = Adapters()
        for _ in range(2):
            adapters.revision(self.adapter("org/name-on-the-hub"))
        [line] = caplog.messages
        assert "org/name-on-the-hub is no local directory of weights" in line
