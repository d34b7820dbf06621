"""What every tier can do: hold the bytes of blocks at extents, within a capacity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from typing_extensions import Buffer

Extent: TypeAlias = int
"""Where a tier keeps a block: an opaque number that the tier mints and alone understands."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a medium must remember about a block to serve it again after a restart.

    Attributes:
        namespace: 32-byte fingerprint of the block's namespace.
        shard: number of the rank's part, from 0.
        hash: 32-byte prefix hash of the block.
        parent: 32-byte prefix hash of its parent; all zeros for a root.
        size: payload bytes.
    """

    namespace: bytes
    shard: int
    hash: bytes
    parent: bytes
    size: int


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A tier's occupancy at one moment, in bytes where not said otherwise.

    Attributes:
        capacity: what the tier may occupy of its medium, everything included.
        used: payload of the blocks held.
        blocks: number of blocks held.
        lost: neither free for use nor holding blocks: headers, padding, tails too short for a
            block, freed ranges that can't be written again yet.
    """

    capacity: int
    used: int
    blocks: int
    lost: int

    @property
    def free(self) -> int:
        """Bytes that blocks could still be stored in."""
        return self.capacity - self.used - self.lost


class Tier(ABC):
    """A medium with a capacity that holds extents.

    ``store``, ``load`` and ``free`` may be called from several threads at once, and ``store`` and
    ``load`` may block. The caller promises that nobody frees an extent that is being read or
    written.
    """

    name: ClassVar[str]
    """The tier's name in metrics, the CLI and the protocol: ``dram``, ``ssd``."""

    @abstractmethod
    def open(self) -> None:
        """Take the medium into use.

        Raises:
            TierConfigError: the settings are impossible on this machine.
            StateLocked: another process has the medium.
            MediumFailed: the medium answered with an I/O error.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the medium back. All threads, descriptors and mappings are gone on return.

        Closing twice, or a tier that was never opened, does nothing.
        """

    @abstractmethod
    def store(self, record: Record, data: Buffer, tag: object, *, owner: str = "") -> Extent | None:
        """Store a block.

        Args:
            record: the block's names; ``record.size`` is the length of ``data`` in bytes.
            data: the payload, any contiguous buffer.
            tag: whatever the caller wants back when it is asked to make room.
            owner: the tenant, for tiers that keep tenants apart.

        Returns:
            The extent, or None where there is no room now.

        Raises:
            MediumFailed: the write failed; nothing is stored.
        """

    @abstractmethod
    def load(self, extent: Extent, into: memoryview, offset: int = 0) -> None:
        """Read exactly ``len(into)`` bytes of a block, from byte ``offset``, into ``into``.

        Raises:
            CorruptBlock: the bytes are not those that were stored; ``into`` is then undefined.
            MediumFailed: the read failed.
            BadExtent: no block there, or the range goes beyond it.
        """

    @abstractmethod
    def free(self, extent: Extent) -> None:
        """Forget the block at ``extent``.

        Raises:
            BadExtent: no block there.
        """

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Bytes that the tier may occupy."""

    @property
    @abstractmethod
    def used(self) -> int:
        """Payload bytes of the blocks held."""

    @abstractmethod
    def statistics(self) -> TierStatistics:
        """Count what is held and what is free."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
