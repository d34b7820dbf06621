"""How blocks and explanations are shown to people."""

from typing import TYPE_CHECKING, Final

from kvstore.cli.output import short, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from kvstore.control.interface import BlockReport, Explanation

_SPARE: Final = ("CRC32C", "PARENT", "CHILDREN", "NAMESPACE", "SHARD", "IDLE")
"""Columns that give way where the terminal is narrow, the first one first."""
_ENDINGS: Final = {
    "complete": "The whole prefix is held.",
    "never_stored": "Nobody has stored the next block.",
    "forgotten": "The next block was never stored, or left so long ago that the node forgot.",
    "pending": "The next block is being written now.",
    "corrupt": "The next block did not match its checksum and was dropped.",
    "node_gone": "The node that held the next block left the cluster.",
}
_REASONS: Final = {
    "capacity": "to make room",
    "ssd_busy": "to make room, before the SSD tier had taken a copy: it could not keep up",
    "quota": "to make room, while its tenant held more than its quota",
    "ssd_reclaim": "when its region of the SSD log was reclaimed",
    "corrupt": "because it did not match its checksum",
    "medium_failed": "because its medium could not be read",
    "admin": "because an operator evicted it",
}


def block_table(blocks: "Sequence[BlockReport]", nodes: "Sequence[str] | None" = None) -> "Table":
    """A table of blocks, with the node of each where ``nodes`` names them."""
    from kvstore.units import format_duration, format_size

    rows = [
        (
            short(block.namespace)[:8],
            block.shard,
            short(block.hash),
            "root" if not any(block.parent) else short(block.parent),
            "+".join(block.tiers) if block.state == "committed" else block.state,
            format_size(block.size),
            block.children,
            block.pins,
            format_duration(block.age),
            format_duration(block.idle),
            "-" if block.checksum is None else f"{block.checksum:08x}",
        )
        for block in blocks
    ]
    columns = (
        "NAMESPACE", ">SHARD", "HASH", "PARENT", "TIERS", ">SIZE", ">CHILDREN", ">PINS", ">AGE",
        ">IDLE", "CRC32C",
    )  # fmt: skip
    if nodes is None:
        return table(columns, rows, spare=_SPARE)
    named = [(node, *row) for node, row in zip(nodes, rows, strict=True)]
    return table(("NODE", *columns), named, spare=_SPARE)


def block_facts(block: "BlockReport") -> "Table":
    """All that there is to say of one block."""
    from kvstore.units import format_duration, format_size

    facts = (
        ("hash", block.hash.hex()),
        ("parent", block.parent.hex() if any(block.parent) else "none: the first of its prefix"),
        ("namespace", block.namespace.hex()),
        ("shard", block.shard),
        ("state", block.state),
        ("tiers", " and ".join(block.tiers) or "-"),
        ("size", format_size(block.size)),
        ("children", block.children),
        ("pins", block.pins),
        ("age", format_duration(block.age)),
        ("last use", f"{format_duration(block.idle)} ago"),
        ("crc32c", "not computed yet" if block.checksum is None else f"{block.checksum:08x}"),
    )
    return table(("BLOCK", short(block.hash)), facts)


def runs(tiers: "Sequence[str]") -> list[tuple[int, int, str]]:
    """First index, last index and tier of each run of equal tiers."""
    found: list[tuple[int, int, str]] = []
    for index, tier in enumerate(tiers):
        if found and found[-1][2] == tier:
            found[-1] = (found[-1][0], index, tier)
        else:
            found.append((index, index, tier))
    return found


def sentence(found: "Explanation") -> str:
    """What an explanation says, for people."""
    from kvstore.units import format_duration

    if found.ending == "departed":
        ago = f" {format_duration(found.ago)} ago" if found.ago is not None else ""
        reason = _REASONS.get(found.reason, found.reason)
        return f"The next block left the {found.tier} tier{ago}, {reason}."
    if found.ending == "shard_absent":
        return f"The next block is held by some shards, but not by shard {found.shard}."
    if found.ending == "other_namespace":
        fields = "; ".join(found.differences)
        return (
            f"The next block is held only in namespace {short(found.nearest)}, which differs: "
            f"{fields}."
        )
    if found.ending == "node_gone" and found.gone:
        return f"The node {found.gone} held the next block, and has left the pool."
    return _ENDINGS[found.ending]
