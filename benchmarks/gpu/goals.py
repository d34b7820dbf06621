"""The goals of the GPU data path beside what the benchmarks found, from the files they left.

python -m benchmarks.gpu.goals DIRECTORY
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

COPIES: Final = "copies"
NODE: Final = "through_node"
TTFT: Final = "ttft"
REPLAY: Final = "replay"


@dataclass(frozen=True, slots=True)
class Goal:
    """One line.

    Attributes:
        what: is measured.
        file: of the benchmark that does it.
        figure: works it out of what the benchmark found.
        least: what it must be at least; at most, where ``most``.
        most: see ``least``.
    """

    what: str
    file: str
    figure: Callable[[Mapping[str, Any]], float]
    least: float
    most: bool = False

    def met(self, value: float) -> bool:
        """Whether the goal is reached."""
        return value <= self.least if self.most else value >= self.least


def _value(name: str, found: Mapping[str, Any]) -> float:
    return float(found[name])


def _ratio(name: str, limit: str, found: Mapping[str, Any]) -> float:
    return float(found[name]) / float(found[limit])


def _one(file: str, what: str, name: str, least: float, *, most: bool = False) -> Goal:
    return Goal(what, file, partial(_value, name), least, most)


def _by(file: str, what: str, name: str, limit: str, least: float) -> Goal:
    return Goal(what, file, partial(_ratio, name, limit), least)


GOALS: Final = (
    _one(COPIES, "load from DRAM, GB/s", "load", 50),
    _by(COPIES, "load from DRAM by a pinned copy", "load", "pinned copy to the device", 0.9),
    _one(NODE, "the same through a node, GB/s", "load from DRAM, GB/s", 50),
    _one(COPIES, "save to DRAM, GB/s", "save", 45),
    _one(NODE, "the same through a node with room, GB/s", "save while there is room, GB/s", 45),
    _one(
        NODE,
        "the same through a full node, GB/s",
        "save while blocks are evicted for it, GB/s",
        45,
    ),
    _by(COPIES, "load from a GPU by a copy on it", "load from a GPU", "copy on the device", 0.7),
    _by(
        NODE,
        "load from HBM through a node by a copy on it",
        "load from HBM, GB/s",
        "copy on the device",
        0.7,
    ),
    _by(
        NODE,
        "the same, the copy alone",
        "load from HBM, the copy alone, GB/s",
        "copy on the device",
        0.7,
    ),
    _one(
        NODE,
        "load from SSD through a node by the disk",
        "load from SSD by the disk's own rate",
        0.9,
    ),
    _one(COPIES, "model beside saves, times as long", "model beside save", 1.03, most=True),
    _one(
        TTFT,
        "prefill while the prompt before is saved, times as long",
        "prefill while the prompt before is saved, times as long",
        1.03,
        most=True,
    ),
    _one(
        TTFT,
        "decode while the prompt before is saved, times as long",
        "decode while the prompt before is saved, times as long",
        1.03,
        most=True,
    ),
    _one(
        TTFT, "first token, 32 k, from DRAM: times faster", "32768 tokens, again: times faster", 8
    ),
    _one(
        TTFT,
        "the same, by the copy engine",
        "32768 tokens, again: times faster from DRAM, by the copy engine",
        8,
    ),
    _one(
        TTFT,
        "first token, 32 k, from HBM: times faster",
        "32768 tokens, again: times faster from HBM",
        12,
    ),
    _one(
        REPLAY,
        "P99 to the first token, store empty at first: cut by",
        "store, empty at first: P99 cut by",
        0.78,
    ),
    _one(
        REPLAY,
        "P99 to the first token, all seen before: cut by",
        "store, all seen before: P99 cut by",
        0.78,
    ),
)


def show(directory: Path) -> None:
    """Print a line for each goal."""
    for goal in GOALS:
        sign = "<=" if goal.most else ">="
        try:
            value = goal.figure(json.loads((directory / f"{goal.file}.json").read_text()))
        except (FileNotFoundError, KeyError):
            verdict = "not measured"
        else:
            verdict = f"{value:8.3f}   {'met' if goal.met(value) else 'MISSED'}"
        print(f"{goal.what:58} {sign} {goal.least:6.2f}   {verdict}")


if __name__ == "__main__":
    show(Path(sys.argv[1]))
