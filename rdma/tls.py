"""TLS on a socket that never blocks, for those who read and write it like a plain one.

Bytes are decrypted straight into the memory that the reader names, as far as TLS allows, and
encrypted straight from the memory that the writer gives.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from rdma.errors import TlsError

__all__ = ["TlsSocket", "explained", "readable", "shake_hands", "shake_hands_until", "wrap"]

_RECORD: Final = 16 << 10
"""Bytes of payload in one record of TLS at most."""
_CHUNK: Final = 16 * _RECORD
"""Bytes encrypted in one call: it does not return before all of them are."""
_SMALL: Final = 2 << 10
"""Parts below this are copied together, so that each is no record of its own."""
_BUDGET: Final = 1 << 20
"""Bytes that one ``sendmsg`` takes at most, and so how long it keeps an event loop."""

_DENIALS: Final = (
    "CERTIFICATE",  # all that OpenSSL calls alerts about certificates, but for these
    "UNKNOWN_CA",
    "ACCESS_DENIED",
)
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "BAD_RECORD_TYPE")


class TlsSocket(ssl.SSLSocket):
    """A connection over TLS. Made by :func:`wrap`; never blocks.

    Where there is nothing to read or no room to write, ``BlockingIOError`` says so, whatever TLS
    waits for; other errors are ``OSError``, with a sentence.
    """

    _unsent: bytes | memoryview | None = None
    _failure: OSError | None = None
    _ended = False

    @property
    def waiting(self) -> bool:
        """Whether there is something to read that the file descriptor does not show any more."""
        return self._ended or self._failure is not None or self.pending() > 0

    @property
    def peer(self) -> str:
        """Name of the other end in its certificate, if it had to show one; for logs."""
        certificate: Any = self.getpeercert() or {}
        for part in certificate.get("subject", ()):
            for key, value in part:
                if key == "commonName":
                    return str(value)
        names = certificate.get("subjectAltName", ())
        return str(names[0][1]) if names else ""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive what there is, of many records where it fits; 0 at the end.

        Raises:
            BlockingIOError: there is nothing yet.
            OSError: the connection broke.
        """
        if self._failure is not None:
            raise self._failure
        view = memoryview(buffer)
        size = nbytes or len(view)
        got = 0
        while got < size:
            try:
                count: Any = self.read(size - got, view[got:size])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if got:
                    return got
                raise _would_block() from None
            except OSError as error:
                self._failure = explained(error)
                if got:
                    return got
                raise self._failure from None
            if not count:
                self._ended = True
                return got
            got += count
        return got

    def send(self, data: Any, flags: int = 0) -> int:
        """Send the beginning of ``data``; see :meth:`sendmsg`."""
        return self.sendmsg((data,))  # TLS has no flags; not waiting is what it does anyway

    def sendmsg(self, buffers: Iterable[Any]) -> int:  # type: ignore[override]
        """Send the beginning of what ``buffers`` hold.

        After ``BlockingIOError`` the next call must be given the same bytes again, and may be given
        more.

        Returns:
            How many bytes were taken.

        Raises:
            BlockingIOError: none were.
            OSError: the connection broke.
        """
        if self._unsent is not None:
            # TLS has begun with these, and takes nothing else before it is through.
            return self._write(self._unsent)
        sent = 0
        for chunk in _chunks(buffers):
            try:
                sent += self._write(chunk)
            except BlockingIOError:
                if sent:
                    return sent
                raise
            if sent >= _BUDGET:
                break
        return sent

    def _write(self, chunk: bytes | memoryview) -> int:
        try:
            self.write(chunk)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._unsent = chunk
            raise _would_block() from None
        except OSError as error:
            raise explained(error) from None
        self._unsent = None
        return len(chunk)

    def shutdown(self, how: int) -> None:
        """End one direction or both, of the socket beneath; what TLS holds is left alone."""
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """Close, and let go of all memory."""
        self._unsent = None
        super().close()


def wrap(sock: socket.socket, context: ssl.SSLContext, host: str | None = None) -> TlsSocket:
    """Take a connected socket over for TLS; no byte is sent yet.

    Args:
        sock: closed where this fails.
        context: made by ``rdma.certificates``.
        host: whom the other end's certificate must name, for the end that connected; None for the
            one that was connected to.

    Raises:
        TlsError: the connection has ended already, or the name is none.
    """
    sock.setblocking(False)
    try:
        wrapped = context.wrap_socket(
            sock,
            server_side=host is None,
            do_handshake_on_connect=False,
            server_hostname=host,
        )
    except (OSError, ValueError) as error:
        sock.close()
        raise TlsError(f"TLS can't begin: {error}") from error
    assert isinstance(wrapped, TlsSocket)
    return wrapped


async def shake_hands(sock: TlsSocket) -> None:
    """Agree on keys with the other end, on the running loop; the caller sets a time.

    Raises:
        TlsError: it did not come to that.
    """
    loop = asyncio.get_running_loop()
    fd = sock.fileno()
    while True:
        wanted = _handshake_step(sock)
        if not wanted:
            return
        if wanted == select.POLLIN:
            await readable(sock)
        else:
            await _turn(lambda wake: loop.add_writer(fd, wake), lambda: loop.remove_writer(fd))


async def readable(sock: socket.socket) -> None:
    """Wait until a socket has something to read, or has ended; whatever lies above it."""
    loop, fd = asyncio.get_running_loop(), sock.fileno()
    await _turn(lambda wake: loop.add_reader(fd, wake), lambda: loop.remove_reader(fd))


def shake_hands_until(sock: TlsSocket, end: float) -> None:
    """Agree on keys with the other end, waiting for it.

    Args:
        sock: the connection.
        end: when to give up, on the monotonic clock.

    Raises:
        TimeoutError: it took longer.
        TlsError: it did not come to that.
    """
    while wanted := _handshake_step(sock):
        poll = select.poll()
        poll.register(sock.fileno(), wanted)
        if not poll.poll(max(end - time.monotonic(), 0.0) * 1000):
            raise TimeoutError


def _handshake_step(sock: TlsSocket) -> int:
    """Go on with a handshake; return what to poll for, 0 where it is over."""
    try:
        sock.do_handshake()
    except ssl.SSLWantReadError:
        return select.POLLIN
    except ssl.SSLWantWriteError:
        return select.POLLOUT
    except OSError as error:
        raise explained(error) from None
    return 0


async def _turn(add: Callable[[Callable[[], None]], object], remove: Callable[[], object]) -> None:
    turned = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not turned.done():
            turned.set_result(None)

    add(wake)
    try:
        await turned
    finally:
        remove()


def explained(error: OSError) -> OSError:
    """An error of TLS in a sentence; others as they are."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        return TlsError(f"the other end's certificate is not trusted: {why}", denied=True)
    if isinstance(error, ssl.SSLEOFError):
        return TlsError("the other end hung up in the middle of TLS")
    if not isinstance(error, ssl.SSLError):
        return error
    reason = str(error.reason or error)
    if reason in _NO_TLS:
        return TlsError("the other end does not speak TLS")
    said = reason.lower().replace("_", " ")
    if "ALERT" in reason and any(word in reason for word in _DENIALS):
        return TlsError(
            f"the other end does not accept this end's certificate: {said}", denied=True
        )
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return TlsError("the other end has shown no certificate", denied=True)
    return TlsError(f"TLS failed: {said}")


def _would_block() -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, "nothing can be moved now")


def _chunks(parts: Iterable[Any]) -> Iterator[bytes | memoryview]:
    """The same bytes in pieces for TLS: small ones put together, large ones cut."""
    small: list[Any] = []
    size = 0
    for part in parts:
        length = len(part)
        if length < _SMALL:
            small.append(part)
            size += length
            if size < _RECORD:
                continue
        if size:
            yield b"".join(small)
            small, size = [], 0
        if length >= _SMALL:
            view = memoryview(part)
            for start in range(0, length, _CHUNK):
                yield view[start : start + _CHUNK]
    if size:
        yield b"".join(small)
