"""Memory segments that other processes can map: the bytes behind the DRAM tier.

Each segment is a memfd, mapped shared. It is sealed against shrinking and growing, so that whoever
gets its descriptor can neither take pages from under the node (a SIGBUS) nor swell it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from typing import Literal

from tiers.errors import MediumFailed, TierConfigError

HugePages = Literal["auto", "never", "require"]

HUGE_PAGE = 2 << 20
"""Bytes of a huge page, which segments must be a multiple of where huge pages are required."""

_MFD_HUGE_2MB = 21 << 26
_MADV_REMOVE = 9
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, length: int, advice: int) -> None:
    """Call ``madvise`` without holding the interpreter lock.

    Raises:
        OSError: as the kernel says.
    """
    if _libc.madvise(address, length, advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Segment:
    """One mapped memfd.

    Attributes:
        number: never used for another segment of the same tier.
        size: bytes.
        fd: descriptor to hand to the owner's processes; the segment closes it.
        owner: the tenant that it belongs to, None before the first.
        view: all of it, writable.
        address: where it is mapped in this process.
    """

    __slots__ = ("_map", "address", "fd", "number", "owner", "size", "view")

    def __init__(self, number: int, size: int, huge_pages: HugePages, owner: str | None = None):
        """Make the memfd and map it; no page is touched yet.

        Raises:
            TierConfigError: huge pages are required and the machine has none to give.
            MediumFailed: the kernel refused memory, a descriptor or an address range.
        """
        self.number = number
        self.size = size
        self.owner = owner
        try:
            self.fd, self._map = _make(number, size, huge_pages)
        except OSError as error:
            raise _refused(error, size, huge_pages) from error
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self, *, discard: bool = True) -> bool:
        """Give the pages and the descriptor back.

        Args:
            discard: whether the pages go even where another process still has the segment mapped,
                which reads zeros then. Otherwise they stay as they are until nobody maps them.

        Returns:
            False where a view is still held in this process; the empty mapping then stays until
            the view is gone, so that using it is wrong but harmless.
        """
        if discard:
            self._discard()
        os.close(self.fd)
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            _log.warning("segment %d closed while a view of it is held", self.number)
            return False
        return True

    def _discard(self) -> None:
        try:
            advise(self.address, self.size, _MADV_REMOVE)
        except OSError as error:
            _log.warning("segment %d: pages not given back: %s", self.number, error)


def _make(number: int, size: int, huge_pages: HugePages) -> tuple[int, mmap.mmap]:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_pages == "require":
        flags |= os.MFD_HUGETLB | _MFD_HUGE_2MB
    fd = os.memfd_create(f"kvstore-{number}", flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        pages = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException:
        os.close(fd)
        raise
    pages.madvise(mmap.MADV_DONTDUMP)
    if huge_pages != "require":
        _prefer(pages, mmap.MADV_HUGEPAGE if huge_pages == "auto" else mmap.MADV_NOHUGEPAGE)
    return fd, pages


def _prefer(pages: mmap.mmap, advice: int) -> None:
    try:
        pages.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _log.debug("this kernel is built without transparent huge pages")


def _refused(error: OSError, size: int, huge_pages: HugePages) -> TierConfigError | MediumFailed:
    if huge_pages == "require":
        return TierConfigError(
            f"huge_pages is 'require' but {size} bytes of 2 MiB huge pages can't be had "
            f"({error.strerror}): raise vm.nr_hugepages, or set huge_pages to 'auto'"
        )
    return MediumFailed(f"no memory segment of {size} bytes: {error.strerror}")
