"""What runs on the second machine: does what the first one's `Peer` orders, until switched off."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.rdma.guest.peer import ANSWERS, ORDERS, PROCESSES, READY, put_file

_POLL = 0.05
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Processes = dict[int, subprocess.Popen[bytes]]


def main() -> None:
    """Takes one order after the other."""
    for folder in (ORDERS, ANSWERS, PROCESSES):
        folder.mkdir(exist_ok=True)  # from before a crash
    running: Processes = {}
    put_file(READY, _BOOT_ID.read_text())
    while True:
        _report_ended(running)
        numbers = sorted(int(name) for name in os.listdir(ORDERS) if name.isdigit())
        for number in numbers:
            path = ORDERS / str(number)
            order = json.loads(path.read_text())
            path.unlink()
            _obey(order, number, running)
            put_file(ANSWERS / str(number), "")
        if not numbers:
            time.sleep(_POLL)


def _obey(order: dict[str, Any], number: int, running: Processes) -> None:
    if "start" in order:
        files = PROCESSES / str(number)
        files.mkdir()
        with (files / "output").open("wb") as output:
            running[number] = subprocess.Popen(
                order["start"], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
    elif "signal" in order:
        if (process := running.get(order["process"])) is not None:
            process.send_signal(order["signal"])
    elif "crash" in order:
        put_file(ANSWERS / str(number), "")
        Path("/proc/sysrq-trigger").write_text("b")


def _report_ended(running: Processes) -> None:
    for number, process in list(running.items()):
        if (status := process.poll()) is not None:
            put_file(PROCESSES / str(number) / "status", str(status))
            del running[number]


if __name__ == "__main__":
    main()
