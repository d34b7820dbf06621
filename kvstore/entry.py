"""One block in the index, and the shard that it belongs to.

At a million blocks every slot counts. So links are intrusive, small facts share one `state` byte,
and what a block's neighbours can answer isn't stored twice: 17 slots, 168 bytes with the headers.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Final

from kvstore.accounts import Account
from kvstore.feed import Feed
from kvstore.identity import ROOT_PARENT
from tiers.links import Link

IN_DRAM: Final = 1
IN_SSD: Final = 2
COMMITTED: Final = 4
USED: Final = 8
GONE: Final = 16
REPLICA: Final = 32
IN_HBM: Final = 64
WANTED: Final = 128

ABSENT_CODE: Final = 0
HBM_CODE: Final = 1
DRAM_CODE: Final = 2
SSD_CODE: Final = 3


def _tier_code(state: int) -> int:
    code = _host_code(state)
    return HBM_CODE if code and state & IN_HBM else code


def _host_code(state: int) -> int:
    if not state & COMMITTED:
        return ABSENT_CODE
    if state & IN_DRAM:
        return DRAM_CODE
    return SSD_CODE if state & IN_SSD else ABSENT_CODE


TIER_CODES: Final = bytes(_tier_code(state) for state in range(256))
"""Translates `Entry.state` to the code of the fastest tier that serves it; 0 if none."""
_TIER_BITS: Final = (("hbm", IN_HBM), ("dram", IN_DRAM), ("ssd", IN_SSD))
_HOST_CODES: Final = bytes(_host_code(state) for state in range(256))


class Entry(Link):
    """A block: where it is, whose child it is, who is using it.

    Only the `Index` changes an entry, except `checksum`, which is its owner's to set.

    Attributes:
        hash: the prefix hash.
        parent: the entry before this one; None for the first block of a prompt. Stays set when
            the entry is dropped, so that what left can still be described.
        root: hash of the first block of its chain, which a directory keeps the chain together by.
        shard: the shard it belongs to.
        dram: extent in the DRAM tier, or None.
        ssd: extent in the SSD tier, or None.
        pins: readers and writers that need its extents to stay; changed by `Index.pin`, `unpin`.
        state: bits: `IN_DRAM`, `IN_SSD`, `COMMITTED`, `USED` (since it was written to SSD), `GONE`
            (dropped or aborted), `REPLICA`, `IN_HBM` (a copy lies on a GPU as well; where, is
            known to `kvstore.hbm_copies`), `WANTED` (a session that computes on a GPU has got it
            since it last was in HBM). Neither committed nor gone means reserved.
        created: when it was reserved, seconds on the caller's clock.
        last_use: when it was last touched, same clock.
        checksum: crc32c of the payload, or None while nobody has computed it.
    """

    __slots__ = (
        "checksum",
        "created",
        "dram",
        "first_child",
        "hash",
        "last_use",
        "next_sibling",
        "parent",
        "pins",
        "previous_sibling",
        "root",
        "shard",
        "ssd",
        "state",
    )

    def __init__(self, shard: ShardIndex, hash: bytes, parent: Entry | None, now: float) -> None:
        super().__init__()
        self.shard = shard
        self.hash = hash
        self.parent = parent
        self.root: bytes = hash if parent is None else parent.root
        self.first_child: Entry | None = None
        self.next_sibling: Entry | None = None
        self.previous_sibling: Entry | None = None
        self.dram: int | None = None
        self.ssd: int | None = None
        self.pins = 0
        self.state = 0
        self.created = now
        self.last_use = now
        self.checksum: int | None = None

    def __repr__(self) -> str:
        return f"<Entry {self.hash.hex()[:12]} of shard {self.shard.number}, state {self.state:#x}>"

    def key(self) -> Hashable:
        """What names the block across namespaces and shards."""
        return (self.shard, self.hash)

    @property
    def committed(self) -> bool:
        """Whether the block can be served."""
        return bool(self.state & COMMITTED)

    @property
    def reserved(self) -> bool:
        """Whether the block is still being written."""
        return not self.state & (COMMITTED | GONE)

    @property
    def gone(self) -> bool:
        """Whether the block was dropped, or its reservation aborted."""
        return bool(self.state & GONE)

    @property
    def replica(self) -> bool:
        """Whether another node has the block too, as far as is known, so that it goes first."""
        return bool(self.state & REPLICA)

    @property
    def tier_code(self) -> int:
        """Code of the fastest tier that serves the block: 1 hbm, 2 dram, 3 ssd; 0 if none does."""
        return TIER_CODES[self.state]

    @property
    def host_code(self) -> int:
        """Likewise of the fastest tier below HBM: what serves a block to those without a GPU."""
        return _HOST_CODES[self.state]

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers in which it has a copy or an extent, fastest first."""
        return tuple(name for name, bit in _TIER_BITS if self.state & bit)

    @property
    def parent_hash(self) -> bytes:
        """Hash of the parent; `ROOT_PARENT` for the first block of a prompt."""
        return ROOT_PARENT if self.parent is None else self.parent.hash

    @property
    def worth_keeping_on_ssd(self) -> bool:
        """Whether to write the block anew when its region is reclaimed.

        Either it was used since it was written, or other blocks need it as their parent.
        """
        return bool(self.state & USED) or self.first_child is not None

    def children(self) -> Iterator[Entry]:
        """The entries right after this one, newest first, reserved ones included."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling

    def path(self) -> list[Entry]:
        """The prefix that this block ends: all entries from the root to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        path.reverse()
        return path

    def subtree(self) -> list[Entry]:
        """This entry and all its descendants, each parent before its children."""
        found = [self]
        for entry in found:
            child = entry.first_child
            while child is not None:
                found.append(child)
                child = child.next_sibling
        return found


class ShardIndex:
    """The blocks of one shard of one namespace.

    Attributes:
        namespace: fingerprint of the namespace.
        number: the rank's number within it.
        block_bytes: size of each of its blocks.
        committed: blocks that can be served, by hash. Read it freely, change it never.
        reserved: blocks that are being written, by hash. Likewise.
        account: where its blocks are counted.
        tenant: whose it is; None while nobody knows, as of what a restarted node finds on its SSD.
        in_dram, in_ssd: blocks, reserved ones included, with an extent in that tier.
        in_hbm: blocks with a copy on a GPU.
        feed: is told of blocks stored and removed; None where nobody follows.
    """

    __slots__ = (
        "account",
        "block_bytes",
        "committed",
        "feed",
        "in_dram",
        "in_hbm",
        "in_ssd",
        "namespace",
        "number",
        "reserved",
        "tenant",
    )

    def __init__(
        self,
        namespace: bytes,
        number: int,
        block_bytes: int,
        account: Account,
        tenant: str | None = None,
    ) -> None:
        self.account = account
        self.tenant = tenant
        self.namespace = namespace
        self.number = number
        self.block_bytes = block_bytes
        self.committed: dict[bytes, Entry] = {}
        self.reserved: dict[bytes, Entry] = {}
        self.in_dram = 0
        self.in_ssd = 0
        self.in_hbm = 0
        self.feed: Feed | None = None

    def __repr__(self) -> str:
        return f"<ShardIndex {self.namespace.hex()[:12]}/{self.number}>"

    @property
    def hbm_bytes(self) -> int:
        """Bytes of payload in the HBM tier."""
        return self.in_hbm * self.block_bytes

    @property
    def dram_bytes(self) -> int:
        """Bytes of payload in the DRAM tier."""
        return self.in_dram * self.block_bytes

    @property
    def ssd_bytes(self) -> int:
        """Bytes of payload in the SSD tier."""
        return self.in_ssd * self.block_bytes

    def get(self, hash: bytes) -> Entry | None:
        """The entry of that hash, committed or reserved."""
        return self.committed.get(hash) or self.reserved.get(hash)

    def page(self, limit: int, after: bytes = b"") -> list[Entry]:
        """Up to `limit` committed blocks with a hash above `after`, in order of their hash.

        The last hash of a page is the cursor of the next. Whatever comes or goes between pages,
        a block that is there all the time is listed exactly once. Looks at every key once (about
        0.1 s at a million blocks), so it's for people, not for the hot path.
        """
        hashes = heapq.nsmallest(limit, (hash for hash in self.committed if hash > after))
        return [self.committed[hash] for hash in hashes]
