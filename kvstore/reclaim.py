"""Which blocks of an SSD region are worth writing again when the region is reclaimed. Pure.

A block is worth it where others hang below it, or where it was used since it was written. Writing
again is bounded to a share of the region, so that reclaiming always gains room; beyond the bound
the least recently used go, with all below them. Pinned blocks are kept in any case. A tenant beyond
its quota gives up what it has too much of, as far as nothing hangs below it, used or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvstore.accounts import Account
from kvstore.entry import Entry

KEPT_SHARE: Final = 0.5
"""Share of a region's bytes that may be written again."""


@dataclass(frozen=True, slots=True)
class ReclaimPlan:
    """What becomes of a region's residents.

    Attributes:
        keep: to be written to another region, parents first.
        give_up: to lose their copy here, children first.
    """

    keep: list[Entry]
    give_up: list[Entry]


def depths_of(entries: Iterable[Entry]) -> dict[Entry, int]:
    """How many blocks the prefix has that each entry ends; of their ancestors, too.

    Each block is visited once, however many of the entries follow it.
    """
    depths: dict[Entry, int] = {}
    for entry in entries:
        path = []
        step: Entry | None = entry
        while step is not None and step not in depths:
            path.append(step)
            step = step.parent
        depth = 0 if step is None else depths[step]
        for one in reversed(path):
            depth += 1
            depths[one] = depth
    return depths


def plan_reclaim(residents: Iterable[Entry], region_bytes: int) -> ReclaimPlan:
    """Divide the residents of one region of ``region_bytes``."""
    entries = list(residents)
    depths = depths_of(entries)
    by_worth = sorted(entries, key=lambda entry: (entry.last_use, -depths[entry]), reverse=True)
    room = int(region_bytes * KEPT_SHARE)
    surplus = _surplus(reversed(by_worth))
    keep: list[Entry] = []
    give_up: list[Entry] = []
    for entry in by_worth:
        size = entry.shard.block_bytes
        is_worth_it = entry.worth_keeping_on_ssd and entry not in surplus
        if entry.pins or (is_worth_it and size <= room):
            room -= size
            keep.append(entry)
        else:
            give_up.append(entry)
    keep.sort(key=depths.__getitem__)
    give_up.sort(key=depths.__getitem__, reverse=True)
    return ReclaimPlan(keep, give_up)


def _surplus(least_worth_first: Iterable[Entry]) -> set[Entry]:
    """The blocks by which tenants are beyond their quota, as far as they are among these."""
    owed: dict[Account, int] = {}
    surplus = set()
    for entry in least_worth_first:
        account = entry.shard.account
        left = owed.setdefault(account, account.beyond("ssd"))
        if left > 0 and not entry.pins and entry.first_child is None:
            owed[account] = left - entry.shard.block_bytes
            surplus.add(entry)
    return surplus
