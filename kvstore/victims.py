"""Which block goes next, over all accounts: one line made of the orders that each account has.

Blocks of tenants beyond their quota go first, then replicas, which another node has too, then
others as the policy says. Between accounts that which was used longest ago goes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvstore.accounts import Account
from kvstore.entry import Entry
from tiers.links import Link
from tiers.policy import Scan


class _Lane(NamedTuple):
    account: Account
    replicas: Scan
    rest: Scan

    def first(self) -> Scan:
        return self.rest if self.replicas.peek() is None else self.replicas


class Line:
    """A look at what goes next, which lasts while blocks come and go.

    Args:
        accounts: whose blocks.
        held: whether parents that were set aside are offered too.
    """

    def __init__(self, accounts: Iterable[Account], *, held: bool) -> None:
        self._lanes = [
            _Lane(one, one.replicas.scan(held=held), one.policy.scan(held=held)) for one in accounts
        ]

    def take(self) -> Entry | None:
        """The block that goes next, which is not offered again; None where there is none now."""
        beyond = [lane.first() for lane in self._lanes if lane.account.beyond("dram")]
        return (_oldest(beyond) if beyond else None) or self._by_age()

    def take_for(self, account: Account, size: int) -> Entry | None:
        """The block that goes next where a tenant needs room for one of `size` bytes.

        A tenant that the block takes beyond its quota is offered its own.
        """
        if account.beyond("dram", size):
            return _oldest(lane.first() for lane in self._lanes if lane.account is account)
        return self._by_age()

    def _by_age(self) -> Entry | None:
        if len(self._lanes) == 1:
            return _entry(self._lanes[0].first().take())
        return _oldest(lane.replicas for lane in self._lanes) or _oldest(
            lane.rest for lane in self._lanes
        )

    def close(self) -> None:
        """End the look."""
        for lane in self._lanes:
            lane.replicas.close()
            lane.rest.close()


def _oldest(scans: Iterable[Scan]) -> Entry | None:
    chosen, oldest = None, float("inf")
    for scan in scans:
        item = scan.peek()
        if item is None:
            continue
        assert isinstance(item, Entry)
        if chosen is None or item.last_use < oldest:
            chosen, oldest = scan, item.last_use
    return None if chosen is None else _entry(chosen.take())


def _entry(item: Link | None) -> Entry | None:
    assert item is None or isinstance(item, Entry)
    return item
