"""Redis by its protocol on a blocking socket: ``sendmsg`` from, and ``recvmsg_into`` the buffers.

The best that one connection can do: no payload is copied in the client but by the kernel.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.peers import adapter

_VECTOR: Final = 512
"""Pieces of one ``sendmsg``; the kernel takes 1024 at most."""
_AHEAD: Final = 64
"""Bytes received behind a block: the frame of the next, and little of its payload."""
_LINES: Final = 1 << 16
_END: Final = b"\r\n"


class Adapter(adapter.Adapter):
    """One connection.

    Settings: ``socket``, a path, or ``port`` on the loopback.
    """

    def open(self, settings: Mapping[str, str]) -> None:
        """Connect."""
        if "socket" in settings:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(settings["socket"])
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(settings["port"])))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ahead = memoryview(bytearray(_AHEAD))
        self._rest = b""

    def close(self) -> None:
        """Empty the server, since the next size begins with all of its memory."""
        self.remove_all()
        self._socket.close()

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """A ``SET`` each, all sent before the first answer is read."""
        pieces: list[bytes | memoryview] = []
        head = b""
        for key, block in zip(keys, blocks, strict=True):
            size = b"$%d\r\n" % len(block)
            pieces += [head + b"*3\r\n$3\r\nSET\r\n" + _bulk(key) + size, block]
            head = _END
        self._send([*pieces, _END])
        return sum(self._line() == b"+OK" for _ in keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """One ``MGET``."""
        self._send([b"*%d\r\n$4\r\nMGET\r\n" % (1 + len(keys)) + b"".join(map(_bulk, keys))])
        self._line()
        return sum(self._receive(block) for block in into)

    def exists(self, keys: Sequence[bytes]) -> int:
        """An ``EXISTS`` each, sent at once: one with all keys would only count them."""
        self._send([b"".join(b"*2\r\n$6\r\nEXISTS\r\n" + _bulk(key) for key in keys)])
        answers = self._rest
        # Each answer has as many bytes: ":1\r\n".
        while len(answers) < 4 * len(keys):
            answers += self._some(_LINES)
        self._rest = answers[4 * len(keys) :]
        return answers[: 4 * len(keys)].count(b"1")

    def remove_all(self) -> None:
        """``FLUSHDB``."""
        self._send([b"*1\r\n$7\r\nFLUSHDB\r\n"])
        self._line()

    def memory(self) -> int:
        """All that the server has allocated, blocks among it."""
        self._send([b"*2\r\n$4\r\nINFO\r\n$6\r\nmemory\r\n"])
        text = bytearray(int(self._line()[1:]))
        self._take(memoryview(text))
        self._line()
        name = b"used_memory:"
        return next(int(line[len(name) :]) for line in text.splitlines() if line.startswith(name))

    def _receive(self, block: memoryview) -> bool:
        """One value of an answer into its buffer; False where there is none."""
        size = int(self._line()[1:])
        if size < 0:
            return False
        if size != len(block):
            raise ValueError(f"a value of {size} bytes for a buffer of {len(block)}")
        self._take(block)
        self._line()
        return True

    def _take(self, block: memoryview) -> None:
        """Fill ``block``, and read a little on into what `_line` looks at."""
        done = min(len(self._rest), len(block))
        block[:done] = self._rest[:done]
        self._rest = self._rest[done:]
        while done < len(block):
            count = self._socket.recvmsg_into([block[done:], self._ahead])[0]
            if not count:
                raise ConnectionError("Redis closed the connection")
            done += count
            if done > len(block):
                self._rest = bytes(self._ahead[: done - len(block)])

    def _line(self) -> bytes:
        while (end := self._rest.find(_END)) < 0:
            self._rest += self._some(_AHEAD)
        line, self._rest = self._rest[:end], self._rest[end + 2 :]
        if line.startswith(b"-"):
            raise ValueError(f"Redis answers {line.decode()}")
        return line

    def _some(self, most: int) -> bytes:
        found = self._socket.recv(most)
        if not found:
            raise ConnectionError("Redis closed the connection")
        return found

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        for start in range(0, len(pieces), _VECTOR):
            waiting = list(pieces[start : start + _VECTOR])
            sent = self._socket.sendmsg(waiting)
            while sent < sum(map(len, waiting)):
                waiting = _after(waiting, sent)
                sent = self._socket.sendmsg(waiting)


def _bulk(key: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(key), key)


def _after(pieces: Sequence[bytes | memoryview], count: int) -> list[bytes | memoryview]:
    """What is left of pieces when so many bytes are gone."""
    for number, piece in enumerate(pieces):
        if count < len(piece):
            return [memoryview(piece)[count:], *pieces[number + 1 :]]
        count -= len(piece)
    return []
