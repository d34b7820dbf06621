"""A device that does nothing, at once: what is left of a transfer is the node's own CPU time.

It stands in for pyverbs' objects at the places where they call libibverbs. Scatter elements and
completions are pyverbs' own, as far as their making costs CPU time. Not for tests: it fails never.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from ipaddress import IPv6Address
from types import SimpleNamespace
from typing import Any, cast

from rdma.verbs.adapter import Adapter, Limits
from rdma.verbs.binding import load
from rdma.verbs.choice import Choice
from rdma.verbs.devices import ROCE_V2, Gid
from rdma.verbs.handshake import Endpoint


class Failure(Exception):
    """What the channel raises when it has no event."""

    error_code = errno.EAGAIN


class Channel:
    """A completion channel with a real descriptor."""

    def __init__(self, _: object) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def get_cq_event(self, _: object) -> None:
        """Take one event."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            raise Failure from None

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class Queue:
    """A completion queue; what is posted on its queue pairs completes at once."""

    def __init__(self, _: object, __: int, ___: object, channel: Channel, ____: int) -> None:
        self._make = load().cq.WC
        self._fd = channel.fd
        self._done: list[int] = []
        self._armed = False

    def complete(self, number: int) -> None:
        """Have a completion to be polled."""
        self._done.append(number)
        if self._armed:
            self._armed = False
            os.eventfd_write(self._fd, 1)

    def req_notify(self) -> None:
        """Ask for one event."""
        self._armed = True

    def ack_events(self, _: int) -> None:
        """Nothing."""

    def poll(self, number: int) -> tuple[int, list[Any]]:
        """Return completions as pyverbs makes them."""
        taken, self._done = self._done[:number], self._done[number:]
        made = [
            self._make(
                wr_id=one,
                status=0,
                opcode=1,
                vendor_err=0,
                byte_len=0,
                qp_num=PAIR,
                src_qp=0,
                imm_data=0,
                wc_flags=0,
                pkey_index=0,
                slid=0,
                sl=0,
                dlid_path_bits=0,
            )
            for one in taken
        ]
        return len(made), made

    def close(self) -> None:
        """Nothing."""


PAIR = 17


class Pair:
    """An extended queue pair."""

    qp_num = PAIR
    wr_id = 0
    wr_flags = 0

    def __init__(self, _: object, initial: Any) -> None:
        self._queue: Queue = initial.scq

    def wr_start(self) -> None:
        """Nothing."""

    def wr_rdma_write(self, key: int, address: int) -> None:
        """Nothing."""

    def wr_rdma_read(self, key: int, address: int) -> None:
        """Nothing."""

    def wr_set_sge(self, element: object) -> None:
        """Nothing."""

    def wr_set_sge_list(self, number: int, elements: object) -> None:
        """Nothing."""

    def wr_complete(self) -> None:
        """Complete what was posted."""
        self._queue.complete(self.wr_id)

    def to_rts(self, _: object) -> None:
        """Nothing."""

    def modify(self, _: object, __: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def stub_adapter() -> Adapter:
    """An adapter of such a device."""
    real = load()
    binding = replace(
        real,
        cq=SimpleNamespace(CompChannel=Channel, CQ=Queue),
        qp=SimpleNamespace(
            QPCap=real.qp.QPCap,
            QPAttr=real.qp.QPAttr,
            QPInitAttrEx=lambda **named: SimpleNamespace(**named),
            QPEx=Pair,
        ),
        Error=Failure,
    )
    gid = Gid(0, IPv6Address("::ffff:192.0.2.1"), ROCE_V2, "stub0")
    return cast(
        Adapter,
        SimpleNamespace(
            binding=binding,
            choice=Choice("stub", 1, gid, 4096),
            context=None,
            domain=None,
            event_fd=os.eventfd(0, os.EFD_CLOEXEC),
            limits=Limits(16, 1 << 14, 1 << 15, 16, 16, 1 << 40),
            mtu=4096,
        ),
    )


REMOTE = Endpoint(18, 0, IPv6Address("::ffff:192.0.2.2"), 4096, 16)
