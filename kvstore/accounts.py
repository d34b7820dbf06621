"""What each tenant holds, and may hold: an account for each tenant that has a quota of its own.

All tenants that are not named in the configuration share one account, `OTHERS`. So the number of
accounts is what the operator wrote down, however many names clients come up with, and a client that
comes up with another name has no more room for it. Pure.

A quota is soft. Room that nobody else needs may be used beyond it, and who is beyond it is the
first to give room back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tiers.lru import Lru
from tiers.policies import make_policy
from tiers.policy import Policy

OTHERS: Final = "*"
"""Name of the account of all tenants that have none of their own."""

QuotaTier = Literal["dram", "ssd"]


@dataclass(frozen=True, slots=True)
class Quota:
    """Bytes of blocks that are to stay where others need the room; None: no limit."""

    dram: int | None = None
    ssd: int | None = None


class Account:
    """What one tenant, or all `OTHERS` together, hold in each tier, reserved blocks included.

    Args:
        name: of the tenant.
        policy: the order in which DRAM gives up its blocks; this account's alone.
        quota: what it may hold.

    Attributes:
        policy: has its blocks of DRAM that are no replicas.
        replicas: has those that are. Whatever the policy, that longest unused goes first.
        hbm, dram, ssd: bytes of its blocks in that tier; the `Index` counts them.
    """

    __slots__ = ("dram", "hbm", "name", "policy", "quota", "replicas", "ssd")

    def __init__(self, name: str, policy: Policy, quota: Quota = Quota()) -> None:
        self.name = name
        self.policy = policy
        self.replicas = Lru(1)
        self.quota = quota
        self.hbm = 0
        self.dram = 0
        self.ssd = 0

    def __repr__(self) -> str:
        return f"<Account {self.name} dram={self.dram} ssd={self.ssd} {self.quota}>"

    def __len__(self) -> int:
        """Committed blocks in DRAM."""
        return len(self.policy) + len(self.replicas)

    def beyond(self, tier: QuotaTier, more: int = 0) -> int:
        """Bytes by which it would be beyond its quota with `more` bytes; 0 where it would not."""
        quota, held = (self.quota.dram, self.dram) if tier == "dram" else (self.quota.ssd, self.ssd)
        return 0 if quota is None else max(held + more - quota, 0)


class Accounts:
    """All accounts of a node.

    Args:
        named: those of single tenants.
        others: that of all the rest.
    """

    def __init__(self, others: Account, named: Iterable[Account] = ()) -> None:
        self.others = others
        self._named = {account.name: account for account in named}
        self._all = (*self._named.values(), others)

    @classmethod
    def make(cls, policy: str, capacity: int, quotas: Mapping[str, Quota]) -> Accounts:
        """Accounts by the names of tenants, each with a policy of that name.

        Args:
            policy: name of the policy.
            capacity: blocks that DRAM may hold.
            quotas: by tenant; `OTHERS` may be among them.

        Raises:
            ValueError: there is no such policy.
        """
        named = [
            Account(name, make_policy(policy, capacity), quota)
            for name, quota in quotas.items()
            if name != OTHERS
        ]
        rest = Account(OTHERS, make_policy(policy, capacity), quotas.get(OTHERS, Quota()))
        return cls(rest, named)

    def of(self, tenant: str | None) -> Account:
        """The account of a tenant; that of `OTHERS` where nobody knows whose blocks they are."""
        return self.others if tenant is None else self._named.get(tenant, self.others)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
