"""The state directory, and the lock by which one daemon has it to itself."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import structlog

from kvstore.errors import ConfigError, StateLocked

_log = structlog.get_logger(__name__)
_LOCK_NAME = "kvstore.lock"


class StateDirectory:
    """A daemon's directory; open by one process at a time.

    The lock is the kernel's, so that it ends with the process however that ends. The file names the
    process, for people.

    Args:
        path: made, readable by its owner only, where it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def open(self) -> None:
        """Take the directory.

        Raises:
            StateLocked: another process has it.
            ConfigError: it cannot be made or written.
        """
        lock = self.path / _LOCK_NAME
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"node.state_directory {self.path} cannot be used: {error.strerror}"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).strip()
            os.close(fd)
            raise StateLocked.held(
                str(self.path), int(holder) if holder.isdigit() else None
            ) from None
        self._fd = fd
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            # A full disk: the lock holds all the same, it only doesn't say whose it is.
            _log.warning("lock file not written", path=str(lock), error=str(error))

    def close(self) -> None:
        """Give the directory back."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None
