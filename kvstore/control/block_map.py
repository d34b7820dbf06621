"""What a follower of a node knows of it, made of what ``Events.Follow`` tells.

Pure: ``kvstore.control.event_client`` reads the stream, and this says what it means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvstore.identity import Namespace

Word = Literal["reset", "resumed", "snapshot", "events", "heartbeat"]
Change = Literal["stored", "moved", "removed"]


class Position(NamedTuple):
    """Up to where a follower knows a node: the node's start, and the number of an event."""

    incarnation: str
    sequence: int


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """What happened to one block of one shard.

    Attributes:
        change: ``stored`` (it can be served), ``moved`` (it has come to a tier or left one) or
            ``removed`` (it is held no longer).
        namespace: fingerprint.
        shard: number of the rank.
        hash: the prefix hash.
        parent: that of the block before; ``identity.ROOT_PARENT`` for the first of a prompt.
        tiers: all tiers that hold the block from now on, fastest first.
    """

    change: Change
    namespace: bytes
    shard: int
    hash: bytes
    parent: bytes
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What a node told at once; ``events.proto`` says what each word asks of the follower.

    Attributes:
        word: what kind of batch it is.
        after: the follower's position before, as the node knows it.
        sequence: the follower's position from now on.
        complete: whether the follower knows all that the node held there.
        node: the node's name; with ``reset`` and ``resumed`` only.
        incarnation: of the node's start; likewise.
        events: in the order in which they happened.
    """

    word: Word
    after: int
    sequence: int
    complete: bool
    node: str = ""
    incarnation: str = ""
    events: tuple[BlockEvent, ...] = ()


class BatchMissing(Exception):
    """A batch does not follow the one before: begin anew, without a position."""


class BlockMap:
    """The blocks of one node, as far as its follower has been told.

    Attributes:
        node: the node's name; empty until the first batch.
        incarnation: of the node's start; likewise.
        sequence: the follower's position.
        complete: whether all that the node held there is known. While a snapshot is under way only
            a part is.
    """

    def __init__(self) -> None:
        self.node = ""
        self.incarnation = ""
        self.sequence = 0
        self.complete = False
        self._shards: dict[tuple[bytes, int], dict[bytes, tuple[str, ...]]] = {}

    def __repr__(self) -> str:
        return f"<BlockMap of {self.node or 'nobody'} at {self.sequence}, {len(self)} blocks>"

    def __len__(self) -> int:
        """Blocks of all shards."""
        return sum(map(len, self._shards.values()))

    @property
    def position(self) -> Position | None:
        """From where to resume; None where it has to begin anew."""
        return Position(self.incarnation, self.sequence) if self.complete else None

    def apply(self, batch: EventBatch) -> None:
        """Take a batch in.

        Raises:
            BatchMissing: it doesn't follow the one before. Nothing of it is taken in.
        """
        if batch.word == "reset":
            self._shards.clear()
            self.node, self.incarnation = batch.node, batch.incarnation
        elif batch.word == "resumed" and self.position != (batch.incarnation, batch.after):
            raise BatchMissing(f"the node resumes at {batch.after}, not {self.sequence}")
        elif batch.after != self.sequence:
            raise BatchMissing(f"the node goes on after {batch.after}, not {self.sequence}")
        for event in batch.events:
            self._apply(event)
        self.sequence = batch.sequence
        self.complete = batch.complete

    def forget(self) -> None:
        """Know nothing, as at the beginning."""
        self._shards.clear()
        self.complete = False

    def _apply(self, event: BlockEvent) -> None:
        name = event.namespace, event.shard
        if event.change != "removed":
            self._shards.setdefault(name, {})[event.hash] = event.tiers
        elif name in self._shards:
            self._shards[name].pop(event.hash, None)

    def blocks(self, fingerprint: bytes, shard: int) -> dict[bytes, tuple[str, ...]]:
        """The blocks of a shard, by prefix hash, with the tiers that hold each."""
        return dict(self._shards.get((fingerprint, shard), {}))

    def prefix(self, namespace: Namespace, hashes: Sequence[bytes]) -> tuple[str, ...]:
        """How far a chain of blocks is held in all shards of its namespace.

        Returns:
            For each block of the prefix the fastest tier that holds it; where shards differ, the
            slowest of theirs.
        """
        fingerprint = namespace.fingerprint
        shards = [self._shards.get((fingerprint, number)) for number in range(namespace.shards)]
        held = [shard for shard in shards if shard]
        if len(held) < len(shards):
            return ()
        tiers: list[str] = []
        for block in hashes:
            found = [shard.get(block) for shard in held]
            fastest = [each[0] for each in found if each]
            if len(fastest) < len(held):
                break
            tiers.append(max(fastest, key=_SPEED.__getitem__))
        return tuple(tiers)


_SPEED = {"hbm": 1, "dram": 2, "ssd": 3}
