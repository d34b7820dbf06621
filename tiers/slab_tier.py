"""What tiers that keep blocks in segments have in common: the allocator, under a lock."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tiers.errors import TierConfigError
from tiers.slab import OFFSET_BITS, OFFSET_MASK, SlabAllocator, unit_bytes
from tiers.tier import Extent, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

S = TypeVar("S", covariant=True)
"""What the tier's segments are."""


class Segments(Protocol[S]):
    """The memory behind the tier; a :class:`tiers.slab.SegmentSource`. The caller has the lock.

    Attributes:
        on_release: see :attr:`SlabTier.on_release`.
    """

    on_release: Callable[[int], None] | None

    @property
    def size(self) -> int:
        """Bytes of all segments."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[S]: ...

    def __getitem__(self, number: int) -> S: ...

    def create(self, number: int, size: int) -> None:
        """See :meth:`tiers.slab.SegmentSource.create`."""

    def claim(self, number: int, owner: str) -> None:
        """See :meth:`tiers.slab.SegmentSource.claim`."""

    def may_replace(self, number: int) -> bool:
        """See :meth:`tiers.slab.SegmentSource.may_replace`."""

    def replace(self, old: int, new: int, owner: str) -> bool:
        """See :meth:`tiers.slab.SegmentSource.replace`."""

    def drop(self, number: int) -> None:
        """See :meth:`tiers.slab.SegmentSource.drop`."""

    def close(self) -> None:
        """Give everything back."""


class SlabTier(Tier, Generic[S]):
    """Blocks in segments. A block's extent stays where it is until it is freed.

    Args:
        capacity: bytes of memory, at least one step. The last segment takes what is left.
        segment_bytes: bytes of a segment: the largest block, and the step in which tenants get
            memory.
        step: bytes that segments are a multiple of.

    Raises:
        TierConfigError: impossible sizes.
    """

    def __init__(self, capacity: int, segment_bytes: int, step: int) -> None:
        if segment_bytes < step or segment_bytes % step or segment_bytes > OFFSET_MASK:
            raise TierConfigError(
                f"segment_bytes must be a multiple of {step}, not {segment_bytes}"
            )
        self._step = max(step, unit_bytes(segment_bytes))
        if capacity < self._step:
            raise TierConfigError(f"capacity must be at least {self._step} bytes, not {capacity}")
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._left = capacity
        self._segments: Segments[S] = self._new_segments(in_use=False)
        self._allocator = SlabAllocator(segment_bytes, self._segments)

    @abstractmethod
    def _new_segments(self, *, in_use: bool) -> Segments[S]:
        """Segments that are none yet: of an open tier, or of one that is not."""

    def open(self) -> None:
        """Make the segments. See :meth:`Tier.open`."""
        with self._lock:
            if len(self._segments):
                return
            self._renew(in_use=True)
            try:
                while self._left >= self._step:
                    size = min(self._segment_bytes, self._left) // self._step * self._step
                    self._allocator.add(size)
                    self._left -= size
            except BaseException:
                self._close()
                raise

    def close(self) -> None:
        """See :meth:`Tier.close`. Views that the caller still holds must not be used."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._left += self._segments.size
        self._segments.close()
        self._renew(in_use=False)

    def _renew(self, *, in_use: bool) -> None:
        self._segments = self._new_segments(in_use=in_use)
        self._allocator = SlabAllocator(
            self._segment_bytes, self._segments, first_number=self._allocator.next_number
        )

    # Hot path.

    def reserve(self, owner: str, size: int, tag: object) -> Extent | None:
        """Find room for a block; its bytes are whatever the tenant last had there.

        The extent is 64-byte aligned in its segment, and page-aligned where ``size`` is a multiple
        of a page. O(1); only the first block of a slab costs more, and a tenant's taking over
        another's empty segment costs giving its memory back.

        Args:
            owner: the tenant.
            size: payload bytes, at least 1.
            tag: what ``tag`` and ``crowding`` answer.

        Returns:
            The extent, or None where there is no room now, or ever (see ``largest_block``).
        """
        with self._lock:
            return self._allocator.reserve(owner, size, tag)

    def free(self, extent: Extent) -> None:
        """See :meth:`Tier.free`. O(1)."""
        with self._lock:
            self._allocator.free(extent)

    def locate(self, extent: Extent) -> tuple[int, int]:
        """The number of the segment, and the byte offset in it."""
        return extent >> OFFSET_BITS, extent & OFFSET_MASK

    # Blocks.

    def tag(self, extent: Extent) -> object:
        """The tag of the block at ``extent``.

        Raises:
            BadExtent: no block there.
        """
        with self._lock:
            return self._allocator.tag(extent)

    def retag(self, extent: Extent, tag: object) -> None:
        """Give the block at ``extent`` another tag.

        Raises:
            BadExtent: no block there.
        """
        with self._lock:
            self._allocator.retag(extent, tag)

    def crowding(
        self, owner: str, size: int, movable: Callable[[object], bool] | None = None
    ) -> list[object]:
        """Tags of the blocks whose freeing makes room for a block, at the least cost.

        For when ``reserve`` answers None. Freeing any one block of the same owner and size helps
        too; those are never named here, as which of them to free is for the eviction order to say.
        The emptiest slabs of the owner's other sizes come first, then the emptiest segment of
        another owner. Freeing them all lets ``reserve`` succeed.

        Args:
            owner: the tenant that needs room.
            size: payload bytes of the block.
            movable: tells by tag whether a block may be freed (it is not pinned); None: all may.

        Returns:
            The tags; empty where no other blocks can make room.
        """
        with self._lock:
            return self._allocator.crowding(owner, size, movable)

    # Segments.

    def segment(self, number: int) -> S:
        """A segment by number. What gives access to it is for processes of its ``owner`` alone.

        Raises:
            BadExtent: no such segment.
        """
        return self._segments[number]

    def segments(self) -> list[S]:
        """All segments, by number."""
        with self._lock:
            return list(self._segments)

    def add_segment(self) -> int:
        """Grow by one segment while running; its number.

        Raises:
            TierConfigError, MediumFailed: the memory can't be had; nothing has changed.
        """
        with self._lock:
            return self._allocator.add(self._segment_bytes // self._step * self._step)

    def retire_segment(self, number: int) -> list[object]:
        """Shrink by one segment while running.

        The segment takes no more blocks from now on; its memory is given back and ``capacity``
        falls when the last block in it has been freed, at once where there is none.

        Returns:
            The tags of the blocks in it, which the caller is to free.

        Raises:
            BadExtent: no such segment.
        """
        with self._lock:
            return self._allocator.retire(number)

    @property
    def on_release(self) -> Callable[[int], None] | None:
        """Called with a segment's number before its memory is given back, while the tier is open.

        For who has registered the memory elsewhere. May be called under the tier's lock.
        """
        return self._segments.on_release

    @on_release.setter
    def on_release(self, on_release: Callable[[int], None] | None) -> None:
        self._segments.on_release = on_release

    # Counting.

    @property
    def capacity(self) -> int:
        """See :attr:`Tier.capacity`. Changes with ``add_segment`` and ``retire_segment``."""
        return self._left + self._segments.size

    @property
    def used(self) -> int:
        """See :attr:`Tier.used`."""
        return self._allocator.used

    @property
    def largest_block(self) -> int:
        """Bytes of the largest block that could ever find room."""
        with self._lock:
            return self._allocator.largest_block
