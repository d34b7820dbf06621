"""Parts of the run, by the names that ``--only`` takes, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.peers.groups import churn, clients, disk, footprint, moves
from benchmarks.peers.run import Measure

GROUPS: Mapping[str, Measure] = {
    "local": moves.local,
    "tcp": moves.tcp,
    "views": moves.views,
    "clients": clients.clients,
    "eviction": churn.eviction,
    "trace": churn.trace,
    "disk": disk.disk,
    "start": footprint.start,
    "keys": footprint.keys,
}
