"""Doubles for the SSD tier's device: one in memory that loses power, one that fails to order."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiers.ssd.buffers import aligned
from tiers.ssd.device import Device
from tiers.ssd.format import PAGE

SECTOR = 512


class PowerCut(Exception):
    """The machine went off; nothing more happens until the device is opened again."""


class MemoryDevice(Device):
    """A disk with a volatile cache: what was written and not synced may be lost, page by page.

    As strict as O_DIRECT about offsets, lengths and addresses.
    """

    def __init__(self, room: int = 1 << 30) -> None:
        self.image = bytearray()
        self.limit = room
        self.syncs = 0
        self._unsynced: dict[int, list[bytes]] = {}

    @property
    def buffered(self) -> bool:
        return False

    @property
    def size(self) -> int:
        return len(self.image)

    @property
    def occupied(self) -> int:
        return len(self.image)

    @property
    def room(self) -> int:
        return self.limit

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def resize(self, size: int) -> None:
        if size > self.limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if size < len(self.image):
            del self.image[size:]
        self.image.extend(bytes(size - len(self.image)))

    def read(self, into: Sequence[memoryview], offset: int) -> None:
        self._check(into, offset)
        for view in into:
            if offset + len(view) > len(self.image):
                raise OSError(errno.EIO, "beyond the end")
            view[:] = self.image[offset : offset + len(view)]
            offset += len(view)

    def write(self, data: Sequence[memoryview], offset: int) -> None:
        self._check(data, offset)
        self.put(b"".join(data), offset)

    def put(self, data: bytes, offset: int) -> None:
        """Write without being strict."""
        if offset + len(data) > len(self.image):
            raise OSError(errno.ENOSPC, "beyond the end")
        for page in range(offset // PAGE, -(-(offset + len(data)) // PAGE)):
            before = bytes(self.image[page * PAGE : (page + 1) * PAGE])
            self._unsynced.setdefault(page, []).append(before)
        self.image[offset : offset + len(data)] = data

    def sync(self) -> None:
        self.syncs += 1
        self._unsynced.clear()

    def lose_power(self, rng: random.Random) -> None:
        """Go back, for every unsynced page, to any of its versions or a mixture of two."""
        for page, versions in self._unsynced.items():
            start = page * PAGE
            candidates = [*versions, bytes(self.image[start : start + PAGE])]
            first, second = rng.choice(candidates), rng.choice(candidates)
            cut = rng.randrange(0, PAGE + 1, SECTOR)
            if start + PAGE <= len(self.image):
                self.image[start : start + PAGE] = first[:cut] + second[cut:]
        self._unsynced.clear()

    def _check(self, views: Sequence[memoryview], offset: int) -> None:
        sound = all(len(view) and not len(view) % PAGE and aligned(view) for view in views)
        if offset % PAGE or not sound:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@dataclass
class Fault:
    """What goes wrong, and when.

    Attributes:
        operation: ``read``, ``write``, ``sync`` or ``resize``.
        error: the errno to fail with; None for none.
        after: how many such operations go well first.
        times: how many go wrong then; None for all.
        torn: bytes of a write that get through before it fails.
        delay: seconds that it takes.
        cut: whether the power goes off, rather than an error coming back.
        where: whether it strikes an operation at this offset.
    """

    operation: str
    error: int | None = errno.EIO
    after: int = 0
    times: int | None = None
    torn: int = 0
    delay: float = 0.0
    cut: bool = False
    where: Callable[[int], bool] = lambda offset: True

    def strikes(self, operation: str, offset: int) -> bool:
        """Count an operation; tell whether this one goes wrong."""
        if operation != self.operation or not self.where(offset):
            return False
        if self.after:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return self.times is None or self.times >= 0


class FaultyDevice(Device):
    """Passes everything on to another device, except where a fault strikes."""

    def __init__(self, device: Device, *faults: Fault) -> None:
        self.device = device
        self.faults = list(faults)
        self.off = False
        self.struck = 0

    @property
    def buffered(self) -> bool:
        return self.device.buffered

    @property
    def size(self) -> int:
        return self.device.size

    @property
    def occupied(self) -> int:
        return self.device.occupied

    @property
    def room(self) -> int:
        return self.device.room

    def open(self) -> None:
        self.off = False
        self.device.open()

    def close(self) -> None:
        self.device.close()

    def resize(self, size: int) -> None:
        self._meet("resize", 0)
        self.device.resize(size)

    def read(self, into: Sequence[memoryview], offset: int) -> None:
        self._meet("read", offset)
        self.device.read(into, offset)

    def write(self, data: Sequence[memoryview], offset: int) -> None:
        self._meet("write", offset, data)
        self.device.write(data, offset)

    def sync(self) -> None:
        self._meet("sync", 0)
        self.device.sync()

    def _meet(self, operation: str, offset: int, data: Sequence[memoryview] = ()) -> None:
        if self.off:
            raise PowerCut
        for fault in self.faults:
            if fault.strikes(operation, offset):
                self._strike(fault, offset, b"".join(data))

    def _strike(self, fault: Fault, offset: int, data: bytes) -> None:
        self.struck += 1
        time.sleep(fault.delay)
        if fault.torn and isinstance(self.device, MemoryDevice):
            self.device.put(data[: fault.torn], offset)
        if fault.cut:
            self.off = True
            raise PowerCut
        if fault.error is not None:
            raise OSError(fault.error, os.strerror(fault.error))
