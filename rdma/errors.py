"""What can go wrong while bytes are moved.

``retry`` says whether the same transfer may succeed later with nothing changed by the caller.
The service turns these into its own errors at the edge.
"""

from __future__ import annotations

__all__ = [
    "BadPlace",
    "CertificateError",
    "RegionError",
    "SegmentError",
    "StreamClosed",
    "TlsError",
    "TransportError",
]


class TransportError(Exception):
    """Base of all errors of the transports.

    Attributes:
        retry: whether the same transfer may succeed later.
    """

    retry: bool = False


class RegionError(TransportError):
    """Memory cannot be registered, or a range lies outside its region."""


class SegmentError(TransportError):
    """A shared segment cannot be received or mapped."""


class BadPlace(TransportError):
    """A place, source or destination named by the peer lies outside the memory it may name."""


class StreamClosed(TransportError):
    """The connection ended before the bytes were through."""

    retry = True


class CertificateError(TransportError):
    """The files of a certificate, its key or its authorities can't be used."""


class TlsError(TransportError, OSError):
    """A TLS connection can't be made, or went wrong; an ``OSError``, as of any other socket.

    Args:
        message: what happened.
        denied: see below.

    Attributes:
        denied: whether one end does not accept the other's certificate, so that nothing helps but
            another certificate.
    """

    def __init__(self, message: str, *, denied: bool = False) -> None:
        super().__init__(message)
        self.denied = denied
