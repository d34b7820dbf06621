"""What a tier can say went wrong.

Every error tells in ``retry`` whether the same call may succeed later. "No room now" is not an
error: :meth:`tiers.tier.Tier.store` answers it with ``None``.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class TierError(Exception):
    """Base of everything that a tier raises."""

    retry: ClassVar[bool] = False
    """True where the same call may succeed later without anybody changing anything."""


class TierFull(TierError):
    """A call that needs room, and may not answer ``None``, found none."""

    retry = True


class CorruptBlock(TierError):
    """The bytes at an extent are not those that were stored: header or checksum disagree."""


class MediumFailed(TierError):
    """The medium answered with an I/O error; the ``OSError`` is the ``__cause__``."""

    retry = True


class BadExtent(TierError):
    """An extent that holds no block, or a byte range outside its block: the caller's mistake."""


class TierConfigError(TierError):
    """The tier can't work with these settings on this machine; the message names the setting."""


class StateLocked(TierError):
    """Another process has the tier's files.

    Attributes:
        path: the directory or device that is locked.
        pid: the process that holds it, or None where it could not be read.
    """

    def __init__(self, path: Path, pid: int | None) -> None:
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(f"{path} is in use by {holder}")
        self.path = path
        self.pid = pid
