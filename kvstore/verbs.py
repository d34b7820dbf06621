"""The node's RDMA device: opened where there is one, and shared by all sessions that use it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from kvstore.config import RdmaSection
from kvstore.errors import ConfigError
from rdma.errors import TransportError
from rdma.verbs.adapter import Adapter, open_adapter
from rdma.verbs.choice import Wish
from rdma.verbs.driver import Driver
from rdma.verbs.memory import Arena, VerbsRegistrar
from rdma.verbs.node import VerbsNodeTransport
from rdma.verbs.settings import QueueSettings
from tiers.dram import DramTier

_log = structlog.get_logger(__name__)


class VerbsDevice:
    """A device, the node's memory registered with it, and the queue pairs of its sessions.

    Args:
        section: which device, and how its queue pairs are set up.
        dram: the node's memory.

    Attributes:
        absence: why there is no device, in a sentence; empty while there is one.
    """

    def __init__(self, section: RdmaSection, dram: DramTier) -> None:
        self.absence = "rdma is off in this node's configuration"
        self._section = section
        self._dram = dram
        self._adapter: Adapter | None = None
        self._driver: Driver | None = None
        self._arena: Arena | None = None
        self._registering: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return self.absence if self._adapter is None else str(self._adapter.choice)

    @property
    def driver(self) -> Driver | None:
        """What posts the work; None where there is no device."""
        return self._driver

    def open(self) -> None:
        """Open the device, and begin to register the node's memory in the background.

        Raises:
            ConfigError: one is required and there is none, or the settings are impossible.
        """
        section = self._section
        if section.mode == "off":
            return
        try:
            settings = queue_settings(section)
            self._adapter = open_adapter(Wish(section.device, section.port, section.gid))
        except TransportError as error:
            if section.mode == "require":
                raise ConfigError(f"rdma.mode is require: {error}") from error
            self.absence = str(error)
            _log.info("no rdma", reason=self.absence)
            return
        self.absence = ""
        self._driver = Driver(self._adapter, settings)
        self._driver.start()
        self._arena = Arena(VerbsRegistrar(self._adapter, shared=False), self._dram)
        self._dram.on_release = self._arena.forget
        loop = asyncio.get_running_loop()
        self._registering = loop.create_task(self._register_all(self._arena))
        _log.info("rdma device opened", device=str(self._adapter.choice), mtu=self._adapter.mtu)

    async def _register_all(self, arena: Arena) -> None:
        """Register the segments once their pages are there: pinning them then costs little."""
        await asyncio.to_thread(self._dram.wait_prefault)
        for segment in self._dram.segments():
            try:
                arena.register(segment.number)
            except TransportError as error:
                _log.error("segment not registered", segment=segment.number, error=str(error))
                return
            await asyncio.sleep(0)

    def transport(self, offer: Mapping[str, object]) -> VerbsNodeTransport:
        """The node's half of a session's transport.

        Args:
            offer: what the client said of its end.

        Raises:
            TransportError: there is no device, or the two ends can't be joined.
        """
        if self._driver is None or self._arena is None:
            raise TransportError(self.absence)
        return VerbsNodeTransport(self._driver, self._arena, offer)

    async def close(self) -> None:
        """End all queue pairs, deregister the memory and give the device back."""
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.gather(self._registering, return_exceptions=True)
        if self._driver is not None:
            self._driver.close()
        if self._arena is not None:
            self._dram.on_release = None
            self._arena.close()
        if self._adapter is not None:
            self._adapter.close()
        self._driver = self._arena = self._adapter = None
        self.absence = "the node is stopping"


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
