"""What the demo calls a failure. The demo itself runs in CI."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from examples.demo import TABLE_WIDTH, reused, table, verdict


def rows(**changes: Any) -> list[dict[str, Any]]:
    row = {
        "request": "question 1",
        "prompt": 100,
        "reused": {"dram": 64, "ssd": 16},
        "cold": 0.2,
        "warm": 0.1,
        "same": True,
    }
    return [row | {"engine": engine} | changes for engine in "ABC"]


def test_all_is_well() -> None:
    assert verdict(rows()) is None
    assert reused(rows()[0]) == "64 dram + 16 ssd"
    assert table(rows()).row_count == 3


def test_one_output_that_differs_is_a_failure() -> None:
    one = rows()
    one[1]["same"] = False
    assert verdict(one) == "the output differs from a run without the store: B question 1"


def test_a_later_process_that_reuses_nothing_is_a_failure() -> None:
    one = rows()
    one[2]["reused"] = {}
    assert verdict(one) == "engine C reused nothing"
    one[0]["reused"] = {}
    one[2]["reused"] = {"ssd": 1}
    assert verdict(one) is None


def test_the_table_fits_eighty_columns() -> None:
    widest = {"request": "chat, turn 1", "prompt": 1406, "reused": {"dram": 1296, "ssd": 48}}
    console = Console(file=StringIO(), width=TABLE_WIDTH)
    assert TABLE_WIDTH == 80
    shown = table(rows(**widest, cold=0.4, warm=0.03))
    assert console.measure(shown).maximum <= TABLE_WIDTH
    console.print(shown)
    assert "…" not in console.file.getvalue()  # type: ignore[attr-defined]
