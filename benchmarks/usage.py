"""What a process has used of the processors: a figure that others on the machine distort less."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path


def processor_seconds(pid: int) -> float:
    """Seconds that all threads of a process have run, in nanosecond steps."""
    return sum(_nanoseconds(task) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def _nanoseconds(task: Path) -> int:
    try:
        return int((task / "schedstat").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return 0  # the thread has ended meanwhile


def per_gib(work: Callable[[], int], pids: Mapping[str, int]) -> dict[str, float]:
    """Processor seconds that each process needs to move a GiB.

    Args:
        work: moves so many bytes.
        pids: the other processes by what they are; this one is added as ``client``.
    """
    everyone = {"client": os.getpid()} | dict(pids)
    before = {name: processor_seconds(pid) for name, pid in everyone.items()}
    moved = work() / (1 << 30)
    return {name: (processor_seconds(pid) - before[name]) / moved for name, pid in everyone.items()}
