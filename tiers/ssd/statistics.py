"""What the SSD tier counts."""

from __future__ import annotations

from dataclasses import dataclass

from tiers.tier import TierStatistics


@dataclass(frozen=True, slots=True)
class SsdStatistics(TierStatistics):
    """The SSD tier's occupancy, and what it has met since it was opened.

    Attributes:
        regions: number of regions.
        free_regions: those that hold nothing and can be put to use.
        occupied: bytes that the file takes from its file system.
        buffered: whether I/O goes through the page cache, for want of O_DIRECT.
        recovered: blocks found when it was opened.
        scanned: regions that had to be scanned for them.
        failed_reads: I/O errors in reads of blocks.
        failed_writes: I/O errors in writes of blocks and region heads.
        unsummarised: summaries that could not be written; the next start scans those regions.
        corrupt: reads that met damaged bytes.
    """

    regions: int
    free_regions: int
    occupied: int
    buffered: bool
    recovered: int
    scanned: int
    failed_reads: int
    failed_writes: int
    unsummarised: int
    corrupt: int
