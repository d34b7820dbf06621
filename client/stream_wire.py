"""One asyncio session with a node: many calls at once over one socket."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from client.endpoint import Settings, choose
from client.operations import (
    Begin,
    Call,
    Finish,
    Move,
    Operation,
    Release,
    Step,
    Terms,
    forsake,
    make_terms,
    names_memory,
)
from client.tally import SessionFacts
from client.tls import lost, secure_soon
from client.wire import adopt, outcome
from kvstore.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unavailable
from kvstore.protocol.caller import Call as Pending
from kvstore.protocol.caller import Caller, Counters
from kvstore.protocol.fields import MAX_SEGMENTS
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import Abort, Hello, Segments, Welcome, unmapped_header
from rdma.errors import TransportError
from rdma.shm import ShmClientTransport
from rdma.stream import SocketStream
from rdma.transport import ClientTransport

logger = logging.getLogger("kvstore.client")

T = TypeVar("T")

_INLINE_BYTES: Final = 256 << 10
"""Bytes that the event loop moves itself; more are moved by a thread of its executor."""

_ABORT_SECONDS: Final = 1.0
"""What the node is told about how long an answer to an abort is of use: none is waited for."""


class _StreamCaller(Caller):
    """A caller that speaks up where no call in flight would: on late answers, and at the end.

    Args:
        counters: where to count.
        on_late: called after bytes have come, for what late answers brought to be given back.
        on_end: called when the node has ended the stream.
    """

    def __init__(
        self, counters: Counters, on_late: Callable[[], object], on_end: Callable[[], object]
    ) -> None:
        super().__init__(counters)
        self._on_late = on_late
        self._on_end = on_end

    def buffer_updated(self, number: int) -> list[Pending[Any]]:
        """Take note of bytes received."""
        done = super().buffer_updated(number)
        self._on_late()
        return done

    def feed_eof(self) -> list[Pending[Any]]:
        """Take note of the node's end of the stream."""
        done = super().feed_eof()
        self._on_end()
        return done


@dataclass(slots=True)
class _Run:
    """What one operation has begun and not finished.

    Attributes:
        begun: its calls.
        unsent: those of them whose payload has not left yet.
    """

    begun: list[Pending[Any]] = field(default_factory=list)
    unsent: set[Pending[Any]] = field(default_factory=set)


class StreamWire:
    """One connection with an open session, shared by all calls of an event loop.

    Attributes:
        terms: what the session agreed on.
        session: what it is, for logs and statistics.
        closed: whether it has ended.
    """

    terms: Terms
    session: SessionFacts

    def __init__(self, connected: socket.socket, counters: Counters) -> None:
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._caller = _StreamCaller(
            counters, self._send_late, lambda: self._loop.call_soon(self._done, ())
        )
        self._transport: ClientTransport | None = None
        self._mapping = asyncio.Lock()
        self._moves = 0  # copies under way in threads
        self._sound = False  # when it was closed: the node would still listen
        self._stream: SocketStream[Pending[Any]] = SocketStream(
            connected, self._caller, self._done, self._ended, serves=False
        )
        self._stream.start()

    @classmethod
    async def open(
        cls, settings: Settings, address: Any, counters: Counters, end: float
    ) -> StreamWire:
        """Connect and open a session.

        Args:
            settings: what the session asks for.
            address: family and address of the node.
            counters: where to count.
            end: when to give up, on the monotonic clock.

        Raises:
            KVStoreError: the node can't be reached, is too slow, or refuses.
        """
        if "rdma" in settings.offers:
            # The first time this opens a device.
            offered = await asyncio.to_thread(settings.transports)
        else:
            offered = settings.transports()
        transports = offered.halves
        wire = None
        try:
            connected = await _open_socket(address, end)
            if settings.certificates is not None:
                host = settings.endpoint.host
                connected = await secure_soon(connected, settings.certificates, host, end)
            wire = cls(connected, counters)
            welcome = await wire._greet(settings.hello(transports), end)
            wire._transport = choose(transports, welcome)
            wire.terms = make_terms(settings.namespace, welcome, wire._transport)
        except BaseException:
            if wire is not None:
                wire.close()
            for transport in transports.values():
                transport.close()
            raise
        wire.session = SessionFacts.of(welcome, offered.why)
        wire._caller.set_max_payload(wire.terms.max_payload)
        counters.connects += 1
        return wire

    @property
    def heard(self) -> int:
        """How many answers have come."""
        return self._caller.heard

    @property
    def alive(self) -> bool:
        """Whether the node has not ended the session, as far as is known."""
        return not self.closed

    async def run(self, operation: Operation[T], end: float) -> T:
        """Carry out an operation.

        A cancelled operation touches no memory of the caller any more.

        Args:
            operation: what to do.
            end: when to give up, on the monotonic clock.

        Raises:
            KVStoreError: as the node answered; ``DeadlineExceeded`` and ``Unavailable`` where it
                did not. The connection may be closed then.
        """
        run = _Run()
        try:
            step = next(operation)
            while True:
                try:
                    value = await self._do(step, end, run)
                except KVStoreError as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(value)
        except StopIteration as done:
            result: T = done.value
            return result
        except TransportError as error:
            self.close()
            raise ProtocolError(f"the node named memory that is not there: {error}") from error
        finally:
            operation.close()
            self._forsake(run)
            if self.terms.leases or self.terms.reservations:
                self._give_back()

    def release(self, leases: list[int]) -> bool:
        """Give back the pins of leases.

        Returns:
            Whether they lasted until now.
        """
        if self.closed:
            return False
        self._stream.send([self._caller.release(leases)])
        return not self.closed

    def close(self, error: KVStoreError | None = None) -> None:
        """End the session and give back everything that was held for it.

        Where threads are still copying, or views on a GPU are in use, the memory and the connection
        follow as soon as that is over.

        Args:
            error: why, where that is not the owner's wish.
        """
        if self.closed:
            return
        self.closed = True
        self._sound = self._caller.broken is None
        if self._transport is None or not self._transport.shares_memory:
            self._stream.close()
        self._done(self._caller.lose(error or Unavailable("the connection is closed")))
        if not self._moves:
            self._let_go()
        if isinstance(self._caller.broken, ProtocolError):
            logger.warning("the node talked nonsense: %s", self._caller.broken)

    def disown(self) -> None:
        """Leave the session to the process that this one was forked from."""
        self.closed = True
        self._stream.disown()

    def _let_go(self) -> None:
        """Give back the memory. Not under a copy: the node gives it to others then."""
        transport = self._transport
        gpus = transport.gpus if isinstance(transport, ShmClientTransport) else None
        if gpus is None:
            self._stream.close()
        else:
            self._stream.pause_reading()
        if transport is not None:
            transport.close()
        if gpus is not None:
            gpus.when_unmapped(lambda: self._hang_up(gpus.over if self._sound else []))

    def _hang_up(self, unmapped: list[int]) -> None:
        """Close the connection; tell the node before which of its segments are not mapped now."""
        if unmapped:
            self._stream.send([encode(unmapped_header(unmapped))])
        self._stream.close()

    # --- steps ---------------------------------------------------------------------------------

    async def _do(self, step: Step, end: float, run: _Run) -> Any:
        if isinstance(step, Call):
            return await self._finish(self._begin(step, end, run), end, run)
        if isinstance(step, Begin):
            return self._begin(step.call, end, run)
        if isinstance(step, Finish):
            return await self._finish(step.handle, end, run)
        if isinstance(step, Move):
            return await self._move(step)
        if isinstance(step, Release):
            return self.release(step.leases)
        return await self._map(step.numbers, end, run)

    async def _greet(self, hello: Hello, end: float) -> Welcome:
        run = _Run()
        try:
            welcome: Welcome = await self._finish(self._begin(Call(hello), end, run), end, run)
            return welcome
        finally:
            for pending in run.begun:
                self._expire(pending)

    async def _finish(self, pending: Pending[Any], end: float, run: _Run) -> Any:
        """Wait for the answer to a call; a cancelled wait leaves it to be forsaken."""
        if not pending.done:
            future = self._loop.create_future()
            pending.context = future
            timer = self._loop.call_later(end - time.monotonic(), self._expire, pending)
            try:
                await future
            finally:
                timer.cancel()
        run.begun.remove(pending)
        return outcome(pending)

    async def _map(self, numbers: list[int], end: float, run: _Run) -> None:
        transport = self.terms.transport
        if not isinstance(transport, ShmClientTransport):
            raise ProtocolError(f"segments named over {transport.name}")
        async with self._mapping:
            wanted = sorted(set(numbers).difference(transport.segments.numbers()))
            self._stream.on_fds = self._caller.feed_fds
            try:
                for start in range(0, len(wanted), MAX_SEGMENTS):
                    request = Segments(wanted[start : start + MAX_SEGMENTS])
                    pending = self._begin(Call(request), end, run)
                    await self._finish(pending, end, run)
                    adopt(transport, pending)
            finally:
                if not self._caller.expects_fds:
                    self._stream.on_fds = None

    async def _move(self, step: Move) -> None:
        if self.closed:
            raise Unavailable("the connection is closed")
        if step.length <= _INLINE_BYTES:
            step.work()
            return
        moved = self._loop.run_in_executor(None, step.work)
        self._moves += 1
        try:
            await asyncio.shield(moved)
        except asyncio.CancelledError:
            # A thread can't be stopped, and the memory is the caller's again once this returns.
            while not moved.done():
                try:
                    await asyncio.wait([moved])
                except asyncio.CancelledError:
                    continue
            raise
        finally:
            self._moved()

    def _moved(self) -> None:
        """Take note that a thread touches no memory any more, after which a close can go on."""
        self._moves -= 1
        if self.closed and not self._moves:
            self._let_go()

    def _give_back(self) -> None:
        """Have the node drop what operations left behind, without waiting for its answer."""
        leases, self.terms.leases = self.terms.leases, []
        reservations, self.terms.reservations = self.terms.reservations, []
        if self.closed:
            return
        if leases:
            self.release(leases)
        try:
            for number in reservations:
                self._begin(Call(Abort(number)), time.monotonic() + _ABORT_SECONDS, _Run())
        except KVStoreError as error:
            logger.debug("the session ended before all was given back: %s", error)

    def _forsake(self, run: _Run) -> None:
        """Give up what an operation began and did not finish."""
        for pending in run.begun:
            if pending.done and pending.error is None:
                forsake(self.terms, pending.result())
                for fd in pending.fds:
                    os.close(fd)
            self._expire(pending)
        if run.unsent:
            # The stream would go on to send memory that is the caller's again.
            self.close(Unavailable("the node did not take a request in time"))

    # --- calls in flight -----------------------------------------------------------------------

    def _begin(self, call: Call, end: float, run: _Run) -> Pending[Any]:
        self._done(())
        if self.closed:
            raise Unavailable("the connection is closed")
        payload = call.payload
        length = sum(map(len, payload)) if payload else 0
        pending, frame = self._caller.begin(call.request, end, time.monotonic(), call.sink, length)
        run.begun.append(pending)
        self._send_late()
        if payload:
            run.unsent.add(pending)
            self._stream.send([frame, *payload], _forget(run.unsent, pending))
        else:
            self._stream.send([frame])
        return pending

    def _send_late(self) -> None:
        """Give back what answers to calls given up have brought."""
        for frame in self._caller.take_outbox():
            self._stream.send([frame])

    def _expire(self, pending: Pending[Any]) -> None:
        """Give a call up if it has no answer."""
        if not pending.done:
            self._done([pending, *self._caller.abandon(pending)])
            if names_memory(pending.request):
                # The node may still be at it.
                self.close(Unavailable("the node did not answer a call for memory in time"))

    def _done(self, calls: Sequence[Pending[Any]]) -> None:
        for pending in calls:
            future = pending.context
            if isinstance(future, asyncio.Future) and not future.done():
                future.set_result(None)
        if self._caller.broken is not None:
            self.close(self._caller.broken)

    def _ended(self, error: Exception | None) -> None:
        self.close(lost(error))


def _forget(unsent: set[Pending[Any]], pending: Pending[Any]) -> Callable[[bool], None]:
    def on_sent(_sent: bool) -> None:
        unsent.discard(pending)

    return on_sent


async def _open_socket(address: Any, end: float) -> socket.socket:
    family, place = address
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setblocking(False)
    try:
        async with asyncio.timeout(end - time.monotonic()):
            await asyncio.get_running_loop().sock_connect(opened, place)
    except TimeoutError as error:
        opened.close()
        raise DeadlineExceeded(f"no connection to {place} in time") from error
    except OSError as error:
        opened.close()
        raise Unavailable(f"no connection to {place}: {error.strerror or error}") from error
    except BaseException:
        opened.close()
        raise
    return opened
