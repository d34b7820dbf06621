"""The examples of the client's page run, one after another, on a real node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.running import DaemonThread, make_config

PAGE = Path(__file__).parents[2] / "docs/client.md"
URL = "unix:///var/lib/kvstore/kvstore.sock"


def test_examples_of_the_page_hold_together(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    bodies = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(bodies) == 10
    with DaemonThread(make_config(tmp_path)) as daemon:
        names: dict[str, Any] = {}
        for body in bodies:
            code = body.replace(URL, daemon.url)
            exec(compile(code, PAGE.name, "exec"), names)  # noqa: S102 - it is our own page
        assert names["url"] == daemon.url
