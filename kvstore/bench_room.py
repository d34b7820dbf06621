"""Whether a node has room for the blocks of a benchmark without giving up any of others. Pure."""

from __future__ import annotations

from typing import Final

from kvstore.control.interface import NodeStatus
from kvstore.errors import OutOfSpace
from kvstore.units import format_size

MARGIN: Final = 0.10
"""Share of the DRAM tier that is left alone: above the high watermark, which is 95 % where nothing
else was configured, blocks of others would be moved down."""


def room(status: NodeStatus, tenant: str) -> int:
    """Bytes of DRAM that a tenant can take and nobody else has to leave; 0 where there are none.

    Args:
        status: of the node.
        tenant: whose blocks they are to be.
    """
    dram = next((tier for tier in status.tiers if tier.name == "dram"), None)
    if dram is None:
        return 0
    left = int(dram.capacity * (1 - MARGIN)) - dram.used - dram.lost
    named = {report.name: report for report in status.tenants}
    account = named.get(tenant) or named.get("*")
    if account is not None and account.dram_quota is not None:
        left = min(left, account.dram_quota - account.dram)
    return max(left, 0)


def check_room(status: NodeStatus, tenant: str, wanted: int) -> None:
    """Accept a node that has room for so many bytes.

    Raises:
        OutOfSpace: it has less; the message says how much, and what can be done.
    """
    found = room(status, tenant)
    if wanted <= found:
        return
    remedy = f"take less with --memory {found >> 20}MiB, or " if found >> 20 else ""
    raise OutOfSpace(
        f"{status.name} has {format_size(found)} of DRAM that nobody else needs, and the benchmark "
        f"wants {format_size(wanted)}: {remedy}let it drop blocks of others with --make-room"
    )
