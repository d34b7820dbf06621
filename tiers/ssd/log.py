"""The log: records are appended to the open region; full regions are sealed, empty ones reused.

Its lock is held for bookkeeping and never over I/O, so that freeing and looking up never wait for
the medium. All methods may be called from several threads at once, and raise OSError where the
medium fails.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from tiers.ssd.format import ENTRY_BYTES
from tiers.ssd.metadata import draw_generation

if TYPE_CHECKING:
    from tiers.ssd.device import Device
    from tiers.ssd.metadata import RegionMetadata
    from tiers.ssd.records import RecordIO
    from tiers.ssd.region import FoundRegion, Region, Slot
    from tiers.ssd.space import Space
    from tiers.tier import Extent, Record

_log = logging.getLogger(__name__)


class RegionLog:
    """Writes to the regions of one volume.

    Args:
        space: which regions hold what.
        device: where they are.
        metadata: for heads and summaries.
        records: for records.

    Attributes:
        lock: to be held over any use of ``space``.
        unsummarised: summaries that could not be written.
    """

    def __init__(
        self, space: Space, device: Device, metadata: RegionMetadata, records: RecordIO
    ) -> None:
        self.space = space
        self.lock = threading.Lock()
        self.unsummarised = 0
        self._device = device
        self._metadata = metadata
        self._records = records
        self._opening = threading.Lock()

    # --- appending ------------------------------------------------------------------------

    def append(
        self, record: Record, payload: memoryview, checksum: int, tag: object
    ) -> Extent | None:
        """Write a record; None where no region is free."""
        try:
            slot = self._allocate(record, checksum)
            return None if slot is None else self._write(slot, payload, tag)
        finally:
            self._summarise_due()

    def _write(self, slot: Slot, payload: memoryview, tag: object) -> Extent:
        try:
            self._records.write(slot, payload)
        except BaseException:
            with self.lock:
                self.space.abandon(slot)
            raise
        with self.lock:
            self.space.commit(slot, tag)
        return slot.extent

    def _allocate(self, record: Record, checksum: int) -> Slot | None:
        while True:
            with self.lock:
                slot = self.space.allocate(record, checksum)
            if slot is not None or not self._open_region(record.size):
                return slot

    def _open_region(self, size: int) -> bool:
        """Put a free region to use, unless another thread has just done so."""
        with self._opening:
            with self.lock:
                if self.space.has_room(size):
                    return True
                region = self.space.take_free()
                sequence = self.space.next_sequence()
            if region is None:
                return False
            generation = draw_generation()
            try:
                self._metadata.write_head(region.number, generation, sequence, used=True)
            except BaseException:
                with self.lock:
                    self.space.release(region)
                raise
            with self.lock:
                self.space.install(region, generation, sequence)
            return True

    # --- reclaiming -----------------------------------------------------------------------

    def reclaim(self, number: int) -> None:
        """Make a sealed region without blocks free; ValueError where it isn't one."""
        with self.lock:
            region = self.space.take_empty(number)
            sequence = self.space.next_sequence()
        try:
            self._metadata.write_head(number, draw_generation(), sequence, used=False)
            self._device.sync()
        except BaseException:
            with self.lock:
                self.space.put_back(region)
            raise
        with self.lock:
            self.space.release(region)

    # --- sealing --------------------------------------------------------------------------

    def resume(self, region: Region, found: FoundRegion) -> None:
        """Write on in a region that was found on the medium."""
        try:
            self._metadata.erase_summary(region.number)
        except OSError as error:
            _log.warning("ssd tier: region %d is not resumed: %s", region.number, error)
        else:
            with self.lock:
                self.space.resume(region, found.entries)

    def seal(self) -> None:
        """Close the open region and write every summary that is due."""
        with self.lock:
            self.space.close_region()
        self._summarise_due()
        self.refresh()

    def refresh(self) -> None:
        """Write the summaries of sealed regions that are missing or list freed blocks."""
        with self.lock:
            outdated = self.space.outdated()
        for region in outdated:
            self._summarise(region)

    def _summarise_due(self) -> None:
        with self.lock:
            due = self.space.due()
        for region in due:
            self._summarise(region)

    def _summarise(self, region: Region) -> None:
        """Write a closing region's summary; where that fails, the next start scans it."""
        try:
            written = self._write_summary(region)
        except OSError as error:
            _log.warning("ssd tier: region %d has no summary: %s", region.number, error)
            written = False
        with self.lock:
            self.unsummarised += not written
            self.space.sealed(region, summarised=written)

    def _write_summary(self, region: Region) -> bool:
        entries = bytes(region.entries)
        if region.summarised:
            summary = self._metadata.read_summary(region.number, region.generation)
            entries = b"" if summary is None else summary[1]
        with self.lock:
            entries = region.live_entries(entries)
            if len(entries) != region.live * ENTRY_BYTES:
                return False
            region.outdated = False
            sequence = self.space.next_sequence()
        self._metadata.write_summary(
            region.number, region.generation, sequence, region.cursor, entries
        )
        return True
