"""Control plane and metrics over TLS, as operators and Prometheus reach them."""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.config import TlsSection
from kvstore.control.client import ControlClient
from kvstore.errors import AccessDenied, KVStoreError, Unavailable
from kvstore.tls import reaching
from kvstore.units import Address, parse_address
from rdma.certificates import CertificateFiles, to_connect
from tests.kvstore.directory.servers import free_port
from tests.running import DaemonThread, daemon_process, make_config
from tests.tls import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def strict(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonThread]:
    config = make_config(
        tmp_path_factory.mktemp("strict"), tls=authority.section(clients="certificate")
    )
    with DaemonThread(config) as running:
        yield running


def address(daemon: DaemonThread) -> Address:
    assert daemon.daemon.control_url is not None
    assert daemon.daemon.control_url.startswith("https://")
    return parse_address(daemon.daemon.control_url.removeprefix("https://"))


def name_of(where: Address, context: ssl.SSLContext | None) -> str:
    async def asking() -> str:
        async with ControlClient(where, context=context, timeout=20) as node:
            return (await node.status()).name

    return asyncio.run(asking())


def context(files: CertificateFiles) -> ssl.SSLContext:
    return reaching(TlsSection(ca=files.ca, certificate=files.certificate, key=files.key))


def test_the_control_plane_answers(strict: DaemonThread, authority: Authority) -> None:
    found = name_of(address(strict), context(authority.files("operator")))
    assert found == strict.config.node.name


def refused(where: Address, context: ssl.SSLContext | None) -> KVStoreError:
    with pytest.raises(KVStoreError) as told:
        name_of(where, context)
    return told.value


def test_the_control_plane_refuses(
    strict: DaemonThread, authority: Authority, tmp_path: Path
) -> None:
    where, other = address(strict), Authority(tmp_path / "other")
    assert isinstance(refused(where, context(CertificateFiles(authority.ca))), KVStoreError)
    stranger = authority.files("stranger", signed_by=other)
    assert isinstance(refused(where, context(stranger)), KVStoreError)
    plain = refused(where, None)
    assert isinstance(plain, Unavailable)
    assert "it may speak TLS there" in str(plain)
    wrong = refused(where, context(other.files("operator")))
    assert isinstance(wrong, AccessDenied)
    assert "the other end's certificate is not trusted" in str(wrong)


def test_a_control_plane_without_tls_is_told_of(authority: Authority, tmp_path: Path) -> None:
    with DaemonThread(make_config(tmp_path)) as daemon:
        assert daemon.daemon.control_url is not None
        where = parse_address(daemon.daemon.control_url.removeprefix("http://"))
        told = refused(where, context(authority.files("operator")))
    assert isinstance(told, Unavailable)
    assert "does not speak TLS" in str(told)


def test_metrics_over_https(strict: DaemonThread, authority: Authority) -> None:
    url = strict.daemon.metrics_url
    assert url is not None
    assert url.startswith("https://")
    known = to_connect(authority.files("prometheus"))
    with urllib.request.urlopen(url, context=known, timeout=20) as answer:
        assert b"kvstore_" in answer.read()
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
        urllib.request.urlopen(url, context=to_connect(CertificateFiles(authority.ca)), timeout=20)


def test_certificates_of_operators_are_renewed(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    with DaemonThread(make_config(tmp_path / "state", tls=old.section())) as daemon:
        name_of(address(daemon), context(CertificateFiles(old.ca)))
        old.files("node", signed_by=new)
        name_of(address(daemon), context(CertificateFiles(new.ca)))
        assert isinstance(refused(address(daemon), context(CertificateFiles(old.ca))), AccessDenied)


@pytest.mark.parametrize("scheme", ["", "https://"])
def test_commands_reach_a_node_over_tls(
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scheme: str,
) -> None:
    control, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    config = make_config(
        tmp_path,
        listen={"control": control, "metrics": metrics, "tcp": "127.0.0.1:0"},
        tls=authority.section(clients="certificate"),
    )
    mine = authority.files("operator")
    with daemon_process(config):
        command = ["status", "--control", f"{scheme}{control}"]
        assert main.main(command) != 0
        assert "TLS" in capsys.readouterr().err
        for key, file in (("CA", mine.ca), ("CERTIFICATE", mine.certificate), ("KEY", mine.key)):
            monkeypatch.setenv(f"KVSTORE_TLS__{key}", str(file))
        assert main.main(command) == 0
        assert "tls://127.0.0.1:" in capsys.readouterr().out
        url = f"https://{metrics}/metrics"
        with urllib.request.urlopen(url, context=to_connect(mine), timeout=20) as answer:
            assert b"kvstore_" in answer.read()
