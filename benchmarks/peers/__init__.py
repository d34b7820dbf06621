"""The same work on this store and on its peers, in one run: ``python -m benchmarks.peers``."""
