"""``python -m benchmarks.vllm``: the connector in real engines, as ratios of one run."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.machine import describe
from benchmarks.vllm import overhead, report, ttft
from benchmarks.vllm.contenders import ABSENT, OURS, PEERS, RECOMPUTE, Place
from benchmarks.vllm.fleet import Running, fleet
from benchmarks.vllm.model import make
from benchmarks.vllm.process import REPOSITORY, EngineFailed
from benchmarks.vllm.shape import DESCRIPTION

RESULTS = REPOSITORY / "benchmarks" / "results"
LENGTHS = (512, 1024, 2048, 4096, 8192)
QUICK_LENGTHS = (512, 2048)
VLLM = REPOSITORY / ".venv-vllm"


def main() -> int:
    """Measure, print both tables and write every turn. Exit status 1 where nothing was measured."""
    # The engines are to end with the run, however it ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="kvbench-", dir=arguments.directory) as scratch:
        try:
            return _run(arguments, Path(scratch))
        except EngineFailed as error:
            print(error, file=sys.stderr)
            return 1


def _run(arguments: argparse.Namespace, scratch: Path) -> int:
    machine = describe()
    model = make(scratch)
    peers = [each for each in PEERS if each.key in arguments.peers]
    overhead_running: list[Running] = []
    ttft_running: list[Running] = []
    overhead_turns: list[overhead.Turn] = []
    ttft_turns: list[ttft.Turn] = []
    if "overhead" in arguments.only:
        place = _place(arguments, scratch, "overhead")
        with fleet((RECOMPUTE, OURS, ABSENT), place, model) as overhead_running:
            overhead_turns = overhead.measure(overhead_running, arguments.overhead_turns, _progress)
    if "ttft" in arguments.only:
        place = _place(arguments, scratch, "ttft")
        with fleet((RECOMPUTE, OURS, *peers), place, model) as ttft_running:
            ttft_turns = ttft.measure(ttft_running, arguments.lengths, arguments.turns, _progress)
    console = Console(width=None if sys.stdout.isatty() else 240)
    console.print(DESCRIPTION)
    if overhead_turns:
        console.print(report.overhead_table(overhead_running, overhead_turns))
    if ttft_turns:
        console.print(report.ttft_table(ttft_running, ttft_turns))
    found = report.as_json(ttft_running, ttft_turns, overhead_running, overhead_turns)
    path = arguments.json or RESULTS / time.strftime("vllm-%Y%m%d-%H%M%S.json", time.gmtime())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "model": DESCRIPTION} | found, indent=1) + "\n")
    console.print(f"every turn: {path}")
    return 0


class _Quick(argparse.Action):
    """Stands for the options of a quick look; those named after it hold."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.turns, namespace.overhead_turns = 2, 4
        namespace.lengths = QUICK_LENGTHS


def _place(arguments: argparse.Namespace, scratch: Path, name: str) -> Place:
    own = scratch / name
    own.mkdir()
    return Place(arguments.vllm / "bin" / "python", arguments.vllm / "peers", own)


def _progress(what: str) -> None:
    print(time.strftime("%H:%M:%S"), what, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("overhead", "ttft"),
        default=("overhead", "ttft"),
        help="measure these alone",
    )
    names = [each.key for each in PEERS]
    parser.add_argument(
        "--peers", nargs="*", choices=names, default=names, help="connectors beside ours"
    )
    parser.add_argument("--turns", type=int, default=5, help="of each engine and length")
    parser.add_argument(
        "--overhead-turns", type=int, default=30, help="of each engine, without reuse"
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=LENGTHS, help="of the prompts, in tokens"
    )
    parser.add_argument(
        "--quick",
        action=_Quick,
        nargs=0,
        help="few turns and short prompts: figures mean little",
    )
    parser.add_argument("--vllm", type=Path, default=VLLM, help="the environment that has vLLM")
    parser.add_argument("--json", type=Path, help="where every turn is written")
    parser.add_argument(
        "--directory", type=Path, default="/var/tmp", help="on the disk of the file-system tier"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
