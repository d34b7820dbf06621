import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop

from rdma.errors import SegmentError, StreamClosed
from rdma.shm import close_fds
from rdma.stream import SocketStream
from tests.tls import shaken

Main = Callable[[], Awaitable[None]]
Run = Callable[[Main], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Return what runs a test on the loop in question, and fails for what the loop swallowed."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    swallowed: list[object] = []

    def run(main: Main) -> None:
        async def bounded() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, c: swallowed.append(c))
            await asyncio.wait_for(main(), 20)

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(bounded())

    yield run
    assert not swallowed


class Messages:
    """A decoder of messages ``length (4 bytes) + bytes``; the bytes land in their own memory."""

    def __init__(self) -> None:
        self.head = bytearray(4)
        self.got = 0
        self.body: memoryview | None = None
        self.hold = False
        self.ended = False

    def get_buffer(self) -> memoryview:
        if self.hold:
            return memoryview(b"")
        if self.body is None:
            return memoryview(self.head)[self.got :]
        return self.body[self.got :]

    def buffer_updated(self, number: int) -> list[bytes]:
        self.got += number
        if self.body is None:
            if self.got == 4:
                (length,) = struct.unpack("<I", self.head)
                self.body, self.got = memoryview(bytearray(length)), 0
            return []
        if self.got < len(self.body):
            return []
        message, self.body, self.got = bytes(self.body), None, 0
        return [message]

    def feed_eof(self) -> list[bytes]:
        self.ended = True
        return [b"<end>"]


def framed(body: bytes) -> list[bytes | memoryview]:
    return [struct.pack("<I", len(body)), memoryview(body)]


class End:
    """One end of a connection: a stream and what it told its owner."""

    def __init__(
        self, sock: socket.socket, high_water: int = 8 << 20, serves: bool = False
    ) -> None:
        self.decoder = Messages()
        self.events: list[bytes] = []
        self.closed: list[Exception | None] = []
        self.changed = asyncio.Event()
        self.stream: SocketStream[bytes] = SocketStream(
            sock,
            self.decoder,
            self.on_events,
            self.on_closed,
            high_water=high_water,
            serves=serves,
        )

    def on_events(self, events: list[bytes]) -> None:
        self.events += events
        self.changed.set()

    def on_closed(self, error: Exception | None) -> None:
        assert self.stream.closed
        self.closed.append(error)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


def connected(kind: str = "unix") -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    left.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return shaken(left, right) if kind == "tls" else (left, right)


def send_all(sock: socket.socket, data: bytes) -> None:
    """Send a few bytes, for which there is room."""
    assert sock.send(data) == len(data)


@pytest.fixture(params=["unix", "tcp", "tls"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_messages_arrive_whole_and_in_order(run: Run, kind: str) -> None:
    async def main() -> None:
        a, b = connected(kind)
        left, right = End(a), End(b, serves=True)
        left.stream.start()
        right.stream.start()
        messages = [os.urandom(size) for size in (1, 5 << 20, 100, 9 << 20, 3)]
        sent: list[bool] = []
        for message in messages:
            left.stream.send(framed(message), sent.append)
            right.stream.send(framed(message[::-1]))
        await right.until(lambda: len(right.events) == len(messages))
        await left.until(lambda: len(left.events) == len(messages))
        assert right.events == messages
        assert left.events == [message[::-1] for message in messages]
        assert sent == [True] * len(messages)
        assert left.stream.queued == right.stream.queued == 0
        left.stream.close()
        await right.until(lambda: b"<end>" in right.events)
        assert not right.closed
        right.stream.close()
        assert not left.closed

    run(main)


def test_more_parts_than_the_kernel_takes_at_once(run: Run, kind: str) -> None:
    async def main() -> None:
        left, right = map(End, connected(kind))
        right.stream.start()
        body = os.urandom(5_000 * 700)
        parts: list[bytes | memoryview] = [struct.pack("<I", len(body))]
        for at in range(0, len(body), 700):
            parts += [memoryview(body)[at : at + 700], b""]
        left.stream.send(parts)
        await right.until(lambda: bool(right.events))
        assert right.events == [body]
        left.stream.close()
        right.stream.close()

    run(main)


def test_memory_is_in_use_until_it_was_said_to_have_left(run: Run, kind: str) -> None:
    async def main() -> None:
        left, right = map(End, connected(kind))
        body = bytearray(os.urandom(8 << 20))
        before = bytes(body)
        left_it = asyncio.Event()

        def on_sent(ok: bool) -> None:
            assert ok
            body[:] = bytes(len(body))
            left_it.set()

        left.stream.send([struct.pack("<I", len(body)), memoryview(body)], on_sent)
        assert not left_it.is_set()
        assert left.stream.queued > 0
        right.stream.start()
        await right.until(lambda: bool(right.events))
        assert left_it.is_set()
        assert right.events == [before]
        left.stream.close()
        right.stream.close()

    run(main)


def test_closing_tells_what_did_not_leave(run: Run, kind: str) -> None:
    async def main() -> None:
        left, right = map(End, connected(kind))
        sent: list[tuple[int, bool]] = []
        for number in range(3):
            left.stream.send(
                framed(bytes(4 << 20)), lambda ok, number=number: sent.append((number, ok))
            )
        left.stream.close()
        assert sent == [(0, False), (1, False), (2, False)]
        left.stream.send(framed(b"late"), lambda ok: sent.append((3, ok)))
        assert sent[3:] == [(3, False)]
        left.stream.close()
        right.stream.close()
        await asyncio.sleep(0.01)
        assert not left.closed
        assert not left.events

    run(main)


def test_no_callback_comes_after_closing_within_one(run: Run, kind: str) -> None:
    async def main() -> None:
        a, b = connected(kind)
        right = End(b)
        b_messages: list[list[bytes]] = []

        def close_at_once(events: list[bytes]) -> None:
            b_messages.append(events)
            right.stream.close()

        right.stream._on_events = close_at_once
        for _ in range(3):
            send_all(a, b"".join(framed(b"x")))
        right.stream.start()
        while not b_messages:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert b_messages == [[b"x"]]
        a.close()

    run(main)


def test_a_peer_that_is_gone_breaks_the_stream(run: Run, kind: str) -> None:
    async def main() -> None:
        a, b = connected(kind)
        left = End(a)
        sent: list[bool] = []
        left.stream.send(framed(bytes(32 << 20)), sent.append)
        b.close()
        await left.until(lambda: bool(left.closed))
        assert isinstance(left.closed[0], OSError)
        assert sent == [False]
        left.stream.send(framed(b"x"), sent.append)
        assert sent == [False, False]
        assert len(left.closed) == 1

    run(main)


def test_a_peer_that_is_gone_is_noticed_by_the_next_small_frame(run: Run) -> None:
    async def main() -> None:
        a, b = connected()
        left = End(a)
        b.close()
        sent: list[bool] = []
        left.stream.send([b"one part"], sent.append)
        assert sent == [False]
        assert isinstance(left.closed[0], BrokenPipeError)

    run(main)


@pytest.mark.parametrize("parts", [1, 2])
def test_who_serves_reads_what_a_peer_said_before_it_was_gone(run: Run, parts: int) -> None:
    async def main() -> None:
        a, b = connected()
        left = End(a, serves=True)
        left.stream.start()
        send_all(b, b"".join(framed(b"last words")))
        b.close()
        sent: list[bool] = []
        for _ in range(2):
            left.stream.send([b"part"] * parts, sent.append)
        assert sent == [False, False]
        await left.until(lambda: bool(left.closed))
        assert left.events == [b"last words", b"<end>"]
        assert isinstance(left.closed[0], BrokenPipeError)
        assert len(left.closed) == 1

    run(main)


def test_who_does_not_read_is_not_read_from(run: Run) -> None:
    async def main() -> None:
        a, b = connected()
        left = End(a, high_water=1 << 20, serves=True)
        left.stream.start()
        b.setblocking(False)
        left.stream.send(framed(bytes(16 << 20)))
        assert not left.stream.writable
        b.send(b"".join(framed(b"unheard")))
        await asyncio.sleep(0.02)
        assert not left.events
        waiter = asyncio.ensure_future(left.stream.wait_writable())
        received = 0
        loop = asyncio.get_running_loop()
        while received < (16 << 20) + 4:
            received += len(await loop.sock_recv(b, 1 << 20))
        await waiter
        await left.until(lambda: bool(left.events))
        assert left.events == [b"unheard"]
        assert left.stream.writable
        left.stream.close()
        b.close()

    run(main)


def test_who_waits_to_send_is_told_of_the_end(run: Run, kind: str) -> None:
    async def main() -> None:
        a, b = connected(kind)
        left = End(a, high_water=1 << 20)
        left.stream.send(framed(bytes(16 << 20)))
        waiters = [asyncio.ensure_future(left.stream.wait_writable()) for _ in range(2)]
        await asyncio.sleep(0)
        left.stream.close()
        for waiter in waiters:
            with pytest.raises(StreamClosed):
                await waiter
        b.close()

    run(main)


def test_reading_waits_for_the_decoder(run: Run, kind: str) -> None:
    async def main() -> None:
        a, b = connected(kind)
        right = End(b)
        right.decoder.hold = True
        right.stream.start()
        send_all(a, b"".join(framed(b"hello")))
        await asyncio.sleep(0.02)
        assert not right.events
        right.decoder.hold = False
        right.stream.resume_reading()
        await right.until(lambda: bool(right.events))
        assert right.events == [b"hello"]
        right.stream.pause_reading()
        send_all(a, b"".join(framed(b"again")))
        await asyncio.sleep(0.02)
        assert right.events == [b"hello"]
        right.stream.resume_reading()
        await right.until(lambda: len(right.events) == 2)
        right.stream.close()
        a.close()

    run(main)


def test_finishing_sends_what_waits_then_closes(run: Run, kind: str) -> None:
    async def main() -> None:
        left, right = map(End, connected(kind))
        left.stream.start()
        body = os.urandom(8 << 20)
        left.stream.send(framed(body))
        left.stream.finish()
        left.stream.finish()
        refused: list[bool] = []
        left.stream.send(framed(b"more"), refused.append)
        assert refused == [False]
        right.stream.start()
        await right.until(lambda: b"<end>" in right.events)
        assert right.events == [body, b"<end>"]
        assert left.closed == [None]
        right.stream.finish()
        assert not right.closed
        await right.until(lambda: bool(right.closed))
        assert right.closed == [None]

    run(main)


def test_an_answer_may_follow_the_peers_end(run: Run) -> None:
    async def main() -> None:
        a, b = connected()
        right = End(b)
        right.stream.start()
        a.sendall(b"".join(framed(b"question")))
        a.shutdown(socket.SHUT_WR)
        await right.until(lambda: b"<end>" in right.events)
        right.stream.send(framed(b"answer"))
        right.stream.finish()
        await right.until(lambda: bool(right.closed))
        assert a.recv(100) == b"".join(framed(b"answer"))
        assert a.recv(100) == b""
        a.close()

    run(main)


def test_sending_from_within_on_sent_keeps_the_order(run: Run, kind: str) -> None:
    async def main() -> None:
        left, right = map(End, connected(kind))
        right.stream.start()
        count = 0

        def next_one(ok: bool) -> None:
            nonlocal count
            count += 1
            if count < 50:
                left.stream.send(framed(bytes([count]) * 100_000), next_one)

        left.stream.send(framed(b"\0" * 100_000), next_one)
        await right.until(lambda: len(right.events) == 50)
        assert [event[0] for event in right.events] == list(range(50))
        left.stream.close()
        right.stream.close()

    run(main)


def test_one_stream_does_not_starve_another(run: Run, kind: str) -> None:
    async def main() -> None:
        busy_left, busy_right = map(End, connected(kind))
        calm_left, calm_right = map(End, connected(kind))
        for end in (busy_right, calm_right):
            end.stream.start()
        order: list[str] = []
        busy_right.stream._on_events = lambda events: order.append("busy")
        calm_right.stream._on_events = lambda events: order.append("calm")
        busy_left.stream.send(framed(bytes(64 << 20)))
        calm_left.stream.send(framed(b"short"))
        while len(order) < 2:
            await asyncio.sleep(0.001)
        assert order == ["calm", "busy"]
        for end in (busy_left, busy_right, calm_left, calm_right):
            end.stream.close()

    run(main)


def test_file_descriptors_go_with_the_first_byte_of_their_frame(run: Run) -> None:
    async def main() -> None:
        left, right = map(End, connected())
        got: list[tuple[int, list[int]]] = []
        right.stream.on_fds = lambda fds: got.append((len(right.events), fds))
        read, write = os.pipe()
        big = bytes(4 << 20)
        for number in range(4):
            fds = [read] * number if number != 2 else []
            left.stream.send(framed(bytes([number]) + big), fds=fds)
        right.stream.start()
        await right.until(lambda: len(right.events) == 4)
        assert [(at, len(fds)) for at, fds in got] == [(1, 1), (3, 3)]
        os.write(write, b"x")
        assert os.read(got[0][1][0], 1) == b"x"
        for _, fds in got:
            close_fds(fds)
        close_fds([read, write])
        left.stream.close()
        right.stream.close()

    run(main)


def test_file_descriptors_that_nobody_expects_are_dropped(run: Run) -> None:
    async def main() -> None:
        left, right = map(End, connected())
        right.stream.start()
        read, write = os.pipe()
        before = len(os.listdir("/proc/self/fd"))
        left.stream.send(framed(b"here"), fds=[read, write])
        await right.until(lambda: bool(right.events))
        assert len(os.listdir("/proc/self/fd")) == before
        close_fds([read, write])
        left.stream.close()
        right.stream.close()

    run(main)


def test_descriptors_that_cannot_be_taken_break_the_stream(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr("rdma.shm._ANCILLARY", socket.CMSG_SPACE(4))
        left, right = map(End, connected())
        right.stream.on_fds = close_fds
        right.stream.start()
        read, write = os.pipe()
        left.stream.send(framed(b"here"), fds=[read, write, read])
        await right.until(lambda: bool(right.closed))
        assert isinstance(right.closed[0], SegmentError)
        close_fds([read, write])
        left.stream.close()

    run(main)
