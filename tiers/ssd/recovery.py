"""Finding the sound records of a region after a restart.

A region with a sound summary is taken at its word: records are checked when they are read. One
without (it was being written at the time, or its summary is damaged) is scanned, payloads
included. Several writers may have been at work when the process died, so any of the last records
may be torn, with sound ones behind: the scan goes on page by page after whatever it can't use.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from tiers.ssd.buffers import aligned_memory
from tiers.ssd.format import (
    PAGE,
    RecordHeader,
    decode_record,
    encode_entry,
    record_pages,
    region_page,
)
from tiers.ssd.region import FoundRegion

if TYPE_CHECKING:
    from tiers.ssd.device import Device
    from tiers.ssd.format import RegionHead
    from tiers.ssd.metadata import RegionMetadata
    from tiers.ssd.volume import Volume

_log = logging.getLogger(__name__)

_WINDOW_PAGES: Final = 256


class RegionReader:
    """Reads a region's pages through a window of 1 MiB; what can't be read is zeros.

    Args:
        device: where the region is.
        first: absolute page number of its head.
        pages: its length.
    """

    def __init__(self, device: Device, first: int, pages: int) -> None:
        self._device = device
        self._first = first
        self._pages = pages
        self._memory = aligned_memory(min(_WINDOW_PAGES, pages) * PAGE)
        self._start = 0
        self._end = 0

    def page(self, number: int) -> memoryview:
        """See a page; valid until the next call."""
        return self._window(number)[:PAGE]

    def checksum(self, number: int, size: int) -> int:
        """The crc32c of ``size`` bytes from the start of page ``number``."""
        crc = 0
        while size > 0:
            part = self._window(number)[:size]
            crc = crc32c(part, crc)
            size -= len(part)
            number += len(part) // PAGE
        return crc

    def _window(self, number: int) -> memoryview:
        if not self._start <= number < self._end:
            self._start = number
            self._end = min(number + _WINDOW_PAGES, self._pages)
            self._fill()
        return self._memory[(number - self._start) * PAGE : (self._end - self._start) * PAGE]

    def _fill(self) -> None:
        whole = self._memory[: (self._end - self._start) * PAGE]
        try:
            self._device.read([whole], (self._first + self._start) * PAGE)
        except OSError:
            for page in range(self._start, self._end):
                self._fill_page(page)

    def _fill_page(self, number: int) -> None:
        start = (number - self._start) * PAGE
        page = self._memory[start : start + PAGE]
        try:
            self._device.read([page], (self._first + number) * PAGE)
        except OSError:
            page[:] = bytes(PAGE)


def scan(reader: RegionReader, head: RegionHead, first: int, pages: int) -> FoundRegion:
    """Find a region's sound records without a summary."""
    entries = bytearray()
    sequence = head.sequence
    number = cursor = 1
    while number < pages:
        found = decode_record(reader.page(number))
        if found is None or not _belongs(found[0], head, first, number, pages):
            number += 1
            continue
        header, crc = found
        if reader.checksum(number + 1, header.record.size) == header.checksum:
            entries += encode_entry(header, crc, number)
        sequence = max(sequence, header.sequence)
        number = cursor = number + record_pages(header.record.size)
    return FoundRegion(
        head.number, head.generation, head.sequence, sequence, cursor, bytes(entries)
    )


def _belongs(header: RecordHeader, head: RegionHead, first: int, number: int, pages: int) -> bool:
    return (
        header.generation == head.generation
        and header.page == first + number
        and number + record_pages(header.record.size) < pages
    )


class Recovery:
    """Finds what a volume holds.

    Args:
        device: where it is.
        volume: what the superblock says.
        metadata: for its heads and summaries.
    """

    def __init__(self, device: Device, volume: Volume, metadata: RegionMetadata) -> None:
        self._device = device
        self._volume = volume
        self._metadata = metadata

    def find(self, depth: int) -> list[FoundRegion]:
        """Find the records of all regions, by region number; ``depth`` regions at a time."""
        numbers = range(self._volume.regions)
        if depth == 1:
            return [self.find_region(number) for number in numbers]
        with ThreadPoolExecutor(depth, thread_name_prefix="ssd-recovery") as threads:
            return list(threads.map(self.find_region, numbers))

    def find_region(self, number: int) -> FoundRegion:
        """Find one region's records; an unreadable region holds none."""
        try:
            head = self._metadata.read_head(number)
        except OSError as error:
            _log.warning("ssd tier: region %d is lost, its head can't be read: %s", number, error)
            return FoundRegion(number)
        if head is None:
            return FoundRegion(number)
        if not head.used:
            return FoundRegion(number, sequence=head.sequence)
        return self._from_summary(head) or self._from_scan(head)

    def _from_summary(self, head: RegionHead) -> FoundRegion | None:
        try:
            summary = self._metadata.read_summary(head.number, head.generation)
        except OSError as error:
            _log.warning("ssd tier: region %d: no summary: %s", head.number, error)
            return None
        if summary is None:
            return None
        footer, entries = summary
        return FoundRegion(
            head.number,
            head.generation,
            head.sequence,
            footer.sequence,
            footer.cursor,
            entries,
            summarised=True,
        )

    def _from_scan(self, head: RegionHead) -> FoundRegion:
        pages = self._volume.region_pages
        first = region_page(head.number, pages)
        found = scan(RegionReader(self._device, first, pages), head, first, pages)
        _log.info(
            "ssd tier: region %d had no summary, %d bytes of records found by scanning",
            head.number,
            (found.cursor - 1) * PAGE,
        )
        return found
