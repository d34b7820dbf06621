"""The node's counters for Prometheus: a collector, and an HTTP endpoint on the event loop.

Nothing is kept twice: a scrape reads ``kvstore.metrics.Metrics`` as it is. The endpoint runs on the
loop that writes the counters, so that a scrape sees them all at one moment and needs no lock.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, get_args

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstore.directory.statistics import Statistics
from kvstore.metrics import TRANSPORTS, CopyOutcome, Histogram, Metrics, MissReason, PutOutcome
from kvstore.units import Address

_MAX_REQUEST: Final = 16 << 10
_REQUEST_SECONDS: Final = 5.0
_MAX_CONNECTIONS: Final = 32

Counts = Iterable[tuple[tuple[str, ...], int]]

_log = structlog.get_logger(__name__)


class MetricsCollector(Collector):
    """Turns the counters into metric families named ``kvstore_*`` when scraped.

    Args:
        metrics: what the node counts into.
        info: labels of ``kvstore_node_info``, for example name and version.
        refresh: called before each scrape; brings occupancy and gauges up to date.

    Attributes:
        directory: what the node counts of the pool's directory, where it has one.
    """

    def __init__(
        self,
        metrics: Metrics,
        info: Mapping[str, str],
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self._metrics = metrics
        self._info = dict(info)
        self._refresh = refresh
        self.directory: Statistics | None = None

    def describe(self) -> Iterable[Metric]:
        """No descriptions ahead of a scrape, so that registering does not cause one."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families with their values of now."""
        self._refresh()
        yield InfoMetricFamily("kvstore_node", "Who the node is.", value=self._info)
        yield from self._lookups()
        yield from self._traffic()
        yield from self._movement()
        yield from self._holdings()
        yield from self._tenants()
        yield from self._rdma()
        yield from self._pool()
        if self.directory is not None:
            yield from _directory(self.directory)
        for name, histogram in self._metrics.latencies().items():
            yield _histogram(f"kvstore_{name}_seconds", f"Time taken by {name}.", histogram)

    def _lookups(self) -> Iterator[Metric]:
        seen = self._metrics
        yield _counter("kvstore_lookups", "Blocks asked for by get.", (), [((), seen.lookups)])
        hits: dict[tuple[str, ...], int] = {(tier,): 0 for tier in seen.occupancy}
        hits |= {(tier,): count for tier, count in seen.hits.items()}
        yield _counter("kvstore_hits", "Blocks found, by tier.", ("tier",), hits.items())
        misses: dict[tuple[str, ...], int] = {
            (reason,): seen.misses[reason] for reason in get_args(MissReason)
        }
        yield _counter(
            "kvstore_misses", "Blocks not found, by reason.", ("reason",), misses.items()
        )
        yield _counter(
            "kvstore_matched_blocks",
            "Blocks asked for by match and exists, by answer.",
            ("answer",),
            [((answer,), count) for answer, count in seen.matched.items()],
        )

    def _traffic(self) -> Iterator[Metric]:
        seen = self._metrics
        yield _counter(
            "kvstore_moved_bytes",
            "Payload bytes; in is towards the node.",
            ("transport", "direction"),
            seen.moved_bytes.items(),
        )
        yield _counter(
            "kvstore_put_blocks",
            "Blocks offered by put, by outcome.",
            ("outcome",),
            [((outcome,), seen.puts[outcome]) for outcome in get_args(PutOutcome)],
        )
        yield _counter(
            "kvstore_pulled_blocks",
            "Blocks to be pulled from other nodes, by outcome.",
            ("outcome",),
            [((outcome,), seen.pulls[outcome]) for outcome in get_args(PutOutcome)],
        )
        yield _counter(
            "kvstore_requests",
            "Requests answered, by operation.",
            ("operation",),
            [((operation,), count) for operation, count in seen.requests.items()],
        )
        yield _counter(
            "kvstore_errors",
            "Requests answered with an error, by its code.",
            ("code",),
            [((code,), count) for code, count in seen.errors.items()],
        )
        yield _counter(
            "kvstore_internal_errors",
            "Exceptions caught at a boundary; each is a bug.",
            (),
            [((), seen.internal_errors)],
        )

    def _movement(self) -> Iterator[Metric]:
        seen = self._metrics
        yield _counter(
            "kvstore_evictions",
            "Extents given up, by tier and reason.",
            ("tier", "reason"),
            [((tier, str(reason)), count) for (tier, reason), count in seen.evictions.items()],
        )
        ways = ("from", "to")
        yield _counter("kvstore_demotions", "Blocks moved down.", ways, seen.demotions.items())
        yield _counter("kvstore_promotions", "Blocks copied up.", ways, seen.promotions.items())

    def _holdings(self) -> Iterator[Metric]:
        seen = self._metrics
        for name, text in (
            ("capacity", "Bytes that the tier may hold."),
            ("used", "Bytes that hold blocks."),
            ("lost", "Bytes neither free for use nor holding a block."),
        ):
            family = GaugeMetricFamily(f"kvstore_tier_{name}_bytes", text, labels=("tier",))
            for tier, occupancy in seen.occupancy.items():
                family.add_metric((tier,), getattr(occupancy, name))
            yield family
        blocks = GaugeMetricFamily("kvstore_tier_blocks", "Blocks held.", labels=("tier",))
        for tier, occupancy in seen.occupancy.items():
            blocks.add_metric((tier,), occupancy.blocks)
        yield blocks
        if seen.gpus:
            gpus = GaugeMetricFamily(
                "kvstore_gpu_up", "Whether a GPU of the HBM tier is in use.", labels=("gpu",)
            )
            for number, up in seen.gpus.items():
                gpus.add_metric((number,), int(up))
            yield gpus
        for name, text, value in (
            ("sessions", "Sessions open.", seen.sessions),
            ("pins", "Pins held by sessions and administrators.", seen.pins),
            ("reservations", "Blocks reserved and not yet committed.", seen.reservations),
            ("followers", "Followers of the node's events.", seen.followers),
        ):
            yield GaugeMetricFamily(f"kvstore_{name}", text, value=value)
        transports = GaugeMetricFamily(
            "kvstore_transport_sessions", "Sessions open, by transport.", labels=("transport",)
        )
        for transport in TRANSPORTS:
            transports.add_metric((transport,), seen.transports[transport])
        yield transports
        yield _counter(
            "kvstore_sessions_opened", "Sessions accepted.", (), [((), seen.sessions_opened)]
        )
        yield _counter(
            "kvstore_follower_failures",
            "Followers too slow for events: some were lost to them (gap), or they were cut off.",
            ("reason",),
            [((reason,), seen.follower_failures[reason]) for reason in ("gap", "stuck")],
        )

    def _tenants(self) -> Iterator[Metric]:
        labels = ("tenant", "tier")
        used = GaugeMetricFamily(
            "kvstore_tenant_used_bytes",
            "Bytes of blocks, by tenant; * is all others.",
            labels=labels,
        )
        quotas = GaugeMetricFamily(
            "kvstore_tenant_quota_bytes", "Bytes that a tenant may keep.", labels=labels
        )
        for one in self._metrics.tenants:
            for tier, held, quota in (
                ("hbm", one.hbm, None),
                ("dram", one.dram, one.quota.dram),
                ("ssd", one.ssd, one.quota.ssd),
            ):
                if tier == "hbm" and not self._metrics.gpus:
                    continue
                used.add_metric((one.name, tier), held)
                if quota is not None:
                    quotas.add_metric((one.name, tier), quota)
        yield used
        yield quotas

    def _pool(self) -> Iterator[Metric]:
        seen = self._metrics
        yield _counter(
            "kvstore_peer_blocks",
            "Blocks received from other nodes.",
            ("peer",),
            [((peer,), count) for peer, count in seen.pulled_blocks.items()],
        )
        yield _counter(
            "kvstore_peer_bytes",
            "Bytes received from other nodes.",
            ("peer",),
            [((peer,), count) for peer, count in seen.pulled_bytes.items()],
        )
        yield _counter(
            "kvstore_pull_failures",
            "Other nodes that did not bring what they were thought to hold, by reason.",
            ("reason",),
            [((reason,), count) for reason, count in seen.pull_failures.items()],
        )
        yield _counter(
            "kvstore_copied_blocks",
            "Blocks stored here that were to be copied to other nodes, by outcome.",
            ("outcome",),
            [((outcome,), seen.copies[outcome]) for outcome in get_args(CopyOutcome)],
        )
        yield _counter(
            "kvstore_offered_blocks",
            "Blocks that other nodes offered, by outcome.",
            ("outcome",),
            [((outcome,), count) for outcome, count in seen.offered.items()],
        )
        yield _counter(
            "kvstore_wrong_hints",
            "Times that another node did not hold what the directory said.",
            (),
            [((), seen.wrong_hints)],
        )

    def _rdma(self) -> Iterator[Metric]:
        seen = self._metrics.rdma
        for name, text, value in (
            ("up", "Whether sessions can use the RDMA device.", int(seen.up)),
            ("registered_bytes", "Bytes of the node's memory registered.", seen.registered_bytes),
            ("queue_pairs", "Queue pairs connected.", seen.queue_pairs),
        ):
            yield GaugeMetricFamily(f"kvstore_rdma_{name}", text, value=value)
        for name, text, value in (
            ("device_openings", "How often the device was opened.", seen.openings),
            ("queue_pairs_made", "Queue pairs made.", seen.queue_pairs_made),
            ("chains", "Chains of work requests posted.", seen.chains),
            ("work_requests", "Work requests posted.", seen.work_requests),
        ):
            yield _counter(f"kvstore_rdma_{name}", text, (), [((), value)])
        yield _counter(
            "kvstore_rdma_bytes",
            "Payload posted: RDMA WRITEs to clients, RDMA READs from them.",
            ("operation",),
            [(("write",), seen.written_bytes), (("read",), seen.read_bytes)],
        )
        yield _counter(
            "kvstore_rdma_failures",
            "Queue pairs that ended in error, by reason.",
            ("reason",),
            [((reason,), count) for reason, count in seen.failures.items()],
        )


def _directory(seen: Statistics) -> Iterator[Metric]:
    yield _counter(
        "kvstore_directory_operations",
        "What the directory was asked and answered.",
        ("operation",),
        [((operation,), count) for operation, count in seen.operations.items()],
    )
    yield _counter(
        "kvstore_directory_failures",
        "What it did not answer, by the code of the error.",
        ("operation", "code"),
        seen.failures.items(),
    )
    for name, text, value in (
        ("refused", "Lookups given up at once, as it had not answered before.", seen.refused),
        ("published", "Changes of this node's blocks that were told.", seen.published),
        ("withdrawn", "Wrong locations of others taken away.", seen.withdrawn),
        ("dropped", "Changes not told for want of room or time.", seen.dropped),
        ("advertisements", "Times that everything held was told.", seen.advertisements),
        ("joins", "Times that the node became a member.", seen.joins),
        ("swept", "Locations of dead members cleared away.", seen.swept),
    ):
        yield _counter(f"kvstore_directory_{name}", text, (), [((), value)])
    for name, text, value in (
        ("queued", "Changes that wait to be told.", seen.queued),
        ("members", "Other live members of the pool.", seen.members),
    ):
        yield GaugeMetricFamily(f"kvstore_directory_{name}", text, value=value)
    yield _histogram(
        "kvstore_directory_reach_seconds", "Time taken by answered lookups.", seen.reach_seconds
    )


def _counter(name: str, text: str, labels: tuple[str, ...], counts: Counts) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts:
        family.add_metric(values, count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    running = 0
    buckets: list[tuple[str, float]] = []
    bounds = [f"{bound:g}" for bound in histogram.bounds] + ["+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        running += count
        buckets.append((bound, running))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)


class MetricsServer:
    """HTTP on the running event loop: ``GET /metrics`` answers with the collector's families.

    Args:
        collector: what to expose, beside the process's own figures (memory, CPU, descriptors).
        address: where to listen; port 0 takes a free one, see ``address`` after ``start``.
        context: for TLS; None for none.
    """

    def __init__(
        self, collector: MetricsCollector, address: Address, context: ssl.SSLContext | None = None
    ) -> None:
        self.address = address
        self._context = context
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken or none of this machine's.
        """
        family = socket.AF_INET6 if ":" in self.address.host else socket.AF_INET
        listener = socket.create_server(self.address, family=family)
        self.address = Address(self.address.host, listener.getsockname()[1])
        seconds = None if self._context is None else _REQUEST_SECONDS
        self._server = await asyncio.start_server(
            self._accept,
            sock=listener,
            limit=_MAX_REQUEST,
            ssl=self._context,
            ssl_handshake_timeout=seconds,
        )

    async def close(self) -> None:
        """Stop listening and end the answers in progress."""
        if self._server is None:
            return
        self._server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._answering) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._answering.add(task)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.decode("latin-1")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _log.debug("metrics request dropped")
        finally:
            self._answering.discard(task)
            writer.close()

    def _answer(self, head: str) -> bytes:
        request, *fields = head.split("\r\n")
        words = request.split(" ")
        method, target = words[:2] if len(words) == 3 else ("", "")
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"only GET is answered\n")
        if target.partition("?")[0] not in ("/", "/metrics"):
            return _response("404 Not Found", "text/plain", b"the metrics are at /metrics\n")
        accept = next(
            (one.partition(":")[2] for one in fields if one.lower().startswith("accept:")), ""
        )
        encoder, content_type = choose_encoder(accept.strip())
        body = encoder(self._registry)
        response = _response("200 OK", content_type, body)
        return response if method == "GET" else response[: -len(body)]


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
