"""What a node's ``[tls]`` comes to: contexts for those it serves, and for those it reaches."""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Self

import structlog

from kvstore.config import ClusterSection, Config, TlsSection
from kvstore.directory.address import PASSWORD_VARIABLE
from kvstore.directory.address import Address as DirectoryAddress
from kvstore.errors import ConfigError
from kvstore.units import Address
from rdma.certificates import CertificateFiles, Certificates, to_connect, to_serve
from rdma.errors import CertificateError

_log = structlog.get_logger(__name__)


def for_sessions(section: TlsSection) -> Certificates | None:
    """For the data path's listening socket; None where TLS is off.

    Raises:
        ConfigError: the files can't be used.
    """
    if not section.on:
        return None
    return _made(section, functools.partial(to_serve, demand=section.mutual), "sessions")


def for_operators(section: TlsSection, what: str, *protocols: str) -> ssl.SSLContext | None:
    """For a listening socket of asyncio's; None where TLS is off.

    Args:
        section: of the node.
        what: is listening, as the log says.
        protocols: what is spoken inside, in the words of ALPN.

    Raises:
        ConfigError: the files can't be used.
    """
    if not section.on:
        return None
    make = functools.partial(to_serve, demand=section.mutual, protocols=protocols)
    return _Renewed.of(_made(section, make, what))


def to_reach(section: TlsSection, what: str) -> Certificates | None:
    """For connections to others that speak TLS; None where there is neither CA nor certificate.

    Args:
        section: of the node, or of who asks it.
        what: is reached, as the log says.

    Raises:
        ConfigError: the files can't be used.
    """
    if not section.on and section.ca is None:
        return None
    return _made(section, to_connect, what)


def reaching(section: TlsSection) -> ssl.SSLContext:
    """For one connection to a control plane that is known to speak TLS.

    Raises:
        ConfigError: the files can't be used.
    """
    context = _made(section, to_connect, "control").context()
    context.set_alpn_protocols(["h2"])
    return context


def warnings(config: Config, *, rdma: bool) -> Iterator[str]:
    """What of a configuration is allowed and yet not safe, each in a sentence.

    Args:
        config: of the node.
        rdma: whether it has a device for it.
    """
    if config.cluster.directory:
        yield from _directory_warnings(config.cluster)
    listen, tls = config.listen, config.tls
    if tls.on:
        if rdma:
            yield "what goes by RDMA is not encrypted, only what is said about it"
        return
    for key, address, guarded in (
        ("tcp", listen.tcp, config.session_token is not None or config.tenant_token_files),
        ("control", listen.control, config.control_token is not None),
    ):
        if guarded and address is not None and not address.loopback:
            yield f"listen.{key} has no TLS: its token can be read, and used, by who is on the way"


def _directory_warnings(section: ClusterSection) -> Iterator[str]:
    where = DirectoryAddress.parse(section.directory)
    far = not all(Address(*host).loopback for host in where.hosts)
    if far and not where.tls and (section.password_file or os.environ.get(PASSWORD_VARIABLE)):
        yield "cluster.directory has no TLS (rediss://): its password can be read on the way"


def _made(
    section: TlsSection, make: Callable[[CertificateFiles], ssl.SSLContext], what: str
) -> Certificates:
    files = CertificateFiles(section.ca, section.certificate, section.key)
    try:
        return Certificates(files, make, functools.partial(_tell, what))
    except CertificateError as error:
        raise ConfigError(f"tls: {error}") from error


def _tell(what: str, sentence: str) -> None:
    _log.warning(sentence, used_for=what)


class _Renewed(ssl.SSLContext):
    """A context for asyncio's servers, which keep the one they are given.

    Each connection is made by the one in force then.
    """

    _certificates: Certificates

    @classmethod
    def of(cls, certificates: Certificates) -> Self:
        """One that follows ``certificates``."""
        made = cls(ssl.PROTOCOL_TLS_SERVER)
        made._certificates = certificates
        return made

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """As the context in force does it."""
        return self._certificates.context().wrap_bio(*arguments, **options)
