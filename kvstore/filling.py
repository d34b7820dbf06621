"""A reservation that one or several peers fill, part by part. No I/O but for checksums.

Parts are handed out in the order of the chain and may be filled in any; blocks become visible
parents first. What a peer does not bring is handed out again.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Mapping, Sequence
from typing import Final

from crc32c import crc32c

from kvstore.entry import Entry
from kvstore.node import Node
from kvstore.reservation import Reservation

Part = list[int]
"""Positions in the reservation that are asked for together, and become visible together."""

_PART_BYTES: Final = 4 << 20
"""Bytes of one part at most."""


class Filling:
    """What is still to come of a reservation.

    Args:
        node: whose reservation it is.
        reservation: taken over; given up by ``close``.
        size: bytes of a block.
        most_blocks: blocks of one part at most.

    Attributes:
        broken: whether blocks had to make room before they were all there: nothing after them can
            become visible.
    """

    def __init__(self, node: Node, reservation: Reservation, size: int, most_blocks: int) -> None:
        self.broken = False
        self._node = node
        self._reservation = reservation
        self._size = size
        positions = list(reservation.blocks)
        step = max(1, min(most_blocks, _PART_BYTES // size))
        self._waiting = [positions[at : at + step] for at in range(0, len(positions), step)]
        self._out = 0
        self._changed: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Filling waiting={len(self._waiting)} out={self._out} broken={self.broken}>"

    @property
    def complete(self) -> bool:
        """Whether nothing is left to be brought."""
        return not self._waiting and not self._out

    def take(self, end: int) -> Part | None:
        """Hand out the next part, if it lies before ``end``; ``give_back`` or ``land`` follows."""
        if self.broken or not self._waiting or self._waiting[0][-1] >= end:
            return None
        self._out += 1
        return heapq.heappop(self._waiting)

    async def more(self, end: int) -> bool:
        """Wait until there is a part before ``end`` to take.

        Returns:
            Whether there is one; if not, all of them are with others or there.
        """
        while True:
            if self.broken or self.complete:
                return False
            if self._waiting:
                return self._waiting[0][-1] < end
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._changed)

    def give_back(self, part: Part) -> None:
        """Take back a part that was not brought; nothing is written to its memory any more."""
        self._out -= 1
        if part:
            heapq.heappush(self._waiting, part)
        self._note()

    def entries(self, part: Part) -> list[Entry]:
        """The blocks of a part."""
        return self._reservation.select(part)

    def views(self, part: Part) -> list[memoryview]:
        """The memory of each block of a part."""
        view, size = self._node.dram.view, self._size
        return [view(entry.dram, size) for entry in self.entries(part)]  # type: ignore[arg-type]

    def expect(self, checksums: Mapping[int, int | None]) -> None:
        """Take note of the crc32c that blocks are to have, by position."""
        self._reservation.checksums.update(
            (position, checksum) for position, checksum in checksums.items() if checksum is not None
        )

    async def count_sound(self, part: Part, count: int, sums: Sequence[int] | None = None) -> int:
        """How many blocks, of the first ``count`` of a part, come before one that is not sound.

        A block of which no checksum is known counts as sound.

        Args:
            part: which.
            count: how many of it are there.
            sums: the crc32c of each of these, where they have been computed already.
        """
        expected = [self._reservation.checksums.get(position) for position in part[:count]]
        if expected.count(None) == count:
            return count
        if sums is None:
            views = self.views(part[:count])
            sums = await asyncio.to_thread(lambda: [crc32c(view) for view in views])
        for position, (checksum, computed) in enumerate(zip(expected, sums, strict=True)):
            if checksum not in (None, computed):
                return position
        return count

    def land(self, part: Part, count: int) -> None:
        """Make visible what can be, of a part whose first ``count`` blocks are there.

        The rest of it is handed out again.
        """
        reservation, node = self._reservation, self._node
        before = len(reservation.blocks)
        committed = node.commit(reservation, part[:count])
        if committed:
            node.renew(committed[max(committed)].path())
        if len(committed) < before - len(reservation.blocks):
            self.broken = True
        self.give_back(part[count:])

    def close(self) -> None:
        """Give up what has not come. Nobody writes to it any more."""
        self._node.abort(self._reservation)
        self.broken = self.broken or not self.complete
        self._note()

    def _note(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)
