"""Where the tests find request traces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

EXCERPT = Path(__file__).parent / "data" / "synthetic-excerpt.jsonl"
"""200 requests that travel with the repository."""

_SHARED = Path(__file__).parents[3] / "shared" / "traces"


def shared_trace(name: str) -> Path:
    """A whole trace of the folder beside the checkout; missing fails in CI, skips elsewhere."""
    path = _SHARED / name
    if not path.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{path} is missing")
        pytest.skip(f"{path} is missing")
    return path
