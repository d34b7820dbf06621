"""What a node asks of a directory: which nodes there are, and which of them hold a block.

Answers are hints. The node that is said to hold a block is asked for it and knows better: a hint
may be late, never harmful. So no call here raises for a directory that is slow or gone, and none is
waited for longer than its deadline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from kvstore.directory.statistics import Statistics

NOBODY: Final = 0
"""No member has this number."""

MOST_OWNERS: Final = 16
"""Owners that are remembered for one block; those beyond are hints that nobody needs."""

MOST_HASHES: Final = 16_384
"""Blocks beyond ``start`` that one ``reach`` looks at; a longer chain is asked for in parts."""


@dataclass(frozen=True, slots=True)
class Member:
    """One start of one node, as the others see it.

    Attributes:
        number: unique for this membership, from 1, below 2^32; what locations name. ``NOBODY``
            before it has joined. A node whose membership has lapsed gets another one.
        node: name of the node.
        incarnation: of this start, as sessions say it too.
        host: which machine it runs on: copies go to other machines.
        data: ``host:port`` of its data path over TCP.
        control: ``host:port`` of its control plane, empty where it has none.
        summary: what it said of itself last, for people: bytes by tier, blocks, rates. Later than
            the rest by up to a minute in big pools.
    """

    number: int
    node: str
    incarnation: str
    host: str
    data: str
    control: str = ""
    summary: Mapping[str, float] | None = None


class Place(NamedTuple):
    """What names a block in the directory.

    Attributes:
        namespace: fingerprint of its namespace, 32 bytes.
        shard: which part of the block.
        root: prefix hash of the first block of its chain, 32 bytes; keeps a chain together.
        hash: its prefix hash, 32 bytes.
    """

    namespace: bytes
    shard: int
    root: bytes
    hash: bytes


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a chain is held by the pool.

    Attributes:
        blocks: leading blocks that every shard has an owner for; at least those asked from.
        owners: for each shard the numbers of live members that hold its deepest such block, and so,
            as far as hints are right, all before it; in no particular order. Empty where ``blocks``
            is what was asked from.
        failure: why nothing is known, as the code of an error; ``None`` where it answered.
    """

    blocks: int
    owners: tuple[tuple[int, ...], ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """A member that this node has seen leave or die.

    Attributes:
        member: as it was.
        when: seconds on the event loop's clock at which it was missed.
    """

    member: Member
    when: float


Inventory = Callable[[], Iterable[Sequence[Place]]]
"""Gives all that this node holds, in pages of a few hundred places. A page is taken when it is
asked for, with waits between one and the next, and must be right at that moment; a block that comes
or goes meanwhile is told by ``stored`` and ``removed`` as always, so pages may miss it or have it.
"""

Summary = Callable[[], Mapping[str, float]]
"""Gives what this node has to say of itself now, a few dozen figures."""


def hold_nothing() -> Iterable[Sequence[Place]]:
    """The inventory of a node that holds nothing."""
    return ()


def say_nothing() -> Mapping[str, float]:
    """The summary of a node that has nothing to say."""
    return {}


class Directory(ABC):
    """The shared knowledge of a pool of nodes, as one node uses it. For one event loop."""

    name: ClassVar[str]
    statistics: Statistics

    @abstractmethod
    async def open(
        self, inventory: Inventory = hold_nothing, summary: Summary = say_nothing
    ) -> None:
        """Begin to join the pool. Returns at once: a directory that is down is joined later.

        Args:
            inventory: asked whenever all that the node holds has to be told: at each joining, when
                the directory may have lost some of it, and now and then.
            summary: asked for figures to tell.
        """

    @abstractmethod
    async def close(self) -> None:
        """Leave the pool: withdraw membership, as far as a moment allows; end all tasks."""

    @property
    @abstractmethod
    def me(self) -> Member | None:
        """This node's membership; None while it has none."""

    @property
    @abstractmethod
    def members(self) -> Mapping[int, Member]:
        """Live members by number, without this node, as last heard."""

    @property
    def gone(self) -> Mapping[int, Gone]:
        """The last members that this node has seen leave or die, by number; the last one last."""
        return {}

    @abstractmethod
    async def reach(
        self,
        namespace: bytes,
        shards: int,
        hashes: Sequence[bytes],
        start: int,
        *,
        deadline: float,
    ) -> Reach:
        """How far other members hold a chain, in one round trip.

        Args:
            namespace: fingerprint.
            shards: how many shards a block has.
            hashes: the whole chain from its first block on.
            start: how many leading blocks need not be asked for.
            deadline: seconds on the event loop's clock.
        """

    @abstractmethod
    async def traces(
        self,
        namespace: bytes,
        shards: int,
        hashes: Sequence[bytes],
        start: int,
        *,
        deadline: float,
    ) -> Reach:
        """As ``reach``, with members that are gone among the owners.

        For explanations: what they held is forgotten some time after they went.
        """

    @abstractmethod
    def stored(self, place: Place) -> None:
        """Take note that this node holds a block; told to the directory soon, in order."""

    @abstractmethod
    def removed(self, place: Place) -> None:
        """Take note that this node no longer holds a block; likewise."""

    @abstractmethod
    def withdraw(self, place: Place, number: int) -> None:
        """Take note that a member does not hold a block after all; likewise."""
