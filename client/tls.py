"""A client's connection over TLS: the handshake, and what its failures mean to the caller."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import AccessDenied, ConfigError, DeadlineExceeded, KVStoreError, Unavailable
from rdma.certificates import CertificateFiles, Certificates, to_connect
from rdma.errors import CertificateError, TlsError
from rdma.tls import TlsSocket, shake_hands, shake_hands_until, wrap

logger = logging.getLogger("kvstore.client")

__all__ = ["certificates_of", "lost", "secure", "secure_soon"]


def certificates_of(files: CertificateFiles) -> Certificates:
    """What every connection of a client takes its certificates from, as the files are then.

    Raises:
        ConfigError: the files can't be used.
    """
    try:
        return Certificates(files, to_connect, logger.warning)
    except CertificateError as error:
        raise ConfigError(str(error)) from error


def secure(
    connected: socket.socket, certificates: Certificates, host: str, end: float
) -> TlsSocket:
    """Begin TLS, waiting for the node.

    Args:
        connected: to the node; closed where this fails.
        certificates: of the client.
        host: whom the node's certificate must name.
        end: when to give up, on the monotonic clock.

    Raises:
        AccessDenied: one end does not accept the other's certificate.
        DeadlineExceeded: it took longer.
        Unavailable: the connection broke, or the node speaks no TLS.
    """
    with _begun(connected, certificates, host) as made:
        shake_hands_until(made, end)
    return made


async def secure_soon(
    connected: socket.socket, certificates: Certificates, host: str, end: float
) -> TlsSocket:
    """As ``secure``, on the running loop."""
    with _begun(connected, certificates, host) as made:
        async with asyncio.timeout(end - time.monotonic()):
            await shake_hands(made)
    return made


@contextmanager
def _begun(connected: socket.socket, certificates: Certificates, host: str) -> Iterator[TlsSocket]:
    """A socket whose handshake the block does; closed where that fails."""
    try:
        made = wrap(connected, certificates.context(), host)
    except TlsError as error:
        raise lost(error) from error
    try:
        yield made
    except TimeoutError as error:
        made.close()
        raise _late() from error
    except OSError as error:
        made.close()
        raise lost(error) from error
    except BaseException:
        made.close()
        raise


def lost(error: Exception | None) -> KVStoreError:
    """What a caller is told of a connection that broke.

    Args:
        error: what broke it, if that is known.
    """
    if isinstance(error, TlsError) and error.denied:
        return AccessDenied(str(error))
    return Unavailable(f"the connection broke: {error}")


def _late() -> DeadlineExceeded:
    return DeadlineExceeded(
        "the node did not begin TLS in time; does it speak TLS at this address?"
    )
