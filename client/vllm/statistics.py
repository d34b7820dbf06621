"""The counts of the connector as vLLM's statistics and metrics.

vLLM brings each side's statistics to where it logs and serves metrics: it sums them over workers,
then with the scheduler's, and takes them from process to process as plain dictionaries.
"""

from __future__ import annotations

from typing import Any, Final

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from client.vllm.counts import COUNTS

PREFIX: Final = "vllm:kvstore_"
"""What the names of all metrics begin with. vLLM expects its own prefix: it finds what it has to
unregister by it."""


class KVStoreStats(KVConnectorStats):
    """Counts of an interval, by name. Without any it is empty."""

    data: dict[str, float]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another side or interval counted to this one.

        Returns:
            This one.
        """
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log says of an interval: what went through, how well, and what went wrong."""
        count = {each.name: self.data.get(each.name, 0) for each in COUNTS}
        summary = {
            "lookups": count["lookups"],
            "tokens asked for": count["asked_tokens"],
            "tokens found": count["matched_tokens"],
            "hit share": _ratio(count["matched_tokens"], count["asked_tokens"]),
            "loaded blocks": count["loaded_blocks"],
            "GB/s of a load": _speed(count["loaded_bytes"], count["load_seconds"]),
            "stored blocks": count["stored_blocks"],
            "GB/s of a save": _speed(count["saved_bytes"], count["save_seconds"]),
        }
        waiting = {
            "requests that waited": count["waits"],
            "seconds waited": count["wait_seconds"],
        }
        trouble = {
            "lookups without answer": count["lookup_timeouts"],
            "blocks not loaded": count["failed_load_blocks"],
            "blocks not stored": count["refused_blocks"]
            + count["failed_save_blocks"]
            + count["skipped_save_blocks"],
            "errors": count["guarded_errors"],
        }
        rare = waiting | trouble
        summary |= {name: number for name, number in rare.items() if number}
        return {name: _short(number) for name, number in summary.items() if number is not None}


class KVStorePromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each count, ``vllm:kvstore_<name>_total``, by engine.

    Args:
        vllm_config: as vLLM gives it to every connector, as it does the other arguments.
        metric_types: the classes to make metrics of.
        labelnames: labels of all metrics.
        per_engine_labelvalues: values of these labels, by engine.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter: Any = metric_types[Counter]
        self._counters = {
            count.name: create_metric_per_engine(
                counter(name=PREFIX + count.name, documentation=count.help, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for count in COUNTS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval to an engine's counters.

        Args:
            transfer_stats_data: as ``KVStoreStats.to_dict`` gave them.
            engine_idx: of which engine.
        """
        for name, by_engine in self._counters.items():
            if number := transfer_stats_data.get(name):
                by_engine[engine_idx].inc(number)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _speed(nbytes: float, seconds: float) -> float | None:
    """In GB/s; where nothing went through there is none, however long that took."""
    return _ratio(nbytes / 1e9, seconds) if nbytes else None


def _short(number: float) -> float:
    """Four digits are enough for people; whole numbers stay as they are."""
    return int(number) if float(number).is_integer() else float(f"{number:.4g}")
