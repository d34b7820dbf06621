"""Who may post how much, and when; pure.

Each session has a flow. Flows take turns, a chain of work requests each; what is under way is
bounded by number and bytes for each flow and by number over all of them, counted here, since
devices round their queues up and lose completions when one overruns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from rdma.verbs.plan import Work

__all__ = ["READ", "WRITE", "Chain", "Flow", "Schedule", "Transfer"]

WRITE: Final = "write"
READ: Final = "read"


class Transfer:
    """All the work of one call.

    Attributes:
        kind: ``READ`` or ``WRITE``.
        length: bytes in all.
        posted: whether any of its work is or was under way.
    """

    __slots__ = ("_next", "_works", "kind", "left", "length", "posted")

    def __init__(self, kind: str, works: Sequence[Work]) -> None:
        self.kind = kind
        self.length = sum(work.length for work in works)
        self.posted = False
        self.left = len(works)
        """Work requests that have not been completed."""
        self._works = works
        self._next = 0

    @property
    def done(self) -> bool:
        """Whether all its work has been completed."""
        return not self.left

    @property
    def exhausted(self) -> bool:
        """Whether all its work has been taken."""
        return self._next == len(self._works)

    def take(self, number: int, room: int, enough: int) -> tuple[list[Work], int]:
        """Take work to be posted.

        Args:
            number: of work requests at most.
            room: bytes at most.
            enough: bytes at most, but for the first work request.

        Returns:
            The work, and its bytes.
        """
        taken: list[Work] = []
        size = 0
        while self._next < len(self._works) and len(taken) < number:
            work = self._works[self._next]
            if size + work.length > (min(room, enough) if taken else room):
                break
            size += work.length
            taken.append(work)
            self._next += 1
        self.posted = self.posted or bool(taken)
        return taken, size


class Chain(NamedTuple):
    """Work requests to be posted together; the last one's completion stands for all.

    Attributes:
        number: names the completion; never used again.
        kind: of the work.
        works: in order.
        length: bytes in all.
        transfer: what it belongs to.
    """

    number: int
    kind: str
    works: Sequence[Work]
    length: int
    transfer: Transfer


class Flow:
    """The work of one session.

    Args:
        depth: work requests under way at most.
        length: bytes under way at most.
    """

    __slots__ = ("bytes_out", "depth", "length", "out", "waiting", "works_out")

    def __init__(self, depth: int, length: int) -> None:
        self.depth = depth
        self.length = length
        self.waiting: deque[Transfer] = deque()
        self.out: deque[Chain] = deque()
        self.works_out = 0
        self.bytes_out = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not self.waiting and not self.out


class Schedule:
    """Lets flows take turns.

    Args:
        works: work requests under way at most, over all flows.
        chain: work requests of one chain at most.
    """

    def __init__(self, works: int, chain: int) -> None:
        self._works = works
        self._chain = chain
        self._turns: deque[Flow] = deque()
        self._number = 0
        self.works_out = 0
        """Work requests under way."""

    def add(self, flow: Flow, transfer: Transfer) -> None:
        """Have ``transfer`` done; one without work is done already."""
        if transfer.done:
            return
        flow.waiting.append(transfer)
        if flow not in self._turns:
            self._turns.append(flow)

    def next(self) -> tuple[Flow, Chain] | None:
        """Return what to post now, if anything may be; it counts as under way from here on."""
        for _ in range(len(self._turns)):
            flow = self._turns.popleft()
            chain = self._take(flow)
            if flow.waiting:
                self._turns.append(flow)
            if chain is not None:
                return flow, chain
        return None

    def complete(self, flow: Flow, number: int) -> list[Transfer]:
        """Take note of a completion: a queue pair completes in order.

        Args:
            flow: whose queue pair it came from.
            number: the chain's; those before it are complete, too. A number that is not under
                way is of a chain that was given up.

        Returns:
            The transfers that are done by it.
        """
        if not any(chain.number == number for chain in flow.out):
            return []
        done = []
        while flow.out:
            chain = flow.out.popleft()
            self._returned(flow, chain)
            chain.transfer.left -= len(chain.works)
            if chain.transfer.done:
                done.append(chain.transfer)
            if chain.number == number:
                break
        return done

    def withdraw(self, flow: Flow, transfer: Transfer) -> bool:
        """Give up a transfer of which nothing has been posted.

        Returns:
            Whether that was so. Otherwise only :meth:`remove` is left.
        """
        if transfer.posted:
            return False
        flow.waiting.remove(transfer)
        if not flow.waiting and flow in self._turns:
            self._turns.remove(flow)
        return True

    def remove(self, flow: Flow) -> list[Transfer]:
        """Give up a flow whose queue pair is no more.

        Returns:
            The transfers that will not be done.
        """
        if flow in self._turns:
            self._turns.remove(flow)
        lost = list(dict.fromkeys([*(chain.transfer for chain in flow.out), *flow.waiting]))
        for chain in flow.out:
            self._returned(flow, chain)
        flow.out.clear()
        flow.waiting.clear()
        return lost

    def _take(self, flow: Flow) -> Chain | None:
        number = min(self._chain, flow.depth - flow.works_out, self._works - self.works_out)
        if number <= 0:
            return None
        transfer = flow.waiting[0]
        # A quarter, so that the device never runs dry while the next chain is made up.
        works, length = transfer.take(number, flow.length - flow.bytes_out, flow.length // 4)
        if not works:
            return None
        if transfer.exhausted:
            flow.waiting.popleft()
        self._number += 1
        chain = Chain(self._number, transfer.kind, works, length, transfer)
        flow.out.append(chain)
        flow.works_out += len(works)
        flow.bytes_out += length
        self.works_out += len(works)
        return chain

    def _returned(self, flow: Flow, chain: Chain) -> None:
        flow.works_out -= len(chain.works)
        flow.bytes_out -= chain.length
        self.works_out -= len(chain.works)
