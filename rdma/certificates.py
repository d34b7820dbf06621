"""TLS contexts made of files, and made anew when the files change.

TLS 1.3 only, without compression or resumption: every connection is judged by the certificates in
force when it is made. One that is open stays so.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

from rdma.errors import CertificateError
from rdma.tls import TlsSocket

__all__ = ["CertificateFiles", "Certificates", "to_connect", "to_serve"]

_Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]
"""Inode, time of the last change and size of each file; None for one that is not there."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where the PEM files are.

    Attributes:
        ca: certificates of the authorities that the other end's must be signed by. Unset: those
            that the system trusts.
        certificate: this end's, with those between it and its authority, if any.
        key: of the certificate. Unset: it is in the same file.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


class Certificates:
    """A context of one use, as the files have it now.

    Args:
        files: what it is made of.
        make: makes it.
        tell: is told in a sentence when the files have changed: whether the new ones are in force.

    Raises:
        CertificateError: the files can't be used.
    """

    def __init__(
        self,
        files: CertificateFiles,
        make: Callable[[CertificateFiles], ssl.SSLContext],
        tell: Callable[[str], None],
    ) -> None:
        self._files = files
        self._make = make
        self._tell = tell
        self._seen = _signature(files)
        self._context = make(files)

    def context(self) -> ssl.SSLContext:
        """The context for the next connection.

        Files that have changed and can't be used leave the last one that could in force, which is
        told once for each change.
        """
        # Looked at before the files are read: a change meanwhile shows the next time.
        seen = _signature(self._files)
        if seen != self._seen:
            self._seen = seen
            try:
                self._context = self._make(self._files)
            except CertificateError as error:
                self._tell(f"the certificates read before stay in force: {error}")
            else:
                self._tell("the certificates have changed and are in force")
        return self._context


def to_connect(files: CertificateFiles) -> ssl.SSLContext:
    """A context for the end that connects; it checks the other's certificate and its name.

    Raises:
        CertificateError: the files can't be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _restrict(context)
    if files.ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _load_authorities(context, files.ca)
    _load_own(context, files)
    return context


def to_serve(
    files: CertificateFiles, *, demand: bool, protocols: tuple[str, ...] = ()
) -> ssl.SSLContext:
    """A context for the end that listens.

    Args:
        files: with a certificate.
        demand: whether the other end must have a certificate that ``files.ca`` has signed.
        protocols: what is spoken inside, in the words of ALPN.

    Raises:
        CertificateError: the files can't be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _restrict(context)
    context.num_tickets = 0
    if protocols:
        context.set_alpn_protocols(protocols)
    if files.certificate is None:
        raise CertificateError("who listens needs a certificate")
    _load_own(context, files)
    if demand:
        if files.ca is None:
            raise CertificateError("clients' certificates can't be checked without a CA")
        _load_authorities(context, files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _restrict(context: ssl.SSLContext) -> None:
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # An end that is cut off is noticed by the frames; and its answers can still be sent.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_IGNORE_UNEXPECTED_EOF


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    _check_readable(path)
    try:
        context.load_verify_locations(cafile=str(path))
    except (OSError, ValueError) as error:
        raise CertificateError(f"{path} has no certificates of authorities: {error}") from error
    if not context.cert_store_stats()["x509"]:
        raise CertificateError(f"{path} has no certificates of authorities")


def _load_own(context: ssl.SSLContext, files: CertificateFiles) -> None:
    if files.certificate is None:
        if files.key is not None:
            raise CertificateError(f"the key {files.key} is of no use without its certificate")
        return
    _check_readable(files.certificate)
    if files.key is not None:
        _check_readable(files.key)
    try:
        context.load_cert_chain(files.certificate, files.key, password=_refuse_passphrase)
    except (OSError, ValueError) as error:
        held = files.key or files.certificate
        raise CertificateError(
            f"{files.certificate} and the key in {held} make no pair: {error}"
        ) from error


def _refuse_passphrase() -> NoReturn:
    raise CertificateError("the key has a passphrase, which nobody is there to type")


def _check_readable(path: Path) -> None:
    """Name the file that can't be read, which the errors of ``ssl`` don't."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise CertificateError(f"{path} can't be read: {error.strerror}") from error


def _signature(files: CertificateFiles) -> _Signature:
    return tuple(_signature_of(path) for path in (files.ca, files.certificate, files.key))


def _signature_of(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, max(found.st_mtime_ns, found.st_ctime_ns), found.st_size
