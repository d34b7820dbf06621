"""``python -m benchmarks``: measures every row, prints one table, writes one JSON file."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.machine import describe
from benchmarks.measure import Row, Settings
from benchmarks.table import as_json, markdown, table

GROUPS = ("shm", "tcp", "match", "ssd", "index_memory", "hashing")
SPECIAL = ("rdma", "pool")
"""Groups that need what not every machine has, RDMA or Redis, or take long; measured only where
they are asked for."""
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the chosen groups. Exit status 1 with ``--strict`` where a goal is missed."""
    arguments = _parser().parse_args()
    progress = Console(stderr=True)
    machine = describe()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvbench-", dir=arguments.directory) as scratch:
        settings = Settings(
            rounds=3 if arguments.quick else arguments.rounds,
            scale=0.1 if arguments.quick else 1.0,
            directory=Path(scratch),
        )
        for group in arguments.only or GROUPS:
            with progress.status(f"measuring {group}"):
                rows += importlib.import_module(f"benchmarks.{group}").measure(settings)
    # A pipe has no width; the table is then as wide as its text.
    console = Console(width=None if sys.stdout.isatty() else 220)
    if arguments.markdown:
        print(markdown(rows))
    else:
        console.print(table(rows))
    path = arguments.json or RESULTS / time.strftime("%Y%m%d-%H%M%S.json", time.gmtime())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(rows, machine), indent=1) + "\n")
    console.print(f"every turn: {path}")
    return 1 if arguments.strict and not all(row.met for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=GROUPS + SPECIAL, help="measure these groups alone"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of subject and limit each")
    parser.add_argument("--quick", action="store_true", help="few short turns: figures mean little")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a goal is missed")
    parser.add_argument("--markdown", action="store_true", help="print the table for a document")
    parser.add_argument("--json", type=Path, help="where every turn is written")
    parser.add_argument(
        "--directory", default="/var/tmp", help="on the disk that the SSD row is to measure"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
