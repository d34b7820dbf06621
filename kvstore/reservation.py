"""A reservation: the blocks of one put, or pull, between reserve and commit. Pure.

The blocks of a reservation form a chain. They become visible one by one, from the first on, however
their bytes arrive: a block that is filled before its parent is committed waits for it. So a put
that breaks off leaves a prefix and no holes.

Each block is pinned while it is in a reservation: whoever fills it may write to its extent until
the reservation lets go of it, whatever happens to its entry meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.entry import Entry
from kvstore.errors import InvalidRequest
from kvstore.metrics import PutOutcome


@dataclass(slots=True)
class Reservation:
    """The blocks that a session may fill.

    Attributes:
        number: names the reservation within its session.
        blocks: the blocks not yet committed, by their position in the request, in order.
        expires: seconds on the node's clock after which others may store these blocks.
        copies: how many nodes are to hold its blocks; 0 or 1 for this one alone.
        outcomes: what becomes of the blocks is counted here.
        checksums: crc32c of the payload by position, where the client gave it.
        checking: positions whose bytes are being checked and must not change meanwhile.
    """

    number: int
    blocks: dict[int, Entry]
    expires: float
    copies: int = field(default=0, kw_only=True)
    outcomes: Counter[PutOutcome] = field(default_factory=Counter)
    checksums: dict[int, int] = field(default_factory=dict)
    checking: set[int] = field(default_factory=set)
    _filled: set[int] = field(default_factory=set)

    def select(self, positions: Sequence[int]) -> list[Entry]:
        """The blocks at ``positions`` of the request, still to be filled.

        Raises:
            InvalidRequest: a position is not that of a block to be filled, or is named twice.
        """
        if len(set(positions)) != len(positions):
            raise InvalidRequest("a block is named twice in one write")
        try:
            selected = [self.blocks[position] for position in positions]
        except KeyError as error:
            raise InvalidRequest(
                f"block {error.args[0]} is not to be filled in reservation {self.number}"
            ) from error
        if not (self._filled.isdisjoint(positions) and self.checking.isdisjoint(positions)):
            raise InvalidRequest(f"a block of reservation {self.number} is filled already")
        return selected

    def fill(self, positions: Sequence[int]) -> list[tuple[int, Entry]]:
        """Mark blocks as filled, and take out those that can be committed now, parents first.

        Raises:
            InvalidRequest: as ``select``.
        """
        self.select(positions)
        self._filled.update(positions)
        ready = []
        for position, entry in self.blocks.items():
            if position not in self._filled:
                break
            ready.append((position, entry))
        for position, _ in ready:
            del self.blocks[position]
        return ready
