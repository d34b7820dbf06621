"""One process to a directory of tier files."""

from __future__ import annotations

import fcntl
import logging
import os
from typing import TYPE_CHECKING

from tiers.errors import StateLocked

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)


class DirectoryLock:
    """A lock file in a directory, held by flock; it tells the holder's pid to who comes second.

    The kernel drops the lock when the process ends, however it ends; the file itself stays.

    Args:
        directory: must exist.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            StateLocked: somebody has it.
            OSError: the lock file can't be opened.
        """
        fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._read_pid(fd)
            os.close(fd)
            raise StateLocked(self._directory, holder) from None
        self._fd = fd
        self._write_pid(fd)

    def release(self) -> None:
        """Give the lock back; without effect where it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @staticmethod
    def _write_pid(fd: int) -> None:
        # Of one width and never truncated, so that a full disk has no say from the second time on.
        try:
            os.pwrite(fd, f"{os.getpid():<20}\n".encode(), 0)
        except OSError as error:
            _log.warning("the lock file does not tell our process id: %s", error)

    @staticmethod
    def _read_pid(fd: int) -> int | None:
        try:
            return int(os.pread(fd, 32, 0))
        except ValueError:
            return None
