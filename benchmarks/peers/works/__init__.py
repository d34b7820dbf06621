"""What is done to every store alike, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.peers.subject import Outcome, Subject
from benchmarks.peers.works import crowd, first, keys, moves, replay, traffic, working_set

Work = Callable[[Subject, Mapping[str, Any]], Outcome]
"""One turn on an open store, with the parameters of the row."""

WORKS: Mapping[str, Work] = {
    "fill": moves.fill,
    "keep": moves.keep,
    "put": moves.put,
    "get": moves.get,
    "view": moves.view,
    "exists": moves.exists,
    "settle": crowd.settle,
    "mingle": crowd.mingle,
    "traffic_fill": traffic.fill,
    "traffic": traffic.requests,
    "store_set": working_set.store,
    "fetch_set": working_set.fetch,
    "replay": replay.replay,
    "first": first.first,
    "keys": keys.keys,
}
