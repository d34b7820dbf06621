"""The SSD tier: a log of checksummed records in preallocated regions."""

from tiers.ssd.device import Device, FileDevice
from tiers.ssd.statistics import SsdStatistics
from tiers.ssd.tier import SsdTier

__all__ = ["Device", "FileDevice", "SsdStatistics", "SsdTier"]
