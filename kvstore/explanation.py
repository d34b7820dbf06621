"""Why a prefix ends where it does: what the node knows about the first block that is missing."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.control.interface import Ending, Explanation
from kvstore.departures import DepartureReason
from kvstore.identity import Namespace
from kvstore.node import Node


def explain(node: Node, fingerprint: bytes, hashes: Sequence[bytes]) -> Explanation:
    """Say why the prefix ``hashes`` ends in a namespace.

    Args:
        node: what is asked.
        fingerprint: of the namespace; it may be unknown to the node.
        hashes: the chain of blocks, from the root on.
    """
    shards = [shard for shard in node.index.shards if shard.namespace == fingerprint]
    namespace = node.catalog.find(fingerprint)
    expected = namespace.shards if namespace is not None else len(shards)
    by_number = {shard.number: shard for shard in shards}
    ends = []
    for number in range(expected):
        shard = by_number.get(number)
        ends.append(len(node.index.match([shard], hashes)) if shard is not None else 0)
    held = min(ends, default=0)
    asked = len(hashes)
    if held == asked:
        return Explanation(asked, held, Ending.COMPLETE)
    missing = hashes[held]
    lacking = ends.index(held) if ends else None
    for shard in shards:
        if missing in shard.reserved:
            return Explanation(asked, held, Ending.PENDING, missing, shard.number)
    if lacking is not None and max(ends) > held:
        found = _departed(node, fingerprint, lacking, asked, held, missing)
        if found is not None:
            return found
        return Explanation(asked, held, Ending.SHARD_ABSENT, missing, lacking)
    return (
        _departed(node, fingerprint, lacking or 0, asked, held, missing)
        or _elsewhere(node, namespace, fingerprint, asked, held, missing)
        or _unknown(node, asked, held, missing)
    )


def _departed(
    node: Node, fingerprint: bytes, shard: int, asked: int, held: int, missing: bytes
) -> Explanation | None:
    departure = node.departures.of(fingerprint, shard, missing)
    if departure is None:
        return None
    corrupt = departure.reason is DepartureReason.CORRUPT
    return Explanation(
        asked,
        held,
        Ending.CORRUPT if corrupt else Ending.DEPARTED,
        missing,
        shard,
        tier=departure.tier,
        reason=departure.reason,
        ago=node.clock() - departure.when,
    )


def _elsewhere(
    node: Node,
    namespace: Namespace | None,
    fingerprint: bytes,
    asked: int,
    held: int,
    missing: bytes,
) -> Explanation | None:
    """The namespace that holds the block and differs least from the one asked about."""
    candidates: list[tuple[int, bytes, tuple[str, ...]]] = []
    for other in {entry.shard.namespace for entry in node.index.find(missing)} - {fingerprint}:
        known = node.catalog.find(other)
        if known is None:
            continue
        candidates.append(_ranked(namespace, known))
    if not candidates:
        return None
    _, nearest, differences = min(candidates)
    return Explanation(
        asked,
        held,
        Ending.OTHER_NAMESPACE,
        missing,
        nearest=nearest,
        differences=differences,
    )


def _ranked(ours: Namespace | None, theirs: Namespace) -> tuple[int, bytes, tuple[str, ...]]:
    if ours is None:
        return 0, theirs.fingerprint, ()
    mine, other = ours.describe(), theirs.describe()
    lines = tuple(
        f"{field}: ours is {mine[field]!r}, theirs is {other[field]!r}"
        for field in ours.difference(theirs)
    )
    return len(lines), theirs.fingerprint, lines


def _unknown(node: Node, asked: int, held: int, missing: bytes) -> Explanation:
    ending = Ending.FORGOTTEN if node.departures.forgotten else Ending.NEVER_STORED
    return Explanation(asked, held, ending, missing)
