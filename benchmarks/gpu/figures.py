"""Figures of one benchmark: printed as they come, and written where ``$OUT`` says."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Figures(dict[str, Any]):
    """What was found, by its name. Times are in ms and rates in GB/s unless the name says else."""

    def note(self, name: str, value: Any) -> None:
        """Keep a figure and print it: what comes after may take too long."""
        self[name] = value
        shown = f"{value:10.3f}" if isinstance(value, float) else value
        print(f"{name:58} {shown}", flush=True)


@contextmanager
def figures(benchmark: str) -> Iterator[Figures]:
    """Figures that are written in the end, whatever happens.

    Args:
        benchmark: names the file.
    """
    found = Figures(torch=torch.__version__)
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    try:
        yield found
    finally:
        if out := os.environ.get("OUT"):
            Path(out, f"{benchmark}.json").write_text(json.dumps(found, indent=1))


def synchronize() -> None:
    """Wait for all that was asked of the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    """How long something takes once, the device's work included."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def median_seconds(work: Callable[[], object], turns: int) -> float:
    """The median of some turns, after one that does not count."""
    return statistics.median([seconds(work) for _ in range(turns + 1)][1:])
