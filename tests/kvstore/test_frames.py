import struct
from collections.abc import Sequence

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.errors import FrameTooLarge, ProtocolError
from kvstore.protocol.frames import (
    MAX_HEADER,
    PREFIX_BYTES,
    Broken,
    Closed,
    Event,
    FrameDecoder,
    HeaderReceived,
    PayloadReceived,
    encode,
)

GUARD = 0xA5


def prefix(
    magic: int = 0x564B, version: int = 1, flags: int = 0, header: int = 2, payload: int = 0
) -> bytes:
    return struct.pack("<HBBIQ", magic, version, flags, header, payload)


class Owner:
    """Feeds a decoder as a transport does; its payloads land between guard bytes."""

    def __init__(self, decoder: FrameDecoder | None = None, splits: Sequence[int] = ()) -> None:
        self.decoder = decoder if decoder is not None else FrameDecoder()
        self.splits = list(splits)
        self.headers: list[list[object]] = []
        self.payloads: list[bytes] = []
        self.ends: list[Event] = []
        self.memory: bytearray | None = None
        self.discards = False

    def feed(self, data: bytes, chunks: Sequence[int] = ()) -> None:
        sizes = list(chunks)
        while data:
            buffer = self.decoder.get_buffer()
            if not len(buffer):
                return
            size = min(len(buffer), len(data), sizes.pop(0) if sizes else len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            self.take(self.decoder.buffer_updated(size))

    def end(self) -> None:
        self.take(self.decoder.feed_eof())

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert not self.broken, "nothing comes after the end"
            if isinstance(event, HeaderReceived):
                self.headers.append(event.header)
                if event.payload_length:
                    self.take(self.sink(event.payload_length))
            elif isinstance(event, PayloadReceived):
                self.land()
            else:
                self.ends.append(event)

    def sink(self, length: int) -> list[Event]:
        if self.discards:
            return self.decoder.discard()
        self.memory = bytearray([GUARD]) * (length + 2)
        view = memoryview(self.memory)[1 : length + 1]
        views = []
        for split in self.splits:
            size = min(split, len(view))
            views.append(view[:size])
            view = view[size:]
        return self.decoder.receive_into([*views, view])

    def land(self) -> None:
        if self.discards:
            self.payloads.append(b"")
            return
        assert self.memory is not None
        assert self.memory[0] == self.memory[-1] == GUARD
        self.payloads.append(bytes(self.memory[1:-1]))

    @property
    def broken(self) -> bool:
        return any(isinstance(end, Broken) for end in self.ends)

    def error(self) -> ProtocolError:
        (end,) = self.ends
        assert isinstance(end, Broken)
        return end.error


headers = st.lists(
    st.one_of(
        st.integers(-(2**63), 2**64 - 1),
        st.binary(max_size=100),
        st.text(max_size=20),
        st.booleans(),
        st.none(),
        st.lists(st.integers(0, 9), max_size=4),
        st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3),
    ),
    max_size=6,
)
payloads = st.one_of(
    st.just(b""),
    st.binary(max_size=64),
    st.integers(16_300, 70_000).map(lambda size: bytes(range(256)) * (size // 256 + 1)),
)
chunk_sizes = st.lists(st.integers(1, 20_000), max_size=60)


@given(
    frames=st.lists(st.tuples(headers, payloads), max_size=6),
    chunks=chunk_sizes,
    splits=st.lists(st.integers(0, 5_000), max_size=5),
)
def test_frames_arrive_whole_however_they_are_cut(
    frames: list[tuple[list[object], bytes]], chunks: list[int], splits: list[int]
) -> None:
    owner = Owner(splits=splits)
    owner.feed(b"".join(encode(h, len(p)) + p for h, p in frames), chunks)
    owner.end()
    assert owner.headers == [header for header, _ in frames]
    assert owner.payloads == [payload for _, payload in frames if payload]
    assert owner.ends == [Closed()]


@given(frames=st.lists(st.tuples(headers, payloads), max_size=4), chunks=chunk_sizes)
def test_discarded_payloads_leave_the_frames_behind_them_whole(
    frames: list[tuple[list[object], bytes]], chunks: list[int]
) -> None:
    owner = Owner()
    owner.discards = True
    owner.feed(b"".join(encode(h, len(p)) + p for h, p in frames), chunks)
    assert owner.headers == [header for header, _ in frames]


@given(frame=st.tuples(headers, payloads), cut=st.integers(0), chunks=chunk_sizes)
def test_a_stream_that_ends_within_a_frame_is_broken(
    frame: tuple[list[object], bytes], cut: int, chunks: list[int]
) -> None:
    whole = encode(frame[0], len(frame[1])) + frame[1]
    cut %= len(whole)
    owner = Owner()
    owner.feed(whole[:cut], chunks)
    owner.end()
    assert owner.broken is (cut > 0)
    assert not owner.payloads


@given(data=st.binary(max_size=400), chunks=chunk_sizes)
@example(data=prefix(header=3) + b"\xc7\x00\xff", chunks=[])
@example(data=prefix(header=2) + b"\xd4\x01", chunks=[])
@example(data=prefix(header=0), chunks=[])
@example(data=prefix(header=1) + b"\xc1", chunks=[])
@example(data=prefix(header=600) + b"\x91" * 600, chunks=[])
@example(data=prefix(header=5) + b"\xdd\xff\xff\xff\xff", chunks=[])
@example(data=prefix(header=3) + b"\x91\xa1\xff", chunks=[])
@example(data=prefix(header=4) + b"\x91\x81\x90\x01", chunks=[])
@example(data=prefix(header=2) + b"\x90\x90", chunks=[])
@example(data=prefix(header=1) + b"\x80", chunks=[])
def test_arbitrary_bytes_end_in_a_defined_way(data: bytes, chunks: list[int]) -> None:
    owner = Owner()
    owner.feed(data, chunks)
    owner.end()
    assert len(owner.ends) == 1
    assert isinstance(owner.ends[0], Broken | Closed)


@given(data=st.binary(max_size=300), payload=st.integers(0, 40), chunks=chunk_sizes)
def test_arbitrary_headers_end_in_a_defined_way(
    data: bytes, payload: int, chunks: list[int]
) -> None:
    owner = Owner()
    owner.feed(prefix(header=len(data), payload=payload) + data + bytes(payload), chunks)
    owner.end()
    assert isinstance(owner.ends[0], Broken | Closed)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (prefix(magic=0x5448), ProtocolError),
        (prefix(version=2), ProtocolError),
        (prefix(flags=1), ProtocolError),
        (prefix(header=MAX_HEADER + 1), FrameTooLarge),
        (prefix(header=0xFFFF_FFFF), FrameTooLarge),
        (prefix(payload=16 << 30), FrameTooLarge),
        (prefix(payload=0xFFFF_FFFF_FFFF_FFFF), FrameTooLarge),
        (b"GET / HTTP/1.1\r\n\r\n", ProtocolError),
    ],
)
def test_a_prefix_that_lies_breaks_the_stream_at_once(
    data: bytes, kind: type[ProtocolError]
) -> None:
    owner = Owner()
    owner.feed(data)
    assert type(owner.error()) is kind
    assert not len(owner.decoder.get_buffer())


def test_frames_before_the_broken_one_are_delivered() -> None:
    owner = Owner()
    owner.feed(encode([1, 2]) + prefix(magic=0))
    assert owner.headers == [[1, 2]]
    assert owner.broken


def test_a_large_header_arrives_and_its_memory_goes() -> None:
    owner = Owner()
    blob = bytes(range(256)) * 4096
    owner.feed(encode([1, blob]) + encode([2]), [7, 100, 16_000, 3])
    assert owner.headers == [[1, blob], [2]]
    assert len(owner.decoder.get_buffer()) < 1 << 17


def test_bounds_may_be_narrower() -> None:
    owner = Owner(FrameDecoder(max_header=10, max_payload=0))
    owner.feed(encode([1, 2, 3]))
    assert owner.headers == [[1, 2, 3]]
    owner.feed(encode([1], 1))
    assert type(owner.error()) is FrameTooLarge


def test_nothing_is_read_while_a_payload_waits_for_memory() -> None:
    decoder = FrameDecoder()
    data = encode([1], 3) + b"abc" + encode([2])
    decoder.get_buffer()[: len(data)] = data
    (event,) = decoder.buffer_updated(len(data))
    assert event == HeaderReceived([1], 3)
    assert decoder.awaiting_sink
    assert not len(decoder.get_buffer())
    memory = bytearray(3)
    events = decoder.receive_into([memoryview(memory)])
    assert events == [PayloadReceived(), HeaderReceived([2], 0)]
    assert memory == b"abc"


@given(
    st.lists(st.integers(1, 700_000), min_size=1, max_size=4),
    st.lists(st.integers(1, 600_000), max_size=12),
)
def test_each_piece_is_shown_once_it_is_there(sizes: list[int], chunks: list[int]) -> None:
    payload = bytes(range(251)) * (sum(sizes) // 251 + 1)
    payload = payload[: sum(sizes)]
    views = [memoryview(bytearray(size)) for size in sizes]
    shown: list[bytes] = []
    decoder = FrameDecoder()
    data = encode([1], len(payload)) + payload + encode([2])
    ends, pending = [], list(chunks)
    while data:
        buffer = decoder.get_buffer()
        size = min(len(buffer), len(data), pending.pop(0) if pending else len(data))
        buffer[:size] = data[:size]
        data = data[size:]
        events = decoder.buffer_updated(size)
        if decoder.awaiting_sink:
            events += decoder.receive_into(views, lambda piece: shown.append(bytes(piece)))
        ends += events
    assert b"".join(shown) == payload
    # Whoever adds up needs to know where one view ends and the next begins.
    edges = {sum(sizes[:number]) for number in range(1, len(sizes) + 1)}
    assert edges <= {sum(map(len, shown[:number])) for number in range(1, len(shown) + 1)}
    assert ends[-2:] == [PayloadReceived(), HeaderReceived([2], 0)]


def test_discarding_half_way_leaves_the_memory_alone() -> None:
    decoder = FrameDecoder()
    head = encode([1], 100_000)
    decoder.get_buffer()[: len(head)] = head
    decoder.buffer_updated(len(head))
    memory = bytearray(100_000)
    decoder.receive_into([memoryview(memory)])
    decoder.get_buffer()[:10] = b"0123456789"
    decoder.buffer_updated(10)
    assert decoder.discard() == []
    left = 99_990
    while left:
        buffer = decoder.get_buffer()
        size = min(left, len(buffer))
        buffer[:size] = b"x" * size
        events = decoder.buffer_updated(size)
        left -= size
    assert events == [PayloadReceived()]
    assert memory == b"0123456789" + bytes(99_990)


@pytest.mark.parametrize(
    "views",
    [
        [],
        [memoryview(bytearray(2))],
        [memoryview(bytearray(4))],
        [memoryview(bytes(3))],
        [memoryview(bytearray(6)).cast("H")],
    ],
)
def test_memory_that_does_not_fit_is_refused(views: list[memoryview]) -> None:
    decoder = FrameDecoder()
    head = encode([1], 3)
    decoder.get_buffer()[: len(head)] = head
    decoder.buffer_updated(len(head))
    with pytest.raises(ValueError, match="must"):
        decoder.receive_into(views)
    assert decoder.awaiting_sink


def test_memory_that_nobody_asked_for_is_refused() -> None:
    decoder = FrameDecoder()
    with pytest.raises(ValueError, match="no payload"):
        decoder.receive_into([])
    with pytest.raises(ValueError, match="no payload"):
        decoder.discard()


def test_bytes_after_the_end_are_an_error() -> None:
    decoder = FrameDecoder()
    assert decoder.feed_eof() == [Closed()]
    assert not len(decoder.get_buffer())
    (event,) = decoder.buffer_updated(3)
    assert isinstance(event, Broken)
    assert decoder.buffer_updated(3) == []
    assert decoder.feed_eof() == []


def test_giving_up_forgets_the_memory() -> None:
    decoder = FrameDecoder()
    head = encode([1], 8)
    decoder.get_buffer()[: len(head)] = head
    decoder.buffer_updated(len(head))
    memory = bytearray(8)
    decoder.receive_into([memoryview(memory)])
    decoder.abort()
    assert not len(decoder.get_buffer())
    memory += b"grows only while nobody looks at it"


def test_a_header_above_the_bound_is_not_sent() -> None:
    with pytest.raises(FrameTooLarge):
        encode([bytes(MAX_HEADER)])


def test_the_frame_is_what_the_documentation_says() -> None:
    frame = encode([7, "a"], 5)
    assert frame[:PREFIX_BYTES] == prefix(header=3 + 0, payload=5)[:4] + struct.pack(
        "<IQ", len(frame) - PREFIX_BYTES, 5
    )
    assert msgpack.unpackb(frame[PREFIX_BYTES:]) == [7, "a"]
