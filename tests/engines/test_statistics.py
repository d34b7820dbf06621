"""The counts as vLLM's statistics: needs vLLM to be there, no engine."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1.metrics.loggers")  # what its imports warn of is not ours to mend

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from client.vllm.counts import COUNTS, Counts
from client.vllm.statistics import KVStorePromMetrics, KVStoreStats


def stats(**numbers: float) -> KVStoreStats:
    counts = Counts()
    counts.add(**numbers)
    return KVStoreStats(data=counts.take())


def test_nothing_counted_is_empty() -> None:
    assert stats().is_empty()
    assert KVStoreStats().is_empty()
    assert not stats(lookups=1).is_empty()


def test_sides_are_added_up() -> None:
    total = stats(loaded_blocks=2, load_seconds=0.5).aggregate(stats(loaded_blocks=3, lookups=1))
    assert total.data == {"loaded_blocks": 5, "load_seconds": 0.5, "lookups": 1}
    assert total.aggregate(KVStoreStats()).data == total.data
    total.reset()
    assert total.is_empty()


def test_two_statistics_share_nothing() -> None:
    KVStoreStats().aggregate(stats(lookups=1))
    assert KVStoreStats().is_empty()


def test_they_pass_between_processes() -> None:
    told = stats(loaded_bytes=1 << 40, load_seconds=0.25)
    assert pickle.loads(pickle.dumps(told)).data == told.data  # noqa: S301  as vLLM's workers do
    home = SchedulerStats(kv_connector_stats=told.to_dict())
    back = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(home))
    assert back.kv_connector_stats == {"loaded_bytes": 1 << 40, "load_seconds": 0.25}


def test_the_log_says_how_well_it_went() -> None:
    summary = stats(
        lookups=4,
        asked_tokens=3_000,
        matched_tokens=1_000,
        loaded_blocks=10,
        loaded_bytes=3e9,
        load_seconds=2.0,
        stored_blocks=7,
        saved_bytes=1e9,
        save_seconds=0.7,
    ).reduce()
    assert summary == {
        "lookups": 4,
        "tokens asked for": 3_000,
        "tokens found": 1_000,
        "hit share": 0.3333,
        "loaded blocks": 10,
        "GB/s of a load": 1.5,
        "stored blocks": 7,
        "GB/s of a save": 1.429,
    }


def test_the_log_tells_waiting_from_loading() -> None:
    summary = stats(
        waits=3, wait_seconds=5.5, loaded_blocks=38, loaded_bytes=1e9, load_seconds=0.5
    ).reduce()
    assert (summary["requests that waited"], summary["seconds waited"]) == (3, 5.5)
    assert (summary["loaded blocks"], summary["GB/s of a load"]) == (38, 2)


def test_the_log_says_what_went_wrong() -> None:
    summary = stats(
        lookup_timeouts=1,
        failed_load_blocks=2,
        refused_blocks=3,
        failed_save_blocks=4,
        skipped_save_blocks=5,
        guarded_errors=6,
        load_seconds=0.5,
        save_seconds=0.5,
    ).reduce()
    assert summary == {
        "lookups": 0,
        "tokens asked for": 0,
        "tokens found": 0,
        "loaded blocks": 0,
        "stored blocks": 0,
        "lookups without answer": 1,
        "blocks not loaded": 2,
        "blocks not stored": 12,
        "errors": 6,
    }


# --- Prometheus --------------------------------------------------------------------------------


@pytest.fixture
def metrics() -> Iterator[KVStorePromMetrics]:
    unregister_vllm_metrics()
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    engines: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
    yield KVStorePromMetrics(config, types, ["model_name", "engine"], engines)  # type: ignore[arg-type]
    unregister_vllm_metrics()


def value(name: str, engine: int) -> float | None:
    labels = {"model_name": "model", "engine": str(engine)}
    return REGISTRY.get_sample_value(f"vllm:kvstore_{name}_total", labels)


def test_every_count_is_a_counter_of_each_engine(metrics: KVStorePromMetrics) -> None:
    metrics.observe({count.name: place for place, count in enumerate(COUNTS, start=1)}, 1)
    metrics.observe({"loaded_bytes": 0.5}, 1)
    for place, count in enumerate(COUNTS, start=1):
        assert value(count.name, 0) == 0
        assert value(count.name, 1) == place + (0.5 if count.name == "loaded_bytes" else 0)


def test_what_is_unknown_or_empty_changes_nothing(metrics: KVStorePromMetrics) -> None:
    metrics.observe({})
    metrics.observe({"lookups_of_a_newer_version": 1})
    assert {value(count.name, 0) for count in COUNTS} == {0}


def test_vllm_unregisters_them_when_it_starts_again(metrics: KVStorePromMetrics) -> None:
    assert b"kvstore" in generate_latest(REGISTRY)
    unregister_vllm_metrics()
    assert b"kvstore" not in generate_latest(REGISTRY)
