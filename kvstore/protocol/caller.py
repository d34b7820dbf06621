"""The client's side of one connection, without I/O: shared by the blocking and asyncio clients.

A :class:`Caller` numbers requests, turns received bytes into finished calls, lets payload land in
the memory of the call that it belongs to, and forgets calls whose deadline has passed: what is
answered to them later goes nowhere, and what the node reserved or pinned for them is given back.

The owner sends what :meth:`Caller.begin` and :meth:`Caller.take_outbox` return, in that order and
whole: if a frame could be sent in part only, the connection is of no more use.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Final, Generic, TypeVar

from kvstore.errors import (
    AccessDenied,
    DeadlineExceeded,
    KVStoreError,
    ProtocolError,
    Unavailable,
)
from kvstore.protocol.frames import (
    Broken,
    Closed,
    Event,
    FrameDecoder,
    HeaderReceived,
    encode,
)
from kvstore.protocol.messages import (
    MAX_DEADLINE_MS,
    MAX_REQUEST_ID,
    Abort,
    Answer,
    GetAnswer,
    Request,
    ReserveAnswer,
    Segments,
    SegmentsAnswer,
    parse_answer,
    parse_error,
    parse_request_id,
    release_header,
    request_header,
)

__all__ = ["Call", "Caller", "Counters"]

A = TypeVar("A", bound=Answer)

_MARGIN_SHARE: Final = 0.1
_MARGIN_MOST: Final = 0.02
"""How long before the deadline the node is told to answer, in seconds, for it to be in time."""


@dataclass(slots=True)
class Counters:
    """What a client has done, over all its connections.

    Attributes:
        calls: requests sent.
        answers: answers in time, errors among them.
        errors: answers that were errors.
        timeouts: calls given up at their deadline.
        late_answers: answers to calls given up before.
        lost_calls: calls that a broken connection left without an answer.
        payload_in: payload bytes received on the stream.
        payload_out: payload bytes sent on the stream.
        connects: sessions opened.
        connect_failures: attempts that opened none.
        refused: calls answered with a miss at once because the node was in doubt.
    """

    calls: int = 0
    answers: int = 0
    errors: int = 0
    timeouts: int = 0
    late_answers: int = 0
    lost_calls: int = 0
    payload_in: int = 0
    payload_out: int = 0
    connects: int = 0
    connect_failures: int = 0
    refused: int = 0

    def snapshot(self) -> dict[str, int]:
        """Return the counters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Call(Generic[A]):
    """One request in flight, or what became of it.

    Attributes:
        request_id: its number on this connection.
        request: what was asked.
        deadline: when the caller gives up, on the owner's clock.
        seen: called with each piece of the sink's memory once it is filled.
        done: whether it has an answer or an error.
        fds: file descriptors that came with the answer; the owner's to close.
        context: the owner's, for instance a future.
    """

    __slots__ = (
        "_answer",
        "_error",
        "abandoned",
        "context",
        "deadline",
        "done",
        "fds",
        "request",
        "request_id",
        "seen",
        "sink",
    )

    def __init__(
        self,
        request_id: int,
        request: Request[A],
        deadline: float,
        sink: Callable[[A], Sequence[memoryview]] | None,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.deadline = deadline
        self.sink = sink
        self.seen: Callable[[memoryview], object] | None = None
        self.done = False
        self.abandoned = False
        self.fds: list[int] = []
        self.context: object = None
        self._answer: A | None = None
        self._error: KVStoreError | None = None

    def result(self) -> A:
        """Return the answer.

        Raises:
            KVStoreError: the call failed; ``DeadlineExceeded`` and ``Unavailable`` among others.
        """
        if self._error is not None:
            raise self._error
        if self._answer is None:
            raise ValueError("the call has no answer yet")
        return self._answer

    @property
    def error(self) -> KVStoreError | None:
        """What the call failed with, if it did."""
        return self._error

    def succeed(self, answer: A) -> None:
        """Give the call its answer."""
        self._answer = answer
        self.done = True
        self.sink = None

    def fail(self, error: KVStoreError) -> None:
        """Give the call an error."""
        self._error = error
        self.done = True
        self.sink = None


class Caller:
    """The calls of one connection, from ``HELLO`` to its end. Its owner's lock guards it.

    It is a decoder in the sense of ``rdma.stream``: its events are the calls that are done.

    Args:
        counters: where to count; shared by the connections of one client.
        max_payload: largest payload accepted, in bytes; may be set when the node has said so.

    Attributes:
        broken: why the connection can't be used any more, once it can't. The owner closes it.
        heard: how many answers have come, late ones among them; tells whether the node lives.
    """

    def __init__(self, counters: Counters | None = None, max_payload: int = 1 << 40) -> None:
        self.counters = counters if counters is not None else Counters()
        self.broken: KVStoreError | None = None
        self.heard = 0
        self._decoder = FrameDecoder(max_payload=max_payload)
        self._pending: dict[int, Call[Answer]] = {}
        self._last_id = 0
        self._landing: tuple[Call[Answer], Answer] | None = None
        self._outbox: list[bytes] = []
        self._fds: deque[list[int]] = deque()

    # --- calls ---------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """How many requests have no answer yet, those given up among them."""
        return len(self._pending)

    @property
    def expects_fds(self) -> bool:
        """Whether file descriptors may come, so that they must be received."""
        return any(call.request.op == Segments.op for call in self._pending.values())

    def begin(
        self,
        request: Request[A],
        deadline: float,
        now: float,
        sink: Callable[[A], Sequence[memoryview]] | None = None,
        payload_length: int = 0,
    ) -> tuple[Call[A], bytes]:
        """Make a request.

        Args:
            request: what is asked.
            deadline: when the caller gives up.
            now: the time, on the same clock.
            sink: returns the memory that the answer's payload lands in; called once if the
                answer is no error and comes in time. Without it, a payload breaks the connection.
            payload_length: how many bytes the owner sends behind the request.

        Returns:
            The call, and the bytes to send before the payload.

        Raises:
            Unavailable: the connection is broken.
            AccessDenied: it is, since one end does not accept the other.
            DeadlineExceeded: the deadline has passed.
            InvalidRequest: the request is malformed.
        """
        if self.broken is not None:
            raise self._gone(self.broken)
        if deadline <= now:
            raise DeadlineExceeded("the deadline passed before the request was sent")
        request_id = self._next_id()
        header = request_header(request_id, _node_deadline_ms(deadline - now), request)
        frame = encode(header, payload_length)
        call = Call(request_id, request, deadline, sink)
        self._pending[request_id] = call  # type: ignore[assignment]
        self.counters.calls += 1
        self.counters.payload_out += payload_length
        return call, frame

    def release(self, leases: list[int]) -> bytes:
        """Return the bytes that give ``leases`` back; nothing is answered to them."""
        return encode(release_header(leases))

    def abandon(self, call: Call[A]) -> list[Call[Answer]]:
        """Give a call up: from now on nothing is written to its memory.

        Returns:
            Calls that were done by bytes received already.
        """
        if call.done:
            return []
        call.abandoned = True
        call.fail(DeadlineExceeded("no answer within the deadline"))
        self.counters.timeouts += 1
        if self._landing is not None and self._landing[0] is call:
            self._give_back(self._landing[1])
            return self._handle(self._decoder.discard())
        return []

    def expire(self, now: float) -> list[Call[Answer]]:
        """Give up the calls whose deadline has passed.

        Returns:
            These calls, and others that were done meanwhile.
        """
        late = [
            call for call in self._pending.values() if not call.abandoned and call.deadline <= now
        ]
        others = [done for call in late for done in self.abandon(call)]
        return late + [call for call in others if call not in late]

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a call in flight."""
        return min(
            (call.deadline for call in self._pending.values() if not call.abandoned),
            default=None,
        )

    def take_outbox(self) -> list[bytes]:
        """Return frames to send that give back what late answers brought, and forget them."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def lose(self, error: KVStoreError) -> list[Call[Answer]]:
        """Take note that the connection is gone.

        Args:
            error: what broke it; kept if it is the first.

        Returns:
            The calls that will have no answer, failed with ``Unavailable``, or ``AccessDenied``
            where that is why.
        """
        if self.broken is None:
            self.broken = error
        self._landing = None
        self._decoder.abort()
        lost = [call for call in self._pending.values() if not call.done]
        self._pending.clear()
        for call in lost:
            _close(call.fds)
            call.fds = []
            call.fail(self._gone(self.broken))
        self.counters.lost_calls += len(lost)
        while self._fds:
            _close(self._fds.popleft())
        return lost

    @staticmethod
    def _gone(why: KVStoreError) -> KVStoreError:
        if isinstance(why, AccessDenied):
            return AccessDenied(str(why))
        return Unavailable(f"the connection is broken: {why}")

    # --- received bytes ------------------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return the memory to receive to; empty once the connection is broken."""
        return self._decoder.get_buffer()

    def buffer_updated(self, number: int) -> list[Call[Answer]]:
        """Take note of ``number`` bytes received; return the calls that are done by them.

        After it the owner looks at ``broken``.
        """
        return self._handle(self._decoder.buffer_updated(number))

    def feed_eof(self) -> list[Call[Answer]]:
        """Take note of the node's end of the stream; return the calls lost by it."""
        return self._handle(self._decoder.feed_eof())

    def feed_fds(self, fds: list[int]) -> None:
        """Take over file descriptors that came with the bytes about to be reported."""
        if self.broken is None and self.expects_fds:
            self._fds.append(fds)
        else:
            _close(fds)

    def set_max_payload(self, max_payload: int) -> None:
        """Bound the payload accepted, in bytes."""
        self._decoder.max_payload = max_payload

    # --- inside --------------------------------------------------------------------------------

    def _next_id(self) -> int:
        while True:
            self._last_id = self._last_id % MAX_REQUEST_ID + 1
            if self._last_id not in self._pending:
                return self._last_id

    def _handle(self, events: list[Event]) -> list[Call[Answer]]:
        done: list[Call[Answer]] = []
        while events:
            more: list[Event] = []
            try:
                for event in events:
                    if type(event) is HeaderReceived:
                        # Only the last header of a batch has a payload, which may bring more.
                        more = self._header(event.header, event.payload_length, done)
                    elif type(event) is Broken:
                        raise event.error
                    elif type(event) is Closed:
                        raise Unavailable("the node ended the connection")
                    else:
                        self._payload_received(done)
            except KVStoreError as error:
                done += self.lose(error)
                break
            events = more
        return done

    def _header(
        self, header: list[object], payload_length: int, done: list[Call[Answer]]
    ) -> list[Event]:
        """Take an answer; return the events that bytes received already hold behind it."""
        request_id = parse_request_id(header)
        if request_id == 0:
            raise parse_error(header)
        call = self._pending.get(request_id)
        if call is None:
            raise ProtocolError(f"an answer to request {request_id}, which is not in flight")
        self.heard += 1
        if header[1] != 0:
            return self._error(call, parse_error(header), payload_length, done)
        answer = parse_answer(call.request, header)
        if type(answer) is SegmentsAnswer:
            self._claim_fds(call, len(answer.segments))
        if call.abandoned:
            return self._late(call, answer, payload_length)
        return self._in_time(call, answer, payload_length, done)

    def _error(
        self,
        call: Call[Answer],
        error: KVStoreError,
        payload_length: int,
        done: list[Call[Answer]],
    ) -> list[Event]:
        if payload_length:
            raise ProtocolError("a payload behind an error")
        del self._pending[call.request_id]
        if call.abandoned:
            self.counters.late_answers += 1
            return []
        self.counters.answers += 1
        self.counters.errors += 1
        call.fail(error)
        done.append(call)
        return []

    def _in_time(
        self,
        call: Call[Answer],
        answer: Answer,
        payload_length: int,
        done: list[Call[Answer]],
    ) -> list[Event]:
        if call.sink is not None or payload_length:
            views = call.sink(answer) if call.sink is not None else ()
            if sum(map(len, views)) != payload_length:
                raise ProtocolError(f"a payload of {payload_length} bytes does not fit the answer")
            if payload_length:
                self._landing = (call, answer)
                return self._decoder.receive_into(views, call.seen)
        self._finish(call, answer, done)
        return []

    def _late(self, call: Call[Answer], answer: Answer, payload_length: int) -> list[Event]:
        self.counters.late_answers += 1
        self._give_back(answer)
        _close(call.fds)
        call.fds = []
        if not payload_length:
            del self._pending[call.request_id]
            return []
        self._landing = (call, answer)
        return self._decoder.discard()

    def _payload_received(self, done: list[Call[Answer]]) -> None:
        if self._landing is None:
            raise ProtocolError("a payload that nobody waits for")
        call, answer = self._landing
        self._landing = None
        if call.abandoned:
            del self._pending[call.request_id]
        else:
            self._finish(call, answer, done)

    def _finish(self, call: Call[Answer], answer: Answer, done: list[Call[Answer]]) -> None:
        del self._pending[call.request_id]
        self.counters.answers += 1
        call.succeed(answer)
        done.append(call)

    def _give_back(self, answer: Answer) -> None:
        if type(answer) is GetAnswer and answer.lease:
            self._outbox.append(self.release([answer.lease]))
        elif type(answer) is ReserveAnswer and answer.reservation:
            self._abort(answer.reservation)

    def _abort(self, reservation: int) -> None:
        request = Abort(reservation)
        request_id = self._next_id()
        call: Call[Answer] = Call(request_id, request, math.inf, None)
        call.abandoned = True
        call.fail(DeadlineExceeded("nobody waits for this answer"))
        self._pending[request_id] = call
        self._outbox.append(encode(request_header(request_id, MAX_DEADLINE_MS, request)))

    def _claim_fds(self, call: Call[Answer], number: int) -> None:
        if not number:
            return
        fds = self._fds.popleft() if self._fds else []
        call.fds = fds
        if len(fds) != number:
            _close(fds)
            call.fds = []
            raise ProtocolError(f"{len(fds)} file descriptors came for {number} segments")


def _node_deadline_ms(seconds: float) -> int:
    if seconds >= MAX_DEADLINE_MS / 1_000:
        return MAX_DEADLINE_MS
    margin = _MARGIN_SHARE * seconds
    if margin > _MARGIN_MOST:
        margin = _MARGIN_MOST
    return int(1_000 * (seconds - margin)) or 1


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
