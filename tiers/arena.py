"""The memory behind the DRAM tier: its segments, by number."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tiers.errors import BadExtent, TierError
from tiers.prefault import Prefaulter
from tiers.segment import HugePages, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)


class Arena:
    """The segments in use. Implements :class:`tiers.slab.SegmentSource`; the caller has the lock.

    Args:
        huge_pages: see :class:`tiers.dram.DramTier`.
        prefault: touch new segments in the background.
    """

    def __init__(self, huge_pages: HugePages, *, prefault: bool) -> None:
        self._huge_pages: HugePages = huge_pages
        self._ahead = prefault
        self._prefaulter = Prefaulter()
        self._segments: dict[int, Segment] = {}
        self.views: dict[int, memoryview] = {}
        self.size = 0
        self.on_release: Callable[[int], None] | None = None

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def __getitem__(self, number: int) -> Segment:
        """A segment by number.

        Raises:
            BadExtent: no such segment.
        """
        segment = self._segments.get(number)
        if segment is None:
            raise BadExtent(f"no segment {number}")
        return segment

    @property
    def populated(self) -> int:
        """Bytes touched ahead of use."""
        return self._prefaulter.populated

    @property
    def populating(self) -> int:
        """Bytes still to be touched ahead of use."""
        return self._prefaulter.remaining

    def create(self, number: int, size: int) -> None:
        """See :meth:`tiers.slab.SegmentSource.create`."""
        self._install(Segment(number, size, self._huge_pages))

    def claim(self, number: int, owner: str) -> None:
        """See :meth:`tiers.slab.SegmentSource.claim`."""
        self._segments[number].owner = owner

    def may_replace(self, number: int) -> bool:
        """See :meth:`tiers.slab.SegmentSource.may_replace`: who has it mapped reads zeros then."""
        return True

    def replace(self, old: int, new: int, owner: str) -> bool:
        """See :meth:`tiers.slab.SegmentSource.replace`.

        The old pages go first: reserved huge pages may be all taken, and memory must not be held
        twice.
        """
        size = self._segments[old].size
        self.drop(old)
        try:
            self._install(Segment(new, size, self._huge_pages, owner))
        except TierError as error:
            _log.error("capacity falls by %d bytes: %s", size, error)
            return False
        return True

    def drop(self, number: int) -> None:
        """See :meth:`tiers.slab.SegmentSource.drop`."""
        self._drop(number, discard=True)

    def _drop(self, number: int, *, discard: bool) -> None:
        if self.on_release is not None:
            self.on_release(number)
        segment = self._segments.pop(number)
        del self.views[number]
        self.size -= segment.size
        self._prefaulter.remove(segment)
        segment.close(discard=discard)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all memory is touched; False where ``timeout`` seconds pass first."""
        return self._prefaulter.wait(timeout)

    def populate(self, number: int) -> None:
        """Touch all memory of a segment now; ends early if it is given back meanwhile.

        Raises:
            BadExtent: no such segment.
        """
        segment = self[number]
        self._prefaulter.populate(segment, lambda: self._segments.get(number) is segment)

    def close(self) -> None:
        """Give everything back; no thread is left.

        Who still looks at blocks in another process goes on seeing them.
        """
        self._prefaulter.close()
        for number in list(self._segments):
            self._drop(number, discard=False)

    def _install(self, segment: Segment) -> None:
        self._segments[segment.number] = segment
        self.views[segment.number] = segment.view
        self.size += segment.size
        if self._ahead:
            self._prefaulter.add(segment)
