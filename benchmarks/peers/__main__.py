"""``python -m benchmarks.peers``: the same work on this store and its peers, in one run.

Writes a table (Markdown), every turn (JSON) and plots (SVG) to ``benchmarks/results``; table and
turns after each row, so that a run cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.peers.contender import Contender
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.groups import GROUPS
from benchmarks.peers.plots import draw
from benchmarks.peers.report import Report, goals_table
from benchmarks.peers.run import TRACE, Options
from benchmarks.peers.versions import versions
from kvstore.errors import MissingExtra

RESULTS = Path(__file__).parents[1] / "results"
FAMILIES = tuple(dict.fromkeys(each.family for each in CONTENDERS if each.kind == "peer"))
MODES = (*FAMILIES, *(each.key for each in CONTENDERS if each.family in FAMILIES))


def main() -> int:
    """Run the chosen groups. Exit status 1 with ``--strict`` where a goal is missed."""
    arguments = _parser().parse_args()
    stem = arguments.output or RESULTS / time.strftime("peers-%Y%m%d-%H%M%S", time.gmtime())
    report = Report(stem, _about(arguments))
    began = time.monotonic()
    try:
        _measure(arguments, report, began)
    except KeyboardInterrupt:
        _say(began, "interrupted: what is complete is kept")
    finally:
        _finish(report, stem)
    missed = [each for row in report.rows for each in row.verdicts if each.met is False]
    return 1 if arguments.strict and missed else 0


def _measure(arguments: argparse.Namespace, report: Report, began: float) -> None:
    with tempfile.TemporaryDirectory(prefix="kvb-", dir=arguments.directory) as scratch:
        options = Options(
            contenders=[each for each in CONTENDERS if _wanted(each, arguments.peers)],
            directory=Path(scratch),
            environments=arguments.environments,
            rounds=arguments.rounds,
            scale=0.1 if arguments.quick else 1.0,
            say=lambda text: _say(began, text),
            trace=arguments.trace,
        )
        for group in arguments.only or GROUPS:
            for row in GROUPS[group](options):
                report.add(row)


def _finish(report: Report, stem: Path) -> None:
    if not report.rows:
        return
    print(goals_table(report.rows))
    print(f"all figures: {report.markdown}")
    try:
        for path in draw(report.rows, stem):
            print(f"plot: {path}")
    except MissingExtra as error:
        print(f"no plots: {error}", file=sys.stderr)


def _wanted(contender: Contender, chosen: Sequence[str] | None) -> bool:
    """Whether ``--peers`` leaves it in: it chooses among all that comes from a peer."""
    if chosen is None or contender.family not in FAMILIES:
        return True
    return any(each in (contender.key, contender.family) for each in chosen)


def _about(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
        "rounds": arguments.rounds,
        **describe(),
        "peers": versions(arguments.environments),
    }


def _say(began: float, text: str) -> None:
    seconds = int(time.monotonic() - began)
    print(f"{seconds // 60:3d}:{seconds % 60:02d} {text}", file=sys.stderr, flush=True)


class _Quick(argparse.Action):
    """Stands for the options of a quick look; those named after it hold."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.quick, namespace.rounds = True, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(GROUPS), help="measure these alone")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=MODES,
        metavar="PEER",
        help=f"of the peers these alone: {', '.join(FAMILIES)}, or one mode such as mooncake-tcp",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each that count")
    parser.add_argument(
        "--quick",
        action=_Quick,
        nargs=0,
        default=False,
        help="two short rounds: figures mean little",
    )
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a goal is missed")
    parser.add_argument("--output", type=Path, help="path of what is written, without endings")
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path(".venv-peers"),
        help="where scripts/setup-peers has put the peers",
    )
    parser.add_argument(
        "--directory", type=Path, default="/var/tmp", help="scratch, on the disk to be measured"
    )
    parser.add_argument(
        "--trace", type=Path, default=TRACE, help="a request trace for the group of that name"
    )
    return parser


if __name__ == "__main__":
    # Told to end it clears up as well, and also where it was started with Ctrl-C ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
