"""Request traces: the requests of a real service, one JSON object a line, read as a stream.

The format is the one published with the Mooncake paper (FAST '25): ``timestamp`` (milliseconds
from the start), ``input_length`` and ``output_length`` (tokens) and ``hash_ids``, one id for each
block of the input. An equal id means equal tokens *and* an equal prefix, so a request's ids are a
chain, and `BlockNames` turns them into prefix hashes.

Fields that the format doesn't know are ignored: other published traces add their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn, cast

import numpy as np

from kvstore.errors import KVStoreError
from kvstore.identity import ROOT_PARENT, prefix_hashes

BLOCK_TOKENS = 512
"""Tokens a block in the published traces."""

MAX_LINE_BYTES = 1 << 20
"""Longest line that is read; a longer one is an error, so that no line can exhaust memory."""

_MAX_ID = (1 << 64) - 1
_MAX_TOKENS = 1 << 40
_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a fraction",
    str: "a string",
    list: "a list",
}


class TraceError(KVStoreError):
    """A trace that cannot be used; the message names the file and, for a bad line, its number."""

    code: ClassVar[str] = "trace"

    def __init__(self, path: Path, reason: str, line: int | None = None) -> None:
        where = str(path) if line is None else f"{path}:{line}"
        super().__init__(f"{where}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    timestamp: float
    """Milliseconds from the start of the trace."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens that were generated."""
    hash_ids: tuple[int, ...]
    """One id a block of the prompt, root first. The last block may be partial."""
    line: int
    """The line of the file, counted from 1."""
    end: int
    """Bytes of the file up to and including this line: what a progress bar shows."""


class Trace:
    """A trace file. Each iteration reads it anew, a line at a time.

    ``block_tokens`` is the number of tokens that an id stands for.

    Raises `TraceError` while iterating: a file that cannot be read, a line that is too long, is
    not a JSON object, lacks a field or has one of the wrong type, or whose number of ids does not
    fit its input length.
    """

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int = BLOCK_TOKENS,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        if block_tokens < 1:
            raise TraceError(path, f"block tokens must be at least 1, not {block_tokens}")
        self.path = path
        self.block_tokens = block_tokens
        self._max_line_bytes = max_line_bytes

    @property
    def size(self) -> int:
        """Bytes of the file. Raises `TraceError` when there is no such file."""
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise TraceError(self.path, f"cannot be read: {error.strerror}") from error

    def __iter__(self) -> Iterator[Request]:
        for line, end, text in self._lines():
            yield _LineReader(self.path, line, self.block_tokens).request(text, end)

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(line number, bytes so far, text) of every line that is not blank."""
        limit = self._max_line_bytes
        line = end = 0
        try:
            with self.path.open("rb") as file:
                while text := file.readline(limit + 1):
                    line += 1
                    end += len(text)
                    if len(text) > limit:
                        raise TraceError(self.path, f"longer than {limit} bytes", line)
                    if not text.isspace():
                        yield line, end, text
        except OSError as error:
            raise TraceError(self.path, f"cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _LineReader:
    """Checks one line; knows where the line stands so that every error can say it."""

    path: Path
    line: int
    block_tokens: int

    def request(self, text: bytes, end: int) -> Request:
        fields = self._object(text)
        ids = self._ids(fields)
        input_length = self._tokens(fields, "input_length")
        blocks = -(-input_length // self.block_tokens)
        if len(ids) != blocks:
            self._fail(
                f"has {len(ids)} hash_ids, but input_length {input_length} in blocks of "
                f"{self.block_tokens} tokens makes {blocks}"
            )
        output_length = self._tokens(fields, "output_length")
        return Request(self._timestamp(fields), input_length, output_length, ids, self.line, end)

    def _fail(self, reason: str) -> NoReturn:
        raise TraceError(self.path, reason, self.line)

    def _object(self, text: bytes) -> dict[str, object]:
        try:
            value: object = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(self.path, f"is not JSON: {error}", self.line) from error
        if not isinstance(value, dict):
            self._fail(f"is not a JSON object but {_kind(value)}")
        return cast(dict[str, object], value)

    def _field(self, fields: dict[str, object], name: str) -> object:
        if name not in fields:
            self._fail(f"lacks the field {name}")
        return fields[name]

    def _timestamp(self, fields: dict[str, object]) -> float:
        value = self._field(fields, "timestamp")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(f"timestamp must be a number, not {_kind(value)}")
        if not 0 <= value <= _MAX_TOKENS or math.isnan(value):
            self._fail("timestamp must be finite and not negative")
        return value

    def _tokens(self, fields: dict[str, object], name: str) -> int:
        value = self._field(fields, name)
        if type(value) is not int:
            self._fail(f"{name} must be an integer, not {_kind(value)}")
        if not 0 <= value <= _MAX_TOKENS:
            self._fail(f"{name} must be between 0 and {_MAX_TOKENS}")
        return value

    def _ids(self, fields: dict[str, object]) -> tuple[int, ...]:
        value = self._field(fields, "hash_ids")
        if not isinstance(value, list):
            self._fail(f"hash_ids must be a list, not {_kind(value)}")
        ids = cast(list[object], value)
        for item in ids:
            if type(item) is not int:
                self._fail(f"hash_ids must hold integers, not {_kind(item)}")
            if not 0 <= item <= _MAX_ID:
                self._fail("hash_ids must hold ids between 0 and 2**64 - 1")
        if len(set(ids)) != len(ids):
            self._fail("hash_ids names a block twice: no block can be its own ancestor")
        return tuple(cast(list[int], ids))


def _kind(value: object) -> str:
    """The JSON word for a value's type."""
    return _KINDS.get(type(value), "an object")


class BlockNames:
    """Prefix hashes for the ids of a trace, each made once.

    An id stands for two tokens (its low and high 32 bits), hashed as any block's tokens are, so a
    name depends on the whole chain before it. An id that appears after two different parents gives
    two names. Memory grows with the unique blocks seen.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def chain(self, ids: Sequence[int]) -> list[bytes]:
        """The prefix hash (32 bytes) of each id, root first."""
        known = self._names
        hashes: list[bytes] = []
        parent = ROOT_PARENT
        for block in ids:
            entry = known.get(block)
            if entry is None or entry[0] != parent:
                break
            parent = entry[1]
            hashes.append(parent)
        rest = ids[len(hashes) :]
        if rest:
            tokens = np.array(rest, dtype="<u8").view("<u4")
            for block, name in zip(rest, prefix_hashes(tokens, 2, parent=parent), strict=True):
                known[block] = (parent, name)
                parent = name
                hashes.append(name)
        return hashes
