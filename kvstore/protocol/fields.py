"""Checks of the single values of a message: types, ranges and numbers, and the blob of hashes.

Each check returns the value that it was given, typed, or raises :class:`InvalidRequest` with a
text that names what is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NoReturn, overload

from kvstore.errors import InvalidRequest

__all__ = [
    "HASH_BYTES",
    "MAX_BYTES",
    "MAX_COPIES",
    "MAX_HASHES",
    "MAX_SEGMENTS",
    "MAX_TRANSPORTS",
    "MAX_U64",
    "JoinedHashes",
    "arguments",
    "codes",
    "flag",
    "integer",
    "integers",
    "join_hashes",
    "joined_hashes",
    "mapping",
    "one_hash",
    "pack_locations",
    "split_hashes",
    "text",
    "unpack_locations",
    "wrong",
]

HASH_BYTES: Final = 32
MAX_HASHES: Final = 65_536
MAX_U64: Final = 0xFFFF_FFFF_FFFF_FFFF
MAX_BYTES: Final = 1 << 40
"""Largest offset, length or size of a block or segment, in bytes."""
MAX_COPIES: Final = 16
"""Most nodes that are to hold one block."""
MAX_TRANSPORTS: Final = 16
MAX_SEGMENTS: Final = 128
"""Most segments asked for at once; the kernel passes at most 253 descriptors in one message."""

_MAX_TEXT: Final = 4_096
_MAX_MAP: Final = 64


def wrong(what: str) -> NoReturn:
    """Refuse the message because of ``what``."""
    raise InvalidRequest(what)


def integer(value: object, low: int, high: int, what: str) -> int:
    """Return ``value`` if it is an integer from ``low`` to ``high`` (no bool)."""
    if type(value) is not int or not low <= value <= high:
        wrong(f"{what} must be an integer from {low} to {high}")
    return value


def flag(value: object, what: str) -> bool:
    """Return ``value`` if it is a bool."""
    if type(value) is not bool:
        wrong(f"{what} must be true or false")
    return value


def text(value: object, what: str) -> str:
    """Return ``value`` if it is text of bounded length."""
    if type(value) is not str or len(value) > _MAX_TEXT:
        wrong(f"{what} must be text of at most {_MAX_TEXT} characters")
    return value


def codes(value: object, allowed: bytes, most: int, what: str) -> bytes:
    """Return ``value`` if it is at most ``most`` bytes, each one of ``allowed``."""
    if type(value) is not bytes or len(value) > most or value.strip(allowed):
        wrong(f"{what} must be at most {most} bytes, each one of {list(allowed)}")
    return value


def integers(value: object, high: int, most: int, what: str) -> list[int]:
    """Return ``value`` if it is a list of at most ``most`` integers from 0 to ``high``."""
    if type(value) is not list or len(value) > most:
        wrong(f"{what} must be a list of at most {most} integers")
    for number in value:
        if type(number) is not int or not 0 <= number <= high:
            wrong(f"{what} must be integers from 0 to {high}")
    return value


def pack_locations(locations: Sequence[int] | None) -> bytes | None:
    """Return the blob of u64 in which what a transport says about places travels.

    Raises:
        InvalidRequest: there are too many, or one does not fit 64 bits.
    """
    if locations is None:
        return None
    number = len(locations)
    if number > MAX_HASHES:
        wrong(f"at most {MAX_HASHES} locations a message, not {number}")
    try:
        return _u64s(number).pack(*locations)
    except struct.error:
        wrong("every location must be an integer of 64 bits")


def unpack_locations(blob: object, what: str) -> Sequence[int] | None:
    """Return what a transport says about places, from the blob in which it travelled."""
    if blob is None:
        return None
    if type(blob) is not bytes or len(blob) % 8 or len(blob) > 8 * MAX_HASHES:
        wrong(f"{what} must be bytes, 8 for each of at most {MAX_HASHES}")
    return _u64s(len(blob) // 8).unpack(blob)


def mapping(value: object, what: str) -> dict[str, object]:
    """Return ``value`` if it is a map of bounded size with text as keys."""
    if type(value) is not dict or len(value) > _MAX_MAP:
        wrong(f"{what} must be a map of at most {_MAX_MAP} entries")
    if not all(type(key) is str for key in value):
        wrong(f"the keys of {what} must be text")
    return value


def arguments(values: Sequence[object], number: int, what: str) -> None:
    """Check that there are exactly ``number`` values."""
    if len(values) != number:
        wrong(f"{what} takes {number} values, not {len(values)}")


# --- hashes ------------------------------------------------------------------------------------

_MAX_CACHED_SPLIT: Final = 4_096


@lru_cache(maxsize=64)
def _splitter(number: int) -> struct.Struct:
    return struct.Struct("32s" * number)


@lru_cache(maxsize=256)
def _u64s(number: int) -> struct.Struct:
    return struct.Struct(f"<{number}Q")


def _joined(blob: object) -> bytes:
    if type(blob) is not bytes:
        wrong("hashes must travel as bytes")
    number, rest = divmod(len(blob), HASH_BYTES)
    if rest or number > MAX_HASHES:
        wrong(f"hashes must be at most {MAX_HASHES} times {HASH_BYTES} bytes, not {len(blob)}")
    return blob


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    """Return ``hashes`` as the one blob in which they travel.

    Raises:
        InvalidRequest: there are more than 65,536, or one is not 32 bytes long.
    """
    number = len(hashes)
    if number > MAX_HASHES:
        wrong(f"at most {MAX_HASHES} hashes a request, not {number}")
    if list(map(len, hashes)).count(HASH_BYTES) != number:
        wrong(f"every hash must be {HASH_BYTES} bytes long")
    return b"".join(hashes)


def split_hashes(blob: object) -> Sequence[bytes]:
    """Return the hashes that travel in ``blob``.

    Raises:
        InvalidRequest: ``blob`` is no bytes object, not a whole number of hashes, or too many.
    """
    joined = _joined(blob)
    number = len(joined) // HASH_BYTES
    if number <= _MAX_CACHED_SPLIT:
        return _splitter(number).unpack(joined)
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


class JoinedHashes(Sequence[bytes]):
    """Hashes as they travel, split where somebody asks for them one by one.

    Attributes:
        joined: 32 bytes for each.
    """

    __slots__ = ("joined",)

    def __init__(self, joined: bytes) -> None:
        self.joined = joined

    @classmethod
    def parse(cls, blob: object) -> JoinedHashes:
        """Return the hashes that travel in ``blob``; see :func:`split_hashes`."""
        return cls(_joined(blob))

    def __len__(self) -> int:
        return len(self.joined) // HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        number = len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(number)
            if step != 1:
                return split_hashes(self.joined)[index]
            return JoinedHashes(self.joined[start * HASH_BYTES : max(start, stop) * HASH_BYTES])
        if not -number <= index < number:
            raise IndexError(f"hash {index} of {number}")
        at = index % number * HASH_BYTES
        return self.joined[at : at + HASH_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        return iter(split_hashes(self.joined))

    def __eq__(self, other: object) -> bool:
        if type(other) is JoinedHashes:
            return self.joined == other.joined
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<JoinedHashes {len(self)}>"


def joined_hashes(hashes: Sequence[bytes]) -> bytes:
    """Return ``hashes`` as the one blob in which they travel; see :func:`join_hashes`."""
    return hashes.joined if type(hashes) is JoinedHashes else join_hashes(hashes)


def one_hash(value: object, what: str) -> bytes:
    """Return ``value`` if it is a hash."""
    if type(value) is not bytes or len(value) != HASH_BYTES:
        wrong(f"{what} must be {HASH_BYTES} bytes long")
    return value
