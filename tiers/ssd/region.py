"""One region's records, as they are kept in memory.

What is kept for every block is four numbers in arrays and its tag, 24 bytes; the names of blocks
are kept only until a summary on the medium has them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from tiers.ssd.format import ENTRY_BYTES, read_entries

if TYPE_CHECKING:
    from tiers.tier import Extent


_PAGE_BITS: Final = 32
_GENERATION_MASK: Final = (1 << 28) - 1
"""With the page number 60 bits, which Python keeps in the smaller of two sizes."""


def make_extent(page: int, generation: int) -> Extent:
    """Mint an extent: a page number, and enough of the region's generation to tell stale ones."""
    return page | (generation & _GENERATION_MASK) << _PAGE_BITS


def extent_page(extent: Extent) -> int:
    """Absolute page number of an extent's header."""
    return extent & ((1 << _PAGE_BITS) - 1)


class State(Enum):
    """Where a region is in its round."""

    FREE = "free"
    BUSY = "busy"
    OPEN = "open"
    CLOSING = "closing"
    SEALED = "sealed"


class _Mark:
    """What stands in a tag's place while there is no block."""


WRITING: Final = _Mark()
DEAD: Final = _Mark()


@dataclass(frozen=True, slots=True)
class Held:
    """A block that the tier holds, as ``load`` needs it.

    Attributes:
        page: absolute page number of its header.
        generation: its region's.
        size: payload bytes.
        checksum: crc32c of the payload.
        header_crc: crc32c that its header ends in.
    """

    page: int
    generation: int
    size: int
    checksum: int
    header_crc: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Space for one record that is being written.

    Attributes:
        region: the region's number.
        index: the record's place in the region's arrays.
        page: absolute page number of the header.
        extent: the record's extent.
        header: the start of the header page.
    """

    region: int
    index: int
    page: int
    extent: Extent
    header: bytes


@dataclass(frozen=True, slots=True)
class FoundRegion:
    """A region as it was found on the medium.

    Attributes:
        number: the region's place in the file.
        generation: the region's; 0 where it holds nothing.
        opened: write sequence when it was put to use.
        sequence: the highest write sequence seen in it.
        cursor: the page after the last record.
        entries: summary entries of its sound records.
        summarised: whether a sound summary told so, or a scan of the records.
    """

    number: int
    generation: int = 0
    opened: int = 0
    sequence: int = 0
    cursor: int = 1
    entries: bytes = b""
    summarised: bool = False


class Region:
    """One region's records; the attributes are for this package alone.

    Attributes:
        number: place in the file, from 0.
        generation: the random number that its records carry.
        opened: write sequence when it was put to use: its age.
        cursor: the next page to be written, counted within the region.
        writers: records being written.
        entries: summary entries of its records, while no summary on the medium has them.
        summarised: whether the summary on the medium is that of this generation.
        outdated: whether blocks were freed since the summary was written.
        failures: reclaims that the medium refused.
    """

    __slots__ = (
        "checksums",
        "cursor",
        "entries",
        "failures",
        "generation",
        "header_crcs",
        "live",
        "live_bytes",
        "number",
        "opened",
        "outdated",
        "pages",
        "sizes",
        "state",
        "summarised",
        "tags",
        "writers",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.failures = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything that was held."""
        self.state = State.FREE
        self.generation = 0
        self.opened = 0
        self.cursor = 1
        self.writers = 0
        self.live = 0
        self.live_bytes = 0
        self.entries = bytearray()
        self.summarised = False
        self.outdated = False
        self.pages = array("I")
        self.sizes = array("I")
        self.checksums = array("I")
        self.header_crcs = array("I")
        self.tags: list[object] = []

    def index_of(self, page: int) -> int | None:
        """The place in the arrays of the record whose header lies on ``page``."""
        index = bisect_left(self.pages, page)
        if index < len(self.pages) and self.pages[index] == page:
            return index
        return None

    def held(self, index: int) -> bool:
        """Whether the record at ``index`` is a block that is held."""
        return not isinstance(self.tags[index], _Mark)

    def fill(self, entries: bytes) -> None:
        """Take over the records that summary entries describe; all are held, with no tag."""
        facts = read_entries(entries)
        self.pages = array("I", facts["page"].tobytes())
        self.sizes = array("I", facts["size"].tobytes())
        self.checksums = array("I", facts["checksum"].tobytes())
        self.header_crcs = array("I", facts["header_crc"].tobytes())
        self.tags = [None] * len(self.pages)
        self.live = len(self.pages)
        self.live_bytes = sum(self.sizes)

    def residents(self) -> list[object]:
        """Tags of the blocks that are held."""
        return [tag for tag in self.tags if not isinstance(tag, _Mark)]

    def live_entries(self, entries: bytes) -> bytes:
        """Pick the summary entries of the blocks that are held."""
        kept = []
        for place, page in enumerate(read_entries(entries)["page"].tolist()):
            index = self.index_of(page)
            if index is not None and self.held(index):
                kept.append(entries[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES])
        return b"".join(kept)
