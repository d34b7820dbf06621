"""Taking up what the SSD tier still holds from before the start."""

from __future__ import annotations

from typing import TypeAlias

from kvstore.identity import ROOT_PARENT
from kvstore.node import Node
from tiers.ssd import SsdTier
from tiers.tier import Extent, Record

_Name: TypeAlias = tuple[bytes, int, bytes]
"""Namespace, shard and hash of a block."""
_Found: TypeAlias = tuple[Record, Extent]


def recover(node: Node, ssd: SsdTier) -> int:
    """Put the blocks that the SSD tier found into the index of a node that holds nothing yet.

    A block whose prefix is incomplete is of no use and is freed. Of two copies of one block the
    later is kept.

    Returns:
        How many blocks are held again.
    """
    latest: dict[_Name, _Found] = {}
    for record, extent in ssd.recovered():
        name = (record.namespace, record.shard, record.hash)
        earlier = latest.pop(name, None)
        if earlier is not None:
            ssd.free(earlier[1])
        latest[name] = (record, extent)
    children: dict[_Name, list[_Found]] = {}
    for record, extent in latest.values():
        parent = (record.namespace, record.shard, record.parent)
        children.setdefault(parent, []).append((record, extent))
    roots = [parent for parent in children if parent[2] == ROOT_PARENT]
    held = sum(_restore(node, ssd, children, root) for root in roots)
    for orphans in children.values():
        for _, extent in orphans:
            ssd.free(extent)
    return held


def _restore(node: Node, ssd: SsdTier, children: dict[_Name, list[_Found]], root: _Name) -> int:
    """Take up all that hangs below ``root``, taking it out of ``children``."""
    now, held = node.clock(), 0
    pending = [root]
    while pending:
        for record, extent in children.pop(pending.pop(), ()):
            known = node.catalog.find(record.namespace)
            tenant = None if known is None else known.tenant
            shard = node.index.shard(record.namespace, record.shard, record.size, tenant)
            if shard.block_bytes != record.size:
                ssd.free(extent)
                continue
            entry = node.index.reserve(shard, record.hash, record.parent, now)
            node.index.place(entry, "ssd", extent)
            node.index.commit([entry], now)
            ssd.set_tag(extent, entry)
            pending.append((record.namespace, record.shard, record.hash))
            held += 1
    return held
