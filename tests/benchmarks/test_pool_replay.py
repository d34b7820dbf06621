"""The replay on a pool of real daemons: a short one, as a person runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import pool_replay
from tests.kvstore.directory.servers import require_redis
from tests.kvstore.trace_files import EXCERPT


@pytest.mark.timeout(180)
def test_daemons_that_are_alone_agree_with_the_simulation_and_a_pool_pulls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_redis()
    figures = tmp_path / "figures.json"
    options = {"--nodes": "2", "--dram": "50%", "--pause": "0.01", "--json": str(figures)}
    words = [word for option in options.items() for word in option]
    monkeypatch.setattr(sys, "argv", ["pool_replay", str(EXCERPT), *words])
    assert pool_replay.main() == 0
    found = json.loads(figures.read_text())
    alone, expected = found["isolated daemons"], found["isolated simulated"]
    assert alone["hit_rate"] == expected["hit_rate"] > 0
    assert alone["remote"] == expected["remote"] == alone["lost"] == 0
    # What is told late makes misses, so only this much is certain of a pool.
    pool = found["pool daemons"]
    assert pool["remote"] > 0
    assert pool["wrong"] == alone["wrong"] == 0
    assert pool["failures"] == alone["failures"] == {}
    assert "times what isolated nodes hit" in capsys.readouterr().out
