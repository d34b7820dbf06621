"""Authorities and certificates for tests, made when they are needed."""

from __future__ import annotations

import atexit
import datetime
import functools
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

import trustme

from rdma.certificates import CertificateFiles, to_connect, to_serve
from rdma.tls import TlsSocket, shake_hands_until, wrap

HERE = ("localhost", "127.0.0.1")


class Authority:
    """Signs certificates, and writes them to files of a directory of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._authority = trustme.CA()
        self.ca = directory / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def files(
        self,
        name: str = "node",
        hosts: tuple[str, ...] = HERE,
        *,
        expired: bool = False,
        signed_by: Authority | None = None,
    ) -> CertificateFiles:
        """A certificate and its key, beside the authority that the other end is to be signed by.

        Args:
            name: of the files, which are written anew where they are there; and of the holder.
            hosts: that the certificate is for.
            expired: whether it is no longer valid.
            signed_by: another authority than this one.
        """
        now = datetime.datetime.now(datetime.UTC)
        made = (signed_by or self)._authority.issue_cert(
            *hosts,
            common_name=name,
            not_before=now - datetime.timedelta(days=3),
            not_after=now + datetime.timedelta(days=-1 if expired else 1),
        )
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        # Renamed into place, as who renews certificates does.
        for path, content in (
            (key, made.private_key_pem.bytes()),
            (certificate, b"".join(each.bytes() for each in made.cert_chain_pems)),
        ):
            new = path.with_suffix(".new")
            new.write_bytes(content)
            new.rename(path)
        return CertificateFiles(self.ca, certificate, key)

    def section(self, name: str = "node", clients: str = "any") -> dict[str, object]:
        """A node's ``[tls]``."""
        files = self.files(name)
        return {
            "ca": str(files.ca),
            "certificate": str(files.certificate),
            "key": str(files.key),
            "clients": clients,
        }


@functools.cache
def _pair_files() -> CertificateFiles:
    directory = tempfile.mkdtemp(prefix="kvstore-tls-")
    atexit.register(shutil.rmtree, directory)
    return Authority(Path(directory)).files()


def shaken(client: socket.socket, server: socket.socket) -> tuple[TlsSocket, TlsSocket]:
    """Both ends of a connection, once TLS has shaken hands on it."""
    files = _pair_files()
    left = wrap(client, to_connect(files), "localhost")
    right = wrap(server, to_serve(files, demand=True))
    end = time.monotonic() + 20
    other = threading.Thread(target=shake_hands_until, args=(left, end))
    other.start()
    shake_hands_until(right, end)
    other.join()
    return left, right
