"""Frames: a prefix of fixed size, a msgpack header and a raw payload, decoded without I/O.

The prefix is 16 bytes, little-endian: magic (u16), version (u8), flags (u8, zero), header length
(u32) and payload length (u64). The header is a msgpack array. The payload is never looked at
here: once a header announced it, the owner names the memory that it lands in, and the transport
reads straight into that memory. Only what came together with the header is copied, at most the
staging buffer's 16 KiB.

Every length is checked against its bound before anything is allocated for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgpack

from kvstore.errors import FrameTooLarge, ProtocolError

__all__ = [
    "DEFAULT_MAX_PAYLOAD",
    "MAX_HEADER",
    "PREFIX_BYTES",
    "Broken",
    "Closed",
    "Event",
    "FrameDecoder",
    "HeaderReceived",
    "PayloadReceived",
    "encode",
]

PREFIX_BYTES: Final = 16
MAX_HEADER: Final = 8 << 20
"""Largest header of a frame, in bytes."""
DEFAULT_MAX_PAYLOAD: Final = 1 << 30
"""Largest payload of a frame where nothing else was agreed, in bytes."""

_PREFIX: Final = struct.Struct("<IIQ")
_MAGIC: Final = 0x564B
_VERSION: Final = 1
_SIGNATURE: Final = _MAGIC | _VERSION << 16
"""Magic, version and flags as one number."""
_STAGING: Final = 16 << 10
_SCRATCH: Final = 256 << 10
_SEEN_AT_ONCE: Final = 512 << 10
"""Bytes of a payload that are read before somebody looks at them: they are in the cache then."""
_MAX_ITEMS: Final = 1 << 16
_MAX_TEXT: Final = 16 << 10
_NOWHERE: Final = memoryview(bytearray())

_pack = msgpack.Packer().pack
"""One packer for all frames, so that its memory is made once; no two threads can be inside it."""


def encode(header: Sequence[object], payload_length: int = 0) -> bytes:
    """Return the bytes of a frame up to its payload.

    Args:
        header: the values of the header, of types that msgpack knows.
        payload_length: how many payload bytes the caller sends after these.

    Raises:
        FrameTooLarge: the header is above ``MAX_HEADER``.
    """
    packed: bytes = _pack(header)
    length = len(packed)
    if length > MAX_HEADER:
        raise FrameTooLarge(f"a header of {length} bytes is above the bound of {MAX_HEADER}")
    return _PREFIX.pack(_SIGNATURE, length, payload_length) + packed


def _decode_header(data: memoryview) -> list[object]:
    try:
        header = msgpack.unpackb(
            data,
            strict_map_key=True,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
            max_str_len=_MAX_TEXT,
            max_bin_len=MAX_HEADER,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the header is not msgpack: {error}") from error
    if type(header) is not list:
        raise ProtocolError("the header is not an array")
    return header


@dataclass(slots=True)
class HeaderReceived:
    """A header is complete.

    Attributes:
        header: its values, unchecked.
        payload_length: how many payload bytes follow. Where it is not 0, nothing more is
            decoded until the owner has called ``receive_into`` or ``discard``.
    """

    header: list[object]
    payload_length: int


@dataclass(frozen=True, slots=True)
class PayloadReceived:
    """The payload of the frame whose header came last is complete (or discarded)."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The byte stream makes no sense any more: tell the peer and close."""

    error: ProtocolError


@dataclass(frozen=True, slots=True)
class Closed:
    """The peer ended the stream between two frames."""


Event: TypeAlias = HeaderReceived | PayloadReceived | Broken | Closed

_PAYLOAD_RECEIVED: Final = PayloadReceived()
_CLOSED: Final = Closed()


class FrameDecoder:
    """Turns the bytes of one direction of one connection into events.

    The transport asks :meth:`get_buffer` where to read to, reads, and reports with
    :meth:`buffer_updated`. An empty buffer means that the owner has to name the memory for a
    payload first.

    Args:
        max_header: largest header accepted, in bytes.
        max_payload: largest payload accepted, in bytes.

    Attributes:
        max_header: as above; may be changed between frames.
        max_payload: as above; may be changed between frames.
    """

    __slots__ = (
        "_ended",
        "_error",
        "_filled",
        "_payload_left",
        "_scratch",
        "_seen",
        "_sink",
        "_staging",
        "_taken",
        "_undecided",
        "_whole",
        "max_header",
        "max_payload",
    )

    def __init__(
        self, max_header: int = MAX_HEADER, max_payload: int = DEFAULT_MAX_PAYLOAD
    ) -> None:
        self.max_header = max_header
        self.max_payload = max_payload
        self._whole = memoryview(bytearray(_STAGING))
        self._staging = self._whole
        self._taken = 0
        self._filled = 0
        self._payload_left = 0
        self._undecided = False
        self._sink: list[memoryview] | None = None
        self._seen: Callable[[memoryview], object] | None = None
        self._scratch: memoryview | None = None
        self._error: ProtocolError | None = None
        self._ended = False

    @property
    def awaiting_sink(self) -> bool:
        """Whether a payload waits for the owner to name the memory that it lands in."""
        return self._undecided

    def get_buffer(self) -> memoryview:
        """Return the memory to read to next; empty while there is none."""
        if self._error is not None or self._ended or self._undecided:
            return _NOWHERE
        left = self._payload_left
        if left:
            if self._sink is not None:
                view = self._sink[-1]
                return view if self._seen is None else view[:_SEEN_AT_ONCE]
            return self._scratch_memory()[:left]
        return self._staging[self._filled :] if self._filled else self._staging

    def buffer_updated(self, number: int) -> list[Event]:
        """Take note of ``number`` bytes read to the buffer that was asked for last.

        Returns:
            What these bytes completed, in order. :class:`Broken` is always the last event of a
            decoder; nothing is decoded after it.
        """
        if self._error is not None:
            return []
        if self._ended:
            return self._break(ProtocolError("bytes came after the end of the stream"), [])
        if self._payload_left and not self._undecided:
            return self._landed(number)
        self._filled += number
        return self._parse([])

    def feed_eof(self) -> list[Event]:
        """Take note that the peer ended the stream."""
        if self._error is not None or self._ended:
            return []
        self._ended = True
        if self._payload_left or self._filled > self._taken:
            return self._break(ProtocolError("the stream ended within a frame"), [])
        return [_CLOSED]

    def abort(self) -> None:
        """Decode nothing more and forget all memory that was named."""
        if self._error is None:
            self._error = ProtocolError("the connection was given up")
        self._sink = None
        self._scratch = None

    def receive_into(
        self, views: Sequence[memoryview], seen: Callable[[memoryview], object] | None = None
    ) -> list[Event]:
        """Name the memory for the payload that was announced last.

        Args:
            views: writable views of single bytes whose lengths add up to the payload's.
            seen: called with each piece of that memory once it is filled, in order, each within
                one of the views. The rest of the payload waits meanwhile.

        Returns:
            What the bytes that had come already completed, in order.

        Raises:
            ValueError: no payload waits for its memory, or the views don't fit it.
        """
        if not self._undecided:
            raise ValueError("no payload waits for memory")
        if sum(map(len, views)) != self._payload_left:
            raise ValueError(f"the views must hold exactly {self._payload_left} bytes")
        if any(view.readonly or view.itemsize != 1 or view.ndim != 1 for view in views):
            raise ValueError("the views must be writable and made of single bytes")
        self._undecided = False
        self._seen = seen
        self._sink = [view for view in reversed(views) if len(view)]
        return self._drain_staging()

    def discard(self) -> list[Event]:
        """Throw away the payload that was announced last, or what is still to come of it.

        From this call on, nothing is written to views given before.

        Returns:
            What the bytes that had come already completed, in order.

        Raises:
            ValueError: no payload is announced or under way.
        """
        if not self._payload_left:
            raise ValueError("no payload is under way")
        self._undecided = False
        self._sink = None
        return self._drain_staging()

    def _drain_staging(self) -> list[Event]:
        staged = min(self._filled - self._taken, self._payload_left)
        if staged and self._sink is not None:
            self._copy_staged(self._sink, staged)
        self._taken += staged
        self._payload_left -= staged
        if self._taken == self._filled:
            self._rewind()
        if self._payload_left:
            return []
        self._sink = None
        return self._parse([_PAYLOAD_RECEIVED])

    def _copy_staged(self, sink: list[memoryview], number: int) -> None:
        start, end = self._taken, self._taken + number
        while start < end:
            view = sink[-1]
            step = min(len(view), end - start)
            view[:step] = self._staging[start : start + step]
            start += step
            self._advance(sink, step)

    def _advance(self, sink: list[memoryview], number: int) -> None:
        view = sink[-1]
        if self._seen is not None:
            self._seen(view[:number])
        if number == len(view):
            sink.pop()
        else:
            sink[-1] = view[number:]

    def _landed(self, number: int) -> list[Event]:
        if self._sink is not None:
            self._advance(self._sink, number)
        self._payload_left -= number
        if self._payload_left:
            return []
        self._sink = None
        return [_PAYLOAD_RECEIVED]

    def _parse(self, events: list[Event]) -> list[Event]:
        staging, taken = self._staging, self._taken
        while (available := self._filled - taken) >= PREFIX_BYTES:
            signature, header_length, payload_length = _PREFIX.unpack_from(staging, taken)
            if (
                signature != _SIGNATURE
                or header_length > self.max_header
                or payload_length > self.max_payload
            ):
                error = self._explain(signature, header_length, payload_length)
                return self._break(error, events)
            if available < PREFIX_BYTES + header_length:
                self._make_room(PREFIX_BYTES + header_length)
                return events
            start = taken + PREFIX_BYTES
            taken = self._taken = start + header_length
            try:
                header = _decode_header(staging[start:taken])
            except ProtocolError as failure:
                return self._break(failure, events)
            events.append(HeaderReceived(header, payload_length))
            if payload_length:
                self._payload_left = payload_length
                self._undecided = True
                return events
        if available == 0:
            self._rewind()
        else:
            self._make_room(PREFIX_BYTES)
        return events

    def _explain(self, signature: int, header_length: int, payload_length: int) -> ProtocolError:
        """Return what is wrong with a prefix that was refused."""
        if signature & 0xFFFF != _MAGIC:
            return ProtocolError("the peer does not speak this protocol")
        if signature != _SIGNATURE:
            version, flags = signature >> 16 & 0xFF, signature >> 24
            return ProtocolError(f"frames of version {version}, flags {flags} are not known")
        if header_length > self.max_header:
            return FrameTooLarge(
                f"a header of {header_length} bytes is above the bound of {self.max_header}"
            )
        return FrameTooLarge(
            f"a payload of {payload_length} bytes is above the bound of {self.max_payload}"
        )

    def _make_room(self, needed: int) -> None:
        """Move the bytes not decoded yet to the front of a buffer of at least ``needed``."""
        pending = self._staging[self._taken : self._filled]
        if needed > len(self._staging):
            self._staging = memoryview(bytearray(needed))
        self._staging[: len(pending)] = pending
        self._taken, self._filled = 0, len(pending)

    def _rewind(self) -> None:
        self._staging = self._whole
        self._taken = self._filled = 0

    def _break(self, error: ProtocolError, events: list[Event]) -> list[Event]:
        self._error = error
        self._sink = None
        self._scratch = None
        events.append(Broken(error))
        return events

    def _scratch_memory(self) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH))
        return self._scratch
