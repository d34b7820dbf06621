"""The daemon: a node, its sessions, its control plane and its metrics, from start to stop.

The order of starting is the order of dependence, and stopping is its reverse. After SIGTERM or
SIGINT nothing new is accepted, what is under way finishes within the grace time, what only DRAM
holds is written to the SSD as far as that time allows, and the SSD tier is sealed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Final

import structlog
import uvloop

from kvstore import tls
from kvstore.accounts import Accounts
from kvstore.catalog import Catalog
from kvstore.cluster import Cluster, MakeDirectory, redis_directory
from kvstore.config import Config, SsdSection
from kvstore.control.drain_service import DrainService
from kvstore.control.event_service import EventService
from kvstore.control.pool_service import PoolService
from kvstore.control.server import ControlServer
from kvstore.control.service import ControlService
from kvstore.departures import Departures
from kvstore.draining import Draining
from kvstore.dram_pins import DramPins
from kvstore.elsewhere import Elsewhere
from kvstore.errors import ConfigError, StateLocked
from kvstore.events import Events
from kvstore.exposition import MetricsCollector, MetricsServer
from kvstore.gpus import Gpus
from kvstore.hbm_promotion import Promotion
from kvstore.index import Index
from kvstore.inspection import Inspection
from kvstore.metrics import Metrics
from kvstore.movement import Movement
from kvstore.node import Node
from kvstore.pool_inspection import PoolInspection
from kvstore.recovery import recover
from kvstore.server import Server
from kvstore.state import StateDirectory
from kvstore.units import Address, format_size
from kvstore.verbs import VerbsDevice
from tiers import errors as tier_errors
from tiers.budget import WriteBudget
from tiers.cuda import CudaDevice
from tiers.device import Device
from tiers.dram import DramTier
from tiers.hbm import HbmTier
from tiers.policies import make_policy
from tiers.ssd import SsdTier

_log = structlog.get_logger(__name__)

_SMALLEST_EXPECTED_BLOCK: Final = 64 << 10
_YOUNG_OBJECTS: Final = 50_000
_SWITCH_SECONDS: Final = 0.0005


class Daemon:
    """One node and all that serves it. ``open`` and ``close`` run on one event loop.

    Args:
        config: checked already.
        directory: makes the node's view of the pool's directory; by default the one that is
            configured, if any.
        make_device: makes a GPU by its number, or a stand-in for one.
    """

    def __init__(
        self,
        config: Config,
        directory: MakeDirectory | None = None,
        make_device: Callable[[int], Device] = CudaDevice,
    ) -> None:
        self.config = config
        self._make_device = make_device
        if directory is None and config.cluster.directory:
            directory = redis_directory(config.cluster)
        self._make_directory = directory
        self.incarnation = secrets.token_hex(8)
        self.metrics = Metrics()
        self.stopping = asyncio.Event()
        """Set when somebody wants the daemon to stop, by a signal or by a call."""
        self._stack = contextlib.AsyncExitStack()
        self.node: Node
        self.draining: Draining
        self.server: Server
        self.verbs: VerbsDevice
        self.movement: Movement | None = None
        self.cluster: Cluster | None = None
        self.control_url: str | None = None
        self._pool: PoolInspection
        self._control_address: Address | None = None
        self._collector: MetricsCollector | None = None
        self.metrics_url: str | None = None

    async def open(self) -> None:
        """Start everything; on an error, what was started is stopped again.

        Raises:
            StateLocked: another daemon has the state directory or the SSD tier.
            ConfigError: a setting is impossible on this machine.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                await self._open(stack)
            except tier_errors.StateLocked as error:
                raise StateLocked.held(str(error.path), error.pid) from error
            except tier_errors.TierError as error:
                raise ConfigError(str(error)) from error
            self._stack = stack.pop_all()

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        config = self.config
        state = StateDirectory(config.node.state_directory)
        state.open()
        stack.callback(state.close)
        catalog = Catalog(config.node.state_directory / "namespaces.msgpack")
        catalog.open()
        dram = self._dram()
        dram.open()
        stack.callback(dram.close)
        ssd = await self._open_ssd(stack)
        accounts = Accounts.make(
            config.policy.dram,
            max(config.dram.capacity // _SMALLEST_EXPECTED_BLOCK, 1),
            config.quotas,
        )
        self.node = Node(
            index=Index(accounts),
            dram=dram,
            ssd=ssd,
            catalog=catalog,
            departures=Departures(config.policy.departures),
            metrics=self.metrics,
        )
        # Before all that may let blocks go at its end: their copies go with them.
        await self._open_hbm(stack)
        if ssd is not None:
            self._open_movement(stack, ssd)
        self.verbs = VerbsDevice(config.rdma, dram)
        stack.push_async_callback(self.verbs.close)
        self.verbs.open()
        self.server = Server(self.node, self.movement, config, self.incarnation, self.verbs)
        stack.push_async_callback(self.server.close, 0.0)
        inspection = await self._open_operators(stack)
        self.server.open()
        await self._open_cluster(stack)
        if self.cluster is not None:
            deadline = config.cluster.lookup_deadline
            directory = self.cluster.directory
            inspection.elsewhere = Elsewhere(self.node.catalog, directory, deadline)
            self._pool.cluster = self.cluster
        inspection.urls = tuple(
            url for url in (*self.server.urls, self.control_url, self.metrics_url) if url
        )

    def _dram(self) -> DramTier:
        section = self.config.dram
        return DramTier(
            section.capacity,
            segment_bytes=min(section.segment, section.capacity),
            huge_pages=section.huge_pages,
            prefault=section.prefault,
        )

    async def _open_hbm(self, stack: contextlib.AsyncExitStack) -> None:
        section, node = self.config.hbm, self.node
        if not section.capacity:
            return
        tiers = [await self._open_gpu(stack, number) for number in section.gpus]
        blocks = max(section.capacity // _SMALLEST_EXPECTED_BLOCK, 1)
        node.gpus = Gpus(
            node.index,
            tiers,
            [make_policy(self.config.policy.hbm, blocks) for _ in tiers],
            self.metrics,
            promote_after=section.promote_after,
        )
        pins = DramPins(node.dram, tiers[0])
        pins.open()
        stack.push_async_callback(asyncio.to_thread, pins.close)
        promotion = Promotion(node, node.gpus, pins)
        promotion.open()
        stack.push_async_callback(promotion.close)

    async def _open_gpu(self, stack: contextlib.AsyncExitStack, number: int) -> HbmTier:
        section = self.config.hbm
        try:
            tier = HbmTier(
                section.capacity,
                device=self._make_device(number),
                segment_bytes=min(section.segment, section.capacity),
            )
            await asyncio.to_thread(tier.open)
        except tier_errors.TierError as error:
            raise ConfigError(f"hbm.capacity: {error} (--hbm)") from error
        stack.push_async_callback(asyncio.to_thread, tier.close)
        return tier

    async def _open_ssd(self, stack: contextlib.AsyncExitStack) -> SsdTier | None:
        section: SsdSection = self.config.ssd
        if not section.capacity or section.directory is None:
            return None
        ssd = SsdTier(
            section.directory,
            section.capacity,
            region_bytes=section.region,
            queue_depth=section.queue_depth,
        )
        await asyncio.to_thread(ssd.open)
        stack.push_async_callback(asyncio.to_thread, ssd.close)
        stack.push_async_callback(asyncio.to_thread, ssd.seal)
        return ssd

    def _open_movement(self, stack: contextlib.AsyncExitStack, ssd: SsdTier) -> None:
        policy, section = self.config.policy, self.config.ssd
        self.movement = Movement(
            self.node,
            ssd,
            low=policy.low_watermark,
            high=policy.high_watermark,
            budget=WriteBudget(section.write_budget),
            queue_depth=section.queue_depth,
            region_bytes=section.region,
        )
        began = time.monotonic()
        held = recover(self.node, ssd)
        _log.info("ssd recovered", blocks=held, seconds=round(time.monotonic() - began, 3))
        self.movement.open()
        stack.push_async_callback(self.movement.close)

    async def _open_cluster(self, stack: contextlib.AsyncExitStack) -> None:
        """Join the pool, where there is one; its sessions are those opened from here on."""
        if self._make_directory is None:
            return
        if self.server.tcp is None:
            raise ConfigError("listen.tcp: the nodes of a pool reach each other over TCP")
        cluster = Cluster(
            self.config,
            self.node,
            self.verbs,
            self.incarnation,
            data=self.server.tcp,
            control=self._control_address,
            make_directory=self._make_directory,
        )
        # Before anybody can connect: that takes a turn of the event loop.
        self.cluster, self.server.remote = cluster, cluster.remote
        self.server.replication, self.server.taking = cluster.replication, cluster.taking
        stack.push_async_callback(cluster.close)
        self.draining.pool = cluster
        stack.push_async_callback(self.draining.close)
        await cluster.open()
        if self._collector is not None:
            self._collector.directory = cluster.directory.statistics

    async def _open_operators(self, stack: contextlib.AsyncExitStack) -> Inspection:
        config = self.config
        self.draining = Draining(self.node, self.stopping.set)
        pool = config.cluster.pool if self._make_directory is not None else ""
        self._pool = PoolInspection(self.node, pool)
        inspection = Inspection(
            self.node, self.movement, self.server, self.verbs, config, self.incarnation
        )
        stack.callback(inspection.close)
        scheme = "https" if config.tls.on else "http"
        if config.listen.control is not None:
            events = EventService(
                Events(self.node.index),
                config.node.name,
                self.incarnation,
                self.metrics,
                self._count_fault,
            )
            stack.callback(events.close)
            control = ControlServer(
                [
                    ControlService(inspection, self._count_fault),
                    PoolService(self._pool, self._count_fault),
                    DrainService(self.draining, self._count_fault),
                    events,
                ],
                config.listen.control,
                token=config.control_token,
                context=tls.for_operators(config.tls, "control", "h2"),
            )
            await _listen("listen.control", config.listen.control, control)
            stack.push_async_callback(control.close)
            self._control_address = control.address
            self.control_url = f"{scheme}://{control.address}"
        if config.listen.metrics is not None:
            labels = {"node": config.node.name, "version": version("tiered-kvstore")}
            self._collector = MetricsCollector(self.metrics, labels, inspection.refresh)
            context = tls.for_operators(config.tls, "metrics", "http/1.1")
            exporter = MetricsServer(self._collector, config.listen.metrics, context)
            await _listen("listen.metrics", config.listen.metrics, exporter)
            stack.push_async_callback(exporter.close)
            self.metrics_url = f"{scheme}://{exporter.address}/metrics"
        return inspection

    def _count_fault(self) -> None:
        self.metrics.internal_errors += 1

    async def close(self) -> None:
        """Stop everything, in an orderly way within the grace time."""
        grace = self.config.node.grace
        deadline = self.node.clock() + grace
        try:
            if self.cluster is not None:
                await self.draining.close()
                await self.cluster.leave()
            # At once, so that a client that hangs does not use up the time to write.
            await asyncio.gather(self.server.close(grace), self._flush(deadline))
            await self._flush(deadline)
        finally:
            await self._stack.aclose()

    async def _flush(self, deadline: float) -> None:
        if self.movement is not None:
            written = await self.movement.flush(deadline)
            _log.info("dram flushed to ssd", blocks=written)


async def _listen(key: str, address: Address, service: ControlServer | MetricsServer) -> None:
    try:
        await service.start()
    except OSError as error:
        # asyncio's own sentence repeats the address.
        reason = os.strerror(error.errno) if error.errno else str(error)
        flag = f"--{key.removeprefix('listen.')}"
        raise ConfigError(
            f"{key} {address}: {reason}; choose another address with {flag}, or {flag} off"
        ) from error


@contextlib.asynccontextmanager
async def running(daemon: Daemon) -> AsyncIterator[Daemon]:
    """Has a daemon run for the time of the block, on the running loop."""
    await daemon.open()
    try:
        yield daemon
    finally:
        await daemon.close()


async def _serve(config: Config, on_ready: Callable[[], object]) -> int:
    daemon = Daemon(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stopping.set)
    async with running(daemon):
        _log.info(
            "serving",
            node=config.node.name,
            pid=os.getpid(),
            incarnation=daemon.incarnation,
            hbm=f"{len(config.hbm.gpus)} x {format_size(config.hbm.capacity)}"
            if config.hbm.capacity
            else "none",
            dram=format_size(config.dram.capacity),
            ssd=format_size(config.ssd.capacity) if config.ssd.capacity else "none",
            listens=[
                url
                for url in (*daemon.server.urls, daemon.control_url, daemon.metrics_url)
                if url is not None
            ],
        )
        for warning in tls.warnings(config, rdma=daemon.verbs.driver is not None):
            _log.warning(warning)
        if not config.ssd.capacity:
            _log.info("dram only: a restart forgets all blocks", remedy="--ssd, --ssd-directory")
        # A full collection looks at every entry of the index, a pause that grows with the cache.
        gc.freeze()
        gc.set_threshold(_YOUNG_OBJECTS, 20, 1000)
        # Threads that have read from SSD wait for the interpreter while the loop is busy.
        sys.setswitchinterval(_SWITCH_SECONDS)
        on_ready()
        await daemon.stopping.wait()
        _log.info("stopping", grace_seconds=config.node.grace)
    _log.info("stopped")
    return 0


def serve(config: Config, on_ready: Callable[[], object] = lambda: None) -> int:
    """Run a daemon until SIGTERM or SIGINT.

    Args:
        config: checked already.
        on_ready: called once when clients can connect.

    Returns:
        The exit status: 0 after an orderly stop.

    Raises:
        StateLocked: another daemon has the state directory.
        ConfigError: a setting is impossible on this machine.
    """
    # A session has a descriptor, and so has a segment; the usual soft limit is below their number.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return uvloop.run(_serve(config, on_ready))
