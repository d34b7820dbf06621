"""What a node has to say of itself to the rest of its pool: what it holds, and what it does."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.heat import Counts, Heat
from kvstore.metrics import Metrics
from kvstore.node import Node


class Load:
    """The figures of one node; what they are, ``kvstore.control.pool.LoadReport`` says.

    Args:
        node: whose.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._began = node.clock()
        self._heat = Heat(self._began)

    def figures(self) -> Mapping[str, float]:
        """As they are now."""
        node, metrics, now = self._node, self._node.metrics, self._node.clock()
        self._heat.look(now, _counts(metrics))
        figures: dict[str, float] = {
            "blocks": len(node.index),
            "dram_used": node.dram.used,
            "dram_capacity": node.dram.capacity,
            "lookups": metrics.lookups,
            "hits": metrics.hits.total(),
            "remote_hits": metrics.hits["remote"],
            "pulled_bytes": metrics.pulled_bytes.total(),
            "sessions": metrics.sessions,
            "uptime": now - self._began,
            "draining": float(not node.accepts_puts),
        }
        if node.ssd is not None:
            statistics = node.ssd.statistics()
            figures |= {"ssd_used": statistics.used, "ssd_capacity": statistics.capacity}
        return figures | self._heat.figures()


def _counts(metrics: Metrics) -> Counts:
    matched = metrics.matched
    return Counts(
        asked=matched.total(),
        held=matched["held"] + matched["remote"],
        lookups=metrics.lookups,
        hits=metrics.hits.total(),
        remote=metrics.hits["remote"],
    )
