"""Whether a node has room for the blocks of a benchmark, and the benchmark memory. Pure."""

from __future__ import annotations

from typing import Final

from kvstore.control.interface import NodeStatus, TenantReport, TierReport
from kvstore.errors import ConfigError, OutOfSpace
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
    left = _unused(status)
    account = _account(status, tenant)
    if account is not None and account.dram_quota is not None:
        left = min(left, account.dram_quota - account.dram)
    return max(left, 0)


def most(status: NodeStatus, tenant: str) -> int:
    """Bytes of DRAM that a tenant can take where all other blocks may leave.

    Args:
        status: of the node.
        tenant: whose blocks they are to be.
    """
    dram = _dram(status)
    if dram is None:
        return 0
    # What is lost may stay so without the others: to begin and fail would cost them their blocks.
    limit = max(int(dram.capacity * (1 - MARGIN)) - dram.lost, 0)
    account = _account(status, tenant)
    if account is None or account.dram_quota is None:
        return limit
    # Beyond its quota a tenant makes room from its own blocks alone, and takes none from others.
    return min(limit, max(account.dram_quota, _unused(status)))


def _unused(status: NodeStatus) -> int:
    dram = _dram(status)
    return 0 if dram is None else int(dram.capacity * (1 - MARGIN)) - dram.used - dram.lost


def _dram(status: NodeStatus) -> TierReport | None:
    return next((tier for tier in status.tiers if tier.name == "dram"), None)


def _account(status: NodeStatus, tenant: str) -> TenantReport | None:
    named = {report.name: report for report in status.tenants}
    return named.get(tenant) or named.get("*")


def check_room(status: NodeStatus, tenant: str, wanted: int) -> None:
    """Accept a node that has room for so many bytes.

    Raises:
        OutOfSpace: it has less; the message says how much, and what can be done.
    """
    found = room(status, tenant)
    if wanted <= found:
        return
    remedies = [_less(found)] if found >> 20 else []
    if wanted <= most(status, tenant):
        remedies.append("let it drop blocks of others with --make-room")
    raise OutOfSpace(
        f"{status.name} has {format_size(found)} of DRAM that nobody else needs, and the benchmark "
        f"wants {format_size(wanted)}: {', or '.join(remedies) or 'it can never have as many'}"
    )


def check_most(status: NodeStatus, tenant: str, wanted: int) -> None:
    """Accept a node that has room for so many bytes once it has dropped what others have there.

    Raises:
        OutOfSpace: it never has; the message says how much it can have.
    """
    found = most(status, tenant)
    if wanted > found:
        remedy = f": {_less(found)}" if found >> 20 else ""
        raise OutOfSpace(
            f"{status.name} has room for {format_size(found)} at most, by its DRAM and quotas, and "
            f"the benchmark wants {format_size(wanted)}{remedy}"
        )


def check_own(available: tuple[int, str] | None, wanted: int, call: int) -> None:
    """Accept a machine with memory for the benchmark's own process.

    Args:
        available: bytes, and where the limit is, as `kvstore.doctor.memory.available` says it.
        wanted: bytes of blocks that the process keeps, as many as the node.
        call: bytes of one call; over TCP the process has those of two at once.

    Raises:
        ConfigError: there is less; the message says what would fit.
    """
    needed = wanted + 2 * call
    if available is None or needed <= available[0]:
        return
    left, place = available
    fitting = (left - 2 * call) >> 20 << 20
    remedy = _less(fitting) if fitting >= max(call, 1) else "take smaller blocks or batches"
    raise ConfigError(
        f"the benchmark wants {format_size(needed)} of memory for itself, and there are "
        f"{format_size(left)} available{place}: {remedy}"
    )


def _less(fitting: int) -> str:
    return f"take less with --memory {fitting >> 20}MiB"
