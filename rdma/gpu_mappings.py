"""A session's mappings of a node's segments on GPUs, and how long they have to stay.

Copies from a view on a GPU are queued, and may be under way when the session ends, for whatever
reason. Nothing is unmapped under them: mappings are closed with the session only where no view is
in use, else with the last of those.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from rdma.errors import BadPlace, SegmentError
from rdma.gpu_reach import ComputeGpu
from rdma.gpu_segments import GpuSegmentMap, GpuView
from rdma.transport import SEGMENT_SHIFT

__all__ = ["GPU_SHIFT", "GpuMappings"]

logger = logging.getLogger("kvstore.client")

GPU_SHIFT: Final = 16
"""The number of a segment is that of the node's GPU, shifted by this, and its number there."""


class GpuMappings:
    """See above. Any thread may use it.

    In the child of a fork it does nothing any more: no GPU is the child's to use, and what is
    mapped is the parent's.

    Args:
        gpu: that this process computes on.
        names: of the node's GPUs, in the order of their numbers.

    Attributes:
        usable: whether blocks are to be asked for on GPUs; cleared where they can't be mapped.
    """

    def __init__(self, gpu: ComputeGpu, names: Sequence[bytes]) -> None:
        self.usable = True
        self._gpu = gpu
        self._names = names
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._maps: dict[int, GpuSegmentMap] = {}
        self._asked: set[int] = set()
        self._in_use = 0
        self._closing = False
        self._unmapped = False
        self._then: Callable[[], object] | None = None

    @property
    def over(self) -> list[int]:
        """Segments that the node shared in this session and that are not mapped, once all is."""
        with self._lock:
            return sorted(self._asked) if self._unmapped else []

    def missing(self, places: Iterable[int]) -> list[int]:
        """The segments among ``places`` that are not mapped yet; they are asked for then."""
        with self._lock:
            mapped = {number for each in self._maps.values() for number in each.numbers()}
            missing = sorted({place >> SEGMENT_SHIFT for place in places} - mapped)
            self._asked.update(missing)
            return missing

    def add(self, number: int, size: int, handle: bytes) -> None:
        """Map a segment, if it is not mapped yet.

        Raises:
            SegmentError: it can't be mapped, or the session is closed.
        """
        with self._lock:
            if self._closing:
                raise SegmentError("the connection is closed")
            self._map_of(number >> GPU_SHIFT).add(number, handle, size)

    def _map_of(self, gpu: int) -> GpuSegmentMap:
        mapped = self._maps.get(gpu)
        if mapped is None:
            if not gpu < len(self._names):
                raise SegmentError(f"a segment on GPU {gpu} of a node that has {len(self._names)}")
            mapper = self._gpu.mapper(self._names[gpu])
            mapped = self._maps[gpu] = GpuSegmentMap(mapper)
        return mapped

    def take(self, places: Sequence[int], length: int) -> list[GpuView]:
        """Views of ``length`` bytes at each of ``places``, in use until ``give_back``.

        Raises:
            BadPlace: a place lies outside the segments mapped.
            SegmentError: the session is closed.
        """
        with self._lock:
            if self._closing:
                raise SegmentError("the connection is closed")
            views = [GpuView(self._address(place, length), length) for place in places]
            self._in_use += 1
            return views

    def _address(self, place: int, length: int) -> int:
        mapped = self._maps.get(place >> SEGMENT_SHIFT >> GPU_SHIFT)
        if mapped is None:
            raise BadPlace("a block lies on a GPU of which nothing is mapped")
        return mapped.address(place, length)

    def give_back(self) -> None:
        """Say that the views of one ``take`` are in use no more: their copies have ended."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._in_use -= 1
            last = self._closing and not self._in_use
        if last:
            self._end()

    def close(self) -> None:
        """Map nothing any more, and unmap everything as soon as no view is in use."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
            last = not self._in_use
        if last:
            self._end()

    def when_unmapped(self, then: Callable[[], object]) -> None:
        """Call ``then`` once all is unmapped: now, or in the thread that gives the last back."""
        with self._lock:
            if not self._unmapped:
                self._then = then
                return
        then()

    def _end(self) -> None:
        for gpu, each in self._maps.items():
            try:
                each.close()
            except SegmentError as error:
                # The node is not told, and so counts on the end of this process.
                logger.warning("a node's memory on a GPU may stay mapped: %s", error)
                self._asked = {number for number in self._asked if number >> GPU_SHIFT != gpu}
        with self._lock:
            self._unmapped = True
            then, self._then = self._then, None
        if then is not None:
            then()
