"""Sharing segments of the DRAM tier with clients on the same host, each tenant's with it alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import AccessDenied
from kvstore.protocol.messages import SegmentsAnswer
from kvstore.reply import Reply
from tiers.dram import DramTier
from tiers.errors import BadExtent
from tiers.segment import Segment


def share_segments(dram: DramTier, tenant: str, numbers: Sequence[int]) -> Reply:
    """Hand segments out, by which a client maps them.

    Args:
        dram: has the segments.
        tenant: of the client.
        numbers: of the segments.

    Raises:
        AccessDenied: one does not hold blocks of the tenant.
    """
    segments = [_segment(dram, tenant, number) for number in numbers]
    shared = [(number, one.size) for number, one in zip(numbers, segments, strict=True)]
    return Reply(SegmentsAnswer(shared), fds=[one.fd for one in segments])


def _segment(dram: DramTier, tenant: str, number: int) -> Segment:
    try:
        segment = dram.segment(number)
    except BadExtent:
        segment = None
    if segment is None or segment.owner != tenant:
        raise AccessDenied(f"segment {number} does not hold blocks of this tenant")
    return segment
