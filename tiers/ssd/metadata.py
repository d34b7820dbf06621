"""Region heads and summaries on the medium."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from tiers.ssd.buffers import aligned_memory
from tiers.ssd.format import (
    ENTRY_BYTES,
    PAGE,
    Footer,
    RegionHead,
    decode_footer,
    decode_head,
    encode_head,
    encode_summary,
    make_footer,
    region_page,
    sound_entries,
    summary_pages,
)

if TYPE_CHECKING:
    from tiers.ssd.device import Device

_ZEROS: Final = bytes(PAGE)


def draw_generation() -> int:
    """A number that no region has carried before."""
    return secrets.randbits(64) or 1


class RegionMetadata:
    """Reads and writes the pages of regions that are not records.

    Args:
        device: where they are.
        store: the superblock's.
        region_pages: pages in a region.
    """

    def __init__(self, device: Device, store: bytes, region_pages: int) -> None:
        self._device = device
        self._store = store
        self._region_pages = region_pages

    def read_head(self, number: int) -> RegionHead | None:
        """Read a region's head; None where there is none of this store."""
        head = decode_head(self._read(region_page(number, self._region_pages), 1))
        if head is None or head.store != self._store or head.number != number:
            return None
        return head

    def write_head(self, number: int, generation: int, sequence: int, *, used: bool) -> None:
        """Say which generation of the region this is, and whether records follow."""
        head = RegionHead(number, generation, sequence, used, self._store)
        self._write(encode_head(head), region_page(number, self._region_pages))

    def read_summary(self, number: int, generation: int) -> tuple[Footer, bytes] | None:
        """Read a region's summary; None where there is none of this generation, or no sound one."""
        end = region_page(number + 1, self._region_pages)
        footer = decode_footer(self._read(end - 1, 1))
        if footer is None or (footer.number, footer.generation) != (number, generation):
            return None
        pages = summary_pages(footer.count)
        if pages >= self._region_pages:
            return None
        data = self._read(end - pages, pages)
        entries = bytes(data[: footer.count * ENTRY_BYTES])
        return (footer, entries) if sound_entries(entries, footer, self._region_pages) else None

    def write_summary(
        self, number: int, generation: int, sequence: int, cursor: int, entries: bytes
    ) -> None:
        """Write a region's summary, and see to it that it and the records before it last."""
        footer = make_footer(number, generation, sequence, cursor, entries)
        end = region_page(number + 1, self._region_pages)
        self._write(encode_summary(footer, entries), end - summary_pages(footer.count))
        self._device.sync()

    def erase_summary(self, number: int) -> None:
        """Make the region one that has to be scanned, because records will be added."""
        self._write(_ZEROS, region_page(number + 1, self._region_pages) - 1)

    def _read(self, page: int, count: int) -> memoryview:
        memory = aligned_memory(count * PAGE)
        self._device.read([memory], page * PAGE)
        return memory

    def _write(self, data: bytes, page: int) -> None:
        memory = aligned_memory(len(data))
        memory[:] = data
        self._device.write([memory], page * PAGE)
