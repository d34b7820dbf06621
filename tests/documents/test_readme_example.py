"""The example on the first page does what it says, on a real node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.running import DaemonThread, make_config

ROOT = Path(__file__).parents[2]
SOCKET = "/var/lib/kvstore/kvstore.sock"


def _example(url: str) -> str:
    (body,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert f"unix://{SOCKET}" in body
    return str(body).replace(f"unix://{SOCKET}", url)


def _run(url: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(_example(url), "README.md", "exec"), names)  # noqa: S102 - it is our own page
    return names


def test_what_one_process_puts_the_next_one_gets(tmp_path: Path) -> None:
    config = make_config(tmp_path, dram={"capacity": "16MiB", "segment": "16MiB"})
    with DaemonThread(config) as daemon:
        first, second = _run(daemon.url), _run(daemon.url)
    told = [f"{run['held']} {run['found']} {run['stored']}" for run in (first, second)]
    assert f"# {', then '.join(told)}\n" in _example(daemon.url)
    assert second["held"] == 3
    assert second["buffers"] == second["blocks"]
