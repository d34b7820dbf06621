"""From blocks here and memory there to work requests; pure.

A peer names its memory by triples ``(address, key, length)``, one after the other. The pieces of
one block follow each other and add up to the length moved; most blocks have a single piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rdma.errors import BadPlace

__all__ = ["Piece", "Work", "plan", "proof", "select", "triples"]

_FIELDS: Final = 3
_MOST_ADDRESS: Final = 1 << 64
_MOST_KEY: Final = 1 << 32


class Piece(NamedTuple):
    """A range of this process's memory, with the key of its registration."""

    address: int
    length: int
    key: int


class Work(NamedTuple):
    """One work request: a contiguous range of the peer's memory and the pieces that go there.

    Attributes:
        remote: the peer's address.
        key: of the peer's registration.
        pieces: memory of this process, in the order of the bytes.
        length: bytes of payload in all.
        proves: whether this is the :func:`proof` behind others.
    """

    remote: int
    key: int
    pieces: tuple[Piece, ...]
    length: int
    proves: bool = False


def triples(named: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Return the pieces of memory that a peer named.

    Raises:
        BadPlace: they are no triples, or a number is out of its bounds.
    """
    if len(named) % _FIELDS:
        raise BadPlace("the peer's memory is named by triples of address, key and length")
    for at in range(0, len(named), _FIELDS):
        address, key, length = named[at : at + _FIELDS]
        if not 0 <= key < _MOST_KEY or length < 1 or not 0 <= address <= _MOST_ADDRESS - length:
            raise BadPlace(f"a piece of {length} bytes at {address:#x} with key {key:#x}")
        yield address, key, length


def select(named: Sequence[int], length: int, found: Sequence[int]) -> list[int]:
    """Return the part of ``named`` that belongs to the blocks found.

    Args:
        named: triples for each block asked for.
        length: bytes of each block.
        found: for each block, whether it was (anything true).

    Raises:
        BadPlace: the triples don't make as many blocks.
    """
    kept: list[int] = []
    pieces = triples(named)
    for wanted in found:
        block: list[int] = []
        left = length
        while left > 0:
            piece = next(pieces, None)
            if piece is None:
                raise BadPlace("fewer blocks are named than were asked for")
            block += piece
            left -= piece[2]
        if left:
            raise BadPlace("a piece reaches beyond its block")
        if wanted:
            kept += block
    if next(pieces, None) is not None:
        raise BadPlace("more memory is named than was asked for")
    return kept


def plan(
    local: Sequence[tuple[int, int]],
    length: int,
    named: Sequence[int],
    *,
    most_pieces: int,
    most_bytes: int,
) -> list[Work]:
    """Return the work requests that join blocks here with the memory that a peer named.

    What follows on at the peer goes into one request, gathered from (or scattered to) several
    pieces here, as far as the bounds allow.

    Args:
        local: address and registration key of each block.
        length: bytes of each block.
        named: triples, in the order of the blocks.
        most_pieces: pieces of one request at most.
        most_bytes: bytes of one request at most.

    Raises:
        BadPlace: the triples don't make as many blocks.
    """
    works = _Builder(most_pieces, most_bytes)
    pieces = triples(named)
    for address, local_key in local:
        done = 0
        while done < length:
            piece = next(pieces, None)
            if piece is None:
                raise BadPlace("less memory is named than the blocks need")
            remote, key, size = piece
            if done + size > length:
                raise BadPlace("a piece reaches beyond its block")
            works.add(remote, key, Piece(address + done, size, local_key))
            done += size
    if next(pieces, None) is not None:
        raise BadPlace("more memory is named than the blocks need")
    return works.finish()


def proof(writes: Sequence[Work], landing: Piece, elsewhere: tuple[int, int] | None = None) -> Work:
    """Return the RDMA READ that proves that WRITEs have reached the peer's memory.

    A WRITE completes when the peer's device has acknowledged it, which may be before its bytes
    have passed the bus behind, and what we tell the peer then goes another way that may be
    quicker. A READ is carried out after the WRITEs before it, and pushes their bytes ahead of
    itself over the bus; the answer to it can't come before they are in memory.

    Args:
        writes: one or more; the proof must be posted behind them on the same queue pair.
        landing: a byte of this process's memory for what is read, which nobody looks at.
        elsewhere: address and key of what to read; by default the last byte written, which also
            serves where the peer's memory is not that of its host.
    """
    last = writes[-1]
    address, key = elsewhere or (last.remote + last.length - 1, last.key)
    return Work(address, key, (landing,), 0, proves=True)


class _Builder:
    """Puts pieces together to work requests."""

    def __init__(self, most_pieces: int, most_bytes: int) -> None:
        self._most_pieces = most_pieces
        self._most_bytes = most_bytes
        self._works: list[Work] = []
        self._remote = self._key = self._length = 0
        self._pieces: list[Piece] = []

    def add(self, remote: int, key: int, piece: Piece) -> None:
        """Add a piece, cut where it is larger than one request may be."""
        most = self._most_bytes
        if piece.length <= most:
            self._add(remote, key, piece)
            return
        for start in range(0, piece.length, most):
            size = min(most, piece.length - start)
            self._add(remote + start, key, Piece(piece.address + start, size, piece.key))

    def finish(self) -> list[Work]:
        """Return all requests."""
        if self._pieces:
            self._works.append(Work(self._remote, self._key, tuple(self._pieces), self._length))
            self._pieces = []
        return self._works

    def _add(self, remote: int, key: int, piece: Piece) -> None:
        pieces = self._pieces
        follows = (
            pieces
            and remote == self._remote + self._length
            and key == self._key
            and self._length + piece.length <= self._most_bytes
        )
        if follows:
            last = pieces[-1]
            if last.key == piece.key and last.address + last.length == piece.address:
                pieces[-1] = Piece(last.address, last.length + piece.length, piece.key)
                self._length += piece.length
                return
            if len(pieces) < self._most_pieces:
                pieces.append(piece)
                self._length += piece.length
                return
        self.finish()
        self._remote, self._key, self._length, self._pieces = remote, key, piece.length, [piece]
