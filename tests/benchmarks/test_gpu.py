"""What the GPU's benchmarks are made of, as far as it needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.gpu import goals, requests  # noqa: E402
from benchmarks.gpu.replay import draw, replay  # noqa: E402


def line(at: int, tokens: int, *ids: int) -> str:
    request = {"timestamp": at, "input_length": tokens, "output_length": 1, "hash_ids": ids}
    return json.dumps(request) + "\n"


def test_prompts_share_what_requests_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line(3000, 1024, 0, 7) + line(6500, 1500, 0, 7, 8) + line(6500, 600, 0, 9))
    monkeypatch.setenv("TRACE", str(trace))
    first, second, third = requests.prompts(3, 8)
    assert [each.arrival for each in (first, second, third)] == [0, 3.5, 3.5]
    assert [each.tokens for each in (first, second, third)] == [128, 187, 75]
    assert torch.equal(first.ids, second.ids[:, :128])
    assert torch.equal(first.ids[:, :64], third.ids[:, :64])
    assert not torch.equal(first.ids[:, 64:75], third.ids[:, 64:75])
    assert len(requests.prompts(2, 8)) == 2


def test_a_missing_trace_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="TRACE"):
        requests.prompts(1, 8)


def test_time_runs_from_arrival() -> None:
    ids = torch.zeros((1, 3), dtype=torch.int64)
    wanted = [requests.Prompt(arrival, ids) for arrival in (0.0, 0.0, 100.0)]
    seen: list[int] = []

    def answer(prompt: object) -> int:
        seen.append(1)
        return 0

    taken, busy = replay(wanted, answer, 1e-4)
    assert len(seen) == len(taken) == 3
    assert taken[1] >= taken[0] > 0
    assert taken[2] > 0
    assert busy > 0


def test_goals_stand_beside_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = {"load": 51.0, "pinned copy to the device": 60.0, "model beside save": 1.02}
    (tmp_path / "copies.json").write_text(json.dumps(copies))
    goals.show(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(goals.GOALS)
    shown = {each[:58].strip(): each.split()[-1] for each in lines}
    assert shown["load from DRAM, GB/s"] == "met"
    assert shown["load from DRAM by a pinned copy"] == "MISSED"
    assert shown["model beside saves, times as long"] == "met"
    assert lines[-1].endswith("not measured")


def test_distributions_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw({"without": [0.5, 0.1], "with": [0.1, 0.02]}, tmp_path / "replay.svg", "two requests")
    text = (tmp_path / "replay.svg").read_text()
    assert "two requests" in text
    assert "without" in text
