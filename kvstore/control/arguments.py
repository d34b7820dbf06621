"""What control calls may carry: every value is checked before the node sees it.

All functions raise ``InvalidRequest`` for what is out of bounds.
"""

from typing import Final

from kvstore.control import interface
from kvstore.errors import InvalidRequest
from kvstore.identity import HASH_BYTES

TIERS: Final = ("hbm", "dram", "ssd")
_HEX: Final = frozenset("0123456789abcdef")


def checked_hash(value: bytes) -> bytes:
    """A prefix hash or a fingerprint."""
    if len(value) != HASH_BYTES:
        raise InvalidRequest(f"a hash has {HASH_BYTES} bytes, not {len(value)}")
    return value


def hash_or_none(value: bytes) -> bytes | None:
    """The same, None for an empty field."""
    return checked_hash(value) if value else None


def split_hashes(joined: bytes) -> list[bytes]:
    """Hashes that came as one string, at most ``MAX_HASHES``."""
    count, rest = divmod(len(joined), HASH_BYTES)
    if rest:
        raise InvalidRequest(f"hashes of {HASH_BYTES} bytes each, not {len(joined)} bytes in all")
    if count > interface.MAX_HASHES:
        raise InvalidRequest(f"{count} hashes, at most {interface.MAX_HASHES} fit")
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]


def checked_limit(limit: int) -> int:
    """How many items one answer may have."""
    if not 0 < limit <= interface.MAX_PAGE:
        raise InvalidRequest(f"a limit must be between 1 and {interface.MAX_PAGE}")
    return limit


def checked_beginning(text: str) -> str:
    """The first hex digits of a hash."""
    if not interface.MIN_BEGINNING <= len(text) <= 2 * HASH_BYTES or not _HEX.issuperset(text):
        raise InvalidRequest(
            f"the beginning of a hash is {interface.MIN_BEGINNING} to {2 * HASH_BYTES} "
            "lower-case hex digits"
        )
    return text


def checked_tier(name: str) -> str:
    """The name of a tier."""
    if name not in TIERS:
        raise InvalidRequest(f"no such tier: {name[:32]!r}; tiers are {', '.join(TIERS)}")
    return name


def tier_or_none(name: str) -> str | None:
    """The same, None for an empty field."""
    return checked_tier(name) if name else None
