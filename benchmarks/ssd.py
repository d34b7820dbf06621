"""Cold blocks from the SSD tier, against what fio reads from the same disk at the same depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.measure import Row, Settings

BLOCK: Final = 1 << 20
BATCH: Final = 32
DEPTH: Final = 8

SUBJECT: Final = f"SSD get into a buffer, O_DIRECT, 1 MiB, cold, {BATCH} a call"
LIMIT: Final = f"fio, direct 1 MiB reads, depth {DEPTH}"


def measure(settings: Settings) -> Iterator[Row]:
    """The row of the SSD tier."""
    yield Row("ssd-get", SUBJECT, LIMIT, "B/s", "at least", 0.8, skipped="not measured")
