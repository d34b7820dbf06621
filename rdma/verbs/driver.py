"""The active end of a device: what posts the work of all sessions and hears of its completion."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rdma.errors import TransportError
from rdma.verbs.adapter import DEVICE_FAILED, PORT_ACTIVE, PORT_DOWN, Adapter
from rdma.verbs.completions import Completions
from rdma.verbs.errors import (
    DeviceError,
    QueueBroken,
    TransferTimeout,
    error_of_status,
    name_of_status,
)
from rdma.verbs.handshake import Endpoint
from rdma.verbs.plan import Work
from rdma.verbs.queue import QueuePair
from rdma.verbs.schedule import READ, WRITE, Chain, Flow, Schedule, Transfer
from rdma.verbs.settings import QueueSettings

__all__ = ["Driver", "DriverCounters", "Queue"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DriverCounters:
    """What a driver has done.

    Attributes:
        queues: queue pairs made.
        chains: chains of work requests posted.
        works: work requests posted.
        bytes_written: by RDMA WRITE.
        bytes_read: by RDMA READ.
        failures: queue pairs that ended in error, by the name of the first completion's status or
            of the error.
    """

    queues: int = 0
    chains: int = 0
    works: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class Driver:
    """The node's half of the device; used in one event loop.

    Args:
        adapter: the device.
        settings: of the queue pairs.
        counters: to go on counting in.

    Attributes:
        adapter: as given.
        settings: as given.
        counters: what was done.
        port_down: whether the device said so; what is under way ends by its own timeouts.

    Raises:
        DeviceError: the device refused.
    """

    def __init__(
        self,
        adapter: Adapter,
        settings: QueueSettings | None = None,
        counters: DriverCounters | None = None,
    ) -> None:
        self.adapter = adapter
        self.settings = settings = settings or QueueSettings()
        self.counters = counters if counters is not None else DriverCounters()
        self.port_down = False
        works = max(1, min(settings.device_works, adapter.limits.completions // 2))
        self._schedule = Schedule(works, settings.chain)
        self._completions = Completions(adapter, 2 * works, self._on_completion, self._on_failure)
        self._queues: dict[int, Queue] = {}
        self._owners: dict[Flow, Queue] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._polling: asyncio.Handle | None = None
        self._failed: DeviceError | None = None

    def __repr__(self) -> str:
        return f"<Driver {self.adapter!r} queues={len(self._queues)}>"

    @property
    def failed(self) -> DeviceError | None:
        """Why the device is of no more use; ``None`` while it is."""
        return self._failed

    @property
    def queues(self) -> int:
        """Queue pairs that are connected."""
        return len(self._queues)

    def start(self) -> None:
        """Begin to watch the device in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._completions.start(self._loop)
        self._loop.add_reader(self.adapter.event_fd, self._on_event)

    def connect(self, remote: Endpoint) -> Queue:
        """Bring up a queue pair to a passive end.

        Raises:
            DeviceError: the device refused, or has failed.
            HandshakeError: the two ends can't be connected.
        """
        if self._loop is None or self._failed is not None:
            raise self._failed or DeviceError("the driver has not been started")
        pair = QueuePair(self.adapter, self._completions.queue, self.settings, active=True)
        try:
            pair.connect(remote)
        except BaseException:
            pair.destroy()
            raise
        queue = Queue(self, pair)
        self._queues[pair.number] = queue
        self._owners[queue.flow] = queue
        self.counters.queues += 1
        return queue

    def close(self) -> None:
        """Destroy all queue pairs and stop watching; the adapter stays open."""
        for queue in list(self._queues.values()):
            queue.fail(QueueBroken("the node closes"))
        if self._polling is not None:
            self._polling.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self.adapter.event_fd)
            self._loop = None
        self._completions.close()

    # --- for the queues ------------------------------------------------------------------------

    def submit(self, queue: Queue, transfer: Transfer) -> None:
        """Have a transfer done in its turn."""
        self._schedule.add(queue.flow, transfer)
        self._pump()
        if self.settings.busy_poll and self._polling is None and self._loop is not None:
            self._polling = self._loop.call_soon(self._spin)

    def withdraw(self, queue: Queue, transfer: Transfer) -> bool:
        """Give up a transfer of which nothing was posted; return whether that was so."""
        return self._schedule.withdraw(queue.flow, transfer)

    def remove(self, queue: Queue, reason: str) -> list[Transfer]:
        """Forget a queue whose queue pair is destroyed; return what was left of its work."""
        del self._queues[queue.pair.number]
        del self._owners[queue.flow]
        if reason:
            self.counters.failures[reason] += 1
        lost = self._schedule.remove(queue.flow)
        if self._loop is not None:
            self._loop.call_soon(self._pump)  # others may have waited for room
        return lost

    # --- posting and completing ----------------------------------------------------------------

    def _pump(self) -> None:
        """Post what may be posted."""
        while (turn := self._schedule.next()) is not None:
            flow, chain = turn
            self._post(self._owners[flow], chain)

    def _post(self, queue: Queue, chain: Chain) -> None:
        try:
            queue.pair.post(chain)
        except self.adapter.binding.Error as error:
            queue.fail(QueueBroken(f"the device takes no work: {error}"), "POST")
            return
        counters = self.counters
        counters.chains += 1
        counters.works += len(chain.works)
        if chain.kind == WRITE:
            counters.bytes_written += chain.length
        elif chain.kind == READ:
            counters.bytes_read += chain.length

    def _on_completion(self, pair: int, number: int, status: int) -> None:
        queue = self._queues.get(pair)
        if queue is None:
            return  # destroyed meanwhile; all its work was accounted for then
        if status:
            _log.info("%r failed: %s", queue.pair, name_of_status(status))
            queue.fail(error_of_status(status), name_of_status(status))
            return
        queue.finish(self._schedule.complete(queue.flow, number))
        self._pump()

    def _spin(self) -> None:
        """Poll again and again for as long as work is under way."""
        self._polling = None
        self._completions.poll()
        if self._schedule.works_out and self._loop is not None:
            self._polling = self._loop.call_soon(self._spin)

    # --- the device itself ---------------------------------------------------------------------

    def _on_failure(self, error: Exception) -> None:
        _log.error("%s does not answer: %s", self.adapter.choice.device, error)
        self._take_event(DEVICE_FAILED)

    def _on_event(self) -> None:
        self.adapter.drain_events(self._take_event)

    def _take_event(self, kind: int) -> None:
        name = self.adapter.choice.device
        if kind == DEVICE_FAILED and self._failed is None:
            _log.error("%s has failed", name)
            self._failed = DeviceError(f"{name} has failed or is gone")
            if self._loop is not None:
                self._loop.remove_reader(self.adapter.event_fd)
            for queue in list(self._queues.values()):
                queue.fail(QueueBroken(str(self._failed)), "DEVICE_FATAL")
        elif kind in (PORT_DOWN, PORT_ACTIVE):
            self.port_down = kind == PORT_DOWN
            _log.warning("%s: a port is %s", name, "down" if self.port_down else "active")


class Queue:
    """One session's work on its queue pair.

    Attributes:
        pair: the queue pair.
        flow: its place in the schedule.
        error: why the queue pair was destroyed; None while it lives.
    """

    __slots__ = ("_driver", "_waiting", "error", "flow", "pair")

    def __init__(self, driver: Driver, pair: QueuePair) -> None:
        self._driver = driver
        self.pair = pair
        self.flow = Flow(pair.depth, driver.settings.bytes_in_flight)
        self.error: TransportError | None = None
        self._waiting: dict[Transfer, asyncio.Future[None]] = {}

    async def move(self, kind: str, works: Sequence[Work], deadline: float) -> None:
        """Have work done.

        When this returns or raises, the device touches none of the memory any more: if bytes are
        under way at the deadline, or where the caller is cancelled, the queue pair is destroyed.

        Args:
            kind: ``READ`` or ``WRITE``.
            works: what to move.
            deadline: when to give up, on the clock of the event loop.

        Raises:
            TransferTimeout: it took longer.
            QueueBroken: a work request failed, this one or another of the session.
        """
        self._check()
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline:
            raise TransferTimeout("the deadline passed before a byte was moved")
        transfer = Transfer(kind, works)
        if transfer.done:
            return
        done: asyncio.Future[None] = loop.create_future()
        self._waiting[transfer] = done
        try:
            self._driver.submit(self, transfer)
            async with asyncio.timeout_at(deadline):
                await done
        except TimeoutError:
            late = TransferTimeout(f"{transfer.length} bytes were not moved by the deadline")
            self._give_up(transfer, late)
            raise late from None
        except asyncio.CancelledError:
            self._give_up(transfer, QueueBroken("a call was cancelled with bytes under way"))
            raise
        finally:
            self._waiting.pop(transfer, None)

    def finish(self, transfers: Sequence[Transfer]) -> None:
        """Tell those who wait that their transfers are done."""
        for transfer in transfers:
            done = self._waiting.get(transfer)
            if done is not None and not done.done():
                done.set_result(None)

    def fail(self, error: TransportError, reason: str = "") -> None:
        """Destroy the queue pair, then fail all that was left of its work.

        Args:
            error: what those who wait are told.
            reason: what to count it under; not counted where empty.
        """
        if self.error is not None:
            return
        self.error = error
        self.pair.break_off()
        self.pair.destroy()
        for transfer in self._driver.remove(self, reason):
            done = self._waiting.get(transfer)
            if done is not None and not done.done():
                done.set_exception(_again(error))

    def _check(self) -> None:
        if self.error is not None:
            raise _again(self.error)

    def _give_up(self, transfer: Transfer, error: TransportError) -> None:
        if self.error is None and not transfer.done and not self._driver.withdraw(self, transfer):
            self.fail(error, type(error).__name__)


def _again(error: TransportError) -> TransportError:
    """Return another error of the same kind: one raised twice would mix its tracebacks up."""
    return type(error)(*error.args)
