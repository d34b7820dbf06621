"""The file under the SSD tier: vectored reads and writes past the page cache."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from tiers.ssd.format import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_log = logging.getLogger(__name__)


class Device(ABC):
    """What regions are kept on. Everything may be called from several threads at once.

    Offsets and lengths of reads and writes are whole pages of 4 KiB; so are the addresses of the
    memory, unless ``buffered``. All failures are ``OSError``.
    """

    @property
    @abstractmethod
    def buffered(self) -> bool:
        """Whether I/O goes through the page cache, so that memory needs no alignment."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes that can be addressed."""

    @property
    @abstractmethod
    def occupied(self) -> int:
        """Bytes that it takes from the medium, its file system's bookkeeping included."""

    @property
    @abstractmethod
    def room(self) -> int:
        """Bytes that it could occupy: what it does, and what is free beside it."""

    @abstractmethod
    def open(self) -> None:
        """Take it into use, creating it empty where there is none."""

    @abstractmethod
    def close(self) -> None:
        """Give it back; without effect where it isn't open."""

    @abstractmethod
    def resize(self, size: int) -> None:
        """Make it ``size`` bytes, all of them with space behind them; unchanged on failure."""

    @abstractmethod
    def read(self, into: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers, one after the other, from ``offset``."""

    @abstractmethod
    def write(self, data: Sequence[memoryview], offset: int) -> None:
        """Write the buffers, one after the other, at ``offset``. May end torn on failure."""

    @abstractmethod
    def sync(self) -> None:
        """Return once everything that was written would survive a power cut."""


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    rest = []
    for view in views:
        if count < len(view):
            rest.append(view[count:])
        count = max(0, count - len(view))
    return rest


class FileDevice(Device):
    """A preallocated file, opened with O_DIRECT where its file system can.

    Where it can't, the first EINVAL turns to buffered I/O for good; that is logged, and seen in
    ``buffered``.

    Args:
        path: the file; its directory must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._buffered = False

    @property
    def buffered(self) -> bool:
        """Whether O_DIRECT was refused."""
        return self._buffered

    @property
    def size(self) -> int:
        """The file's length."""
        return os.fstat(self._fd).st_size

    @property
    def occupied(self) -> int:
        """What its blocks take, as the file system counts them."""
        return os.fstat(self._fd).st_blocks * 512

    @property
    def room(self) -> int:
        """That, and what the file system gives to this user beside it."""
        system = os.fstatvfs(self._fd)
        return self.occupied + system.f_bavail * system.f_frsize

    def open(self) -> None:
        """Open the file, past the page cache where possible."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(self._path, flags, 0o600)
            self._note_buffered()

    def close(self) -> None:
        """Close it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def resize(self, size: int) -> None:
        """Cut it, or preallocate it."""
        before = self.size
        # Where the file system can't preallocate, the C library writes single bytes instead,
        # which O_DIRECT would refuse.
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if before > size:
                os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
        except OSError:
            if before < size:
                os.ftruncate(fd, before)
            raise
        finally:
            os.close(fd)

    def read(self, into: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers; too short a file is an EIO."""
        self._transfer(os.preadv, into, offset)

    def write(self, data: Sequence[memoryview], offset: int) -> None:
        """Write the buffers."""
        self._transfer(os.pwritev, data, offset)

    def sync(self) -> None:
        """Flush the file, and the metadata needed to read it."""
        os.fdatasync(self._fd)

    def _transfer(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        views: Sequence[memoryview],
        offset: int,
    ) -> None:
        wanted = sum(map(len, views))
        while wanted:
            count = self._attempt(call, views, offset)
            if count != wanted and (count == 0 or count % PAGE):
                raise OSError(errno.EIO, f"{self._path}: {count} of {wanted} bytes at {offset}")
            wanted -= count
            offset += count
            views = _after(views, count)

    def _attempt(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        views: Sequence[memoryview],
        offset: int,
    ) -> int:
        try:
            return call(self._fd, views, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or self._buffered:
                raise
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._note_buffered()
        return call(self._fd, views, offset)

    def _note_buffered(self) -> None:
        self._buffered = True
        _log.warning("%s: no O_DIRECT here, using the page cache", self._path)
