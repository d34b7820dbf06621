"""Contexts that follow their files: what is read, what is refused, and what stays in force."""

from __future__ import annotations

import functools
import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from rdma.certificates import CertificateFiles, Certificates, to_connect, to_serve
from rdma.errors import CertificateError
from tests.tls import Authority

serve = functools.partial(to_serve, demand=True)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def test_only_the_newest_tls_without_extras(authority: Authority) -> None:
    files = authority.files()
    for context in (to_connect(files), serve(files)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.options & ssl.OP_NO_COMPRESSION
    assert to_connect(files).check_hostname
    assert to_connect(files).verify_mode == serve(files).verify_mode == ssl.CERT_REQUIRED
    assert to_serve(files, demand=False).verify_mode == ssl.CERT_NONE
    assert serve(files).num_tickets == 0


def test_a_context_is_kept_while_its_files_are(authority: Authority) -> None:
    told: list[str] = []
    certificates = Certificates(authority.files(), serve, told.append)
    first = certificates.context()
    assert certificates.context() is first
    authority.files()
    second = certificates.context()
    assert second is not first
    assert certificates.context() is second
    assert told == ["the certificates have changed and are in force"]


def test_a_change_that_is_half_done_waits_for_the_other_half(authority: Authority) -> None:
    told: list[str] = []
    files, others = authority.files("one"), authority.files("two")
    assert files.certificate is not None
    assert files.key is not None
    assert others.certificate is not None
    assert others.key is not None
    certificates = Certificates(files, serve, told.append)
    first = certificates.context()
    os.replace(others.certificate, files.certificate)
    assert [certificates.context() for _ in range(3)] == [first] * 3
    assert len(told) == 1
    assert "stay in force" in told[0]
    assert "make no pair" in told[0]
    os.replace(others.key, files.key)
    assert certificates.context() is not first
    files.key.unlink()
    assert certificates.context() is certificates.context()
    assert [sentence.partition(":")[0] for sentence in told[1:]] == [
        "the certificates have changed and are in force",
        "the certificates read before stay in force",
    ]


@pytest.mark.parametrize("missing", ["ca", "certificate", "key"])
def test_a_file_that_is_not_there_is_named(authority: Authority, missing: str) -> None:
    path = getattr(authority.files(), missing)
    path.unlink()
    files = CertificateFiles(authority.ca, *(authority.ca.with_name(f"node{e}") for e in _ENDS))
    with pytest.raises(CertificateError, match=rf"{path} can't be read: No such file"):
        serve(files)


_ENDS = (".pem", ".key")


def test_what_makes_no_sense_is_refused(authority: Authority, tmp_path: Path) -> None:
    files = authority.files()
    empty = tmp_path / "empty"
    empty.touch()
    assert files.certificate is not None
    for wrong in (
        CertificateFiles(files.ca),
        CertificateFiles(None, files.certificate, files.key),
        CertificateFiles(files.ca, None, files.key),
        CertificateFiles(empty, files.certificate, files.key),
        CertificateFiles(files.ca, empty, files.key),
        CertificateFiles(files.ca, files.certificate, empty),
        CertificateFiles(files.ca, files.certificate),
        CertificateFiles(files.key, files.certificate, files.key),
    ):
        with pytest.raises(CertificateError):
            serve(wrong)


def test_certificate_and_key_may_be_one_file(authority: Authority, tmp_path: Path) -> None:
    files = authority.files()
    assert files.certificate is not None
    assert files.key is not None
    both = tmp_path / "both.pem"
    both.write_bytes(files.key.read_bytes() + files.certificate.read_bytes())
    serve(CertificateFiles(files.ca, both))
    to_connect(CertificateFiles(files.ca, both))


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(
    authority: Authority, tmp_path: Path
) -> None:
    files = authority.files()
    locked = tmp_path / "locked.key"
    assert files.key is not None
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(CertificateError, match="passphrase"):
        serve(CertificateFiles(files.ca, files.certificate, locked))
