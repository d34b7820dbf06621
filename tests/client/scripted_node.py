"""A stand-in for a node: a Unix socket whose answers are a script. It stores nothing."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.identity import Namespace
from kvstore.protocol.frames import FrameDecoder, HeaderReceived, encode
from kvstore.protocol.messages import (
    Hello,
    SegmentsAnswer,
    Welcome,
    answer_header,
    parse_request,
)

NAMESPACE = Namespace("m", "uint8", "raw", 4, 1000)


class Session:
    """One connection of a client, as the script sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = FrameDecoder()
        self._headers: list[HeaderReceived] = []

    def ask(self) -> tuple[int, Any]:
        """The next request and its id; EOFError where the client has gone. Takes no payload."""
        while not self._headers:
            number = self.sock.recv_into(self._decoder.get_buffer())
            if not number:
                raise EOFError
            for event in self._decoder.buffer_updated(number):
                assert isinstance(event, HeaderReceived), event
                self._headers.append(event)
        header = self._headers.pop(0)
        incoming = parse_request(header.header, header.payload_length)
        return incoming.request_id, incoming.request

    def answer(self, request_id: int, answer: Any, payload: bytes = b"") -> None:
        """Answer a request."""
        self.sock.sendall(encode(answer_header(request_id, answer), len(payload)) + payload)

    def answer_with_memory(self, request_id: int, request: Any, size: int) -> None:
        """Answer a request for segments with new memory."""
        fds = [os.memfd_create("script") for _ in request.numbers]
        for fd in fds:
            os.ftruncate(fd, size)
        answer = SegmentsAnswer([(number, size) for number in request.numbers])
        socket.send_fds(self.sock, [encode(answer_header(request_id, answer))], fds)
        for fd in fds:
            os.close(fd)

    def welcome(self, **changes: Any) -> None:
        """Open the session, over ``tcp``."""
        request_id, hello = self.ask()
        assert isinstance(hello, Hello)
        values: dict[str, Any] = {
            "node": "script",
            "incarnation": "1",
            "transport": "tcp",
            "block_bytes": NAMESPACE.block_bytes,
            "limits": {},
            "details": {},
        }
        self.answer(request_id, Welcome(**values | changes))


Script = Callable[[Session], None]


@contextmanager
def scripted_node(folder: Path, *scripts: Script) -> Iterator[str]:
    """Answer one connection after the other, each with its script; yields the URL.

    A script that returns ends its connection. After the last one nobody listens.
    """
    path = folder / "script.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(8)
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            for script in scripts:
                accepted, _ = listener.accept()
                with accepted:
                    try:
                        script(Session(accepted))
                    except (EOFError, ConnectionError):
                        continue
        except OSError:
            return
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            failures.append(error)
        finally:
            listener.close()

    thread = threading.Thread(target=serve, name="script")
    thread.start()
    try:
        yield f"unix://{path}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
