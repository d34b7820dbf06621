"""DRAM segments pinned for the GPUs, so that they copy straight from them.

Pinning takes up to 0.1 s for each GiB, so it goes on in a thread of its own; until a segment is
pinned, copies from it go through buffers.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import structlog

from tiers.dram import DramTier
from tiers.errors import BadExtent, MediumFailed
from tiers.hbm import HbmTier

_log = structlog.get_logger(__name__)


class DramPins:
    """Which segments are pinned. ``open`` and ``close`` run while both tiers are open.

    Args:
        dram: whose segments; this asks to be told when one goes, and tells who asked before.
        tier: pins them. Memory that one GPU has pinned is pinned for all of a process.
    """

    def __init__(self, dram: DramTier, tier: HbmTier) -> None:
        self._dram = dram
        self._tier = tier
        self._changed = threading.Condition()
        self._wanted: set[int] = set()
        self._pinned: dict[int, int] = {}
        self._refused: set[int] = set()
        self._busy: int | None = None
        self._thread: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"<DramPins of {len(self._pinned)} segments>"

    def __len__(self) -> int:
        """Segments that are pinned."""
        return len(self._pinned)

    def open(self) -> None:
        """Begin to pin all segments there are."""
        self._thread = ThreadPoolExecutor(1, "hbm-pin")
        self._dram.on_release = self._released
        segments = self._dram.segments()
        with self._changed:
            for segment in segments:
                self._want(segment.number)

    def close(self) -> None:
        """Unpin everything; the thread is gone on return."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._changed:
            self._wanted.clear()
        thread.shutdown(wait=True)
        self._dram.on_release = None
        while self._pinned:
            self._tier.unpin(self._pinned.popitem()[1])

    def covers(self, number: int) -> bool:
        """Whether a segment is pinned. One that isn't will be, unless it can't."""
        with self._changed:
            if number in self._pinned:
                return True
            if number not in self._wanted and number not in self._refused:
                self._want(number)
            return False

    def _want(self, number: int) -> None:
        if self._thread is not None:
            self._wanted.add(number)
            self._thread.submit(self._pin, number)

    def _pin(self, number: int) -> None:
        try:
            segment = self._dram.segment(number)
        except BadExtent:
            return  # it was given back meanwhile
        with self._changed:
            # Whatever is wanted is still there: a segment that goes waits for what is busy here.
            if number not in self._wanted:
                return
            self._busy = number
        refusal = None
        try:
            self._tier.pin(segment.address, segment.size)
        except MediumFailed as error:
            refusal = str(error)
        with self._changed:
            self._busy = None
            self._wanted.discard(number)
            if refusal is None:
                self._pinned[number] = segment.address
            else:
                self._refused.add(number)
            self._changed.notify_all()
        if refusal is not None:
            _log.warning("segment not pinned", segment=number, error=refusal)

    def _released(self, number: int) -> None:
        """A segment is about to go; called under the tier's lock."""
        with self._changed:
            self._wanted.discard(number)
            while self._busy == number:
                self._changed.wait()
            address = self._pinned.pop(number, None)
            self._refused.discard(number)
        if address is not None:
            self._tier.unpin(address)
