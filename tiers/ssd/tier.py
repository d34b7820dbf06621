"""The SSD tier: a log of records in regions, written and read by the calling threads.

Space is given out under a lock that is never held over I/O; the I/O itself runs in parallel, at
most ``queue_depth`` at once. To make room, the caller reclaims a region::

    region = tier.victim()
    for tag in tier.residents(region):      # drop each block, or copy it elsewhere, and
        tier.free(extent)
    tier.reclaim(region)

An extent that outlives its block (freed, its region reclaimed and written again) is refused as a
bad extent, and never gives the bytes of another block. A block that is freed may be found again by
the next start, until its region is reclaimed or :meth:`SsdTier.seal` has brought the summaries up
to date.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from crc32c import crc32c

from tiers.errors import BadExtent, CorruptBlock, MediumFailed, TierConfigError
from tiers.ssd.buffers import BouncePool, flat
from tiers.ssd.device import Device, FileDevice
from tiers.ssd.format import entry_records, region_page
from tiers.ssd.lock import DirectoryLock
from tiers.ssd.log import RegionLog
from tiers.ssd.metadata import RegionMetadata
from tiers.ssd.records import RecordIO
from tiers.ssd.recovery import Recovery
from tiers.ssd.region import make_extent
from tiers.ssd.space import Space
from tiers.ssd.statistics import SsdStatistics
from tiers.ssd.volume import Volume, check_region_bytes, prepare, regions_within
from tiers.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Buffer

    from tiers.ssd.region import FoundRegion, Held
    from tiers.tier import Extent, Record

_NOTHING = Volume(store=b"", regions=0, region_pages=1, fresh=True)


class SsdTier(Tier):
    """Blocks on a disk, found again after a restart.

    Args:
        directory: where the tier's files are; made where it is absent.
        capacity: bytes on disk, everything included.
        region_bytes: length of a region: what is reclaimed at once. A multiple of 4096.
        queue_depth: I/Os in flight at once; each may hold one block's length of memory.
        device: what to keep the regions on, instead of a file in ``directory``.

    Raises:
        TierConfigError: an impossible size or depth.
    """

    name: ClassVar[str] = "ssd"

    def __init__(
        self,
        directory: Path,
        capacity: int,
        *,
        region_bytes: int = 64 << 20,
        queue_depth: int = 8,
        device: Device | None = None,
    ) -> None:
        check_region_bytes(region_bytes)
        regions_within(capacity, region_bytes)
        if queue_depth < 1:
            raise TierConfigError(f"ssd queue depth of {queue_depth}: must be at least 1")
        self._directory = directory
        self._capacity = capacity
        self._region_bytes = region_bytes
        self._depth = queue_depth
        self._device = device if device is not None else FileDevice(directory / "regions")
        self._lock = DirectoryLock(directory)
        self._quiet = threading.Condition()
        self._working = 0
        self._is_open = False
        self._use(_NOTHING)

    def _use(self, volume: Volume) -> None:
        self._pool = BouncePool(self._depth)
        self._records = RecordIO(self._device, self._pool)
        self._metadata = RegionMetadata(self._device, volume.store, volume.region_pages)
        self._space = Space(volume.regions, volume.region_pages)
        self._log = RegionLog(self._space, self._device, self._metadata, self._records)
        self._found: list[FoundRegion] = []
        self._recovered = 0
        self._scanned = 0
        self._failed_reads = 0
        self._failed_writes = 0
        self._corrupt = 0

    # --- opening and closing --------------------------------------------------------------

    def open(self) -> None:
        """Lock the directory, then find what the file holds, or make a file.

        Raises:
            StateLocked: another process has the directory.
            TierConfigError: the directory can't be used, or the capacity does not fit on it.
            MediumFailed: a file could not be made.
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire()
        except OSError as error:
            raise TierConfigError(f"ssd directory {self._directory}: {error}") from error
        try:
            self._open_volume()
        except BaseException:
            self._device.close()
            self._lock.release()
            raise

    def _open_volume(self) -> None:
        try:
            self._device.open()
        except OSError as error:
            raise MediumFailed(f"the ssd tier's file can't be opened: {error}") from error
        volume = prepare(self._device, self._capacity, self._region_bytes)
        self._use(volume)
        if not volume.fresh:
            self._recover(Recovery(self._device, volume, self._metadata).find(self._depth))
        self._is_open = True

    def _recover(self, found: list[FoundRegion]) -> None:
        self._space.restore(found)
        self._recovered = self._space.blocks
        self._scanned = sum(bool(seen.generation) and not seen.summarised for seen in found)
        self._found = sorted((seen for seen in found if seen.entries), key=lambda f: f.opened)
        resumable = self._space.resumable()
        if resumable is not None:
            self._log.resume(resumable, found[resumable.number])
        self._log.refresh()

    def close(self) -> None:
        """Wait for the I/O in flight, then give the files back. Does not :meth:`seal`."""
        with self._quiet:
            self._is_open = False
            while self._working:
                self._quiet.wait()
        self._pool.clear()
        self._device.close()
        self._lock.release()

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Keep the files open for the length of a ``with``."""
        with self._quiet:
            if not self._is_open:
                raise MediumFailed("the ssd tier is closed")
            self._working += 1
        try:
            yield
        finally:
            with self._quiet:
                self._working -= 1
                if not self._working:
                    self._quiet.notify_all()

    def recovered(self) -> Iterator[tuple[Record, Extent]]:
        """Go through the blocks that :meth:`open` found, in the order in which they were written.

        Each is held, with None for a tag, until the caller frees it. The same block may come
        twice. What was gone through is forgotten, and with it the memory that it took.
        """
        self._found.reverse()
        while self._found:
            found = self._found.pop()
            first = region_page(found.number, self._space.region_pages)
            for page, record in entry_records(found.entries):
                yield record, make_extent(first + page, found.generation)

    # --- blocks ---------------------------------------------------------------------------

    def store(self, record: Record, data: Buffer, tag: object, *, owner: str = "") -> Extent | None:
        """Append a block to the log.

        Returns:
            The extent, or None where no region is free.

        Raises:
            MediumFailed: the write failed; nothing is stored.
            TierConfigError: such a block does not fit in a region.
            ValueError: ``data`` is not ``record.size`` bytes long, or empty.
        """
        payload = flat(data)
        if not payload or len(payload) != record.size:
            raise ValueError(f"{len(payload)} bytes for a block of {record.size}")
        with self._writing("write"):
            if not self._space.fits(record.size):
                raise TierConfigError(
                    f"a block of {record.size} bytes does not fit in an ssd region of "
                    f"{self._region_bytes}: raise the region size"
                )
            return self._log.append(record, payload, crc32c(payload), tag)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        with self._work():
            try:
                yield
            except OSError as error:
                with self._log.lock:
                    self._failed_writes += 1
                raise MediumFailed(f"the ssd tier's {what} failed: {error}") from error

    def load(self, extent: Extent, into: memoryview, offset: int = 0) -> None:
        """Read bytes of a block, and check the whole of it.

        A whole block lands straight in ``into`` where that is aligned to 4096 bytes.

        Raises:
            CorruptBlock: header or payload are not what was stored; ``into`` is undefined.
            MediumFailed: the read failed; ``into`` is undefined.
            BadExtent: no block there, or the range goes beyond it.
        """
        target = flat(into)
        with self._reading(extent) as held:
            end = offset + len(target)
            if offset < 0 or end > held.size:
                raise BadExtent(f"bytes {offset} to {end} of a block of {held.size}")
            self._records.read(held, target, offset)

    def verify(self, extent: Extent) -> None:
        """Read a block and check it; raises as :meth:`load` does."""
        with self._reading(extent) as held:
            self._records.verify(held)

    def record(self, extent: Extent) -> Record:
        """Read a block's names from its header; raises as :meth:`load` does."""
        with self._reading(extent) as held:
            return self._records.header(held).record

    @contextmanager
    def _reading(self, extent: Extent) -> Iterator[Held]:
        with self._work():
            with self._log.lock:
                held = self._space.held(extent)
            try:
                yield held
            except CorruptBlock:
                with self._log.lock:
                    self._corrupt += 1
                raise
            except OSError as error:
                with self._log.lock:
                    self._failed_reads += 1
                raise MediumFailed(f"the ssd tier's read failed: {error}") from error

    def checksum(self, extent: Extent) -> int:
        """The crc32c of a block's payload, from memory; raises BadExtent."""
        with self._log.lock:
            return self._space.held(extent).checksum

    def set_tag(self, extent: Extent, tag: object) -> None:
        """Give a block another tag; raises BadExtent."""
        with self._log.lock:
            self._space.set_tag(extent, tag)

    def free(self, extent: Extent) -> None:
        """Forget a block; its space comes back when its region is reclaimed. Never blocks."""
        with self._log.lock:
            self._space.free(extent)

    # --- making room, sealing -------------------------------------------------------------

    @property
    def free_regions(self) -> int:
        """Regions that hold nothing and can be put to use."""
        return self._space.free_regions

    def pressure(self) -> float:
        """The share of regions that is not free, from 0 to 1."""
        total = len(self._space.regions)
        return 1 - self._space.free_regions / total if total else 1.0

    def victim(self) -> int | None:
        """The sealed region to reclaim next: the fewest live bytes, then the oldest."""
        with self._log.lock:
            region = self._space.victim()
            return None if region is None else region.number

    def residents(self, region: int) -> list[object]:
        """The tags of the blocks held in a region.

        Among them may be a block whose :meth:`store` has yet to return, so that the caller doesn't
        know its extent: leave such a region for later.
        """
        with self._log.lock:
            return self._space.residents(region)

    def reclaim(self, region: int) -> None:
        """Make a region free; nothing in it will be found again, not by a restart either.

        Raises:
            ValueError: it is not sealed, or holds blocks.
            MediumFailed: the medium refused; the region is as it was, and a victim only once
                nothing else is.
        """
        with self._writing("reclaim"):
            self._log.reclaim(region)

    def seal(self) -> None:
        """Write all summaries that are missing or list freed blocks, so that a restart is quick.

        A region with writers at work is sealed by the last of them. A summary that can't be
        written is logged and counted; the next start scans that region.
        """
        with self._work():
            self._log.seal()

    # --- figures --------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Bytes on disk that the tier may take, everything included."""
        return self._capacity

    @property
    def largest_block(self) -> int:
        """Bytes of the largest block that fits in a region."""
        return self._space.largest_block

    @property
    def used(self) -> int:
        """Payload bytes of the blocks held."""
        return self._space.live_bytes

    def statistics(self) -> SsdStatistics:
        """Count what is held, what is free, and what went wrong."""
        with self._quiet, self._log.lock:
            space = self._space
            return SsdStatistics(
                capacity=self._capacity,
                used=space.live_bytes,
                blocks=space.blocks,
                lost=self._capacity - space.live_bytes - space.writable_bytes,
                regions=len(space.regions),
                free_regions=space.free_regions,
                occupied=self._device.occupied if self._is_open else 0,
                buffered=self._device.buffered,
                recovered=self._recovered,
                scanned=self._scanned,
                failed_reads=self._failed_reads,
                failed_writes=self._failed_writes,
                unsummarised=self._log.unsummarised,
                corrupt=self._corrupt,
            )
