"""What routers were told that the store holds, and what they are to be told next.

Routers send a request to where its prefix is. They learn that from events: which blocks were
stored, which are gone. The ledger makes sure that whoever applies its events, in order, never
believes in a block that the ledger would not take back: a block that it can't remember is not
announced, and one that it has to forget is taken back first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

CAPACITY: Final = 1_000_000
"""Blocks that a ledger remembers; at some 230 bytes each."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A block that the store holds, in the store's words and in the engine's.

    Attributes:
        hash: its prefix hash. One engine hash belongs to it.
        parent: prefix hash of the block before it.
        engine_hash: what the engine and its routers call it.
        engine_parent: what they call the block before it; ``None`` where there is none.
        tokens: the ids of its tokens.
        extra_keys: what else the engine hashed, in the engine's form.
        lora_id: number of the adapter, if any.
        lora_name: name of the adapter, if any.
    """

    hash: bytes
    parent: bytes
    engine_hash: bytes
    engine_parent: bytes | None
    tokens: Sequence[int]
    extra_keys: tuple[object, ...] | None = None
    lora_id: int | None = None
    lora_name: str | None = None

    def followed_by(self, other: Announced) -> bool:
        """Whether one event can tell of this block and ``other`` in this order."""
        return (
            other.engine_parent == self.engine_hash
            and len(other.tokens) == len(self.tokens)
            and (other.lora_id, other.lora_name) == (self.lora_id, self.lora_name)
        )


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """Blocks of one chain, each the parent of the next, that are to be had from now on."""

    blocks: tuple[Announced, ...]


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """Blocks, by the engine's hashes, that are to be had no longer."""

    engine_hashes: tuple[bytes, ...]


Event = StoredEvent | RemovedEvent


class Ledger:
    """What was announced and not taken back; every change of it is an event.

    Where there are too many blocks, the block to be forgotten is the oldest that none known
    follows, so that what many prompts share stays known.

    Args:
        capacity: how many blocks are remembered.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"a ledger remembers at least one block, not {capacity}")
        self._capacity = capacity
        self._known: dict[bytes, tuple[bytes, bytes]] = {}
        """Engine hash and parent, by hash."""
        self._leaves: OrderedDict[bytes, None] = OrderedDict()
        """Blocks that none known follows, the oldest first."""
        self._branches: dict[bytes, int] = {}
        """How many follow a block, where that is more than one."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, block: bytes) -> bool:
        return block in self._known

    def announce(self, blocks: Iterable[Announced]) -> list[Event]:
        """Take note that the store holds blocks.

        Args:
            blocks: in the order of their chain, or of several chains one after the other. What is
                known already is not said again.

        Returns:
            What is to be told, in this order.
        """
        fresh = [block for block in blocks if self._learn(block)]
        events: list[Event] = [StoredEvent(chain) for chain in _chains(fresh)]
        return events + self._forget_surplus()

    def removed(self, hashes: Iterable[bytes]) -> list[Event]:
        """Take note that the store no longer holds blocks; those never announced are nothing new.

        Returns:
            What is to be told.
        """
        return _removal(self._forget(block) for block in hashes if block in self._known)

    def missing(self, hashes: Sequence[bytes], held: Sequence[bool]) -> list[Event]:
        """Take note of what the store answered when it was asked.

        Args:
            hashes: the blocks that it was asked for.
            held: whether it holds each.

        Returns:
            What is to be told.

        Raises:
            ValueError: there are not as many answers as blocks.
        """
        answers = list(zip(hashes, held, strict=True))
        return self.removed(block for block, is_held in answers if not is_held)

    def cleared(self) -> list[Event]:
        """Take note that the store holds nothing any more.

        Returns:
            What is to be told.
        """
        return self.removed(list(self._known))

    def believed(self) -> list[bytes]:
        """All blocks that were announced and not taken back."""
        return list(self._known)

    def _learn(self, block: Announced) -> bool:
        if block.hash in self._known:
            return False
        if block.parent in self._known:
            self._gain_child(block.parent)
        self._known[block.hash] = (block.engine_hash, block.parent)
        self._leaves[block.hash] = None
        return True

    def _forget(self, block: bytes) -> bytes:
        engine_hash, parent = self._known.pop(block)
        self._leaves.pop(block, None)
        self._branches.pop(block, None)
        if parent in self._known:
            self._lose_child(parent)
        return engine_hash

    def _gain_child(self, block: bytes) -> None:
        if block in self._leaves:
            del self._leaves[block]
        else:
            self._branches[block] = self._branches.get(block, 1) + 1

    def _lose_child(self, block: bytes) -> None:
        """Children from before a block was gone and came back are not counted: it may be a leaf."""
        if block in self._leaves:
            return
        children = self._branches.pop(block, 1) - 1
        if children > 1:
            self._branches[block] = children
        elif children == 0:
            self._leaves[block] = None
            self._leaves.move_to_end(block, last=False)

    def _forget_surplus(self) -> list[Event]:
        surplus = []
        while len(self._known) > self._capacity:
            surplus.append(self._forget(next(iter(self._leaves))))
        return _removal(surplus)


def _chains(blocks: Sequence[Announced]) -> list[tuple[Announced, ...]]:
    chains: list[list[Announced]] = []
    for block in blocks:
        if chains and chains[-1][-1].followed_by(block):
            chains[-1].append(block)
        else:
            chains.append([block])
    return [tuple(chain) for chain in chains]


def _removal(engine_hashes: Iterable[bytes]) -> list[Event]:
    gone = tuple(engine_hashes)
    return [RemovedEvent(gone)] if gone else []
