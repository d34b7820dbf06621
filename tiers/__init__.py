"""Media and policy: the DRAM and SSD tiers, eviction and admission."""

from tiers.errors import (
    BadExtent,
    CorruptBlock,
    MediumFailed,
    StateLocked,
    TierConfigError,
    TierError,
    TierFull,
)
from tiers.tier import Extent, Record, Tier, TierStatistics

__all__ = [
    "BadExtent",
    "CorruptBlock",
    "Extent",
    "MediumFailed",
    "Record",
    "StateLocked",
    "Tier",
    "TierConfigError",
    "TierError",
    "TierFull",
    "TierStatistics",
]
