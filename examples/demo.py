"""A prefix computed once is reused by the next request, the next process, and after a restart.

Starts a daemon with a DRAM and an SSD tier, runs three engine processes against it, the last one
after a restart of the daemon, and prints one table. Exit status 1 if any output with the store
differs from the output without it, or if a later process reused nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import kvstore

ENGINE = Path(__file__).with_name("engine.py")
START_SECONDS = 30.0
STOP_SECONDS = 30.0
TABLE_WIDTH = 80
SETTINGS = {
    "DRAM__CAPACITY": "256MiB",
    "SSD__CAPACITY": "512MiB",
    "LISTEN__CONTROL": "off",
    "LISTEN__METRICS": "off",
    "LOG__LEVEL": "warning",
}


@dataclass(frozen=True)
class Stage:
    """One engine process: its name in the table, and how much it is asked."""

    name: str
    questions: int
    turns: int


BEFORE_RESTART = (Stage("A", 2, 2), Stage("B", 2, 3))
AFTER_RESTART = (Stage("C", 2, 4),)


class DemoError(Exception):
    """The demo could not be run."""


@contextmanager
def daemon(state: Path) -> Iterator[str]:
    """Run the daemon; SIGTERM at the end, as an init system would.

    Args:
        state: directory of its socket and of the SSD tier.

    Yields:
        The URL to connect to.
    """
    settings = {
        **SETTINGS,
        "NODE__STATE_DIRECTORY": str(state),
        "SSD__DIRECTORY": str(state / "ssd"),
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    environment = kept | {f"KVSTORE_{name}": value for name, value in settings.items()}
    log = state / "daemon.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "serve"],
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        url = f"unix://{state / 'kvstore.sock'}"
        wait_until_up(process, url, log)
        yield url
    finally:
        stop(process, log)


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the daemon takes sessions.

    Raises:
        DemoError: it ended, or took too long.
    """
    probe = kvstore.Namespace("probe", "uint8", "raw", block_tokens=1, block_bytes=4096)
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            kvstore.connect(url, probe).close()
        except kvstore.KVStoreError:
            time.sleep(0.05)
        else:
            return
    raise DemoError(f"the daemon did not start:\n{tail(log)}")


def tail(log: Path) -> str:
    """The end of what the daemon said."""
    return log.read_text(errors="replace")[-2_000:]


def stop(process: subprocess.Popen[bytes], log: Path) -> None:
    """Ask the daemon to end, and see that it does so cleanly.

    Raises:
        DemoError: it did not.
    """
    process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    if status:
        raise DemoError(
            f"the daemon ended with {status}:\n{log.read_text(errors='replace')[-2000:]}"
        )


def run_engine(stage: Stage, url: str, console: Console) -> list[dict[str, Any]]:
    """Run one engine process.

    Returns:
        What it did for each request.

    Raises:
        DemoError: it failed.
    """
    command = [sys.executable, str(ENGINE), url]
    command += ["--questions", str(stage.questions), "--turns", str(stage.turns)]
    rows: list[dict[str, Any]] = []
    total = stage.questions + stage.turns
    with (
        console.status(f"engine {stage.name}: loading the model") as status,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        for line in process.stdout or ():
            rows.append(json.loads(line) | {"engine": stage.name})
            status.update(f"engine {stage.name}: {len(rows)} of {total} requests answered")
    if process.returncode:
        raise DemoError(f"engine {stage.name} ended with {process.returncode}")
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """The results for people."""
    shown = Table(
        title="KV cache reuse: a Llama on the CPU, block by block from the store",
        caption="prompt and reused: tokens; cold and cached: time to the first token;\n"
        "same: whether the output is that of a run without the store",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("engine")
    shown.add_column("request", no_wrap=True)
    for heading in ("prompt", "reused", "cold", "cached", "faster"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("same")
    engine = ""
    for row in rows:
        if engine and row["engine"] != engine:
            shown.add_section()
        engine = row["engine"]
        shown.add_row(
            engine,
            row["request"],
            str(row["prompt"]),
            reused(row),
            f"{row['cold'] * 1e3:.0f} ms",
            f"{row['warm'] * 1e3:.0f} ms",
            f"{row['cold'] / row['warm']:.1f} ×",
            "yes" if row["same"] else "[red]NO[/red]",
        )
    return shown


def reused(row: dict[str, Any]) -> str:
    """The tokens reused and the tiers they came from."""
    tiers: dict[str, int] = row["reused"]
    return " + ".join(f"{count} {name}" for name, count in tiers.items()) or "0"


def verdict(rows: list[dict[str, Any]]) -> str | None:
    """What is wrong with the results; ``None`` where nothing is."""
    if different := [row for row in rows if not row["same"]]:
        names = ", ".join(f"{row['engine']} {row['request']}" for row in different)
        return f"the output differs from a run without the store: {names}"
    for stage in (*BEFORE_RESTART, *AFTER_RESTART)[1:]:
        if not any(row["reused"] for row in rows if row["engine"] == stage.name):
            return f"engine {stage.name} reused nothing"
    return None


def main() -> int:
    """Run the demo."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    began = time.monotonic()
    disk = Path("/var/tmp")
    with tempfile.TemporaryDirectory(
        prefix="kvstore-demo-", dir=disk if disk.is_dir() else None
    ) as folder:
        state, rows = Path(folder), []
        try:
            for stages in (BEFORE_RESTART, AFTER_RESTART):
                with daemon(state) as url:
                    for stage in stages:
                        rows += run_engine(stage, url, console)
        except DemoError as error:
            console.print(f"[red]{error}[/red]")
            return 1
    console.print(table(rows))
    console.print(
        "A and B are separate processes on one daemon; C ran after the daemon was restarted. "
        f"{time.monotonic() - began:.0f} s."
    )
    problem = verdict(rows)
    if problem:
        console.print(f"[red]{problem}[/red]")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
