"""Checksums of blocks in DRAM, computed off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from crc32c import crc32c

from kvstore.entry import Entry
from kvstore.errors import InvalidRequest
from kvstore.node import Node
from kvstore.reservation import Reservation


async def sum_unknown(node: Node, entries: Sequence[Entry], size: int) -> None:
    """Compute the checksums that nobody has yet; blocks don't change, so they are kept.

    Args:
        node: has the blocks.
        entries: pinned, and in DRAM.
        size: bytes of each.
    """
    unknown = [entry for entry in entries if node.checksum(entry) is None]
    if not unknown:
        return
    for entry, checksum in zip(unknown, await _sums(node, unknown, size), strict=True):
        entry.checksum = checksum


async def check_written(
    node: Node,
    reservation: Reservation,
    positions: Sequence[int],
    entries: Sequence[Entry],
    size: int,
) -> None:
    """Compare what was written with the checksums given for it; take them where none were.

    Args:
        node: has the blocks.
        reservation: that they belong to.
        positions: of the blocks in it.
        entries: the blocks themselves, pinned.
        size: bytes of each.

    Raises:
        InvalidRequest: a block does not match.
    """
    for position, checksum in zip(positions, await _sums(node, entries, size), strict=True):
        if reservation.checksums.setdefault(position, checksum) != checksum:
            raise InvalidRequest(f"block {position} does not match the checksum given for it")


async def _sums(node: Node, entries: Sequence[Entry], size: int) -> list[int]:
    views = [node.dram.view(entry.dram, size) for entry in entries]  # type: ignore[arg-type]
    return await asyncio.to_thread(lambda: [crc32c(view) for view in views])
