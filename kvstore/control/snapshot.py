"""From the node's counters to the ``Snapshot`` that ``top`` shows."""

from collections.abc import Iterable, Sequence

from kvstore.control.interface import Latency, Snapshot, TierReport
from kvstore.metrics import Histogram, Metrics


def take(metrics: Metrics, clock: float, tiers: Sequence[TierReport]) -> Snapshot:
    """The counters as they are now; ``clock`` is the node's monotonic time in seconds."""
    return Snapshot(
        clock=clock,
        lookups=metrics.lookups,
        hits=dict(metrics.hits),
        misses={str(reason): count for reason, count in metrics.misses.items()},
        puts={str(outcome): count for outcome, count in metrics.puts.items()},
        moved_bytes=_joined(metrics.moved_bytes.items()),
        evictions=_joined(metrics.evictions.items()),
        demotions=sum(metrics.demotions.values()),
        promotions=sum(metrics.promotions.values()),
        sessions=metrics.sessions,
        pins=metrics.pins,
        reservations=metrics.reservations,
        latencies={name: _latency(seen) for name, seen in metrics.latencies().items()},
        tiers=tuple(tiers),
        matched={str(answer): count for answer, count in metrics.matched.items()},
    )


def _joined(counts: Iterable[tuple[tuple[str, str], int]]) -> dict[str, int]:
    return {" ".join(labels): count for labels, count in counts}


def _latency(histogram: Histogram) -> Latency:
    return Latency(histogram.count, histogram.quantile(0.5), histogram.quantile(0.99))
