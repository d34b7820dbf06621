"""What can go wrong with verbs, and what a completion's status means."""

from __future__ import annotations

from typing import Final

from rdma.errors import TransportError

__all__ = [
    "BindingError",
    "DeviceError",
    "HandshakeError",
    "LocalAccessError",
    "PeerLost",
    "QueueBroken",
    "RemoteAccessError",
    "TransferTimeout",
    "error_of_status",
    "name_of_status",
]


class BindingError(TransportError):
    """pyverbs cannot be imported; the message says what to install."""


class DeviceError(TransportError):
    """No device, port or GID serves, or the device failed; the message says what was looked at."""


class HandshakeError(TransportError):
    """What the peer said of its queue pair makes no sense, or the two cannot be connected."""


class QueueBroken(TransportError):
    """The session's queue pair is in error; the session has to be opened anew."""

    retry = True


class PeerLost(QueueBroken):
    """The peer's device stopped answering: it died, or the path to it broke."""


class TransferTimeout(QueueBroken):
    """The deadline passed with bytes under way, so the queue pair was destroyed to stop them."""


class RemoteAccessError(QueueBroken):
    """The peer's memory is not, or no longer, registered for what was to be done with it."""

    retry = False


class LocalAccessError(QueueBroken):
    """Memory of our own is not registered for what was to be done with it."""

    retry = False


SUCCESS: Final = 0
FLUSHED: Final = 5

_STATUSES: Final[dict[int, tuple[str, type[QueueBroken]]]] = {
    1: ("LOC_LEN_ERR", LocalAccessError),
    2: ("LOC_QP_OP_ERR", QueueBroken),
    3: ("LOC_EEC_OP_ERR", QueueBroken),
    4: ("LOC_PROT_ERR", LocalAccessError),
    FLUSHED: ("WR_FLUSH_ERR", QueueBroken),
    6: ("MW_BIND_ERR", QueueBroken),
    7: ("BAD_RESP_ERR", QueueBroken),
    8: ("LOC_ACCESS_ERR", LocalAccessError),
    9: ("REM_INV_REQ_ERR", RemoteAccessError),
    10: ("REM_ACCESS_ERR", RemoteAccessError),
    11: ("REM_OP_ERR", PeerLost),
    12: ("RETRY_EXC_ERR", PeerLost),
    13: ("RNR_RETRY_EXC_ERR", PeerLost),
    14: ("LOC_RDD_VIOL_ERR", QueueBroken),
    15: ("REM_INV_RD_REQ_ERR", RemoteAccessError),
    16: ("REM_ABORT_ERR", PeerLost),
    17: ("INV_EECN_ERR", QueueBroken),
    18: ("INV_EEC_STATE_ERR", QueueBroken),
    19: ("FATAL_ERR", QueueBroken),
    20: ("RESP_TIMEOUT_ERR", PeerLost),
    21: ("GENERAL_ERR", QueueBroken),
}
"""``enum ibv_wc_status`` of <infiniband/verbs.h>, which is ABI."""

_MEANINGS: Final[dict[type[QueueBroken], str]] = {
    QueueBroken: "the queue pair is in error",
    PeerLost: "the peer's device does not answer",
    RemoteAccessError: "the peer's memory may not be touched so",
    LocalAccessError: "memory of this process is not registered so",
}


def name_of_status(status: int) -> str:
    """Return the name of a completion's status, for logs and metrics."""
    if status == SUCCESS:
        return "SUCCESS"
    return _STATUSES[status][0] if status in _STATUSES else f"status {status}"


def error_of_status(status: int) -> QueueBroken:
    """Return the error that a completion with ``status`` stands for.

    Args:
        status: of the completion; anything but success.
    """
    kind = _STATUSES[status][1] if status in _STATUSES else QueueBroken
    return kind(f"{_MEANINGS[kind]} ({name_of_status(status)})")
