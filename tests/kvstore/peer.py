"""A client that speaks frames and nothing more, to say what no good client would."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.protocol.frames import FrameDecoder, HeaderReceived, encode
from kvstore.protocol.messages import (
    PROTOCOL_VERSION,
    Answer,
    Hello,
    Request,
    Reserve,
    Welcome,
    Write,
    parse_answer,
    request_header,
)

BLOCK = 64 << 10
NAMESPACE = Namespace("m", "float32", "test", 16, BLOCK)


class Peer:
    """A connection to a daemon, by hand."""

    def __init__(self, path: Path | str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(str(path))
        self._decoder = FrameDecoder()
        self._answers: list[tuple[list[Any], bytes]] = []
        self._next = 1

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(
        self, header: Sequence[object], payload: bytes = b"", length: int | None = None
    ) -> None:
        """Send one frame; ``length`` announces another payload length than the true one."""
        announced = len(payload) if length is None else length
        self.sock.sendall(encode(header, announced) + payload)

    def receive(self) -> tuple[list[Any], bytes]:
        """The next frame: header and payload. EOFError at the end of the stream."""
        while not self._answers:
            count = self.sock.recv_into(self._decoder.get_buffer())
            if not count:
                raise EOFError
            events = self._decoder.buffer_updated(count)
            for event in events:
                assert isinstance(event, HeaderReceived), event
                self._answers.append((event.header, self._payload(event.payload_length)))
        return self._answers.pop(0)

    def _payload(self, length: int) -> bytes:
        if not length:
            return b""
        payload = memoryview(bytearray(length))
        events = self._decoder.receive_into([payload])
        while not events:
            count = self.sock.recv_into(self._decoder.get_buffer())
            assert count, "the stream ended within a payload"
            events = self._decoder.buffer_updated(count)
        assert len(events) == 1, "a payload is the last thing that these tests wait for"
        return bytes(payload)

    def ask(
        self, request: Request[Any], payload: bytes = b"", deadline_ms: int = 5000
    ) -> tuple[Any, bytes]:
        """Send a request and return its answer and payload; raises what the node answered."""
        number, self._next = self._next, self._next + 1
        self.send(request_header(number, deadline_ms, request), payload)
        header, received = self.receive()
        assert header[0] == number, header
        return parse_answer(request, header), received

    def hello(
        self,
        namespace: Namespace = NAMESPACE,
        transport: str = "tcp",
        shard: int = 0,
        offer: dict[str, object] | None = None,
        token: str | None = None,
        tenant: str | None = None,
    ) -> Welcome:
        """Open the session; ``tenant`` is who it says to be, if not whose the namespace is."""
        hello = Hello(
            PROTOCOL_VERSION,
            tenant or namespace.tenant,
            token,
            dict(namespace.describe()),
            shard,
            [transport],
            offers={transport: offer} if offer else {},
        )
        welcome: Welcome = self.ask(hello)[0]
        return welcome

    def put(self, hashes: Sequence[bytes], parent: bytes = ROOT_PARENT, size: int = BLOCK) -> bytes:
        """Put a chain of blocks over ``tcp``, each filled with its hash; the verdicts."""
        answer = self.ask(Reserve(parent, hashes))[0]
        wanted = [index for index, verdict in enumerate(answer.verdicts) if verdict == 0]
        if wanted:
            payload = b"".join(content(hashes[index], size) for index in wanted)
            self.ask(Write(answer.reservation, wanted, 0, size, commit=True), payload)
        verdicts: bytes = answer.verdicts
        return verdicts

    def error(
        self, header: Sequence[object], payload: bytes = b"", length: int | None = None
    ) -> str:
        """Send a frame and return the code of the error that comes back."""
        self.send(header, payload, length)
        answer, _ = self.receive()
        assert answer[1] == 1, f"no error but {answer}"
        return str(answer[2])


def content(block: bytes, size: int = BLOCK) -> bytes:
    """The bytes that a test stores under a hash."""
    return block * (size // len(block))


__all__ = ["BLOCK", "NAMESPACE", "Answer", "KVStoreError", "Peer", "content"]
