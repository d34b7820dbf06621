"""One store as one of its clients sees it.

Imported by the interpreter of each peer's environment: the standard library and numpy only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

KEY_BYTES = 32


class Adapter(ABC):
    """A client of a store, driven by one thread.

    Each list of keys is a chain: to a store that knows of prefixes, every key's block follows the
    one before it. Keys have `KEY_BYTES` bytes; all blocks of one ``open`` have the same size.

    What a store raises is let through: the worker reports it as the reason why there is no figure.
    """

    zero_copy: bool = False
    """Whether ``view`` works."""
    blocks_apart: bool = False
    """Whether ``memory`` leaves out the blocks, because they lie in other memory than the keys."""

    @abstractmethod
    def open(self, settings: Mapping[str, str]) -> None:
        """Connect, in the store's best configuration.

        Args:
            settings: what the starter of the store's servers says, such as an address; and always
                ``block_bytes``, the size of all blocks until ``close``, and ``capacity``, the bytes
                of blocks that the store is to hold.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""

    @abstractmethod
    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Store blocks; return how many are stored for certain."""

    @abstractmethod
    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Copy blocks to ``into``; return how many came."""

    def put_after(
        self, before: Sequence[bytes], keys: Sequence[bytes], blocks: Sequence[memoryview]
    ) -> int:
        """Store blocks that follow others in their chain, which are held; as ``put`` otherwise."""
        return self.put(keys, blocks)

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> int:
        """How many of the blocks are held; the store must have said it of each by itself."""

    def buffers(self, count: int, size: int) -> list[memoryview]:
        """Writable memory of the client in the form that suits the store best, pages touched.

        Registered or from the store's own pool, where that makes it faster. It lives until
        ``close``.
        """
        return [np.ones(size, np.uint8).data.cast("B") for _ in range(count)]

    def view(
        self, keys: Sequence[bytes], size: int
    ) -> AbstractContextManager[Sequence[memoryview | None]]:
        """Show blocks where they lie, without a copy, until the block of ``with`` ends.

        Raises:
            NotImplementedError: the store can't; ``zero_copy`` says so.
        """
        raise NotImplementedError

    def remove_all(self) -> None:  # noqa: B027
        """Make room: blocks may be gone afterwards. Not timed; a store that evicts needs none."""

    def memory(self) -> int:
        """Resident bytes of what keeps the keys, for memory per key; 0 where that isn't known."""
        return 0
