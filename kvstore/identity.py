"""What names a block: namespaces and chained prefix hashes.

A block is reusable only where everything that shaped its bytes agrees. The namespace holds what is
the same for all blocks of an engine (model, dtype, layout, ...); the prefix hash names the tokens
of a block and everything before it. Both are plain SHA-256 over length-framed bytes, so they are
equal in every process, on every machine and for every engine.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np

from kvstore.errors import InvalidRequest

HASH_BYTES: Final = 32
"""Bytes of a prefix hash and of a namespace fingerprint."""

ROOT_PARENT: Final = bytes(HASH_BYTES)
"""The parent of the first block of every prefix."""

MAX_TEXT_BYTES: Final = 1024
"""UTF-8 bytes that one text field of a namespace or one extra key may have."""

MAX_BLOCK_TOKENS: Final = 1 << 16
MAX_BLOCK_BYTES: Final = 1 << 30
MAX_SHARDS: Final = 1 << 12

_TOKEN_BYTES: Final = 4
_FINGERPRINT_PREFIX: Final = b"kvstore namespace 1"
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_EXTRA_HEADER: Final = struct.Struct("<BI")


@dataclass(frozen=True)
class Namespace:
    """Everything that must agree for block bytes to be reusable.

    One differing field gives another fingerprint, so a lookup misses instead of finding bytes that
    mean something else.

    Attributes:
        model: name or path of the model.
        revision: revision of its weights; may be empty.
        dtype: element type of the KV tensors, for example ``bfloat16``.
        layout: how tensors become block bytes; see ``client.layout``.
        block_tokens: tokens in one block.
        block_bytes: bytes of one block of one shard.
        tp_size: tensor parallel ranks.
        pp_size: pipeline parallel ranks.
        tenant: whose blocks these are.
        salt: anything else that separates caches; may be empty.

    Raises:
        InvalidRequest: a field has the wrong type or is out of bounds.
    """

    model: str
    dtype: str
    layout: str
    block_tokens: int
    block_bytes: int
    revision: str = ""
    tp_size: int = 1
    pp_size: int = 1
    tenant: str = "default"
    salt: str = ""

    def __post_init__(self) -> None:
        for name in ("model", "dtype", "layout", "tenant"):
            _check_text(name, getattr(self, name), may_be_empty=False)
        for name in ("revision", "salt"):
            _check_text(name, getattr(self, name), may_be_empty=True)
        _check_int("block_tokens", self.block_tokens, MAX_BLOCK_TOKENS)
        _check_int("block_bytes", self.block_bytes, MAX_BLOCK_BYTES)
        _check_int("tp_size", self.tp_size, MAX_SHARDS)
        _check_int("pp_size", self.pp_size, MAX_SHARDS)
        if self.shards > MAX_SHARDS:
            raise InvalidRequest(f"tp_size x pp_size is {self.shards}, at most {MAX_SHARDS} fit")

    @property
    def shards(self) -> int:
        """How many shards a block has: one for each tensor and pipeline parallel rank."""
        return self.tp_size * self.pp_size

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that stand for this namespace."""
        digest = hashlib.sha256(_FINGERPRINT_PREFIX)
        for name, value in sorted(self.describe().items()):
            digest.update(_frame(name.encode()) + _frame_value(value))
        return digest.digest()

    def describe(self) -> dict[str, str | int]:
        """The fields by name, as they travel in a session's greeting."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def parse(cls, description: Mapping[Any, Any]) -> Namespace:
        """Build a namespace from what a peer sent.

        Args:
            description: what ``describe`` of the other side returned.

        Raises:
            InvalidRequest: a field is missing, unknown, of the wrong type or out of bounds.
        """
        if not isinstance(description, Mapping):
            raise InvalidRequest("a namespace must be a map of fields")
        known = {field.name for field in fields(cls)}
        if unknown := [repr(key)[:64] for key in description if key not in known]:
            raise InvalidRequest(f"unknown namespace field {unknown[0]}")
        if missing := sorted(known - description.keys()):
            raise InvalidRequest(f"namespace field {missing[0]!r} is missing")
        return cls(**description)

    def difference(self, other: Namespace) -> list[str]:
        """Names of the fields in which two namespaces differ, in the order of the fields."""
        mine, theirs = self.describe(), other.describe()
        return [name for name in mine if mine[name] != theirs[name]]


class ExtraKind(IntEnum):
    """What an extra key stands for; the number is part of the hash."""

    LORA = 1
    MULTIMODAL = 2
    CACHE_SALT = 3


@dataclass(frozen=True, slots=True, order=True)
class ExtraKey:
    """Something besides tokens that changes the KV bytes of a block.

    Attributes:
        kind: what the value stands for. Two kinds never collide, whatever their values.
        value: the bytes that identify it.

    Raises:
        InvalidRequest: the value is not bytes or is too long.
    """

    kind: ExtraKind
    value: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.kind, ExtraKind):
            raise InvalidRequest(f"extra key kind must be an ExtraKind, not {self.kind!r}")
        value: object = self.value
        if not isinstance(value, bytes) or len(value) > MAX_TEXT_BYTES:
            raise InvalidRequest(f"an extra key must be bytes, at most {MAX_TEXT_BYTES} of them")

    @classmethod
    def lora(cls, name: str) -> ExtraKey:
        """The LoRA adapter that the tokens ran through."""
        return cls(ExtraKind.LORA, _encode_text(name))

    @classmethod
    def cache_salt(cls, salt: str) -> ExtraKey:
        """A salt that keeps requests of different users apart."""
        return cls(ExtraKind.CACHE_SALT, _encode_text(salt))

    @classmethod
    def multimodal(cls, item_hash: bytes, offset: int = 0) -> ExtraKey:
        """An image, audio or video item.

        Args:
            item_hash: hash of the item's content.
            offset: the item's first placeholder token, counted from the start of the block;
                negative where the item began in an earlier block.
        """
        return cls(ExtraKind.MULTIMODAL, struct.pack("<q", offset) + item_hash)

    def encode(self) -> bytes:
        """The bytes that enter the prefix hash: kind, length, value."""
        return _EXTRA_HEADER.pack(self.kind, len(self.value)) + self.value


ExtraKeys: TypeAlias = (
    Sequence[ExtraKey] | Mapping[int, Sequence[ExtraKey]] | Callable[[int], Sequence[ExtraKey]]
)
"""Extra keys of all blocks; or by block index, as a map or a function."""


def prefix_hashes(
    token_ids: Sequence[int] | np.ndarray[Any, Any],
    block_tokens: int,
    extra_keys: ExtraKeys = (),
    parent: bytes = ROOT_PARENT,
) -> list[bytes]:
    """Hash every full block of a token sequence.

    ``sha256(parent hash, token ids as little-endian u32, extra keys)``, where each hash is the
    parent of the next. Tokens after the last full block are left out.

    Args:
        token_ids: a list, array or tensor of token ids on the CPU.
        block_tokens: tokens in one block.
        extra_keys: what else shapes the blocks: one sequence for all of them, or a map or function
            from a block's index (0 is the first of ``token_ids``) to its own sequence. The order
            within a sequence does not matter.
        parent: hash of the block before the first; the root's where there is none.

    Returns:
        One 32-byte hash for each full block.

    Raises:
        InvalidRequest: a token id is not an integer of 32 bits, ``block_tokens`` is not positive,
            or the parent is not 32 bytes.
    """
    _check_int("block_tokens", block_tokens, MAX_BLOCK_TOKENS)
    check_hash(parent)
    data = encode_tokens(token_ids)
    step = block_tokens * _TOKEN_BYTES
    count = len(data) // step
    chunks = struct.unpack_from(f"{step}s" * count, data)
    sha256 = hashlib.sha256
    if isinstance(extra_keys, Sequence):
        extra = _encode_extra(extra_keys)
        if not extra:
            return [parent := sha256(parent + chunk).digest() for chunk in chunks]
        return [parent := sha256(parent + chunk + extra).digest() for chunk in chunks]
    extras = _extras_by_block(extra_keys, count)
    return [
        parent := sha256(parent + chunk + extra).digest()
        for chunk, extra in zip(chunks, extras, strict=True)
    ]


def encode_tokens(token_ids: Sequence[int] | np.ndarray[Any, Any]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers.

    Raises:
        InvalidRequest: an id is not an integer, or does not fit.
    """
    if isinstance(token_ids, list | tuple):
        try:
            packed = array("I", token_ids)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(f"token ids must be integers of 32 bits: {error}") from error
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()
    ids = np.asarray(token_ids)
    if ids.ndim != 1:
        raise InvalidRequest(f"token ids must have one dimension, not {ids.ndim}")
    if ids.size == 0:
        return b""
    if ids.dtype.kind not in "iu":
        raise InvalidRequest(f"token ids must be integers, not {ids.dtype}")
    if int(ids.min()) < 0 or int(ids.max()) > 0xFFFF_FFFF:
        raise InvalidRequest("token ids must be integers of 32 bits")
    return ids.astype("<u4", copy=False).tobytes()


def check_hash(value: object) -> None:
    """Accept a 32-byte hash.

    Raises:
        InvalidRequest: the value has another length or type.
    """
    if not isinstance(value, bytes) or len(value) != HASH_BYTES:
        length = len(value) if isinstance(value, bytes) else type(value).__name__
        raise InvalidRequest(f"a hash must be {HASH_BYTES} bytes, not {length}")


def _extras_by_block(
    extra_keys: Mapping[int, Sequence[ExtraKey]] | Callable[[int], Sequence[ExtraKey]], count: int
) -> list[bytes]:
    if isinstance(extra_keys, Mapping):
        if outside := [index for index in extra_keys if index < 0]:
            raise InvalidRequest(f"extra keys name block {outside[0]}, which is before the first")
        return [_encode_extra(extra_keys.get(index, ())) for index in range(count)]
    return [_encode_extra(extra_keys(index)) for index in range(count)]


def _encode_extra(extra_keys: Sequence[ExtraKey]) -> bytes:
    return b"".join(key.encode() for key in sorted(extra_keys))


def _encode_text(value: str) -> bytes:
    try:
        return value.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidRequest("an extra key must be valid UTF-8 text") from error


def _frame(value: bytes) -> bytes:
    return _U32.pack(len(value)) + value


def _frame_value(value: str | int) -> bytes:
    if isinstance(value, int):
        return b"i" + _frame(_U64.pack(value))
    return b"s" + _frame(value.encode())


def _check_text(name: str, value: object, *, may_be_empty: bool) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"namespace field {name!r} must be text, not {type(value).__name__}")
    try:
        length = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"namespace field {name!r} is not valid UTF-8 text") from error
    if length > MAX_TEXT_BYTES or (length == 0 and not may_be_empty):
        low = 0 if may_be_empty else 1
        raise InvalidRequest(
            f"namespace field {name!r} has {length} bytes, not {low} to {MAX_TEXT_BYTES}"
        )


def _check_int(name: str, value: object, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, not {type(value).__name__}")
    if not 1 <= value <= highest:
        raise InvalidRequest(f"{name} is {value}, not 1 to {highest}")
