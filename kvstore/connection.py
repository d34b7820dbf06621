"""One connection: frames in, replies out, around a session.

A malformed request is answered with an error and costs nobody else anything. A broken frame, or a
request id that is in use, leaves no way to go on: the peer is told, and the connection ends.

What a client could still touch is freed only when it has closed its end. Where the node has to end
a session of the ``shm`` transport itself, its memory therefore lingers until the client is gone
too. And where the client is dying, until it is dead: the kernel closes its socket before its GPU
has stopped to copy from and to that memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Protocol

import structlog

from kvstore.entry import Entry
from kvstore.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVStoreError,
    ProtocolError,
    Unavailable,
)
from kvstore.metrics import Metrics
from kvstore.node import Node
from kvstore.process_watch import ProcessWatch, pid_of_peer
from kvstore.protocol.frames import (
    Broken,
    Closed,
    Event,
    FrameDecoder,
    HeaderReceived,
    PayloadReceived,
    encode,
)
from kvstore.protocol.messages import (
    Abort,
    DeviceSegments,
    Exists,
    Follow,
    Get,
    Hello,
    Incoming,
    Match,
    Ping,
    Release,
    Reserve,
    Segments,
    Take,
    Unmapped,
    Welcome,
    Write,
    answer_header,
    error_header,
    parse_request,
    parse_request_id,
)
from kvstore.reply import Reply
from kvstore.session import Session
from rdma.errors import BadPlace, TransportError
from rdma.stream import SocketStream
from rdma.tls import TlsSocket
from rdma.verbs.errors import TransferTimeout
from tiers.errors import TierError

_log = structlog.get_logger(__name__)

HELLO_SECONDS: Final = 10.0
"""How long a connection may stay open without a session."""
_MOST_WAITING: Final = 256
"""Requests of one connection that may wait at once; above, it is not read."""


_NAMES: Final[dict[type, str]] = {
    kind: kind.__name__.lower()
    for kind in (Abort, Exists, Follow, Get, Match, Ping, Release, Reserve, Segments, Take, Write)
} | {DeviceSegments: "device_segments", Unmapped: "unmapped"}
_ENDING: Final = frozenset((Abort, DeviceSegments, Ping, Release, Segments, Unmapped, Write))
"""What a client may still ask while the node stops, to end what it has begun."""


class Reception(Protocol):
    """What admits clients: the server."""

    @property
    def node(self) -> Node:
        """The node whose sessions these are."""

    @property
    def longest_deadline(self) -> float:
        """Seconds to which longer deadlines are shortened."""

    @property
    def max_payload(self) -> int:
        """Bytes of payload in one frame."""

    def welcome(self, hello: Hello, sock: socket.socket) -> tuple[Session, Welcome]:
        """Open a session on a connection, or raise the error that the client is answered."""

    def farewell(self, connection: Connection) -> None:
        """Forget a connection that has ended."""


class Connection:
    """A client's connection.

    Args:
        reception: admits the client.
        sock: connected; the connection's from here on.
    """

    def __init__(self, reception: Reception, sock: socket.socket) -> None:
        self.session: Session | None = None
        self._named: dict[str, str] = {}  # what the log calls the session
        self._reception = reception
        self._node = reception.node
        self._longest_deadline = reception.longest_deadline
        self._metrics: Metrics = reception.node.metrics
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._decoder = FrameDecoder(max_payload=reception.max_payload)
        self._stream: SocketStream[Event] = SocketStream(
            sock, self._decoder, self._on_events, self._on_closed
        )
        self._landing: Incoming | None = None
        self._waiting: dict[int, asyncio.Task[Reply]] = {}
        self._lingering: socket.socket | None = None
        self._dying: ProcessWatch | None = None
        self._pid = pid_of_peer(sock)
        self._refusing = False
        self._failed = False
        self._timer = self._loop.call_later(HELLO_SECONDS, self._too_slow)

    def __repr__(self) -> str:
        return f"<Connection {self.session!r} waiting={len(self._waiting)}>"

    @property
    def busy(self) -> bool:
        """Whether requests, puts, replies or a client's reads on a GPU are under way."""
        session = self.session
        writing = session is not None and session.writing and not self._failed
        reading = session is not None and session.reading_gpu
        return bool(writing or reading or self._waiting or self._stream.queued or self._landing)

    def start(self) -> None:
        """Begin to serve."""
        self._stream.start()

    def refuse(self) -> None:
        """Answer what begins anew with Unavailable: the node is stopping."""
        self._refusing = True

    def close(self) -> None:
        """End the connection at once, whatever is under way, and free what it holds."""
        self._failed = True
        self._stream.close()
        self._end(at_once=True)

    # --- incoming ------------------------------------------------------------------------------

    def _on_events(self, events: Sequence[Event]) -> None:
        while events:
            more: Sequence[Event] = ()
            for event in events:
                if self._failed:
                    return
                if type(event) is HeaderReceived:
                    # Only the last header of a batch has a payload, whose landing may bring more.
                    more = self._on_header(event.header, event.payload_length)
                elif type(event) is PayloadReceived:
                    incoming, self._landing = self._landing, None
                    if incoming is not None:
                        self._serve(incoming)
                elif type(event) is Broken:
                    self._fail(event.error)
                elif type(event) is Closed:
                    self._on_closed(None)
            events = more

    def _on_header(self, header: list[object], payload_length: int) -> Sequence[Event]:
        try:
            request_id = parse_request_id(header)
            if request_id in self._waiting:
                raise ProtocolError(f"request id {request_id} is in use")
        except ProtocolError as error:
            self._fail(error)
            return ()
        try:
            incoming = parse_request(header, payload_length)
            if payload_length:
                views = self._open_session().landing(incoming.request)  # type: ignore[arg-type]
                self._landing = incoming
                return self._decoder.receive_into(views)
        except (KVStoreError, TransportError) as error:
            self._answer_error(request_id, error)
            return self._decoder.discard() if payload_length else ()
        self._serve(incoming)
        return ()

    def _open_session(self) -> Session:
        if self.session is None:
            raise InvalidRequest("the first request must be HELLO")
        return self.session

    def _serve(self, incoming: Incoming) -> None:
        request_id, request = incoming.request_id, incoming.request
        try:
            if self._refusing and type(request) not in _ENDING:
                raise Unavailable("the node is stopping")
            if type(request) is Hello:
                self._hello(request_id, request)
                return
            seconds = incoming.deadline_ms / 1000
            if seconds > self._longest_deadline:
                seconds = self._longest_deadline
            session = self.session or self._open_session()
            handled = session.handle(request, self._loop.time() + seconds)
        except Exception as error:  # noqa: BLE001 - boundary: one request's failure is its own
            self._answer_error(request_id, error)
            return
        self._metrics.requests[_NAMES[type(request)]] += 1
        if type(handled) is Reply:
            self._reply(request_id, handled)
        else:
            self._wait(request_id, handled)  # type: ignore[arg-type]

    def _hello(self, request_id: int, hello: Hello) -> None:
        if self.session is not None:
            raise InvalidRequest("the session is open already")
        self.session, welcome = self._reception.welcome(hello, self._sock)
        over = self.session.transport.name
        self._named = {"client": hello.client, "over": over, "tenant": hello.tenant}
        if isinstance(self._sock, TlsSocket) and self._sock.peer:
            self._named["certificate"] = self._sock.peer
        _log.info("session opened", **self._named)
        self._timer.cancel()
        self._reply(request_id, Reply(welcome))

    # --- waiting requests ------------------------------------------------------------------------

    def _wait(self, request_id: int, handled: Coroutine[Any, Any, Reply]) -> None:
        task = self._loop.create_task(handled)
        self._waiting[request_id] = task
        task.add_done_callback(lambda done: self._finished(request_id, done))
        if len(self._waiting) >= _MOST_WAITING:
            self._stream.pause_reading()

    def _finished(self, request_id: int, task: asyncio.Task[Reply]) -> None:
        self._no_longer_waiting(request_id)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._reply(request_id, task.result())
        else:
            self._answer_error(request_id, error)

    def _no_longer_waiting(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)
        if len(self._waiting) == _MOST_WAITING - 1 and not self._stream.closed:
            self._stream.resume_reading()

    # --- outgoing ------------------------------------------------------------------------------

    def _reply(self, request_id: int, reply: Reply) -> None:
        if reply.answer is None:
            return
        header = answer_header(request_id, reply.answer)
        if reply.payload or reply.pinned:
            self._send_payload(header, reply.payload, reply.pinned)
        else:
            self._stream.send((encode(header),), None, reply.fds)
        if reply.used:
            self._node.touch(reply.used)

    def _send_payload(
        self, header: list[object], payload: Sequence[memoryview], pinned: Sequence[Entry]
    ) -> None:
        node = self._node

        def on_sent(_: bool) -> None:
            node.unpin(pinned)

        self._stream.send([encode(header, sum(map(len, payload))), *payload], on_sent)

    def _answer_error(self, request_id: int, error: BaseException) -> None:
        known = self._as_known(error)
        self._metrics.errors[known.code] += 1
        if request_id:
            self._stream.send([encode(error_header(request_id, known))])
        if self.session is not None and self.session.transport.broken is not None:
            # Nothing can be moved in this session any more: the client has to open another.
            self._stream.finish()

    def _as_known(self, error: BaseException) -> KVStoreError:
        if isinstance(error, KVStoreError):
            return error
        if isinstance(error, BadPlace):
            return InvalidRequest(str(error))
        if isinstance(error, TransferTimeout):
            return DeadlineExceeded(str(error))
        if isinstance(error, TransportError | TierError):
            return Unavailable(str(error))
        self._metrics.internal_errors += 1
        _log.error("request failed", connection=repr(self), exc_info=error)
        return InternalError("the node failed at this request; its log says why")

    # --- the end -------------------------------------------------------------------------------

    def _too_slow(self) -> None:
        self._fail(ProtocolError(f"no HELLO within {HELLO_SECONDS:.0f} s"))

    def _fail(self, error: ProtocolError) -> None:
        """Tell the peer what is wrong with the connection, and end it."""
        self._failed = True
        _log.info("connection broken", error=str(error), session=repr(self.session))
        self._metrics.errors[error.code] += 1
        self._stream.send([encode(error_header(0, error))])
        if self._stream.closed:
            return  # the peer was gone already, and so is all that it held
        if self.session is not None and self.session.transport.name == "shm":
            self._lingering = self._sock.dup()
        self._stream.finish()
        self._timer.cancel()
        self._timer = self._loop.call_later(HELLO_SECONDS, self._stop_sending)

    def _stop_sending(self) -> None:
        self._stream.close()
        self._on_closed(None)

    def _on_closed(self, error: Exception | None) -> None:
        if error is not None:
            _log.info("connection lost", error=str(error), session=repr(self.session))
        self._failed = True
        self._stream.close()
        if self._lingering is None:
            self._end()
            return
        self._timer.cancel()
        lingering = self._lingering
        lingering.setblocking(False)
        lingering.shutdown(socket.SHUT_WR)
        self._loop.add_reader(lingering.fileno(), self._drain)

    def _drain(self) -> None:
        """Throw away what a client still sends after its session was ended, until it is gone."""
        assert self._lingering is not None
        try:
            ended = not self._lingering.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            self._end()

    def _end(self, *, at_once: bool = False) -> None:
        self._timer.cancel()
        if self._lingering is not None:
            self._loop.remove_reader(self._lingering.fileno())
            self._lingering.close()
            self._lingering = None
        for task in list(self._waiting.values()):
            task.cancel()
        self._waiting.clear()
        if self._dying is None and self.session is not None and self.session.holds_memory:
            self._dying = ProcessWatch.of_dying(self._pid)
            if self._dying is not None:
                self._dying.when_over(self._free)
        if self._dying is None or at_once:
            self._free()

    def _free(self) -> None:
        if self._dying is not None:
            self._dying.close()
        if self.session is not None:
            self.session.close()
        if self._named:
            _log.info("session closed", **self._named)
            self._named = {}
        self._reception.farewell(self)
