"""Media and policy: the HBM, DRAM and SSD tiers, eviction and admission."""

from tiers.dram import DramTier
from tiers.errors import (
    BadExtent,
    CorruptBlock,
    MediumFailed,
    StateLocked,
    TierConfigError,
    TierError,
    TierFull,
)
from tiers.hbm import HbmTier
from tiers.occupancy import DramStatistics, HbmStatistics
from tiers.segment import HugePages, Segment
from tiers.tier import Extent, Record, Tier, TierStatistics

__all__ = [
    "BadExtent",
    "CorruptBlock",
    "DramStatistics",
    "DramTier",
    "Extent",
    "HbmStatistics",
    "HbmTier",
    "HugePages",
    "MediumFailed",
    "Record",
    "Segment",
    "StateLocked",
    "Tier",
    "TierConfigError",
    "TierError",
    "TierFull",
    "TierStatistics",
]
