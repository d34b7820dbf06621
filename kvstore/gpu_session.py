"""What sessions have of the node's GPUs: blocks that their processes read there, and segments.

A process reads a block on a GPU by copies that it queues. They end before it gives the lease back;
but where a session ends with leases of such blocks, whoever ended it, nobody knows of them. The
room of these blocks is then not reused before the process is gone, or has said that it has the
segments mapped no more, and until then none of them is given to anybody else.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Final

import structlog

from kvstore.entry import Entry
from kvstore.errors import AccessDenied
from kvstore.gpus import SEGMENT_BITS, Gpus
from kvstore.process_watch import ProcessWatch
from kvstore.protocol.messages import HBM, DeviceSegmentsAnswer, GetAnswer, GpuOffer

_log = structlog.get_logger(__name__)

MOST_DEPARTING: Final = 1024
"""Ended sessions whose processes are waited for at most, with a descriptor for each: a process that
breaks one session after the other must not take all of the node's."""


class GpuSession:
    """One session's part.

    Args:
        gpus: the node's.
        tenant: of the session.
        reach: numbers of the GPUs whose memory its process can map.
        own: number of the one to which its blocks are to be copied: on which it computes, if the
            node has that one.
        departing: takes in what must outlive the session.
        watch: on the process; taken over.
    """

    def __init__(
        self,
        gpus: Gpus,
        tenant: str,
        reach: frozenset[int],
        own: int,
        departing: set[ProcessWatch],
        watch: ProcessWatch,
    ) -> None:
        self._gpus = gpus
        self._tenant = tenant
        self._reach = reach
        self._own = own
        self._departing = departing
        self._watch = watch
        self._leases: dict[int, Sequence[Entry]] = {}
        self._shares: dict[int, tuple[int, bytes]] = {}

    @property
    def reading(self) -> bool:
        """Whether the process may be reading blocks on a GPU."""
        return bool(self._leases)

    def places(self, entries: Sequence[Entry | None]) -> list[int | None]:
        """Where blocks lie on a GPU within reach; None for those that don't."""
        place, reach = self._gpus.place, self._reach
        return [None if entry is None else place(entry, reach) for entry in entries]

    def handed_out(self, answer: GetAnswer, entries: Sequence[Entry]) -> None:
        """Note what a get of the process was answered.

        Args:
            answer: says which blocks it may read on a GPU.
            entries: the blocks found, from root to leaf; pinned until the lease is ``released``.
        """
        tiers = filter(None, answer.tiers)
        held = [entry for entry, tier in zip(entries, tiers, strict=True) if tier == HBM]
        if held:
            self._leases[answer.lease] = held
        self._gpus.used(entries, self._own)

    def released(self, leases: Sequence[int]) -> None:
        """Forget leases that the process has given back."""
        for lease in leases:
            self._leases.pop(lease, None)

    def share(self, numbers: Sequence[int]) -> DeviceSegmentsAnswer:
        """Hand segments out, by which the process maps them.

        Raises:
            AccessDenied: one is out of its reach, or does not hold blocks of the tenant.
            Unavailable: its GPU is out of use.
        """
        for number in numbers:
            if number not in self._shares:
                if number >> SEGMENT_BITS not in self._reach:
                    raise AccessDenied(f"segment {number} is on no GPU of the client's reach")
                self._shares[number] = self._gpus.share(number, self._tenant)
        return DeviceSegmentsAnswer([(number, *self._shares[number]) for number in numbers])

    def unmapped(self, numbers: Sequence[int]) -> None:
        """Take note of segments that the process has mapped no more."""
        for number in numbers:
            if self._shares.pop(number, None) is not None:
                self._gpus.unshare(number)

    def close(self) -> None:
        """End the session's part. The blocks of its leases must be pinned still."""
        if not self._shares:
            # Nothing is mapped, so nothing can be read.
            self._watch.close()
            return
        held = [entry for entries in self._leases.values() for entry in entries]
        if held:
            _log.info("blocks on a gpu wait for the end of a process", blocks=len(held))
            self._gpus.lease(held, self._watch)
        self._departing.add(self._watch)
        self._watch.when_over(partial(self._gone, list(self._shares)))

    def _gone(self, numbers: Sequence[int]) -> None:
        self._departing.discard(self._watch)
        for number in numbers:
            self._gpus.unshare(number)


class GpuSessions:
    """Opens them, and keeps what outlives them.

    Args:
        gpus: the node's.
    """

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._departing: set[ProcessWatch] = set()

    @property
    def departing(self) -> int:
        """Number of ended sessions whose processes may still have segments mapped."""
        return len(self._departing)

    def open(self, offer: GpuOffer, tenant: str, sock: socket.socket) -> GpuSession | str:
        """The part of a new session; or why it can't use the node's GPUs.

        Args:
            offer: what its client said of GPUs.
            tenant: of the session.
            sock: its connection, over a Unix socket.
        """
        names = self._gpus.uuids()
        reach = frozenset(number for number, name in enumerate(names) if name in offer.reaches)
        if not reach:
            return "the client reaches none of the node's GPUs"
        if len(self._departing) >= MOST_DEPARTING:
            return "too many sessions have ended whose processes live, with memory mapped"
        watch = ProcessWatch.of_peer(sock)
        if watch is None:
            return "the node can't see the client's process"
        own = names.index(offer.gpu) if offer.gpu in names else min(reach)
        return GpuSession(self._gpus, tenant, reach, own, self._departing, watch)

    def names(self) -> list[bytes]:
        """Of the node's GPUs, in the order of their numbers."""
        return self._gpus.uuids()

    def close(self) -> None:
        """Wait for no process any more: the GPUs' memory is about to be given back."""
        for watch in self._departing:
            watch.close()
        self._departing.clear()
