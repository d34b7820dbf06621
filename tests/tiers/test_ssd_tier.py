"""The SSD tier on a real file: contract, restart, making room, sealing, locking."""

from __future__ import annotations

from pathlib import Path

from tests.tiers.tier_contract import TierContract
from tiers.ssd import SsdTier
from tiers.tier import Tier

REGION = 256 << 10
CAPACITY = 4 << 20


class TestSsdTier(TierContract):
    def make(self, directory: Path) -> Tier:
        return SsdTier(directory, CAPACITY, region_bytes=REGION)

    def make_room(self, tier: Tier) -> None:
        assert isinstance(tier, SsdTier)
        while (region := tier.victim()) is not None and not tier.residents(region):
            tier.reclaim(region)
