"""Counters on the hot path, and the exposition that Prometheus reads."""

import asyncio
import contextlib
import timeit
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvstore.departures import DepartureReason
from kvstore.exposition import MetricsCollector, MetricsServer
from kvstore.metrics import LATENCY_BUCKETS, MOST_OWNERS, Histogram, Metrics, Occupancy
from kvstore.units import Address

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def metrics() -> Metrics:
    counted = Metrics()
    counted.hit("dram", 5)
    counted.hit("ssd", 2)
    counted.miss("absent", 4)
    counted.miss("corrupt")
    counted.moved("shm", "out", 7 << 20)
    counted.puts["stored"] += 3
    counted.evictions["dram", DepartureReason.CAPACITY] += 2
    counted.demotions["dram", "ssd"] += 2
    counted.occupancy["dram"] = Occupancy(capacity=1 << 30, used=5 << 20, lost=4096, blocks=5)
    counted.sessions = 3
    for seconds in (5e-7, 3e-6, 3e-6, 60.0):
        counted.get_seconds.observe(seconds)
    return counted


@pytest.fixture
async def server(metrics: Metrics) -> AsyncIterator[MetricsServer]:
    collector = MetricsCollector(metrics, {"name": "node-a", "version": "0.1.0"})
    running = MetricsServer(collector, Address("127.0.0.1", 0))
    await running.start()
    yield running
    await running.close()


async def ask(server: MetricsServer, request: bytes) -> tuple[str, str]:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(request)
    head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head.decode(), body.decode()


def parse(body: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


async def test_the_exposition_parses_and_adds_up(server: MetricsServer) -> None:
    head, body = await ask(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK")
    assert "text/plain" in head
    samples = parse(body)

    def value(name: str, /, **labels: str) -> float:
        return samples[name, frozenset(labels.items())]

    def total(name: str) -> float:
        return sum(number for (found, _), number in samples.items() if found == name)

    assert value("kvstore_hits_total", tier="dram") == 5
    assert value("kvstore_misses_total", reason="pending") == 0
    hits, misses = total("kvstore_hits_total"), total("kvstore_misses_total")
    assert hits + misses == value("kvstore_lookups_total") == 12
    assert value("kvstore_moved_bytes_total", transport="shm", direction="out") == 7 << 20
    assert value("kvstore_evictions_total", tier="dram", reason="capacity") == 2
    assert value("kvstore_demotions_total", **{"from": "dram", "to": "ssd"}) == 2
    assert value("kvstore_tier_lost_bytes", tier="dram") == 4096
    assert value("kvstore_sessions") == 3
    assert value("kvstore_node_info", name="node-a", version="0.1.0") == 1
    assert value("kvstore_get_seconds_count") == value("kvstore_get_seconds_bucket", le="+Inf") == 4
    assert value("kvstore_get_seconds_bucket", le="5e-06") == 3
    assert value("kvstore_get_seconds_sum") == pytest.approx(60.0000065)
    assert value("process_open_fds") > 0


async def test_every_series_is_ours_or_the_process_s(server: MetricsServer) -> None:
    _, body = await ask(server, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert {name.split("_")[0] for name, _ in parse(body)} == {"kvstore", "process"}


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"GET /secrets HTTP/1.1\r\n\r\n", "404"),
        (b"rubbish\r\n\r\n", "405"),
        (b"HEAD / HTTP/1.1\r\n\r\n", "200"),
    ],
)
async def test_other_requests_get_an_answer(
    server: MetricsServer, request_: bytes, status: str
) -> None:
    head, body = await ask(server, request_)
    assert head.split(" ")[1] == status
    assert not body or not request_.startswith(b"HEAD")


async def test_a_scraper_that_sends_too_much_is_hung_up_on(server: MetricsServer) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"x" * (64 << 10))
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert (await ask(server, b"GET / HTTP/1.1\r\n\r\n"))[0].startswith("HTTP/1.1 200")


async def test_closing_ends_a_silent_connection_at_once(metrics: Metrics) -> None:
    running = MetricsServer(MetricsCollector(metrics, {}), Address("127.0.0.1", 0))
    await running.start()
    reader, writer = await asyncio.open_connection(*running.address)
    await asyncio.sleep(0.02)
    await asyncio.wait_for(running.close(), 1)
    assert await asyncio.wait_for(reader.read(), 1) == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*running.address)
    await running.close()


def test_a_scrape_refreshes_first(metrics: Metrics) -> None:
    def refresh() -> None:
        metrics.pins = 9

    families = {family.name: family for family in MetricsCollector(metrics, {}, refresh).collect()}
    assert families["kvstore_pins"].samples[0].value == 9


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_each_observation_once(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    assert histogram.count == len(values)
    for index, bound in enumerate(LATENCY_BUCKETS):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)


def test_quantiles_are_the_bound_of_their_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 3.0))
    assert histogram.quantile(0.5) == 0.0
    for value in (0.5, 0.5, 1.5, 9.0):
        histogram.observe(value)
    assert [histogram.quantile(share) for share in (0.0, 0.5, 0.75, 1.0)] == [1.0, 1.0, 2.0, 3.0]


def test_an_observation_is_cheap() -> None:
    histogram = Histogram()
    best = min(timeit.repeat(lambda: histogram.observe(3e-5), number=20_000, repeat=5)) / 20_000
    assert best < 5e-6, "five times the budget, for a busy machine"


def test_pulls_are_counted_by_so_many_names_at_most() -> None:
    metrics = Metrics()
    for number in range(MOST_OWNERS + 50):
        metrics.pulled(f"node{number}", 1, 10)
    metrics.pulled("node3", 1, 10)
    assert len(metrics.pulled_blocks) == len(metrics.pulled_bytes) == MOST_OWNERS + 1
    assert metrics.pulled_blocks["node3"] == 2
    assert metrics.pulled_bytes["others"] == 500
