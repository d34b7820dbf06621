"""The messages of the protocol, and the headers in which they travel.

A request header is ``[request id, operation, deadline in ms, *arguments]``. Its answer is
``[request id, 0, *values]``, or ``[request id, 1, code, message, retry]`` for an error. Request
id 0 is never answered: a request carries it only where it is one-way (``RELEASE``, ``UNMAPPED``),
an answer only where it speaks of the whole connection (an error, after which the sender closes).

Hashes travel as one blob of 32 bytes each. Tiers travel as one byte per block: 0 absent, 1 hbm,
2 dram, 3 ssd, 4 remote (another node holds it). Locations, destinations and sources are sequences
of 64-bit integers that only the transport in use understands; they travel as one blob of 8 bytes
each.

All that a peer sent is checked before anything acts on it, by :func:`parse_request_id` (its
failure is a :class:`ProtocolError`: there is nobody to answer), :func:`parse_request` (an
:class:`InvalidRequest` answered to that request alone) and :func:`parse_answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from kvstore.errors import InvalidRequest, KVStoreError, ProtocolError, from_code
from kvstore.protocol import fields
from kvstore.protocol.answers import (
    ABSENT,
    BLOCK_REMOVED,
    BLOCK_STORED,
    BUSY,
    DRAM,
    FILL,
    HBM,
    HELD,
    REFUSED,
    REMOTE,
    SSD,
    AbortAnswer,
    Answer,
    ExistsAnswer,
    FollowAnswer,
    GetAnswer,
    MatchAnswer,
    PingAnswer,
    ReserveAnswer,
    SegmentsAnswer,
    TakeAnswer,
    Welcome,
    WriteAnswer,
)
from kvstore.protocol.fields import HASH_BYTES, MAX_COPIES, MAX_HASHES, join_hashes, split_hashes
from kvstore.protocol.gpu_messages import (
    DeviceSegments,
    DeviceSegmentsAnswer,
    GpuOffer,
    Unmapped,
)
from kvstore.protocol.requests import (
    Abort,
    Exists,
    Follow,
    Get,
    Hello,
    Match,
    Ping,
    Release,
    Request,
    Reserve,
    Segments,
    Take,
    Write,
)

__all__ = [
    "ABSENT",
    "BLOCK_REMOVED",
    "BLOCK_STORED",
    "BUSY",
    "DRAM",
    "FILL",
    "HASH_BYTES",
    "HBM",
    "HELD",
    "MAX_COPIES",
    "MAX_DEADLINE_MS",
    "MAX_HASHES",
    "MAX_REQUEST_ID",
    "PROTOCOL_VERSION",
    "REFUSED",
    "REMOTE",
    "SSD",
    "Abort",
    "AbortAnswer",
    "Answer",
    "AnyRequest",
    "DeviceSegments",
    "DeviceSegmentsAnswer",
    "Exists",
    "ExistsAnswer",
    "Follow",
    "FollowAnswer",
    "Get",
    "GetAnswer",
    "GpuOffer",
    "Hello",
    "Incoming",
    "Match",
    "MatchAnswer",
    "Ping",
    "PingAnswer",
    "Release",
    "Request",
    "Reserve",
    "ReserveAnswer",
    "Segments",
    "SegmentsAnswer",
    "Take",
    "TakeAnswer",
    "Unmapped",
    "Welcome",
    "Write",
    "WriteAnswer",
    "answer_header",
    "error_header",
    "join_hashes",
    "parse_answer",
    "parse_error",
    "parse_request",
    "parse_request_id",
    "release_header",
    "request_header",
    "split_hashes",
    "unmapped_header",
]

PROTOCOL_VERSION: Final = 1
MAX_REQUEST_ID: Final = 0xFFFF_FFFF
MAX_DEADLINE_MS: Final = 86_400_000
"""Longest deadline of a request: a day."""

_MAX_MESSAGE: Final = 2_000

AnyRequest: TypeAlias = (
    Hello
    | Match
    | Exists
    | Get
    | Release
    | Reserve
    | Write
    | Abort
    | Segments
    | Ping
    | Follow
    | Take
    | DeviceSegments
    | Unmapped
)
A = TypeVar("A", bound=Answer)

_PARSERS: Final[dict[int, Callable[[Sequence[object]], AnyRequest]]] = {
    kind.op: kind.parse
    for kind in (
        Hello,
        Match,
        Exists,
        Get,
        Release,
        Reserve,
        Write,
        Abort,
        Segments,
        Ping,
        Follow,
        Take,
        DeviceSegments,
        Unmapped,
    )
}

_ONE_WAY: Final = frozenset((Release.op, Unmapped.op))


@dataclass(slots=True)
class Incoming:
    """A request as the node received it.

    Attributes:
        request_id: to be repeated in the answer; 0 for a one-way request.
        deadline_ms: how long the client waits, in ms from now.
        request: what it asks.
    """

    request_id: int
    deadline_ms: int
    request: AnyRequest


def request_header(request_id: int, deadline_ms: int, request: Request[Answer]) -> list[object]:
    """Return the header of ``request``.

    Args:
        request_id: 1 to ``MAX_REQUEST_ID``, not in use on this connection.
        deadline_ms: how long the caller waits from now, in ms.
        request: what is asked.

    Raises:
        InvalidRequest: a hash is not 32 bytes long, or there are too many.
    """
    return [request_id, request.op, deadline_ms, *request.arguments()]


def release_header(leases: list[int]) -> list[object]:
    """Return the header of the one-way request that gives ``leases`` back."""
    return [0, Release.op, 0, leases]


def unmapped_header(numbers: list[int]) -> list[object]:
    """Return the header of the one-way request that says which segments are not mapped any more."""
    return [0, Unmapped.op, 0, numbers]


def answer_header(request_id: int, answer: Answer) -> list[object]:
    """Return the header of ``answer`` to the request ``request_id``."""
    return [request_id, 0, *answer.values()]


def error_header(request_id: int, error: KVStoreError) -> list[object]:
    """Return the header that tells the peer of ``error``.

    Args:
        request_id: the request that failed; 0 for the whole connection, which is then closed.
        error: what went wrong; its text is cut at 2,000 characters.
    """
    message = str(error)[:_MAX_MESSAGE].encode(errors="replace").decode()
    return [request_id, 1, error.code, message, error.retry]


def parse_request_id(header: Sequence[object]) -> int:
    """Return the request id of a request or answer header.

    Raises:
        ProtocolError: there is none, so that nobody can be answered.
    """
    if len(header) < 2:
        raise ProtocolError("the header is too short")
    request_id = header[0]
    if type(request_id) is not int or not 0 <= request_id <= MAX_REQUEST_ID:
        raise ProtocolError("the header does not begin with a request id")
    return request_id


def parse_request(header: Sequence[object], payload_length: int = 0) -> Incoming:
    """Check a request header and return what it asks.

    Args:
        header: as decoded; :func:`parse_request_id` has accepted it.
        payload_length: of the frame, in bytes.

    Raises:
        InvalidRequest: the operation is unknown, an argument has the wrong type or range, or
            the payload does not fit. The answer is an error to this request alone.
    """
    if len(header) < 3:
        fields.wrong("the header is too short for a request")
    op = header[1]
    parse = _PARSERS.get(op) if type(op) is int else None
    if parse is None:
        fields.wrong(f"unknown operation {op!r:.40}")
    deadline_ms = fields.integer(header[2], 0, MAX_DEADLINE_MS, "deadline")
    request = parse(header[3:])
    request_id = header[0]
    if (request_id == 0) is not (op in _ONE_WAY):
        fields.wrong("request id 0 is for RELEASE and UNMAPPED, and for these alone")
    if payload_length:
        _check_payload(request, payload_length)
    return Incoming(request_id, deadline_ms, request)  # type: ignore[arg-type]


def _check_payload(request: AnyRequest, payload_length: int) -> None:
    if type(request) is not Write:
        fields.wrong("a payload may follow WRITE only")
    expected = len(request.indexes) * request.length
    if payload_length != expected:
        fields.wrong(f"a payload of {expected} bytes expected, not {payload_length}")


def parse_answer(request: Request[A], header: Sequence[object]) -> A:
    """Check the header that answers ``request`` and return the answer.

    Raises:
        KVStoreError: the error that the node answered, rebuilt.
        ProtocolError: the header is malformed or does not fit what was asked.
    """
    status = header[1]
    if type(status) is int and status == 0:
        try:
            return request.read(header[2:])
        except InvalidRequest as error:
            raise ProtocolError(f"malformed answer: {error}") from error
    raise parse_error(header)


def parse_error(header: Sequence[object]) -> KVStoreError:
    """Return the error that an answer header carries.

    Raises:
        ProtocolError: the header is no well-formed error.
    """
    try:
        status, code, message, retry = header[1:]
        fields.integer(status, 1, 1, "status")
        return from_code(
            fields.text(code, "code"), fields.text(message, "message"), fields.flag(retry, "retry")
        )
    except (ValueError, InvalidRequest) as error:
        raise ProtocolError(f"malformed error answer: {error}") from error
