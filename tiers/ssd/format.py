"""What the SSD tier writes: superblock, region heads, record headers, region summaries.

Pure codecs, no I/O. Everything is little-endian, lies on pages of 4 KiB and ends in a crc32c of
itself; a structure that does not check out decodes to None and is never guessed at::

    page 0            superblock
    page 1 ...        regions, each of `region_pages`:
      page 0            head: which generation of the region this is, and whether it is in use
      page 1 ...        records: one header page, then the payload padded to whole pages
      last pages        summary: the facts of every record, then a footer on the last page

The superblock and the head are kept twice on their page, so that one flipped bit or a write torn
within the page loses nothing; of two sound heads the later one counts.

A region's *generation* is a random 64-bit number, drawn anew whenever the region is put to use or
reclaimed. Records and summary carry it, so what an earlier generation left behind is never taken
for the present one, whatever was lost of the head. Nobody outside this process ever sees it, so a
payload that imitates a record can't be mistaken for one either.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from crc32c import crc32c

from tiers.tier import Record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TypeAlias

    from typing_extensions import Buffer

    Entries: TypeAlias = np.ndarray[tuple[int], np.dtype[Any]]

PAGE: Final = 4096
FORMAT_VERSION: Final = 1
STORE_BYTES: Final = 16
HASH_BYTES: Final = 32
MAX_REGION_BYTES: Final = 1 << 32
MAX_FILE_BYTES: Final = PAGE << 32
MIN_REGION_PAGES: Final = 5
"""Head, one record of two pages, summary of two pages."""

_SECOND_COPY: Final = PAGE // 2
_CRC: Final = struct.Struct("<I")
_SUPERBLOCK: Final = struct.Struct("<8sIIQQ16s")
_HEAD: Final = struct.Struct("<8sIIQQI16s")
_RECORD: Final = struct.Struct("<8sIIQQQQ32s32s32sI")
_FOOTER: Final = struct.Struct("<8sIIQQIII")
_ENTRY: Final = struct.Struct("<32s32s32sQIIIIII")
_SUPERBLOCK_MAGIC: Final = b"kvs.ssd\0"
_HEAD_MAGIC: Final = b"kvs.reg\0"
_RECORD_MAGIC: Final = b"kvs.rec\0"
_FOOTER_MAGIC: Final = b"kvs.sum\0"

ENTRY_BYTES: Final = _ENTRY.size
_ENTRY_FIELDS: Final = np.dtype(
    [
        ("names", "V96"),
        ("sequence", "<u8"),
        ("page", "<u4"),
        ("size", "<u4"),
        ("checksum", "<u4"),
        ("header_crc", "<u4"),
        ("shard", "<u4"),
        ("reserved", "<u4"),
    ]
)


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the file is.

    Attributes:
        region_bytes: length of a region.
        regions: number of regions that the file was made for.
        store: 16 random bytes drawn when the file was made; ties the region heads to it.
    """

    region_bytes: int
    regions: int
    store: bytes


@dataclass(frozen=True, slots=True)
class RegionHead:
    """What a region is.

    Attributes:
        number: the region's place in the file, from 0.
        generation: the random number that the region's records carry.
        sequence: the write sequence when the head was written; the later of two heads counts.
        used: whether records were written under this generation; False after a reclaim.
        store: the superblock's.
    """

    number: int
    generation: int
    sequence: int
    used: bool
    store: bytes


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record is.

    Attributes:
        record: the block's names and size.
        generation: the region's.
        sequence: place in the order of writes, over all regions.
        page: absolute page number of this header.
        checksum: crc32c of the payload.
    """

    record: Record
    generation: int
    sequence: int
    page: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Footer:
    """The last page of a sealed region.

    Attributes:
        number: the region's place in the file.
        generation: the region's.
        sequence: the write sequence when it was sealed.
        cursor: the page after the last record ever written, counted within the region.
        count: number of entries; they lie on the pages before the footer.
        entries_crc: crc32c of the entries.
    """

    number: int
    generation: int
    sequence: int
    cursor: int
    count: int
    entries_crc: int


def region_page(number: int, region_pages: int) -> int:
    """Absolute page number of a region's head."""
    return 1 + number * region_pages


def pages_of(size: int) -> int:
    """Whole pages that hold ``size`` bytes."""
    return -(-size // PAGE)


def record_pages(size: int) -> int:
    """Pages that a record with ``size`` bytes of payload takes, its header included."""
    return 1 + pages_of(size)


def summary_pages(count: int) -> int:
    """Pages that the summary of ``count`` records takes, its footer included."""
    return 1 + pages_of(count * ENTRY_BYTES)


def _sealed(body: bytes) -> bytes:
    return body + _CRC.pack(crc32c(body))


def _unsealed(layout: struct.Struct, magic: bytes, data: bytes) -> tuple[Any, ...] | None:
    if len(data) < layout.size + _CRC.size or not data.startswith(magic):
        return None
    body = data[: layout.size]
    if _CRC.unpack_from(data, layout.size)[0] != crc32c(body):
        return None
    return layout.unpack(body)


def _twice(copy: bytes) -> bytes:
    return copy.ljust(_SECOND_COPY, b"\0") * 2


def encode_superblock(superblock: Superblock) -> bytes:
    """Make the page."""
    body = _SUPERBLOCK.pack(
        _SUPERBLOCK_MAGIC,
        FORMAT_VERSION,
        PAGE,
        superblock.region_bytes,
        superblock.regions,
        superblock.store,
    )
    return _twice(_sealed(body))


def decode_superblock(page: Buffer) -> Superblock | None:
    """Read the page; None where neither copy is a superblock of this format version."""
    data = bytes(page)
    for start in (0, _SECOND_COPY):
        fields = _unsealed(_SUPERBLOCK, _SUPERBLOCK_MAGIC, data[start:])
        if fields is not None and fields[1:3] == (FORMAT_VERSION, PAGE):
            return Superblock(*fields[3:])
    return None


def encode_head(head: RegionHead) -> bytes:
    """Make the page."""
    body = _HEAD.pack(
        _HEAD_MAGIC,
        FORMAT_VERSION,
        head.number,
        head.generation,
        head.sequence,
        head.used,
        head.store,
    )
    return _twice(_sealed(body))


def decode_head(page: Buffer) -> RegionHead | None:
    """Read the page; None where neither copy is a head of this format version."""
    data = bytes(page)
    latest: RegionHead | None = None
    for start in (0, _SECOND_COPY):
        fields = _unsealed(_HEAD, _HEAD_MAGIC, data[start:])
        if fields is None or fields[1] != FORMAT_VERSION:
            continue
        _, _, number, generation, sequence, used, store = fields
        if latest is None or sequence > latest.sequence:
            latest = RegionHead(number, generation, sequence, bool(used), store)
    return latest


def encode_record(header: RecordHeader) -> tuple[bytes, int]:
    """Make the start of the header page (the rest is zeros), and the crc32c that it ends in."""
    record = header.record
    body = _RECORD.pack(
        _RECORD_MAGIC,
        FORMAT_VERSION,
        record.shard,
        header.generation,
        header.sequence,
        header.page,
        record.size,
        record.namespace,
        record.hash,
        record.parent,
        header.checksum,
    )
    crc = crc32c(body)
    return body + _CRC.pack(crc), crc


def decode_record(page: Buffer) -> tuple[RecordHeader, int] | None:
    """Read a header page: the header and its crc32c, or None where it is none."""
    data = bytes(memoryview(page)[: _RECORD.size + _CRC.size])
    fields = _unsealed(_RECORD, _RECORD_MAGIC, data)
    if fields is None or fields[1] != FORMAT_VERSION:
        return None
    _, _, shard, generation, sequence, place, size, namespace, name, parent, checksum = fields
    record = Record(namespace, shard, name, parent, size)
    header = RecordHeader(record, generation, sequence, place, checksum)
    return header, _CRC.unpack_from(data, _RECORD.size)[0]


def encode_entry(header: RecordHeader, header_crc: int, page: int) -> bytes:
    """Make a summary entry; ``page`` is the header's place within the region."""
    record = header.record
    return _ENTRY.pack(
        record.namespace,
        record.hash,
        record.parent,
        header.sequence,
        page,
        record.size,
        header.checksum,
        header_crc,
        record.shard,
        0,
    )


def read_entries(entries: bytes) -> Entries:
    """See summary entries as an array with the fields page, size, checksum, header_crc, ..."""
    return np.frombuffer(entries, dtype=_ENTRY_FIELDS)


def entry_records(entries: bytes) -> Iterator[tuple[int, Record]]:
    """Go through summary entries: place within the region, and the block's record."""
    for fields in _ENTRY.iter_unpack(entries):
        namespace, name, parent, _, page, size, _, _, shard, _ = fields
        yield page, Record(namespace, shard, name, parent, size)


def make_footer(number: int, generation: int, sequence: int, cursor: int, entries: bytes) -> Footer:
    """Describe a summary's entries."""
    count = len(entries) // ENTRY_BYTES
    return Footer(number, generation, sequence, cursor, count, crc32c(entries))


def encode_summary(footer: Footer, entries: bytes) -> bytes:
    """Make the summary's pages, footer last; they go to the end of the region."""
    body = _FOOTER.pack(
        _FOOTER_MAGIC,
        FORMAT_VERSION,
        footer.number,
        footer.generation,
        footer.sequence,
        footer.cursor,
        footer.count,
        footer.entries_crc,
    )
    return entries.ljust(pages_of(len(entries)) * PAGE, b"\0") + _sealed(body).ljust(PAGE, b"\0")


def decode_footer(page: Buffer) -> Footer | None:
    """Read a region's last page; None where it is no footer of this format version."""
    fields = _unsealed(_FOOTER, _FOOTER_MAGIC, bytes(page))
    if fields is None or fields[1] != FORMAT_VERSION:
        return None
    return Footer(*fields[2:])


def sound_entries(entries: bytes, footer: Footer, region_pages: int) -> bool:
    """Tell whether summary entries are the footer's and describe records that fit the region."""
    if len(entries) != footer.count * ENTRY_BYTES or crc32c(entries) != footer.entries_crc:
        return False
    facts = read_entries(entries)
    starts = facts["page"].astype(np.int64)
    ends = starts + 1 + -(-facts["size"].astype(np.int64) // PAGE)
    if not len(starts):
        return True
    limit = min(footer.cursor, region_pages - summary_pages(footer.count))
    return bool(starts[0] >= 1 and ends[-1] <= limit and (ends[:-1] <= starts[1:]).all())
