"""Telling when the process at the other end of a Unix socket is gone.

That its connection has closed says less: the kernel closes a dying process's files one after the
other, so that the socket may be gone while a GPU still works through what the process had queued.
And a process may close a connection and live on.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_SO_PEERPIDFD: Final = 77
"""Linux 6.5 and later; this Python has no name for it."""
_CREDENTIALS: Final = struct.Struct("3i")
_FLAGS: Final = 6
"""Which field of ``/proc/PID/stat``, after the name, has the kernel's flags of the process."""
_PF_EXITING: Final = 4
"""The flag that is set before a dying process's files are closed."""


class ProcessWatch:
    """Waits for the end of a process, by its pidfd. Implements :class:`tiers.device.End`.

    Args:
        pidfd: of the process; taken over.
    """

    def __init__(self, pidfd: int) -> None:
        self._pidfd: int | None = pidfd
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = False

    @classmethod
    def of_peer(cls, sock: socket.socket) -> ProcessWatch | None:
        """A watch on the process that connected a Unix socket; None where it can't be seen.

        That can be so where it is gone, and is before Linux 6.5 where it has a PID namespace of its
        own.
        """
        pidfd = _pidfd_of_peer(sock)
        return None if pidfd is None else cls(pidfd)

    @classmethod
    def of_dying(cls, pid: int) -> ProcessWatch | None:
        """A watch on a process that is on its way out; None where it lives, is gone or unseen."""
        if not _is_dying(pid):
            return None
        try:
            return cls(os.pidfd_open(pid))
        except OSError:
            return None

    def done(self) -> bool:
        """Whether the process was seen to be gone, after ``when_over`` was called."""
        return self._over

    def when_over(self, then: Callable[[], object]) -> None:
        """Call ``then`` from the running event loop once the process is gone."""
        assert self._pidfd is not None

        def on_end() -> None:
            self.close()
            self._over = True
            then()

        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, on_end)

    def close(self) -> None:
        """Wait no longer; may be called again."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            if self._loop is not None:
                self._loop.remove_reader(pidfd)
            os.close(pidfd)


def pid_of_peer(sock: socket.socket) -> int:
    """The process that connected a Unix socket; 0 where it can't be seen, or for another socket."""
    try:
        told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return 0
    pid: int = _CREDENTIALS.unpack(told)[0] if len(told) == _CREDENTIALS.size else 0
    return pid


def _pidfd_of_peer(sock: socket.socket) -> int | None:
    with suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    # Should the number be another process's by now, the wait is only too long.
    pid = pid_of_peer(sock)
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _is_dying(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return bool(int(fields[_FLAGS]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return False
