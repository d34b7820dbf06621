"""The pages for engines describe every option, every argument and every count there is."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any, get_args

import pytest

from client.transformers import CacheCounts, PrefixCache
from client.vllm.counts import COUNTS
from client.vllm.plugin import NAME
from client.vllm.settings import ENVIRONMENT_PREFIX, Settings, default_state_directory
from tests.running import DaemonThread, make_config

ROOT = Path(__file__).parents[2]
VLLM = ROOT / "docs/engines/vllm.md"
TRANSFORMERS = ROOT / "docs/engines/transformers.md"
URL = "unix:///var/lib/kvstore/kvstore.sock"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def _rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its own head."""
    _, _, below = page.read_text().partition(f"\n{heading}\n")
    table = re.search(r"^\|.*?(?=^[^|])", below, re.MULTILINE | re.DOTALL)
    assert table is not None, heading
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def _code(cell: str) -> str:
    found = re.search(r"`([^`]+)`", cell)
    assert found is not None, cell
    return found[1]


OPTIONS = {_code(row[0]): row for row in _rows(VLLM, "## Options")}


def test_every_option_is_described() -> None:
    assert list(OPTIONS) == list(Settings.model_fields)
    assert all(len(row[2]) > 10 for row in OPTIONS.values())


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name != "url"])
def test_defaults_are_those_in_force(name: str) -> None:
    cell = OPTIONS[name][1]
    in_force = getattr(Settings.read({}, {}), name)
    if cell == "unset":
        assert not in_force
        assert in_force is not False
    else:
        assert getattr(Settings.read({name: _code(cell)}, {}), name) == in_force


def test_the_default_address_is_that_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (0, 1000):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        environ = {"XDG_STATE_HOME": "$XDG_STATE_HOME"}
        directory = str(default_state_directory(environ))
        assert any(directory == code for code in re.findall(r"`([^`]+)`", OPTIONS["url"][1]))


def test_every_choice_is_named() -> None:
    for name, field in Settings.model_fields.items():
        choices = [each for each in get_args(field.annotation) if isinstance(each, str)]
        assert all(f"`{choice}`" in OPTIONS[name][2] for choice in choices)
    assert f"`{ENVIRONMENT_PREFIX}LOOKUP_DEADLINE`" in VLLM.read_text()


def test_every_count_is_described_as_the_metric_says() -> None:
    rows = [[_code(row[0]), *row[1:]] for row in _rows(VLLM, "### Counts")]
    assert rows == [[f"vllm:kvstore_{each.name}_total", each.unit, each.help] for each in COUNTS]


def test_the_lines_that_start_engines_name_the_connector() -> None:
    for page in (VLLM, ROOT / "README.md"):
        found = re.findall(r"--kv-transfer-config\s+\\?\s*'([^']+)'", page.read_text())
        assert found
        for body in found:
            config = json.loads(body)
            assert config["kv_connector"] == NAME
            Settings.read(config.get("kv_connector_extra_config", {}), {})


def test_every_argument_of_the_prefix_cache_is_described() -> None:
    described = [_code(row[0]) for row in _rows(TRANSFORMERS, "## Arguments")]
    fields = [field.name for field in dataclasses.fields(PrefixCache) if field.init]
    assert described == [name for name in fields if name != "counts"]


def test_every_count_of_the_prefix_cache_is_described() -> None:
    described = [_code(row[0]) for row in _rows(TRANSFORMERS, "### Counts")]
    assert described == [field.name for field in dataclasses.fields(CacheCounts)]


def test_the_examples_for_transformers_hit(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    body, paged, by_hand = re.findall(
        r"^```python\n(.*?)^```", TRANSFORMERS.read_text(), re.M | re.S
    )
    paged += indent(by_hand, "    ")
    with DaemonThread(make_config(tmp_path)) as daemon:
        names: dict[str, Any] = {}
        for written, meant in ((URL, daemon.url), (MODEL, str(tmp_path / "model"))):
            assert f'"{written}"' in body
            body = body.replace(written, meant)
        exec(compile(body, TRANSFORMERS.name, "exec"), names)  # noqa: S102 - it is our own page
        first = names["first"]
        exec(compile(paged, TRANSFORMERS.name, "exec"), names)  # noqa: S102
    assert first.saved.stored == 6
    assert names["second"].reused.tiers == {"dram": 96}
    assert names["cache"].counts.stored_blocks == 6
    assert names["token"] == names["first"].output[0, 100]
