"""The end of a process that may be using memory which is shared with it."""

from __future__ import annotations

import os
import select


class ProcessEnd:
    """An end of :class:`tiers.device.End`: the process is gone, and what it had queued with it.

    A connection that has closed is not enough: the kernel closes a dying process's files one after
    the other, so that its socket can be gone while its GPU still works through what it was asked
    for. A process's pidfd tells its end only when all of its files are closed.

    Args:
        pidfd: of the process; taken over, and closed when the end has come or with ``close``.
    """

    __slots__ = ("_pidfd",)

    def __init__(self, pidfd: int) -> None:
        self._pidfd: int | None = pidfd

    def done(self) -> bool:
        """Whether the process has ended. Does not block."""
        if self._pidfd is None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(0):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Give the descriptor back; the end counts as come."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)
