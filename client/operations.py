"""What each call says to the node and makes of the answers, without any I/O.

An operation is a generator: it yields steps, a driver carries each one out and sends back what
came of it. The blocking and the asyncio client differ in their drivers alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

from client.buffers import Buffers, writable_bytes
from client.results import GetResult, Match
from kvstore.errors import InvalidRequest, NamespaceMismatch, Unavailable
from kvstore.identity import HASH_BYTES, Namespace
from kvstore.protocol import messages
from kvstore.protocol.frames import DEFAULT_MAX_PAYLOAD
from rdma.errors import BadPlace, TransportError
from rdma.gpu_segments import GpuView
from rdma.transport import ClientTransport

T = TypeVar("T")
V = TypeVar("V", bound="memoryview | GpuView")

GET_BYTES: Final = 16 << 20
"""Bytes of one request of a get: so many are copied while the node brings up the next."""

GETS_AHEAD: Final = 2
"""Requests of one get that the node works on while one is copied."""

BATCH_BYTES: Final = 128 << 20
"""Payload of one GET at most, so that pins stay few and short."""


@dataclass(slots=True)
class Call:
    """Ask the node one thing; comes back as its answer.

    Attributes:
        request: what is asked.
        payload: bytes that follow the request.
        sink: from the answer to the memory for the payload behind it.
    """

    request: messages.Request[Any]
    payload: Sequence[memoryview] = ()
    sink: Callable[[Any], Sequence[memoryview]] | None = None


@dataclass(slots=True)
class Begin:
    """Ask without waiting for the answer; comes back as a handle of the driver's."""

    call: Call


@dataclass(slots=True)
class Finish:
    """Wait for what was begun; comes back as its answer."""

    handle: Any


@dataclass(slots=True)
class MapSegments:
    """Ask for segments and map them; comes back as ``None``."""

    numbers: list[int]


@dataclass(slots=True)
class Move:
    """Move many bytes by CPU, where that holds up nobody else; comes back as ``None``.

    Attributes:
        work: does it.
        length: number of bytes.
    """

    work: Callable[[], object]
    length: int


@dataclass(slots=True)
class Release:
    """Give back the pins of leases; comes back as whether they lasted until now."""

    leases: list[int]


Step: TypeAlias = Call | Begin | Finish | MapSegments | Move | Release
Operation: TypeAlias = Generator[Step, Any, T]


@dataclass(slots=True)
class Terms:
    """What a session agreed on.

    Attributes:
        namespace: of the session.
        transport: how its payload moves.
        max_payload: bytes that may follow one header.
        max_hashes: hashes that one request may name.
        leases: of operations that ended early, for the driver to give back.
        reservations: likewise.
    """

    namespace: Namespace
    transport: ClientTransport
    max_payload: int
    max_hashes: int
    leases: list[int] = field(default_factory=list)
    reservations: list[int] = field(default_factory=list)

    def blocks_at_once(self, block_bytes: int, most_bytes: int) -> int:
        """How many blocks one request may move."""
        return max(1, min(self.max_hashes, min(self.max_payload, most_bytes) // block_bytes))


def make_terms(
    namespace: Namespace, welcome: messages.Welcome, transport: ClientTransport
) -> Terms:
    """What a session agreed on.

    Raises:
        NamespaceMismatch: the node has another idea of the size of a block.
    """
    if welcome.block_bytes != namespace.block_bytes:
        raise NamespaceMismatch(
            f"blocks of {welcome.block_bytes} bytes at the node, {namespace.block_bytes} here"
        )
    limits = welcome.limits
    return Terms(
        namespace,
        transport,
        limits.get("max_payload", DEFAULT_MAX_PAYLOAD),
        max(1, min(limits.get("max_hashes", messages.MAX_HASHES), messages.MAX_HASHES)),
    )


@dataclass(slots=True)
class Seen(Generic[V]):
    """Blocks as they lie in memory; the pins of ``leases`` keep them there.

    Attributes:
        codes: the tier code of each block, 0 for a miss.
        views: a read-only view of each block found, ``None`` for a miss.
        leases: names the pins.
        ended: to be called when the views on GPUs are in use no more.
    """

    codes: bytes
    views: list[V | None]
    leases: list[int]
    ended: Sequence[Callable[[], object]] = ()


def names_memory(request: messages.Request[Any]) -> bool:
    """Whether the node is told of the caller's memory, to write to it or read from it itself."""
    if isinstance(request, messages.Get):
        return request.destinations is not None
    return isinstance(request, messages.Write) and request.sources is not None


def forsake(terms: Terms, answer: object) -> None:
    """Have the node drop what an answer brought that nobody will read."""
    if isinstance(answer, messages.GetAnswer) and answer.lease:
        terms.leases.append(answer.lease)
    elif isinstance(answer, messages.ReserveAnswer) and answer.reservation:
        terms.reservations.append(answer.reservation)


def check_hashes(hashes: Sequence[bytes]) -> None:
    """Accept hashes of the right length.

    Raises:
        InvalidRequest: one is not 32 bytes.
    """
    if list(map(len, hashes)).count(HASH_BYTES) != len(hashes):
        raise InvalidRequest(f"every hash must be {HASH_BYTES} bytes")


def match(terms: Terms, hashes: Sequence[bytes], prefetch: bool) -> Operation[Match]:
    """Find how far a prefix reaches over all shards."""
    if len(hashes) <= terms.max_hashes:
        only: messages.MatchAnswer = yield Call(messages.Match(hashes, prefetch))
        return Match(only.tiers)
    codes = b""
    for start in range(0, len(hashes), terms.max_hashes):
        batch = hashes[start : start + terms.max_hashes]
        answer: messages.MatchAnswer = yield Call(messages.Match(batch, prefetch))
        codes += answer.tiers
        if len(answer.tiers) < len(batch):
            break
    return Match(codes)


def exists(terms: Terms, hashes: Sequence[bytes]) -> Operation[GetResult]:
    """Find which blocks this shard holds."""
    codes = b""
    for start in range(0, len(hashes), terms.max_hashes):
        batch = hashes[start : start + terms.max_hashes]
        answer: messages.ExistsAnswer = yield Call(messages.Exists(batch))
        codes += answer.tiers
    return GetResult(codes)


def byte_range(namespace: Namespace, offset: int, length: int | None) -> int:
    """The number of bytes that a byte range of every block has.

    Raises:
        InvalidRequest: it lies outside a block.
    """
    size = namespace.block_bytes
    wanted = size - offset if length is None else length
    if offset < 0 or wanted < 1 or offset + wanted > size:
        raise InvalidRequest(
            f"bytes {offset} to {offset + wanted} lie outside a block of {size} bytes"
        )
    return wanted


def destinations(buffers: Buffers, count: int, length: int) -> list[memoryview]:
    """The memory that blocks are to land in, one view of ``length`` bytes each.

    Raises:
        InvalidRequest: there are too few buffers, or one is too small, read-only or no buffer.
    """
    if len(buffers) != count:
        raise InvalidRequest(f"{count} blocks need as many buffers, not {len(buffers)}")
    views = [writable_bytes(buffer) for buffer in buffers]
    for view in views:
        if len(view) < length:
            raise InvalidRequest(f"a buffer has {len(view)} bytes, {length} are needed")
    return [view if len(view) == length else view[:length] for view in views]


def get(
    terms: Terms, hashes: Sequence[bytes], into: Sequence[memoryview], offset: int, wait: bool
) -> Operation[GetResult]:
    """Bring blocks, or a byte range of each, into memory of the caller.

    Many bytes are asked for in parts: while one is copied, the node brings the next up.
    """
    if not hashes:
        return GetResult(b"")
    step = terms.blocks_at_once(len(into[0]), GET_BYTES)
    if len(hashes) <= step:
        return GetResult((yield from _get_batch(terms, hashes, into, offset, wait)))
    codes = b""
    parts: deque[_Part] = deque()
    try:
        for start in range(0, len(hashes), step):
            part = _Part(terms, hashes[start : start + step], into[start : start + step])
            parts.append(part)
            part.handle = yield Begin(part.call(offset, wait))
            if len(parts) > GETS_AHEAD:
                codes += yield from parts[0].take((yield Finish(parts[0].handle)))
                parts.popleft().close()
        while parts:
            codes += yield from parts[0].take((yield Finish(parts[0].handle)))
            parts.popleft().close()
    finally:
        for part in parts:
            part.close()
    return GetResult(codes)


def _get_batch(
    terms: Terms,
    hashes: Sequence[bytes],
    buffers: Sequence[memoryview],
    offset: int,
    wait: bool,
) -> Operation[bytes]:
    part = _Part(terms, hashes, buffers)
    try:
        return (yield from part.take((yield part.call(offset, wait))))
    finally:
        part.close()


class _Part:
    """One request of a get.

    Attributes:
        handle: of the call, once it has begun.
    """

    def __init__(
        self, terms: Terms, hashes: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> None:
        self.handle: Any = None
        self._terms = terms
        self._hashes = hashes
        self._buffers = buffers
        self._named: Sequence[int] | None = None

    def call(self, offset: int, wait: bool) -> Call:
        """The request for the blocks.

        Raises:
            Unavailable: the memory can't be registered, or the session has ended.
        """
        transport, buffers = self._terms.transport, self._buffers
        self._named = name_memory(transport.destinations, buffers)
        request = messages.Get(self._hashes, offset, len(buffers[0]), wait, self._named)
        inline = not transport.shares_memory and self._named is None
        return Call(request, sink=self._found if inline else None)

    def _found(self, answer: messages.GetAnswer) -> list[memoryview]:
        return [buffer for tier, buffer in zip(answer.tiers, self._buffers, strict=True) if tier]

    def take(self, answer: messages.GetAnswer) -> Operation[bytes]:
        """See to it that the bytes are in the buffers; returns the tier code of each block."""
        terms, transport = self._terms, self._terms.transport
        targets = self._found(answer)
        if not targets:
            return answer.tiers
        lasted = True
        with kept(terms, [answer.lease] if answer.lease else []) as leases:
            if missing := transport.missing(answer.locations):
                yield MapSegments(missing)
            place = partial(transport.place, answer.locations, targets)
            if transport.shares_memory:
                yield Move(place, sum(map(len, targets)))
            else:
                place()
            if leases:
                lasted = yield Release(leases)
        return answer.tiers if lasted else bytes(len(answer.tiers))

    def close(self) -> None:
        """Take back the memory that the node was told of."""
        self._terms.transport.done(self._named)


def name_memory(
    how: Callable[[Sequence[memoryview]], Sequence[int] | None], buffers: Sequence[memoryview]
) -> Sequence[int] | None:
    """What the transport tells the node of the caller's memory.

    Raises:
        Unavailable: the memory can't be registered, or the session has ended.
    """
    try:
        return how(buffers)
    except TransportError as error:
        raise Unavailable(str(error)) from error


def view(terms: Terms, hashes: Sequence[bytes]) -> Operation[Seen[memoryview]]:
    """Show blocks where they lie, or in memory of their own where none is shared."""
    if terms.transport.shares_memory:
        step, how = terms.max_hashes, show
    else:
        step, how = terms.blocks_at_once(terms.namespace.block_bytes, BATCH_BYTES), _get_views
    if 0 < len(hashes) <= step:
        return how(terms, hashes)
    return view_batches(Seen(b"", [], []), terms, hashes, step, how)


def view_batches(
    seen: Seen[V],
    terms: Terms,
    hashes: Sequence[bytes],
    step: int,
    how: Callable[[Terms, Sequence[bytes]], Operation[Seen[V]]],
) -> Operation[Seen[V]]:
    """Add to ``seen`` what ``how`` shows of the blocks, so many at a time."""
    with kept(terms, seen.leases):
        for start in range(0, len(hashes), step):
            part = yield from how(terms, hashes[start : start + step])
            seen.codes += part.codes
            seen.views += part.views
            seen.leases += part.leases
            seen.ended = [*seen.ended, *part.ended]
    return seen


@contextmanager
def kept(terms: Terms, leases: list[int]) -> Iterator[list[int]]:
    """Have the leases given back if the operation ends early."""
    try:
        yield leases
    except BaseException:
        terms.leases += leases
        raise


def show(terms: Terms, hashes: Sequence[bytes]) -> Operation[Seen[memoryview]]:
    """Show blocks in the node's memory, as many as one request may name."""
    answer: messages.GetAnswer = yield Call(messages.Get(hashes))
    return (yield from shown(terms, answer))


def shown(terms: Terms, answer: messages.GetAnswer) -> Operation[Seen[memoryview]]:
    """Show the blocks that an answer found, all of them in the node's memory."""
    transport, size = terms.transport, terms.namespace.block_bytes
    locations = answer.locations or ()
    leases = [answer.lease] if answer.lease else []
    views: list[memoryview | None]
    try:
        views = transport.views(locations, size)  # type: ignore[assignment]
    except BadPlace:
        # Looking for missing segments first would cost each call what only the first one needs.
        with kept(terms, leases):
            yield MapSegments(transport.missing(locations))
        views = transport.views(locations, size)  # type: ignore[assignment]
    if len(views) < len(answer.tiers):
        views = spread(answer.tiers, views)
    return Seen(answer.tiers, views, leases)


def _get_views(terms: Terms, hashes: Sequence[bytes]) -> Operation[Seen[memoryview]]:
    size = terms.namespace.block_bytes
    whole = memoryview(bytearray(len(hashes) * size))
    buffers = [whole[start : start + size] for start in range(0, len(whole), size)]
    codes = yield from _get_batch(terms, hashes, buffers, 0, wait=False)
    views = [
        buffer.toreadonly() if code != messages.ABSENT else None
        for code, buffer in zip(codes, buffers, strict=True)
    ]
    return Seen(codes, views, [])


def spread(codes: bytes, views: Sequence[V | None]) -> list[V | None]:
    """Put ``None`` where a block was missed."""
    found = iter(views)
    return [next(found) if code != messages.ABSENT else None for code in codes]
