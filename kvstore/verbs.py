"""The node's RDMA device: opened where there is one, and shared by all sessions that use it.

A device that fails ends the sessions that use it; it is opened anew for the next one that asks.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping

import structlog

from kvstore.config import RdmaSection
from kvstore.errors import ConfigError
from kvstore.metrics import RdmaState
from rdma.errors import TransportError
from rdma.transport import place_of
from rdma.verbs.adapter import Adapter, open_adapter
from rdma.verbs.choice import Wish
from rdma.verbs.driver import Driver, DriverCounters
from rdma.verbs.memory import Arena, VerbsRegistrar
from rdma.verbs.node import VerbsNodeTransport
from rdma.verbs.pulling import VerbsPullTransport
from rdma.verbs.settings import QueueSettings
from tiers.dram import DramTier
from tiers.errors import TierError

_log = structlog.get_logger(__name__)


class VerbsDevice:
    """A device, the node's memory registered with it, and the queue pairs of its sessions.

    Args:
        section: which device, and how its queue pairs are set up.
        dram: the node's memory.

    Attributes:
        absence: why sessions can't use RDMA, in a sentence; empty while they can.
    """

    def __init__(self, section: RdmaSection, dram: DramTier) -> None:
        self.absence = "rdma is off in this node's configuration"
        self._section = section
        self._dram = dram
        self._counters = DriverCounters()
        self._openings = 0
        self._opened: _Opened | None = None

    def __str__(self) -> str:
        if self._opened is None or self.absence:
            return self.absence
        driver = self._opened.driver
        state = "failed" if driver.failed else "port down" if driver.port_down else "up"
        return f"{driver.adapter.choice}, {state}, queue pairs: {driver.queues}"

    @property
    def driver(self) -> Driver | None:
        """What posts the work; None where there is no device."""
        return None if self._opened is None else self._opened.driver

    def open(self) -> None:
        """Open the device, and begin to register the node's memory in the background.

        Raises:
            ConfigError: one is required and there is none, or the settings are impossible.
        """
        if self._section.mode == "off":
            return
        try:
            self._open()
        except TransportError as error:
            if self._section.mode == "require":
                raise ConfigError(f"rdma.mode is require: {error}") from error
            self.absence = str(error)
            _log.debug("no rdma", reason=self.absence)

    def _open(self) -> None:
        section = self._section
        settings = queue_settings(section)
        adapter = open_adapter(Wish(section.device, section.port, section.gid))
        try:
            self._opened = _Opened(adapter, settings, self._counters, self._dram)
        except BaseException:
            adapter.close()
            raise
        self.absence = ""
        self._openings += 1
        self._opened.registering = asyncio.get_running_loop().create_task(
            self._register_all(self._opened.arena)
        )
        _log.info("rdma device opened", device=str(adapter.choice), mtu=adapter.mtu)

    async def _register_all(self, arena: Arena) -> None:
        """Register the segments once their pages are there: pinning them then costs little."""
        await asyncio.to_thread(self._dram.wait_prefault)
        for segment in self._dram.segments():
            try:
                await arena.prepare([place_of(segment.number, 0)])
            except TierError:
                continue  # it was given back meanwhile
            except TransportError as error:
                # Sessions would fail at their first block there: none is to begin.
                self.absence = str(error)
                _log.error("segment not registered", segment=segment.number, error=str(error))
                return

    def transport(self, offer: Mapping[str, object]) -> VerbsNodeTransport:
        """The node's half of a session's transport.

        Args:
            offer: what the client said of its end.

        Raises:
            TransportError: there is no device, or the two ends can't be joined.
        """
        opened = self._working()
        return VerbsNodeTransport(opened.driver, opened.arena, offer)

    def pulling(self) -> VerbsPullTransport:
        """This node's half of a session in which a peer writes blocks to this node's memory.

        Raises:
            TransportError: there is no device, or it refused.
        """
        opened = self._working()
        half = VerbsPullTransport(opened.driver.adapter, opened.driver.settings)
        opened.pulling.add(half)
        return half

    def _working(self) -> _Opened:
        if self._openings and (self._opened is None or self._opened.driver.failed is not None):
            self._open_anew()
        if self._opened is None or self.absence:
            raise TransportError(self.absence)
        return self._opened

    def _open_anew(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        try:
            self._open()
        except TransportError as error:
            self.absence = str(error)
            _log.warning("rdma device not opened anew", reason=self.absence)

    def state(self) -> RdmaState:
        """What there is to know of the device now, for metrics."""
        opened, counters = self._opened, self._counters
        up = opened is not None and opened.driver.failed is None and not opened.driver.port_down
        return RdmaState(
            up=up and not self.absence,
            openings=self._openings,
            registered_bytes=0 if opened is None else opened.arena.registered,
            queue_pairs=0 if opened is None else opened.driver.queues,
            queue_pairs_made=counters.queues,
            chains=counters.chains,
            work_requests=counters.works,
            written_bytes=counters.bytes_written,
            read_bytes=counters.bytes_read,
            failures=dict(counters.failures),
        )

    async def close(self) -> None:
        """End all queue pairs, deregister the memory and give the device back."""
        opened, self._opened = self._opened, None
        self._openings = 0
        self.absence = "the node is stopping"
        if opened is not None:
            opened.close()
            if opened.registering is not None:
                await asyncio.gather(opened.registering, return_exceptions=True)


class _Opened:
    """A device while it is open.

    Args:
        adapter: the device; closed with this.
        settings: of the queue pairs.
        counters: of the work.
        dram: the node's memory.

    Attributes:
        driver: posts the work.
        arena: the node's memory as the device knows it.
        pulling: halves of sessions with peers.
        registering: registers it.

    Raises:
        TransportError: the device refused.
    """

    def __init__(
        self,
        adapter: Adapter,
        settings: QueueSettings,
        counters: DriverCounters,
        dram: DramTier,
    ) -> None:
        self._adapter = adapter
        self._dram = dram
        self.registering: asyncio.Task[None] | None = None
        self.pulling: weakref.WeakSet[VerbsPullTransport] = weakref.WeakSet()
        self.arena = Arena(VerbsRegistrar(adapter, shared=False), dram, dram.populate)
        try:
            self.driver = Driver(adapter, settings, counters)
        except BaseException:
            self.arena.close()
            raise
        self.driver.start()
        self._others = dram.on_release
        dram.on_release = self._released

    def close(self) -> None:
        """End all queue pairs, deregister the memory and give the device back."""
        if self.registering is not None:
            self.registering.cancel()
        for half in list(self.pulling):
            half.close()
        self.driver.close()
        self._dram.on_release = self._others
        self.arena.close()
        self._adapter.close()

    def _released(self, number: int) -> None:
        self.arena.forget(number)
        if self._others is not None:
            self._others(number)


def queue_settings(section: RdmaSection) -> QueueSettings:
    """The settings of the queue pairs that a configuration asks for.

    Raises:
        DeviceError: they are impossible.
    """
    return QueueSettings(
        mtu=section.mtu,
        traffic_class=section.traffic_class,
        service_level=section.service_level,
        timeout=section.timeout,
        retry_count=section.retry_count,
        rnr_retry=section.rnr_retry,
        reads=section.reads,
        depth=section.depth,
        bytes_in_flight=section.bytes_in_flight,
        busy_poll=section.busy_poll,
    )
