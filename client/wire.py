"""One blocking session with a node: a socket, and the state of the calls on it."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from client.endpoint import Settings, choose, open_socket
from client.operations import (
    Begin,
    Call,
    Finish,
    MapSegments,
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
from client.tls import lost, secure
from kvstore.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unavailable
from kvstore.protocol.caller import Call as Pending
from kvstore.protocol.caller import Caller, Counters
from kvstore.protocol.fields import MAX_SEGMENTS
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import Abort, Segments, unmapped_header
from rdma.errors import TransportError
from rdma.shm import ShmClientTransport, receive_with_fds
from rdma.stream import tune
from rdma.tls import TlsSocket
from rdma.transport import ClientTransport

logger = logging.getLogger("kvstore.client")

T = TypeVar("T")

_MAX_PARTS: Final = 1_000
"""Buffers in one ``sendmsg``, below the kernel's IOV_MAX of 1,024."""

_SLACK: Final = 0.002
"""Seconds that a small frame may take to be sent even where the deadline has passed."""

_PATIENCE: Final = struct.pack("@ll", 0, 1_000)
"""How long the kernel waits within one call on the socket: 1 ms, rounded up to its ticks.

Most answers come sooner, and then waiting costs no system call of its own. Longer waits are left
to ``poll``: a signal restarts the kernel's timeout, so a profiler's would put deadlines off for
ever."""


class Wire:
    """One connection with an open session. Used by one thread at a time.

    Blocking calls with a short timeout of the kernel's: one system call to send, one to receive.
    Over TLS, whose calls don't know such a timeout, they never block, and waiting is a call more.

    Attributes:
        terms: what the session agreed on.
        session: what it is, for logs and statistics.
    """

    terms: Terms
    session: SessionFacts

    def __init__(self, connected: socket.socket, counters: Counters) -> None:
        tune(connected)
        self._socket = connected
        self._tls = connected if isinstance(connected, TlsSocket) else None
        self._caller = Caller(counters)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, _PATIENCE)
        self._expects_fds = False
        self._begun: list[Pending[Any]] = []
        self._transport: ClientTransport | None = None
        self._exposed = False
        self._moving = threading.Lock()
        self._interrupted = False
        self._cut_off = False  # within a frame that was being sent
        self.closed = False

    @classmethod
    def open(cls, settings: Settings, address: Any, counters: Counters, end: float) -> Wire:
        """Connect and open a session.

        Args:
            settings: what the session asks for.
            address: family and address of the node.
            counters: where to count.
            end: when to give up, on the monotonic clock.

        Raises:
            KVStoreError: the node can't be reached, is too slow, or refuses.
        """
        offered = settings.transports()
        transports = offered.halves
        wire = None
        try:
            connected = open_socket(address[0], address[1], end - time.monotonic())
            if settings.certificates is not None:
                connected = secure(connected, settings.certificates, settings.endpoint.host, end)
            wire = cls(connected, counters)
            welcome = wire._call(Call(settings.hello(transports)), end)
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
        """Whether the node has not ended the session, as far as can be known without asking."""
        if self.closed or self._caller.broken is not None:
            return False
        try:
            # Of the socket beneath, where there is TLS: what comes says as little there.
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            return bool(socket.socket.recv(self._socket, 1, flags))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def run(self, operation: Operation[T], end: float) -> T:
        """Carry out an operation.

        Args:
            operation: what to do.
            end: when to give up, on the monotonic clock.

        Raises:
            KVStoreError: as the node answered; ``DeadlineExceeded`` and ``Unavailable`` where it
                did not. The connection may be closed then.
        """
        try:
            step = next(operation)
            while True:
                try:
                    value = self._call(step, end) if type(step) is Call else self._do(step, end)
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
        except KVStoreError:
            raise
        except BaseException:
            # An answer that is still to come would land in memory that is the caller's again.
            self.close()
            raise
        finally:
            operation.close()
            if self._begun:
                self._forsake()
            if self._exposed:
                self.close()
            if self.terms.leases or self.terms.reservations:
                self._give_back(end)

    def release(self, leases: list[int], end: float) -> bool:
        """Give back the pins of leases.

        Returns:
            Whether they lasted until now.
        """
        try:
            self._send(self._caller.release(leases), (), end)
        except KVStoreError:
            return False
        return True

    def catch_up(self) -> None:
        """Take note of late answers, without waiting."""
        if self._tls is None:
            self._socket.setblocking(False)
        while not self.closed and self._receive_into(self._caller.get_buffer()):
            pass
        if not self.closed and self._tls is None:
            self._socket.setblocking(True)

    def interrupt(self) -> None:
        """Make whoever waits on this connection return; may be called from another thread."""
        with self._moving:
            # Not before: the node gives the memory of a session that ends to others.
            self._interrupted = True
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("the connection had ended already: %s", error)

    def close(self) -> None:
        """End the session and give back everything that was held for it.

        Where views on a GPU are in use, they and the connection stay until the last is given back.
        """
        if self.closed:
            return
        self.closed = True
        transport, sound = self._transport, self._caller.broken is None and not self._cut_off
        if transport is not None:
            # First: the node gives the memory of a session that ends to others.
            transport.close()
        gpus = transport.gpus if isinstance(transport, ShmClientTransport) else None
        if gpus is None:
            self._socket.close()
        else:
            gpus.when_unmapped(lambda: self._hang_up(gpus.over if sound else []))
        self._caller.lose(Unavailable("the connection is closed"))
        if isinstance(self._caller.broken, ProtocolError):
            logger.warning("the node talked nonsense: %s", self._caller.broken)

    def _hang_up(self, unmapped: list[int]) -> None:
        """Close the connection; tell the node before which of its segments are not mapped now."""
        if unmapped:
            try:
                self._socket.send(encode(unmapped_header(unmapped)), socket.MSG_DONTWAIT)
            except OSError as error:
                logger.debug("the node waits for the end of this process: %s", error)
        self._socket.close()

    def disown(self) -> None:
        """Leave the session to the process that this one was forked from."""
        self.closed = True
        self._socket.close()

    # --- steps ---------------------------------------------------------------------------------

    def _do(self, step: Step, end: float) -> Any:
        if isinstance(step, Move):
            with self._moving:
                if self._interrupted:
                    raise Unavailable("the client is closing")
                step.work()
            return None
        if isinstance(step, Release):
            return self.release(step.leases, end)
        if isinstance(step, Begin):
            pending = self._begin(step.call, end)
            self._begun.append(pending)
            return pending
        if isinstance(step, Finish):
            return self._finish(step.handle, end)
        if isinstance(step, MapSegments):
            return self._map(step.numbers, end)
        return self._call(step, end)

    def _give_back(self, end: float) -> None:
        """Have the node drop what operations left behind, without waiting for its answer."""
        leases, self.terms.leases = self.terms.leases, []
        reservations, self.terms.reservations = self.terms.reservations, []
        if self.closed:
            return
        if leases:
            self.release(leases, end)
        soon = max(end, time.monotonic() + _SLACK)
        try:
            for number in reservations:
                self._begin(Call(Abort(number)), soon)
        except KVStoreError as error:
            logger.debug("the session ended before all was given back: %s", error)

    def _call(self, call: Call, end: float) -> Any:
        pending = self._begin(call, end)
        while not pending.done:
            self._receive(pending, end)
        return outcome(pending)

    def _finish(self, pending: Pending[Any], end: float) -> Any:
        while not pending.done:
            self._receive(pending, end)
        self._begun.remove(pending)
        return outcome(pending)

    def _forsake(self) -> None:
        """Give up what the operation began and did not finish."""
        begun, self._begun = self._begun, []
        for pending in begun:
            if pending.done and pending.error is None:
                forsake(self.terms, pending.result())
            self._abandon(pending)

    def _map(self, numbers: list[int], end: float) -> None:
        transport = self.terms.transport
        if not isinstance(transport, ShmClientTransport):
            raise ProtocolError(f"segments named over {transport.name}")
        self._expects_fds = True
        try:
            for start in range(0, len(numbers), MAX_SEGMENTS):
                pending = self._begin(Call(Segments(numbers[start : start + MAX_SEGMENTS])), end)
                while not pending.done:
                    self._receive(pending, end)
                adopt(transport, pending)
        finally:
            self._expects_fds = self._caller.expects_fds

    # --- the socket ----------------------------------------------------------------------------

    def _begin(self, call: Call, end: float) -> Pending[Any]:
        payload = call.payload
        length = sum(map(len, payload)) if payload else 0
        caller = self._caller
        pending, frame = caller.begin(call.request, end, time.monotonic(), call.sink, length)
        for late in caller.take_outbox():
            self._send(late, (), end)
        self._send(frame, payload, end)
        return pending

    def _send(self, frame: bytes, payload: Sequence[memoryview], end: float) -> None:
        """Send a frame whole, or break the connection: half a frame can't be taken back."""
        if self.closed:
            raise Unavailable("the connection is closed")
        sent = 0
        try:
            if not payload:
                # A small frame nearly always fits, and then no timeout has to be set.
                sent = self._socket.send(frame, socket.MSG_DONTWAIT)
                if sent == len(frame):
                    return
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(lost(error))
            raise lost(error) from error
        self._send_parts([memoryview(frame)[sent:], *payload], end)

    def _send_parts(self, parts: list[memoryview], end: float) -> None:
        soonest = time.monotonic() + _SLACK
        self._cut_off = True
        try:
            while parts:
                try:
                    parts = _rest(parts, self._socket.sendmsg(parts[:_MAX_PARTS]))
                except BlockingIOError:
                    self._wait(select.POLLOUT, max(end, soonest))
                if parts and time.monotonic() >= max(end, soonest):
                    self._lose(Unavailable("the node did not take a request in time"))
                    raise DeadlineExceeded("the node did not take the request in time")
        except OSError as error:
            self._lose(lost(error))
            raise lost(error) from error
        self._cut_off = False

    def _abandon(self, pending: Pending[Any]) -> None:
        """Give a call up. The node may still be at the memory that it was told of, if any."""
        if not pending.done and names_memory(pending.request):
            self._exposed = True
        self._caller.abandon(pending)

    def _receive(self, pending: Pending[Any], end: float) -> None:
        """Receive once; give ``pending`` up at the deadline."""
        left = end - time.monotonic()
        if left <= 0:
            self._abandon(pending)
            return
        if left < _SLACK and not self._wait(select.POLLIN, end):
            return
        if not (self._receive_into(self._caller.get_buffer()) or self.closed):
            self._wait(select.POLLIN, end)

    def _wait(self, event: int, end: float) -> bool:
        """Wait, whatever signals come; returns whether the socket was ready in time."""
        if self._tls is not None and event == select.POLLIN and self._tls.waiting:
            return True
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(max(end - time.monotonic(), 0.0) * 1000))

    def _receive_into(self, buffer: memoryview) -> bool:
        """Receive what is there; returns whether there was anything."""
        caller = self._caller
        try:
            if self._expects_fds:
                count, fds = receive_with_fds(self._socket, buffer)
                if fds:
                    caller.feed_fds(fds)
            else:
                count = self._socket.recv_into(buffer)
        except BlockingIOError:
            return False
        except (OSError, TransportError) as error:
            self._lose(lost(error))
            return False
        if count:
            caller.buffer_updated(count)
        else:
            caller.feed_eof()
        if caller.broken is not None:
            self.close()
        return True

    def _lose(self, error: KVStoreError) -> None:
        self._caller.lose(error)
        self.close()


def outcome(pending: Pending[Any]) -> Any:
    """The answer to a call that is over.

    Raises:
        KVStoreError: it failed.
    """
    if pending.abandoned:
        # The call is remembered until its late answer comes. An error raised from within it would
        # keep the frames that it passed through, and so the caller's memory, for as long.
        raise DeadlineExceeded("no answer within the deadline")
    return pending.result()


def adopt(transport: ShmClientTransport, pending: Pending[Any]) -> None:
    """Map the segments that an answer brought.

    Args:
        transport: of the session.
        pending: the call for the segments.

    Raises:
        KVStoreError: the call failed.
        TransportError: a segment can't be mapped.
    """
    answer = outcome(pending)
    fds, pending.fds = pending.fds, []
    try:
        for number, size in answer.segments:
            transport.segments.add(number, fds.pop(0), size)
    finally:
        for fd in fds:
            os.close(fd)


def _rest(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What of the parts is still to be sent."""
    for index, part in enumerate(parts):
        if sent < len(part):
            return [part[sent:], *parts[index + 1 :]]
        sent -= len(part)
    return []
