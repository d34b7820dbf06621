"""Plots: a file of the format asked for, and errors that say what to do."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError, MissingExtra
from kvstore.plot import plot_hit_rate
from kvstore.simulate import Outcome

PNG = b"\x89PNG\r\n\x1a\n"


def outcome(policy: str, dram: int | None, ssd: int | None, hits: int) -> Outcome:
    made = Outcome(policy, dram, ssd, True, unique=1000, accesses=100, tokens=100)
    made.hit_blocks["dram"] = hits
    return made


OUTCOMES = [
    outcome("lru", 10, 0, 3),
    outcome("lru", 100, 0, 40),
    outcome("arc", 10, 0, 5),
    outcome("arc", 100, 0, 45),
    outcome("lru", None, 0, 64),
]


def draw(path: Path, outcomes: list[Outcome] = OUTCOMES) -> bytes:
    plot_hit_rate(outcomes, path, title="some trace", block_bytes=1 << 20)
    return path.read_bytes()


def test_the_ending_chooses_the_format(tmp_path: Path) -> None:
    assert draw(tmp_path / "a.png").startswith(PNG)
    assert draw(tmp_path / "A.PNG").startswith(PNG)
    assert b"<svg" in draw(tmp_path / "a.svg")


def test_a_picture_names_its_lines_axes_and_units(tmp_path: Path) -> None:
    text = draw(tmp_path / "a.svg").decode()
    for part in (
        "some trace",
        "LRU",
        "ARC",
        "infinite: 64.0 %",
        "DRAM capacity (% of the trace's 1,000 unique blocks)",
        "hit rate (% of block accesses)",
        "10 MiB",
        "1 %",
    ):
        assert f">{part}<" in text, part


def test_equal_outcomes_give_equal_svg(tmp_path: Path) -> None:
    assert draw(tmp_path / "a.svg") == draw(tmp_path / "b.svg")


def test_the_tier_that_varies_is_the_axis(tmp_path: Path) -> None:
    outcomes = [outcome("lru", 10, ssd, 5 * ssd // 100) for ssd in (0, 100, 500)]
    text = draw(tmp_path / "a.svg", outcomes).decode()
    assert "SSD capacity" in text
    assert "LRU, DRAM 10 MiB" in text


def test_several_ssd_capacities_are_several_lines(tmp_path: Path) -> None:
    outcomes = [outcome("lru", dram, ssd, 1) for dram in (10, 20, 40, 80) for ssd in (0, 100, None)]
    text = draw(tmp_path / "a.svg", outcomes).decode()
    for label in ("LRU, no SSD", "LRU, SSD 100 MiB", "LRU, SSD infinite"):
        assert f">{label}<" in text


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.png.txt"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        draw(tmp_path / name)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        draw(tmp_path / "no" / "a.png")


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to plot"):
        draw(tmp_path / "a.png", [])


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtra, match="plot"):
        draw(tmp_path / "a.png")
