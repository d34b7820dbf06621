"""What a put says to the node and makes of the answers, without any I/O; see ``operations``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from client.buffers import BlockSource, Buffers, PutBlocks, flat_bytes
from client.operations import Begin, Call, Finish, MapSegments, Move, Operation, Terms, name_memory
from client.results import BUSY, FAILED, REFUSED, STORED, PutResult
from kvstore.errors import InvalidRequest, KVStoreError, NamespaceMismatch, Unavailable
from kvstore.identity import Namespace
from kvstore.protocol import messages

RESERVE_BYTES: Final = 128 << 20
"""What one RESERVE asks room for at most, so that little is held up by a slow writer."""

WRITE_BYTES: Final = 8 << 20
"""Payload of one WRITE at most, if a source doesn't say more; several are under way at once."""

STAGED_AHEAD: Final = 2
"""Requests whose staging memory is in use while a source writes that of the next."""

_SEQUENCES: Final = (list, tuple, np.ndarray)


class Filled(NamedTuple):
    """Blocks on their way into what was reserved.

    Attributes:
        buffers: where they lie.
        payload: what of them follows the request.
    """

    buffers: Sequence[memoryview]
    payload: Sequence[memoryview]


class Filling(Protocol):
    """The blocks of one put.

    Attributes:
        error: why they could not be had; nothing more is asked of them then.
    """

    error: Exception | None

    def fill(
        self, terms: Terms, places: Sequence[int] | None, positions: Sequence[int]
    ) -> Operation[Filled]:
        """Bring blocks to the places reserved for them, or where they can be sent from."""

    def staged(self, terms: Terms) -> bool:
        """Whether they pass through memory that has to be kept small."""

    def at_once(self, terms: Terms) -> int:
        """How many bytes are filled in at once."""

    def check(self) -> None:
        """Raise what kept the blocks from being had, to the caller of the put."""


class BufferFilling:
    """Blocks that lie in buffers of the caller.

    Attributes:
        error: never set.
    """

    error: Exception | None = None

    def __init__(self, blocks: Buffers) -> None:
        self._blocks = blocks

    def fill(
        self, terms: Terms, places: Sequence[int] | None, positions: Sequence[int]
    ) -> Operation[Filled]:
        """See ``Filling.fill``."""
        buffers = [flat_bytes(self._blocks[position]) for position in positions]
        if not terms.transport.shares_memory:
            return Filled(buffers, terms.transport.fill(places, 0, buffers))
        fill = partial(terms.transport.fill, places, 0, buffers)
        yield Move(fill, terms.namespace.block_bytes * len(buffers))
        return Filled(buffers, ())

    def staged(self, terms: Terms) -> bool:
        """They don't."""
        return False

    def at_once(self, terms: Terms) -> int:
        """See ``Filling.at_once``."""
        return WRITE_BYTES

    def check(self) -> None:
        """Nothing can have."""


class SourceFilling:
    """Blocks that a source writes, where the node's memory is shared straight into that.

    Attributes:
        error: what the source raised. It is kept for the caller of the put, because a driver ends
            its session at errors that it does not know.
    """

    def __init__(self, source: BlockSource) -> None:
        self.error: Exception | None = None
        self._source = source

    def fill(
        self, terms: Terms, places: Sequence[int] | None, positions: Sequence[int]
    ) -> Operation[Filled]:
        """See ``Filling.fill``."""
        transport, size = terms.transport, terms.namespace.block_bytes
        if transport.shares_memory:
            extents = transport.extents(places, size)
            yield Move(partial(self._write, positions, extents), size * len(extents))
            for extent in extents:
                # A source may look at them no longer; where it still does, that can't be helped.
                with suppress(BufferError):
                    extent.release()
            return Filled((), ())
        buffers = [row.data for row in np.empty((len(positions), size), np.uint8)]
        yield Move(partial(self._write, positions, buffers), size * len(buffers))
        if self.error is not None:
            return Filled((), ())
        return Filled(buffers, transport.fill(places, 0, buffers))

    def staged(self, terms: Terms) -> bool:
        """They do where no memory is shared."""
        return not terms.transport.shares_memory

    def at_once(self, terms: Terms) -> int:
        """What the source says, where it writes into the node's memory."""
        said: int = getattr(self._source, "write_bytes", WRITE_BYTES)
        return said if terms.transport.shares_memory else WRITE_BYTES

    def check(self) -> None:
        """See ``Filling.check``."""
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it would keep itself alive, and the memory that it came across

    def _write(self, positions: Sequence[int], buffers: Sequence[memoryview]) -> None:
        try:
            self._source.write(positions, buffers)
        except Exception as error:  # noqa: BLE001 - raised again by check
            self.error = error


def filling_of(namespace: Namespace, hashes: Sequence[bytes], blocks: PutBlocks) -> Filling:
    """Accept blocks to store.

    Raises:
        InvalidRequest: their number is not that of the hashes, or one is no buffer.
        NamespaceMismatch: one has another size than the blocks of the namespace.
    """
    if len(blocks) != len(hashes):
        raise InvalidRequest(f"{len(hashes)} hashes need as many blocks, not {len(blocks)}")
    # The usual ones first: asking whether something has the methods of a source takes 20 µs.
    if not isinstance(blocks, _SEQUENCES) and isinstance(blocks, BlockSource):
        return SourceFilling(blocks)
    size = namespace.block_bytes
    for block in blocks:
        if (found := flat_bytes(block).nbytes) != size:
            raise NamespaceMismatch(f"a block has {found} bytes, the namespace {size}")
    return BufferFilling(blocks)


def put(
    terms: Terms, hashes: Sequence[bytes], filling: Filling, parent: bytes, copies: int = 0
) -> Operation[PutResult]:
    """Store a chain of blocks: reserve, fill, commit; what is held already is skipped.

    What is reserved is filled in parts: while one is filled, the node commits the one before.
    ``filling.check()`` has to be called afterwards. ``copies`` nodes are to hold the chain in the
    end; 0 where the node is to say how many.
    """
    putting = _Putting(terms, hashes, filling, parent, copies)
    try:
        yield from putting.run()
    finally:
        terms.reservations += [number for number, left in putting.open.items() if left]
        for part in putting.written:
            terms.transport.done(part.named)
    return PutResult(bytes(putting.codes))


@dataclass(slots=True)
class _Part:
    """Blocks that the node has been asked to commit.

    Attributes:
        reservation: that they belong to.
        positions: of the blocks within the put.
        named: what the node was told of the caller's memory.
        handle: of the call.
    """

    reservation: int
    positions: list[int]
    named: Sequence[int] | None
    handle: Any = None


class _Putting:
    """One put on its way.

    Attributes:
        codes: the outcome of each block as far as it is known.
        open: how many blocks of each reservation have not been committed.
        written: what the node has not answered yet.
    """

    def __init__(
        self, terms: Terms, hashes: Sequence[bytes], filling: Filling, parent: bytes, copies: int
    ) -> None:
        self.codes = bytearray([FAILED]) * len(hashes)
        self.open: dict[int, int] = {}
        self.written: deque[_Part] = deque()
        self._terms = terms
        self._size = terms.namespace.block_bytes
        self._hashes = hashes
        self._filling = filling
        self._parent = parent
        self._copies = copies
        self._step = terms.blocks_at_once(self._size, RESERVE_BYTES)
        self._ahead = STAGED_AHEAD if filling.staged(terms) else len(hashes)

    def run(self) -> Operation[None]:
        """Store all parts; stop at the first that has no room or is being written by another."""
        for start in range(0, len(self._hashes), self._step):
            more = yield from self._store(start)
            yield from self._settle(0)
            if not more:
                return

    def _store(self, start: int) -> Operation[bool]:
        """Write what the node has room for; returns whether the next part makes sense."""
        chain = self._hashes[start : start + self._step]
        parent = self._hashes[start - 1] if start else self._parent
        answer: messages.ReserveAnswer = yield Call(messages.Reserve(parent, chain, self._copies))
        verdicts = answer.verdicts
        self.codes[start : start + len(verdicts)] = verdicts
        indexes = [i for i, verdict in enumerate(verdicts) if verdict == messages.FILL]
        if indexes:
            self.open[answer.reservation] = len(indexes)
            yield from self._write(start, answer, indexes)
            if self._filling.error is not None:
                yield from self._give_up(answer.reservation)
                return False
        for code in (REFUSED, BUSY):
            if code in verdicts:
                self._rest(start + len(verdicts), code)
                return False
        return True

    def _write(
        self, start: int, answer: messages.ReserveAnswer, indexes: list[int]
    ) -> Operation[None]:
        """Move the blocks reserved, and ask the node to commit them."""
        for index in indexes:
            self.codes[start + index] = FAILED
        locations, transport = answer.locations, self._terms.transport
        if missing := transport.missing(locations):
            yield MapSegments(missing)
        step = self._terms.blocks_at_once(self._size, self._filling.at_once(self._terms))
        for first in range(0, len(indexes), step):
            yield from self._settle(self._ahead)
            some = indexes[first : first + step]
            positions = [start + index for index in some]
            places = locations[first : first + step] if locations is not None else None
            filled = yield from self._filling.fill(self._terms, places, positions)
            if self._filling.error is not None:
                return
            named = name_memory(transport.sources, filled.buffers)
            part = _Part(answer.reservation, positions, named)
            self.written.append(part)
            request = messages.Write(answer.reservation, some, 0, self._size, sources=named)
            part.handle = yield Begin(Call(request, filled.payload))

    def _settle(self, ahead: int) -> Operation[None]:
        """See which blocks have been committed, until no more than some parts are open."""
        while len(self.written) > ahead:
            part = self.written[0]
            try:
                written: messages.WriteAnswer = yield Finish(part.handle)
            except InvalidRequest as error:
                raise Unavailable(f"the node gave up blocks it had reserved: {error}") from error
            for position, done in zip(part.positions, written.committed, strict=True):
                if done:
                    self.codes[position] = STORED
            self.open[part.reservation] -= written.committed.count(1)
            self._terms.transport.done(self.written.popleft().named)

    def _give_up(self, reservation: int) -> Operation[None]:
        """Have the node drop what a source could not write, before its error is raised."""
        with suppress(KVStoreError):  # the error of the source comes first
            yield from self._settle(0)
            yield Call(messages.Abort(reservation))
            self.open[reservation] = 0

    def _rest(self, start: int, code: int) -> None:
        """Say of all blocks from one on that the put does not get to them."""
        self.codes[start:] = bytes([code]) * (len(self.codes) - start)


def copies_of(replicas: int | None) -> int:
    """How many nodes are to hold a chain, as it travels; 0 where the node is to say.

    Raises:
        InvalidRequest: there can't be so many.
    """
    if replicas is None:
        return 0
    if isinstance(replicas, bool) or not isinstance(replicas, int):
        raise InvalidRequest(f"replicas must be an integer, not {replicas!r}")
    if not 1 <= replicas <= messages.MAX_COPIES:
        raise InvalidRequest(f"from 1 to {messages.MAX_COPIES} replicas, not {replicas}")
    return replicas
