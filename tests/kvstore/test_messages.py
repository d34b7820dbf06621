import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import (
    AccessDenied,
    InvalidRequest,
    ProtocolError,
    UnknownError,
)
from kvstore.protocol.frames import FrameDecoder, HeaderReceived, encode
from kvstore.protocol.messages import (
    MAX_HASHES,
    Abort,
    AbortAnswer,
    Answer,
    AnyRequest,
    Exists,
    ExistsAnswer,
    Follow,
    FollowAnswer,
    Get,
    GetAnswer,
    Hello,
    Incoming,
    Match,
    MatchAnswer,
    Ping,
    PingAnswer,
    Release,
    Reserve,
    ReserveAnswer,
    Segments,
    SegmentsAnswer,
    Take,
    TakeAnswer,
    Welcome,
    Write,
    WriteAnswer,
    answer_header,
    error_header,
    join_hashes,
    parse_answer,
    parse_request,
    parse_request_id,
    release_header,
    request_header,
    split_hashes,
)

H = [bytes([n]) * 32 for n in range(1, 6)]
ROOT = bytes(32)
PLACE = 3 << 44 | 4096

HELLO = Hello(1, "acme", "secret", {"model": "m", "block_tokens": 16}, 2, ["shm", "tcp"], "test")
WELCOME = Welcome("n", "i", "shm", 4096, {"max_payload": 1 << 30}, {"segments": [1]})

PAIRS: list[tuple[AnyRequest, Answer]] = [
    (HELLO, WELCOME),
    (dataclasses.replace(HELLO, token=None), WELCOME),
    (Match(H, True), MatchAnswer(b"\x02\x03\x04")),
    (Match([]), MatchAnswer(b"")),
    (Exists(H), ExistsAnswer(b"\x00\x01\x02\x03\x00")),
    (Get(H[:2], 4, 8, True, [1, 2, 3]), GetAnswer(9, b"\x02\x00", [PLACE])),
    (Get(H[:2]), GetAnswer(0, b"\x02\x03")),
    (Get(H[:2]), GetAnswer(0, b"\x04\x00")),
    (Reserve(ROOT, H[:4]), ReserveAnswer(5, b"\x00\x01\x02\x03", [PLACE])),
    (Reserve(ROOT, H[:1], 3), ReserveAnswer(5, b"\x00", [PLACE])),
    (Write(5, [0, 2], 8, 16, False, [1, 0xFFFF_FFFF], [PLACE]), WriteAnswer(b"\x01\x00")),
    (Write(5, []), WriteAnswer(b"")),
    (Abort(5), AbortAnswer()),
    (Segments([3, 1]), SegmentsAnswer([(3, 1 << 30), (1, 4096)])),
    (Ping(), PingAnswer()),
    (Follow(0, 1), FollowAnswer(1 << 62, False, b"", [])),
    (Follow(7, MAX_HASHES), FollowAnswer(9, True, b"\x01\x00", H[:2])),
    (Take(7, "start", H, 1 << 40), TakeAnswer(2, "no_space")),
    (Take(1, "", H[:1]), TakeAnswer(1)),
    (Get(H[:3], checksums=True), GetAnswer(0, b"\x02\x00\x02", None, [0, 0xFFFF_FFFF])),
]


def over_the_wire(header: list[object]) -> list[object]:
    decoder = FrameDecoder()
    frame = encode(header)
    decoder.get_buffer()[: len(frame)] = frame
    (event,) = decoder.buffer_updated(len(frame))
    assert isinstance(event, HeaderReceived)
    return event.header


def plain(message: object) -> dict[str, object]:
    """Return the fields of a message, every sequence as a list."""
    return {
        field.name: list(value) if isinstance(value, list | tuple) else value
        for field in dataclasses.fields(message)  # type: ignore[arg-type]
        for value in [getattr(message, field.name)]
    }


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: type(pair[0]).__name__)
def test_a_message_is_the_same_after_the_wire(pair: tuple[AnyRequest, Answer]) -> None:
    request, answer = pair
    assert not isinstance(request, Release)
    header = over_the_wire(request_header(17, 250, request))
    assert parse_request_id(header) == 17
    incoming = parse_request(header)
    assert (incoming.request_id, incoming.deadline_ms) == (17, 250)
    assert type(incoming.request) is type(request)
    assert plain(incoming.request) == plain(request)

    header = over_the_wire(answer_header(17, answer))
    assert parse_request_id(header) == 17
    parsed = parse_answer(request, header)  # type: ignore[type-var]
    assert type(parsed) is type(answer)
    assert plain(parsed) == plain(answer)


def test_release_is_one_way() -> None:
    header = over_the_wire(release_header([1, 2]))
    assert parse_request(header) == Incoming(0, 0, Release([1, 2]))
    with pytest.raises(InvalidRequest, match="request id 0"):
        parse_request([4, *header[1:]])
    with pytest.raises(InvalidRequest, match="request id 0"):
        parse_request([0, Ping.op, 0])


def test_hello_does_not_show_its_token() -> None:
    assert "secret" not in repr(HELLO)


BLOB = b"".join(H)
BAD_REQUESTS: list[list[object]] = [
    [1, Ping.op],
    [1, 99, 0],
    [1, 0, 0],
    [1, True, 0],
    [1, "MATCH", 0],
    [1, [], 0],
    [1, Ping.op, -1],
    [1, Ping.op, 1 << 40],
    [1, Ping.op, 1.5],
    [1, Ping.op, None],
    [1, Ping.op, 0, 1],
    [1, Match.op, 0, BLOB],
    [1, Match.op, 0, BLOB[:-1], False],
    [1, Match.op, 0, "x" * 32, False],
    [1, Match.op, 0, [H[0]], False],
    [1, Match.op, 0, BLOB, 1],
    [1, Match.op, 0, bytes(32 * (MAX_HASHES + 1)), False],
    [1, Exists.op, 0, b"x"],
    [1, Get.op, 0, BLOB, -1, 0, False, None],
    [1, Get.op, 0, BLOB, 0, 16 << 40, False, None],
    [1, Get.op, 0, BLOB, 0, 0, None, None],
    [1, Get.op, 0, BLOB, 0, 0, False, [1]],
    [1, Get.op, 0, BLOB, 0, 0, False, b"1234567"],
    [1, Get.op, 0, BLOB, True, 0, False, None],
    [0, Release.op, 0, [-1]],
    [0, Release.op, 0, [1 << 65]],
    [0, Release.op, 0, [True]],
    [0, Release.op, 0, ["1"]],
    [0, Release.op, 0, b"\x01"],
    [1, Reserve.op, 0, ROOT[:-1], BLOB],
    [1, Reserve.op, 0, None, BLOB],
    [1, Write.op, 0, 0, [0], 0, 0, True, None, None],
    [1, Write.op, 0, 1, [0, 0], 0, 0, True, None, None],
    [1, Write.op, 0, 1, [65_536], 0, 0, True, None, None],
    [1, Write.op, 0, 1, [0], 0, 0, True, [1, 2], None],
    [1, Write.op, 0, 1, [0], 0, 0, True, [1 << 32], None],
    [1, Abort.op, 0, 0],
    [1, Segments.op, 0, list(range(1000))],
    [1, Follow.op, 0, 1],
    [1, Follow.op, 0, -1, 1],
    [1, Follow.op, 0, 1 << 64, 1],
    [1, Follow.op, 0, False, 1],
    [1, Follow.op, 0, 1, 0],
    [1, Follow.op, 0, 1, MAX_HASHES + 1],
    [1, Follow.op, 0, 1, 1, 1],
    [1, Hello.op, 0, 1, "t", None, {}, 0, [], "", {}],
    [1, Hello.op, 0, 1, "t", None, {}, 0, ["shm"] * 17, "", {}],
    [1, Hello.op, 0, 1, "t", None, {}, 0, [1], "", {}],
    [1, Hello.op, 0, 1, "t", b"", {}, 0, ["tcp"], "", {}],
    [1, Hello.op, 0, 1, "t", None, {b"m": 1}, 0, ["tcp"], "", {}],
    [1, Hello.op, 0, 1, "t", None, [], 0, ["tcp"], "", {}],
    [1, Hello.op, 0, 1, "t", None, {str(n): n for n in range(65)}, 0, ["tcp"], "", {}],
    [1, Hello.op, 0, 1, "t" * 5000, None, {}, 0, ["tcp"], "", {}],
]


@pytest.mark.parametrize("header", BAD_REQUESTS, ids=lambda header: f"{header!r:.60}")
def test_a_malformed_request_is_answered_alone(header: list[object]) -> None:
    parse_request_id(header)
    with pytest.raises(InvalidRequest):
        parse_request(header)


@pytest.mark.parametrize("header", [[], [1], ["1", 2], [-1, 2], [1 << 32, 2], [True, 2], [None, 1]])
def test_a_header_without_a_request_id_breaks_the_connection(header: list[object]) -> None:
    with pytest.raises(ProtocolError):
        parse_request_id(header)


def test_a_payload_has_to_fit_its_request() -> None:
    write = over_the_wire(request_header(1, 0, Write(5, [0, 1], 0, 16)))
    assert parse_request(write, 32).request_id == 1
    assert parse_request(write, 0).request_id == 1
    with pytest.raises(InvalidRequest, match="32 bytes"):
        parse_request(write, 31)
    with pytest.raises(InvalidRequest, match="WRITE only"):
        parse_request(over_the_wire(request_header(1, 0, Ping())), 1)


values = st.recursive(
    st.one_of(
        st.integers(-(2**63), 2**64 - 1),
        st.binary(max_size=70),
        st.sampled_from([BLOB, ROOT, b"", 0, 1, 16, None, True, False]),
        st.text(max_size=5),
        st.floats(),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(
    op=st.integers(0, 12), arguments=st.lists(values, max_size=8), payload=st.integers(0, 1 << 40)
)
def test_any_header_is_a_request_or_an_invalid_request(
    op: int, arguments: list[object], payload: int
) -> None:
    header = over_the_wire([1, op, *arguments])
    with contextlib.suppress(InvalidRequest):
        parse_request(header, payload)


@given(pair=st.sampled_from(PAIRS), status=values | st.just(0), answer=st.lists(values, max_size=7))
def test_any_header_is_an_answer_or_an_error(
    pair: tuple[AnyRequest, Answer], status: object, answer: list[object]
) -> None:
    header = over_the_wire([1, status, *answer])
    with contextlib.suppress(ProtocolError, UnknownError):
        parse_answer(pair[0], header)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (Match(H[:1]), MatchAnswer(b"\x02\x02")),
        (Match(H), MatchAnswer(b"\x00")),
        (Match(H), MatchAnswer(b"\x02\x09\x02")),
        (Exists(H[:1]), ExistsAnswer(b"\x04")),
        (Get(H[:2], checksums=True), GetAnswer(0, b"\x02\x02", None, [1])),
        (Get(H[:1], checksums=True), GetAnswer(0, b"\x02")),
        (Get(H[:1], checksums=True), GetAnswer(0, b"\x02", None, [1 << 32])),
        (Get(H[:1], checksums=True), GetAnswer(0, b"\x02", None, [-1])),
        (Get(H[:1]), GetAnswer(0, b"\x02", None, [1])),
        (Exists(H), ExistsAnswer(b"\x02")),
        (Get(H), GetAnswer(0, b"\x02")),
        (Get(H[:1]), GetAnswer(1, b"\x02", [1, 2])),
        (Get(H[:1]), GetAnswer(1, b"\x05")),
        (Reserve(ROOT, H[:1]), ReserveAnswer(1, b"\x00", [])),
        (Reserve(ROOT, H[:1]), ReserveAnswer(1, b"\x00\x00")),
        (Write(1, [0]), WriteAnswer(b"")),
        (Write(1, [0]), WriteAnswer(b"\x02")),
        (Segments([1]), SegmentsAnswer([(2, 4096)])),
        (Follow(7, 1), FollowAnswer(9, True, b"\x01\x00", H[:2])),
        (Follow(7, 9), FollowAnswer(8, True, b"\x01\x00", H[:2])),
        (Follow(7, 9), FollowAnswer(8, False, b"\x01", H[:1])),
        (Follow(7, 9), FollowAnswer(8, True, b"\x02", H[:1])),
        (Follow(7, 9), FollowAnswer(8, True, b"\x01", H[:2])),
        (Follow(0, 9), FollowAnswer(0, False)),
        (HELLO, dataclasses.replace(WELCOME, transport="rdma")),
    ],
)
def test_an_answer_that_does_not_fit_its_request_is_refused(
    request_: AnyRequest, answer: Answer
) -> None:
    with pytest.raises(ProtocolError):
        parse_answer(request_, over_the_wire(answer_header(1, answer)))  # type: ignore[arg-type]


def test_an_error_is_rebuilt() -> None:
    header = over_the_wire(error_header(3, AccessDenied("not you")))
    with pytest.raises(AccessDenied, match="not you"):
        parse_answer(Ping(), header)


def test_an_error_text_never_hinders_its_answer() -> None:
    header = over_the_wire(error_header(3, AccessDenied("\udcff" + "x" * 10_000)))
    with pytest.raises(AccessDenied, match="xxx"):
        parse_answer(Ping(), header)


@pytest.mark.parametrize("number", [0, 1, 4_096, 4_097, MAX_HASHES])
def test_hashes_are_split_as_they_were_joined(number: int) -> None:
    hashes = [n.to_bytes(32, "big") for n in range(number)]
    joined = join_hashes(hashes)
    assert list(split_hashes(joined)) == hashes
    match = parse_request([1, Match.op, 0, joined, False]).request
    assert isinstance(match, Match)
    assert (len(match.hashes), list(match.hashes), match.joined) == (len(hashes), hashes, joined)
    assert list(match.hashes[1:]) == hashes[1:]


def test_hashes_of_the_wrong_length_are_not_sent() -> None:
    with pytest.raises(InvalidRequest, match="32 bytes"):
        join_hashes([b"x" * 31, b"x" * 33])
    with pytest.raises(InvalidRequest, match="at most"):
        join_hashes([ROOT] * (MAX_HASHES + 1))


def test_locations_that_do_not_fit_are_not_sent() -> None:
    for locations in ([-1], [1 << 64], [0.5], [0] * (MAX_HASHES + 1)):
        with pytest.raises(InvalidRequest):
            GetAnswer(1, b"", locations).values()  # type: ignore[arg-type]
