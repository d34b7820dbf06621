"""Media and policy: the DRAM and SSD tiers, eviction and admission."""
