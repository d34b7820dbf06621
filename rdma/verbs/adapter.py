"""An opened device: its context, a protection domain, and what its port can do."""

from __future__ import annotations

import copy
import logging
import select
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from rdma.verbs.binding import Binding, load, with_event_fd
from rdma.verbs.choice import Choice, Wish, choose
from rdma.verbs.devices import list_devices
from rdma.verbs.errors import DeviceError
from rdma.verbs.settings import MTUS

__all__ = ["DEVICE_FAILED", "PORT_ACTIVE", "PORT_DOWN", "Adapter", "Limits", "open_adapter"]

_log = logging.getLogger(__name__)

DEVICE_FAILED: Final = 8
PORT_ACTIVE: Final = 9
PORT_DOWN: Final = 10
"""Of ``enum ibv_event_type`` of <infiniband/verbs.h>, which is ABI."""

_MOST_PIECES: Final = 16
"""Pieces gathered in one work request at most; more needs larger queue entries for no gain."""


class Limits(NamedTuple):
    """What a device can do.

    Attributes:
        pieces: of one work request.
        works: work requests in one queue.
        completions: entries of one completion queue.
        reads_out: RDMA READs under way on a queue pair.
        reads_in: RDMA READs served at once on a queue pair.
        region: bytes of one registration.
    """

    pieces: int
    works: int
    completions: int
    reads_out: int
    reads_in: int
    region: int


class Adapter:
    """An opened device. Everything made from it must be closed before it is.

    Args:
        choice: which device, port and GID.

    Attributes:
        choice: as given.
        binding: pyverbs.
        context: pyverbs' context.
        domain: pyverbs' protection domain.
        limits: what the device can do.
        mtu: the port's, in bytes.

    Raises:
        BindingError: pyverbs is missing.
        DeviceError: the device can't be opened or its port asked.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.binding: Binding = load()
        binding = self.binding
        self._owns_context = True
        try:
            self.context, self.event_fd = with_event_fd(
                lambda: binding.device.Context(name=choice.device)
            )
        except binding.Error as error:
            raise DeviceError(f"{choice.device} cannot be opened: {error}") from error
        try:
            self.limits = _limits(self.context.query_device())
            self.mtu = _bytes_of_mtu(self.context.query_port(choice.port).active_mtu)
            self.domain: Any = binding.pd.PD(self.context)
        except binding.Error as error:
            self.context.close()
            raise DeviceError(f"{choice.device} does not answer: {error}") from error

    def __repr__(self) -> str:
        return f"<Adapter {self.choice} MTU {self.mtu}>"

    def compartment(self) -> Adapter:
        """Return this device with a protection domain of its own, to be closed before this one.

        A queue pair made there can touch what is registered there, and nothing else.

        Raises:
            DeviceError: the device refused.
        """
        apart = copy.copy(self)
        apart._owns_context = False
        try:
            apart.domain = self.binding.pd.PD(self.context)
        except self.binding.Error as error:
            raise DeviceError(
                f"{self.choice.device} makes no protection domain: {error}"
            ) from error
        return apart

    def drain_events(self, on_event: Callable[[int], None]) -> None:
        """Take note of what the device says of itself, without waiting.

        Args:
            on_event: is called with each ``enum ibv_event_type``.
        """
        while self._has_event():
            try:
                event = self.context.get_async_event()
            except self.binding.Error:
                on_event(DEVICE_FAILED)
                return
            kind = int(event.event_type)
            # Before anybody reacts: a queue pair can't be destroyed while an event of its is out.
            event.ack()
            on_event(kind)

    def _has_event(self) -> bool:
        """Whether there is one; pyverbs' error does not tell that there is none."""
        waiting = select.poll()
        waiting.register(self.event_fd, select.POLLIN)
        return bool(waiting.poll(0))

    def close(self) -> None:
        """Give the device back; may be called again."""
        try:
            self.domain.close()
            if self._owns_context:
                self.context.close()
        except self.binding.Error as error:
            # Only a device that is gone refuses.
            _log.warning("%s cannot be closed: %s", self.choice.device, error)


def _limits(attributes: Any) -> Limits:
    return Limits(
        pieces=max(1, min(_MOST_PIECES, attributes.max_sge, attributes.max_sge_rd or 1 << 30)),
        works=attributes.max_qp_wr,
        completions=attributes.max_cqe,
        reads_out=attributes.max_qp_init_rd_atom,
        reads_in=attributes.max_qp_rd_atom,
        region=attributes.max_mr_size,
    )


def _bytes_of_mtu(code: int) -> int:
    for size, value in MTUS.items():
        if value == code:
            return size
    raise DeviceError(f"the port's MTU has the unknown code {code}")


_lock = threading.Lock()


def open_adapter(wish: Wish | None = None) -> Adapter:
    """Choose a device of this machine and open it.

    Args:
        wish: what the user wants; the best there is, by default.

    Raises:
        BindingError: pyverbs is missing.
        DeviceError: no device serves, or it can't be opened.
    """
    with _lock:
        return Adapter(choose(list_devices(), wish))
