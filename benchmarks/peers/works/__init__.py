"""What is done to every store alike, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.peers.subject import Outcome, Subject
from benchmarks.peers.works import moves

Work = Callable[[Subject, Mapping[str, Any]], Outcome]
"""One turn on an open store, with the parameters of the row."""

WORKS: Mapping[str, Work] = {
    "fill": moves.fill,
    "keep": moves.keep,
    "put": moves.put,
    "get": moves.get,
    "view": moves.view,
    "exists": moves.exists,
}
