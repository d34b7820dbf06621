"""The example on the first page does what it says, on a real node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.running import DaemonThread, make_config

ROOT = Path(__file__).parents[2]
SOCKET = "/var/lib/kvstore/kvstore.sock"
BLOCKS = 3


def _example(url: str) -> str:
    (body,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert f"unix://{SOCKET}" in body
    return str(body).replace(f"unix://{SOCKET}", url)


def _run(url: str, buffers: list[bytearray], blocks: list[bytes]) -> dict[str, Any]:
    names: dict[str, Any] = {
        "token_ids": list(range(16 * BLOCKS)),
        "buffers": buffers,
        "blocks": blocks,
    }
    exec(compile(_example(url), "README.md", "exec"), names)  # noqa: S102 - it is our own page
    return names


def test_what_one_process_puts_the_next_one_gets(tmp_path: Path) -> None:
    blocks = [bytes([number]) * (2 << 20) for number in range(BLOCKS)]
    buffers = [bytearray(2 << 20) for _ in range(BLOCKS)]
    config = make_config(tmp_path, dram={"capacity": "16MiB", "segment": "16MiB"})
    with DaemonThread(config) as daemon:
        first = _run(daemon.url, buffers, blocks)
        assert first["held"] == 0
        second = _run(daemon.url, buffers, blocks)
    assert second["held"] == BLOCKS
    assert second["found"].found == BLOCKS
    assert buffers == blocks
