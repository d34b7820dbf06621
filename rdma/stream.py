"""A stream socket under an event loop: the edge between a sans-I/O decoder and the kernel.

Bytes are received straight into the memory that the decoder names, and sent straight from the
memory that the caller gives; nothing is copied in between. One stream reads a bounded number of
bytes each time its socket is ready, so that many share a loop fairly.

Works with asyncio's own loop and with uvloop, and with a ``TlsSocket`` as with a plain one.
"""

from __future__ import annotations

import array
import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from rdma.errors import StreamClosed, TransportError
from rdma.shm import receive_with_fds
from rdma.tls import TlsSocket

__all__ = ["Decoder", "SocketStream", "tune"]

_READ_BUDGET: Final = 4 << 20
_READ_BUDGET_TLS: Final = 1 << 20
"""Less, since a byte takes several times as long."""
_MAX_PARTS: Final = 1_024
"""Most buffers in one ``sendmsg``: IOV_MAX of Linux."""
_UNIX_BUFFER: Final = 1 << 20
_NOTHING: Final = memoryview(b"")

E = TypeVar("E")


class Decoder(Protocol[E]):
    """What turns received bytes into events."""

    def get_buffer(self) -> memoryview:
        """Return where to receive to; empty to stop reading until ``resume_reading``."""

    def buffer_updated(self, number: int, /) -> list[E]:
        """Take note of bytes received to the buffer returned last."""

    def feed_eof(self) -> list[E]:
        """Take note that the peer ended the stream."""


def tune(sock: socket.socket) -> None:
    """Set the options that frames of up to many MiB want; for blocking sockets as well."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _Outgoing:
    """A frame on its way out: what is left of its parts."""

    __slots__ = ("fds", "left", "next_part", "on_sent", "parts")

    def __init__(
        self,
        parts: list[memoryview],
        left: int,
        on_sent: Callable[[bool], None] | None,
        fds: Sequence[int],
    ) -> None:
        self.parts = parts
        self.next_part = 0
        self.left = left
        self.on_sent = on_sent
        self.fds = fds

    def advance(self, number: int) -> None:
        """Take ``number`` bytes off the front."""
        self.left -= number
        while number:
            part = self.parts[self.next_part]
            if number < len(part):
                self.parts[self.next_part] = part[number:]
                return
            number -= len(part)
            self.parts[self.next_part] = _NOTHING
            self.next_part += 1


class SocketStream(Generic[E]):
    """One connected stream socket, owned by the stream from here on.

    Args:
        sock: connected Unix or TCP stream socket; made non-blocking. TLS has shaken hands.
        decoder: names the memory to receive to and makes events of what came.
        on_events: called with the events of each piece received.
        on_closed: called once where the stream has ended without :meth:`close`: with the error
            if it broke, with ``None`` when :meth:`finish` is through. The socket is closed by
            then. Where a peer on the same host takes nothing more, a stream that ``serves`` reads
            what it said before, and breaks then. The peer's end is no such case: it reaches the
            owner as the decoder's event, and the owner may still send before it finishes or
            closes.
        high_water: bytes waiting to be sent above which the stream is not ``writable``, until
            it is below half of that.
        serves: whether reading stops while the stream is not writable, so that who does not
            read its answers is not served further. One side of a connection only: were both to
            stop, each would wait for the other, so a client passes ``False``.
        loop: the event loop; the running one if not given.

    Attributes:
        on_fds: while set, file descriptors that arrive are handed to it, and are its to close;
            while not, the kernel drops them.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: Decoder[E],
        on_events: Callable[[list[E]], None],
        on_closed: Callable[[Exception | None], None],
        *,
        high_water: int = 8 << 20,
        serves: bool = True,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        sock.setblocking(False)
        tune(sock)
        self.on_fds: Callable[[list[int]], None] | None = None
        self._sock = sock
        self._fd = sock.fileno()
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._budget = _READ_BUDGET if self._tls is None else _READ_BUDGET_TLS
        self._loop = loop if loop is not None else asyncio.get_running_loop()
        self._decoder = decoder
        self._on_events = on_events
        self._on_closed = on_closed
        self._high_water = high_water
        self._serves = serves
        self._queue: deque[_Outgoing] = deque()
        self._queued = 0
        self._flushing = False
        self._writing = False
        self._reading = False
        self._wants_reading = True
        self._congested = False
        self._ended = False
        self._finishing = False
        self._closed = False
        self._unheard: OSError | None = None  # why nothing can be sent any more
        self._drained: asyncio.Future[None] | None = None

    # --- reading -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to read."""
        self._update_reading()

    def pause_reading(self) -> None:
        """Stop to read until :meth:`resume_reading`."""
        self._wants_reading = False
        self._update_reading()

    def resume_reading(self) -> None:
        """Read on, after :meth:`pause_reading` or after the decoder had no memory to name."""
        self._wants_reading = True
        self._update_reading()

    def _update_reading(self) -> None:
        wanted = (
            self._wants_reading
            and not (self._serves and self._congested)
            and not (self._ended or self._finishing or self._closed)
        )
        if wanted and not self._reading:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)
            if self._tls is not None:
                self._read_decrypted(self._tls)
        elif self._reading and not wanted:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _read_decrypted(self, tls: TlsSocket) -> None:
        """Read on in the loop's next turn what TLS has taken from the kernel already."""
        if self._reading and tls.waiting:
            self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        budget = self._budget
        while self._reading:
            buffer = self._decoder.get_buffer()
            wanted = len(buffer)
            if not wanted:
                self.pause_reading()
                return
            if wanted > budget:
                buffer = buffer[:budget]
                wanted = budget
            received = self._receive(buffer)
            if received < 0:
                return
            if not received:
                self._peer_ended()
                return
            events = self._decoder.buffer_updated(received)
            if events:
                self._on_events(events)
            budget -= received
            if received < wanted or not budget:
                break
        if self._tls is not None:
            self._read_decrypted(self._tls)

    def _receive(self, buffer: memoryview) -> int:
        """Return how many bytes came; -1 where none can be had now or any more."""
        try:
            if self.on_fds is None:
                return self._sock.recv_into(buffer)
            received, fds = receive_with_fds(self._sock, buffer)
        except (BlockingIOError, InterruptedError):
            return -1
        except (OSError, TransportError) as error:
            self._break(error)
            return -1
        if fds:
            self.on_fds(fds)
        return received

    def _peer_ended(self) -> None:
        self._ended = True
        self._update_reading()
        events = self._decoder.feed_eof()
        if events:
            self._on_events(events)
        if self._unheard is not None and not self._closed:
            self._break(self._unheard)

    # --- sending -------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent."""
        return self._queued

    @property
    def writable(self) -> bool:
        """Whether less than ``high_water`` bytes wait to be sent."""
        return not self._congested and not self._closed

    @property
    def closed(self) -> bool:
        """Whether the stream is closed."""
        return self._closed

    def send(
        self,
        parts: Sequence[bytes | memoryview],
        on_sent: Callable[[bool], None] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """Send one frame.

        Args:
            parts: the bytes, in order; views of single bytes. They must not change until they
                have left.
            on_sent: called once, perhaps before this returns: with ``True`` when the last byte
                has been given to the kernel, with ``False`` if that will never happen.
            fds: file descriptors to go with the first byte (Unix sockets); open until then.
        """
        if self._closed or self._finishing or self._unheard is not None:
            if on_sent is not None:
                on_sent(False)
            return
        if not self._queue and not fds and len(parts) == 1:
            part = parts[0]
            sent = self._send_now(part)
            if sent == len(part):
                if on_sent is not None:
                    on_sent(True)
                return
            if sent < 0:
                if on_sent is not None:
                    on_sent(False)
                return
            parts = (memoryview(part)[sent:],)
        views = [part if type(part) is memoryview else memoryview(part) for part in parts]
        left = sum(map(len, views))
        self._queue.append(_Outgoing(views, left, on_sent, fds))
        self._queued += left
        if not self._writing:
            self._flush()

    async def wait_writable(self) -> None:
        """Wait until less than ``high_water`` bytes wait to be sent.

        Raises:
            StreamClosed: the stream is or gets closed.
        """
        while not self.writable:
            if self._closed:
                raise StreamClosed("the connection is closed")
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def _send_now(self, part: bytes | memoryview) -> int:
        try:
            return self._sock.send(part)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._cannot_send(error)
            return -1

    def _flush(self) -> None:
        """Send what the kernel takes now, and see to it that the rest follows."""
        if self._flushing:
            return
        self._flushing = True
        try:
            while self._queue and self._send_queued():
                pass
        finally:
            self._flushing = False
        if not self._closed:
            self._after_flush()

    def _send_queued(self) -> bool:
        """Offer the kernel what comes next; return whether it took all of it."""
        parts = self._gather()
        try:
            sent = self._send_parts(parts)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._cannot_send(error)
            return False
        self._take_off(sent)
        return sent == sum(map(len, parts))

    def _send_parts(self, parts: list[memoryview]) -> int:
        first = self._queue[0]
        if not first.fds:
            return self._sock.sendmsg(parts)
        rights = array.array("i", first.fds)
        sent = self._sock.sendmsg(parts, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        first.fds = ()
        return sent

    def _gather(self) -> list[memoryview]:
        """Return the parts to send next: never beyond a frame that carries descriptors."""
        parts: list[memoryview] = []
        for frame in self._queue:
            if parts and frame.fds:
                break
            room = _MAX_PARTS - len(parts)
            parts += frame.parts[frame.next_part : frame.next_part + room]
            if len(parts) >= _MAX_PARTS or frame.fds:
                break
        return parts

    def _take_off(self, sent: int) -> None:
        self._queued -= sent
        while self._queue:
            frame = self._queue[0]
            step = min(sent, frame.left)
            frame.advance(step)
            sent -= step
            if frame.left:
                return
            self._queue.popleft()
            if frame.on_sent is not None:
                frame.on_sent(True)

    def _after_flush(self) -> None:
        waiting = bool(self._queue)
        if waiting and not self._writing:
            self._writing = True
            self._loop.add_writer(self._fd, self._flush)
        elif self._writing and not waiting:
            self._writing = False
            self._loop.remove_writer(self._fd)
        if self._finishing and not waiting:
            self._end(None)
            return
        congested = self._queued > (self._high_water // 2 if self._congested else self._high_water)
        if congested is not self._congested:
            self._congested = congested
            self._update_reading()
            if not congested:
                self._wake_senders()

    def _wake_senders(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    # --- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Read no more, send what waits, then close and call ``on_closed(None)``.

        Who does not read can hold this up for ever: the owner sets a timer and calls
        :meth:`close`.
        """
        if self._closed or self._finishing:
            return
        self._finishing = True
        self._update_reading()
        if not self._queue:
            self._loop.call_soon(self._finish_now)

    def close(self) -> None:
        """Close at once; may be called again.

        Frames not sent yet are told so by ``on_sent(False)`` before this returns. After it no
        callback is called and no memory is touched.
        """
        if self._closed:
            return
        self._closed = True
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)
        self._sock.close()
        self._wake_senders()
        self._drop_queue()

    def _drop_queue(self) -> None:
        queue, self._queue = self._queue, deque()
        self._queued = 0
        for frame in queue:
            if frame.on_sent is not None:
                frame.on_sent(False)

    def disown(self) -> None:
        """Close only this process's end, in the child of a fork: the loop is the parent's."""
        self._closed = True
        self._sock.close()

    def _finish_now(self) -> None:
        if not self._closed and not self._queue:
            self._end(None)

    def _cannot_send(self, error: OSError) -> None:
        """Break the stream, at once or where there is no more to read."""
        gone = isinstance(error, ConnectionError) and self._sock.family == socket.AF_UNIX
        if not (gone and self._serves) or self._ended or self._finishing:
            self._break(error)
            return
        # What the peer said last may matter even where it awaits no answer.
        self._unheard = error
        self._drop_queue()
        if not self._flushing:
            self._after_flush()

    def _break(self, error: Exception) -> None:
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self.close()
        self._on_closed(error)
