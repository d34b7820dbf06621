"""Completions, brought to the event loop by the descriptor of their channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from rdma.verbs.adapter import Adapter
from rdma.verbs.binding import nothing_there, with_event_fd
from rdma.verbs.errors import DeviceError

__all__ = ["Completions"]

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 64


class Completions:
    """A completion queue and its channel.

    Args:
        adapter: the device.
        depth: entries that must never be exceeded.
        on_completion: is called with the number of the queue pair, that of the work request, and
            the status.
        on_failure: is called once if the device stops answering; no completions come any more.

    Raises:
        DeviceError: the device refused.
    """

    def __init__(
        self,
        adapter: Adapter,
        depth: int,
        on_completion: Callable[[int, int, int], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        binding = adapter.binding
        self._failure = binding.Error
        self._on_completion = on_completion
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            self._channel, self._fd = with_event_fd(lambda: binding.cq.CompChannel(adapter.context))
            self.queue: Any = binding.cq.CQ(adapter.context, depth, None, self._channel, 0)
        except binding.Error as error:
            raise DeviceError(
                f"{adapter.choice.device} makes no completion queue: {error}"
            ) from error

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch."""
        self.queue.req_notify()
        self._loop = loop
        loop.add_reader(self._fd, self._on_readable)

    def poll(self) -> None:
        """Take in completions until there are none."""
        try:
            number = _AT_ONCE
            while number == _AT_ONCE:
                number, completions = self.queue.poll(_AT_ONCE)
                for completion in completions:
                    self._on_completion(completion.qp_num, completion.wr_id, completion.status)
        except self._failure as error:
            self._fail(error)

    def close(self) -> None:
        """Stop watching and give the queue back; all queue pairs that use it must be destroyed."""
        self._stop()
        try:
            self.queue.close()
            self._channel.close()
        except self._failure as error:
            # Only a device that is gone refuses.
            _log.warning("a completion queue cannot be destroyed: %s", error)

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None

    def _fail(self, error: Exception) -> None:
        self._stop()
        self._on_failure(error)

    def _on_readable(self) -> None:
        """Drain, acknowledge, ask for the next event, and only then poll.

        In any other order a completion that comes in between goes unnoticed.
        """
        try:
            events = self._drain()
            if events:
                # Also before a queue is destroyed, which waits for its events for ever.
                self.queue.ack_events(events)
                self.queue.req_notify()
        except self._failure as error:
            self._fail(error)
            return
        self.poll()

    def _drain(self) -> int:
        events = 0
        while True:
            try:
                self._channel.get_cq_event(self.queue)
            except self._failure as error:
                if nothing_there(error):
                    return events
                raise
            events += 1
