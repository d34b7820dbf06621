"""The node's GPUs: where the copies of blocks lie, for sessions of processes that compute there.

Everything here runs on the event loop's thread, and waits for a GPU only where a segment goes from
one tenant to another, to be cleared. The copies up from DRAM are in ``kvstore.hbm_promotion``.

A GPU that fails is not used any more: what was copied there is forgotten, and the blocks are served
from DRAM and SSD, where they are as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final

import structlog

from kvstore.departures import DepartureReason
from kvstore.entry import GONE, IN_HBM, Entry
from kvstore.errors import AccessDenied, Unavailable
from kvstore.hbm_copies import Copy, HbmCopies
from kvstore.index import Index
from kvstore.metrics import Metrics
from tiers.device import End
from tiers.errors import BadExtent, MediumFailed
from tiers.hbm import HbmTier
from tiers.policy import Policy
from tiers.tier import TierStatistics

_log = structlog.get_logger(__name__)

OFFSET_BITS: Final = 44
"""A place is ``segment << OFFSET_BITS | offset``, as in DRAM."""
SEGMENT_BITS: Final = 16
"""A segment's number on the wire is ``gpu << SEGMENT_BITS | number``, the latter its tier's."""
MOST_GPUS: Final = 16

_SEGMENT_MASK: Final = (1 << SEGMENT_BITS) - 1
_MOST_EVICTIONS_A_BLOCK: Final = 64
"""Evictions in policy order to find room for one block before a whole slab is cleared for it."""
_MOST_LOOKED_AT_A_BLOCK: Final = 256
"""Copies looked at for these, those of other tenants among them."""


class Gpu:
    """One GPU of the node.

    Args:
        number: its place among the node's GPUs.
        tier: its memory; open.

    Attributes:
        uuid: 16 bytes that name it in every process of the host.
        largest: bytes of the largest block that may ever find room.
        failed: whether it is out of use.
    """

    __slots__ = ("failed", "largest", "number", "tier", "uuid")

    def __init__(self, number: int, tier: HbmTier) -> None:
        self.number = number
        self.tier = tier
        self.uuid = tier.uuid()
        self.largest = tier.largest_block
        self.failed = False

    def __repr__(self) -> str:
        return f"<Gpu {self.number} {self.tier!r}{' failed' if self.failed else ''}>"


class Gpus:
    """The HBM tier of a node: the memory of its GPUs, and what lies in it.

    Args:
        index: holds the blocks.
        tiers: one for each GPU, open; at most ``MOST_GPUS``.
        orders: for each GPU the order in which its copies go.
        metrics: is counted into.
        promote_after: at which get by a session that computes on a GPU a block is wanted there: the
            first or the second.

    Attributes:
        copies: what lies where.
        wanted: is told of blocks of DRAM that should have a copy on a GPU, and of its number;
            ``kvstore.hbm_promotion`` hangs itself in here.
    """

    def __init__(
        self,
        index: Index,
        tiers: Sequence[HbmTier],
        orders: Sequence[Policy],
        metrics: Metrics,
        *,
        promote_after: int = 2,
    ) -> None:
        self.copies = HbmCopies(index, orders)
        self.wanted: Callable[[Entry, int], None] = lambda _entry, _gpu: None
        self._index = index
        self._gpus = [Gpu(number, tier) for number, tier in enumerate(tiers)]
        self._metrics = metrics
        self._at_once = promote_after <= 1

    def __repr__(self) -> str:
        return f"<Gpus {self._gpus} with {len(self.copies)} copies>"

    def __len__(self) -> int:
        return len(self._gpus)

    def __getitem__(self, number: int) -> Gpu:
        return self._gpus[number]

    # --- what sessions ask -----------------------------------------------------------------------

    def uuids(self) -> list[bytes]:
        """The GPUs' names, 16 bytes each; a GPU's place in the list is its number."""
        return [gpu.uuid for gpu in self._gpus]

    def place(self, entry: Entry, reach: Collection[int]) -> int | None:
        """Where the copy of a pinned block lies, as the wire says it.

        It stays there, and keeps its bytes, as long as the block is pinned.

        Args:
            entry: the block.
            reach: numbers of the GPUs whose memory the session's process can map.

        Returns:
            ``segment << 44 | offset`` with ``segment = gpu << 16 | number``; None where there is no
            copy within reach.
        """
        if not entry.state & IN_HBM:
            return None
        copy = self.copies.of(entry)
        if copy is None or copy.gpu not in reach:
            return None
        number, offset = self._gpus[copy.gpu].tier.locate(copy.extent)
        if number > _SEGMENT_MASK:
            return None  # Segments are numbered for ever, and this one's number can't be said.
        return (copy.gpu << SEGMENT_BITS | number) << OFFSET_BITS | offset

    def share(self, number: int, owner: str) -> tuple[int, bytes]:
        """What a process of a tenant maps a segment by; see :meth:`tiers.hbm.HbmTier.share`.

        To be undone with ``unshare`` when the process has ended or closed its mapping.

        Args:
            number: the segment's, as in ``place``.
            owner: the tenant.

        Returns:
            Its size in bytes, and the handle of 64 bytes.

        Raises:
            AccessDenied: there is no such segment, or it holds no blocks of this tenant.
            Unavailable: the GPU is out of use.
        """
        gpu, segment = self._segment(number)
        try:
            handle = gpu.tier.share(segment, owner)
            return gpu.tier.segment(segment).size, handle
        except BadExtent:
            raise AccessDenied(f"segment {number} does not hold blocks of this tenant") from None
        except MediumFailed as error:
            self.fail(gpu.number, str(error))
            raise Unavailable(str(error)) from error

    def _segment(self, number: int) -> tuple[Gpu, int]:
        which = number >> SEGMENT_BITS
        if not 0 <= which < len(self._gpus):
            raise AccessDenied(f"there is no segment {number}")
        gpu = self._gpus[which]
        if gpu.failed:
            raise Unavailable(f"GPU {which} is out of use")
        return gpu, number & _SEGMENT_MASK

    def unshare(self, number: int) -> None:
        """Say that a process has closed its mapping, or has ended: once for each ``share``."""
        self._gpus[number >> SEGMENT_BITS].tier.unshare(number & _SEGMENT_MASK)

    def lease(self, entries: Sequence[Entry], end: End) -> None:
        """Let the room of copies not be reused before ``end``, even where they go earlier.

        Args:
            entries: pinned blocks, with a copy or without.
            end: of whoever reads the copies, such as a :class:`kvstore.process_watch.ProcessWatch`.
        """
        for gpu in self._gpus:
            copies = map(self.copies.of, entries)
            held = [copy.extent for copy in copies if copy is not None and copy.gpu == gpu.number]
            if held:
                gpu.tier.lease(held, end)

    def used(self, entries: Sequence[Entry], gpu: int | None) -> None:
        """Note a get by a session that computes on a GPU.

        Args:
            entries: the blocks that it got, from root to leaf.
            gpu: number of its GPU; None where that is none of the node's.
        """
        if gpu is not None and not self._gpus[gpu].failed:
            for entry in entries:
                if entry.state & (IN_HBM | GONE):
                    continue
                if self._index.want(entry) or self._at_once:
                    self.wanted(entry, gpu)
        self.copies.touch(reversed(entries))

    # --- what the node asks ----------------------------------------------------------------------

    def reserve(self, entry: Entry, owner: str, gpu: int) -> Copy | None:
        """Room for a block's copy, evicting for it what the policy says; None if nothing can go.

        Args:
            entry: the block.
            owner: its tenant, whose segment it goes to.
            gpu: number of the GPU.
        """
        size, copy = entry.shard.block_bytes, Copy(entry, gpu)
        if size > self._gpus[gpu].largest:
            return None
        if self._take_room(copy, owner, size):
            return copy
        self.copies.fit(gpu)
        # Where another tenant's copy goes, its segment is no less that tenant's.
        coldest = islice(self.copies.victims(gpu), _MOST_LOOKED_AT_A_BLOCK)
        own = (copy for copy in coldest if copy.entry.shard.tenant == owner)
        for victim in islice(own, _MOST_EVICTIONS_A_BLOCK):
            self._evict(victim, DepartureReason.CAPACITY)
            if self._take_room(copy, owner, size):
                return copy
        for tag in self._gpus[gpu].tier.crowding(owner, size, self._may_go):
            assert isinstance(tag, Copy)
            self._evict(tag, DepartureReason.CAPACITY)
        return copy if self._take_room(copy, owner, size) else None

    def _take_room(self, copy: Copy, owner: str, size: int) -> bool:
        extent = self._gpus[copy.gpu].tier.reserve(owner, size, copy)
        if extent is None:
            return False
        copy.extent = extent
        return True

    def _may_go(self, tag: object) -> bool:
        """Whether a copy may make room: it is one already, and nobody reads it."""
        return (
            isinstance(tag, Copy)
            and not tag.entry.pins
            and not tag.entry.gone
            and self.copies.of(tag.entry) is tag
        )

    def settle(self, copy: Copy) -> bool:
        """Let a copy be used whose bytes are all there now.

        Returns:
            Whether it is; not where the block has gone meanwhile, has got another copy, or the GPU
            has failed. Its room is given back then.
        """
        entry = copy.entry
        if self._gpus[copy.gpu].failed or entry.gone or entry.state & IN_HBM:
            self._give_back(copy)
            return False
        self.copies.add(copy)
        return True

    def _give_back(self, copy: Copy) -> None:
        if not self._gpus[copy.gpu].failed:
            self._gpus[copy.gpu].tier.free(copy.extent)

    def evict(self, entry: Entry, reason: DepartureReason) -> bool:
        """Take the copy of a block off its GPU; whether that could be: not while it is pinned."""
        copy = self.copies.of(entry)
        if copy is None or entry.pins:
            return False
        self._evict(copy, reason)
        return True

    def _evict(self, copy: Copy, reason: DepartureReason) -> None:
        capacity = reason is DepartureReason.CAPACITY
        self.copies.remove(copy, evicted=capacity)
        self._give_back(copy)
        self._metrics.evictions["hbm", reason] += 1
        if capacity:
            below = "ssd" if copy.entry.dram is None else "dram"
            self._metrics.demotions["hbm", below] += 1

    def forget(self, entry: Entry) -> None:
        """Give up the copy, if there is one, of a block that nobody has pinned."""
        copy = self.copies.of(entry)
        if copy is not None:
            self.copies.remove(copy, evicted=False)
            self._give_back(copy)

    def read(self, entry: Entry) -> bytearray | None:
        """The bytes of a pinned block's copy; None where it has none any more. Waits.

        Raises:
            TierError: the GPU failed.
        """
        copy = self.copies.of(entry)
        if copy is None:
            return None
        found = bytearray(entry.shard.block_bytes)
        self._gpus[copy.gpu].tier.load(copy.extent, memoryview(found))
        return found

    def failed(self) -> list[int]:
        """Numbers of the GPUs that are out of use."""
        return [gpu.number for gpu in self._gpus if gpu.failed]

    def statistics(self) -> TierStatistics:
        """What the GPUs that are in use hold, together."""
        found = [gpu.tier.statistics() for gpu in self._gpus if not gpu.failed]
        return TierStatistics(
            capacity=sum(one.capacity for one in found),
            used=sum(one.used for one in found),
            blocks=sum(one.blocks for one in found),
            lost=sum(one.lost for one in found),
        )

    def fail(self, gpu: int, reason: str) -> None:
        """Take a GPU out of use, and forget what was copied there."""
        failed = self._gpus[gpu]
        if failed.failed:
            return
        failed.failed = True
        lost = self.copies.on(gpu)
        for copy in lost:
            self.copies.remove(copy, evicted=False)
        self._metrics.evictions["hbm", DepartureReason.MEDIUM_FAILED] += len(lost)
        _log.error("gpu out of use", tier="hbm", gpu=gpu, error=reason, copies=len(lost))
