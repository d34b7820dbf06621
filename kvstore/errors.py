"""Every error that the service and its clients raise on purpose.

Each class carries a stable ``code``, the name by which the error crosses the wire and by which
scripts recognise it, and ``retry``, which says whether the same call may succeed later without
anybody changing anything. A miss is not an error: it is a value.

This module imports nothing, so that every part of the house may import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

__all__ = [
    "AccessDenied",
    "ConfigError",
    "CorruptBlock",
    "DeadlineExceeded",
    "FrameTooLarge",
    "InternalError",
    "InvalidRequest",
    "KVStoreError",
    "MissingExtra",
    "NamespaceMismatch",
    "OutOfSpace",
    "ParentAbsent",
    "ProtocolError",
    "ShadowedPackage",
    "StateLocked",
    "Unavailable",
    "UnknownError",
    "from_code",
]


class KVStoreError(Exception):
    """Base of all errors of the service.

    Attributes:
        code: stable name of the kind of error, the same on the wire and in ``--json`` output.
        retry: whether the same call may succeed later with nothing changed by the caller.
    """

    code: ClassVar[str] = "error"
    retry: bool = False


class ConfigError(KVStoreError):
    """A setting is unknown, impossible or contradicts another one."""

    code = "config"


class ProtocolError(KVStoreError):
    """The peer broke the wire protocol in a way that leaves the connection unusable."""

    code = "protocol"


class FrameTooLarge(ProtocolError):
    """A frame announces a header or payload above the agreed bound."""

    code = "frame_too_large"


class InvalidRequest(KVStoreError):
    """One request is malformed or makes no sense; the connection goes on."""

    code = "invalid_request"


class ParentAbsent(InvalidRequest):
    """A block was to be stored under a parent that is not held."""

    code = "parent_absent"


class NamespaceMismatch(InvalidRequest):
    """The bytes or the shard given do not fit the namespace of the session."""

    code = "namespace_mismatch"


class AccessDenied(KVStoreError):
    """The credentials do not allow this."""

    code = "access_denied"


class Unavailable(KVStoreError):
    """The node cannot be reached, is stopping or has too much to do."""

    code = "unavailable"
    retry = True


class DeadlineExceeded(KVStoreError):
    """The answer did not come before the caller's deadline."""

    code = "deadline_exceeded"
    retry = True


class OutOfSpace(KVStoreError):
    """No tier has room now, because all that could make room is pinned or in use."""

    code = "out_of_space"
    retry = True


class CorruptBlock(KVStoreError):
    """A stored block does not match its checksum or its name; it is dropped, never served."""

    code = "corrupt_block"


class StateLocked(KVStoreError):
    """Another daemon holds the state directory."""

    code = "state_locked"

    @classmethod
    def held(cls, path: str, pid: int | None) -> StateLocked:
        """Return the error for ``path``, naming the process ``pid`` that holds it if known."""
        holder = f"process {pid}" if pid is not None else "another process"
        return cls(f"{path} is in use by {holder}; stop it or choose another state directory")


class MissingExtra(KVStoreError):
    """An optional part needs a package that is not installed."""

    code = "missing_extra"

    @classmethod
    def named(cls, extra: str, purpose: str) -> MissingExtra:
        """Return the error for the optional dependency group ``extra`` needed for ``purpose``."""
        return cls(f"{purpose} needs the '{extra}' extra: install tiered-kvstore[{extra}]")


class ShadowedPackage(KVStoreError):
    """A file of the same name hides one of our packages."""

    code = "shadowed_package"

    @classmethod
    def by(cls, package: str, path: str) -> ShadowedPackage:
        """Return the error for ``package`` hidden by the file or folder at ``path``."""
        return cls(f"the package '{package}' is hidden by {path}; rename or move that file")


class InternalError(KVStoreError):
    """The node failed at a request through a fault of its own, which it has logged."""

    code = "internal"


class UnknownError(KVStoreError):
    """A newer node reported a kind of error that this version does not know."""

    code = "unknown"


def _family(root: type[KVStoreError]) -> Iterator[type[KVStoreError]]:
    yield root
    for child in root.__subclasses__():
        yield from _family(child)


_BY_CODE: dict[str, type[KVStoreError]] = {kind.code: kind for kind in _family(KVStoreError)}


def from_code(code: str, message: str, retry: bool = False) -> KVStoreError:
    """Rebuild an error from its form on the wire.

    Args:
        code: the ``code`` that the peer sent.
        message: the text for people that the peer sent.
        retry: what the peer said about retrying; used only where the code is not known here.

    Returns:
        An instance, not raised, of the class that owns ``code``, or :class:`UnknownError`.
    """
    kind = _BY_CODE.get(code)
    if kind is not None:
        return kind(message)
    error = UnknownError(f"{code}: {message}")
    error.retry = retry
    return error
