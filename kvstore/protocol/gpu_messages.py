"""What a client and a node say to each other about a node's segments on GPUs.

A process maps such a segment by a handle of 64 bytes, to read and to write, and says so when it has
closed the mapping: before that, or its end, the node gives the memory to nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from kvstore.protocol import fields

__all__ = [
    "GPU_NAME_BYTES",
    "HANDLE_BYTES",
    "MAX_GPUS",
    "DeviceSegments",
    "DeviceSegmentsAnswer",
    "GpuOffer",
    "Unmapped",
]

HANDLE_BYTES: Final = 64
"""Length of the handle of a segment on a GPU."""
GPU_NAME_BYTES: Final = 16
"""Length of what names a GPU in every process of its host."""
MAX_GPUS: Final = 64
"""Most GPUs that a client may name."""

_MAX_NUMBER: Final = 0xF_FFFF
"""Largest number of a segment: a place has 20 bits for it."""


@dataclass(frozen=True, slots=True)
class GpuOffer:
    """What a client says in HELLO, of the transport ``shm``, where it computes on a GPU.

    Attributes:
        gpu: name of the GPU.
        reaches: names of the GPUs whose memory it can map and read there, that one included.
    """

    gpu: bytes
    reaches: frozenset[bytes]

    @classmethod
    def parse(cls, offer: object) -> GpuOffer | None:
        """Check what HELLO said of ``shm``; None where it names no GPU."""
        if offer is None:
            return None
        said = fields.mapping(offer, "the offer of shm")
        if "gpu" not in said:
            return None
        reaches = said.get("gpus")
        if type(reaches) is not list or len(reaches) > MAX_GPUS:
            fields.wrong(f"gpus must be a list of at most {MAX_GPUS} names")
        return cls(_name(said["gpu"]), frozenset(map(_name, reaches)))


@dataclass(slots=True)
class DeviceSegments:
    """Asks for the handles of segments on GPUs (``shm`` only)."""

    op: ClassVar[int] = 13

    numbers: list[int]

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [self.numbers]

    @classmethod
    def parse(cls, values: Sequence[object]) -> DeviceSegments:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 1, "DEVICE_SEGMENTS")
        return cls(_numbers(values[0]))

    def read(self, values: Sequence[object]) -> DeviceSegmentsAnswer:
        """Check and return the answer to this request that ``values`` are."""
        answer = DeviceSegmentsAnswer.parse(values)
        if [number for number, _, _ in answer.segments] != self.numbers:
            fields.wrong("other segments were answered than asked for")
        return answer


@dataclass(slots=True)
class DeviceSegmentsAnswer:
    """Answer to :class:`DeviceSegments`: ``(number, size in bytes, handle)`` of each segment."""

    segments: list[tuple[int, int, bytes]]

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        sizes = [value for number, size, _ in self.segments for value in (number, size)]
        return [sizes, b"".join(handle for _, _, handle in self.segments)]

    @classmethod
    def parse(cls, values: Sequence[object]) -> DeviceSegmentsAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 2, "the answer to DEVICE_SEGMENTS")
        flat = fields.integers(values[0], fields.MAX_BYTES, 2 * fields.MAX_SEGMENTS, "segments")
        handles = values[1]
        if type(handles) is not bytes or 2 * len(handles) != HANDLE_BYTES * len(flat):
            fields.wrong(
                f"segments must be pairs of number and size, each with {HANDLE_BYTES} bytes"
            )
        each = (handles[at : at + HANDLE_BYTES] for at in range(0, len(handles), HANDLE_BYTES))
        return cls(list(zip(flat[::2], flat[1::2], each, strict=True)))


@dataclass(slots=True)
class Unmapped:
    """Says that the client has closed its mappings of segments on GPUs, and reads them no more.

    One-way: it is never answered. A segment that is mapped again is asked for again first.
    """

    op: ClassVar[int] = 14

    numbers: list[int]

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [self.numbers]

    @classmethod
    def parse(cls, values: Sequence[object]) -> Unmapped:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 1, "UNMAPPED")
        return cls(fields.integers(values[0], _MAX_NUMBER, fields.MAX_HASHES, "segments"))


def _numbers(value: object) -> list[int]:
    numbers = fields.integers(value, _MAX_NUMBER, fields.MAX_SEGMENTS, "segments")
    if len(set(numbers)) != len(numbers):
        fields.wrong("no segment may come twice")
    return numbers


def _name(value: object) -> bytes:
    if type(value) is not bytes or len(value) != GPU_NAME_BYTES:
        fields.wrong(f"a GPU is named by {GPU_NAME_BYTES} bytes")
    return value
