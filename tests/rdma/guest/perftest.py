"""perftest's own measure of a device: what bandwidth it gives to a program in C."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence

from tests.rdma.guest.errors import GuestError

GID_INDEX = 1
"""rxe's first GID is link-local, its second the IPv4-mapped one."""


def arguments(size: int, iterations: int, *more: str) -> list[str]:
    """Those that client and server must agree on; `size` in bytes."""
    return [
        *("-d", "rxe0", "-x", str(GID_INDEX), "-F"),
        *("-s", str(size), "-n", str(iterations)),
        *more,
    ]


def measure(tool: str, size: int, iterations: int, *more: str) -> float:
    """Runs server and client on this machine; the bandwidth in MB (10^6 bytes) a second.

    Raises:
        GuestError: it couldn't be measured.
    """
    command = [tool, *arguments(size, iterations, *more)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            return measure_against("127.0.0.1", command)
        finally:
            server.kill()


def measure_against(address: str, command: Sequence[str], patience: float = 20) -> float:
    """Runs the client against a server that starts within `patience` seconds; see `measure`."""
    deadline = time.monotonic() + patience
    while True:
        done = subprocess.run(
            [*command, address, "--report_gbits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        if "Couldn't connect" not in done.stdout or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    # Columns: bytes, iterations, peak, average, messages a second.
    row = re.search(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", done.stdout, re.MULTILINE)
    if done.returncode or row is None:
        raise GuestError(f"{' '.join(command)} {address}:\n{done.stdout}")
    return float(row.group(1)) * 1000 / 8
