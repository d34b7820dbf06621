"""The SSD tier: a log of checksummed records in preallocated regions."""
