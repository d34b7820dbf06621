"""What the security page tells people to type makes what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import kvstore
from kvstore.directory.scripts import COMMANDS
from kvstore.errors import AccessDenied
from kvstore.sources import load
from tests.running import DaemonThread, make_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_an_authority_and_a_certificate_are_two_commands(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    script = next(body for kind, body in FENCES if kind == "sh" and "openssl" in body)
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True, capture_output=True)
    files = {name: str(tmp_path / name) for name in ("ca.pem", "node-1.pem", "node-1.key")}
    section = {
        "certificate": files["node-1.pem"],
        "key": files["node-1.key"],
        "ca": files["ca.pem"],
        "clients": "certificate",
    }
    config = make_config(tmp_path / "node", listen={"tcp": "127.0.0.1:0"}, tls=section)
    namespace = kvstore.Namespace("model", "uint8", "raw", 4, 4096)
    with DaemonThread(config) as daemon:
        url = next(url for url in daemon.daemon.server.urls if url.startswith("tls://"))
        mine = {key: section[key] for key in ("ca", "certificate", "key")}
        with kvstore.connect(url, namespace, deadline=10.0, **mine) as client:
            assert client.match([bytes(32)]).failure is None
        with pytest.raises(AccessDenied):
            kvstore.connect(url, namespace, deadline=10.0, ca=section["ca"])


def test_the_configurations_are_complete(tmp_path: Path) -> None:
    for kind, body in FENCES:
        if kind == "toml":
            file = tmp_path / "kvstore.toml"
            file.write_text(body)
            assert load(file, environ={}).config.listen.tcp is not None


def test_the_user_of_redis_may_do_what_is_needed_and_no_more() -> None:
    line = next(
        line for _, body in FENCES for line in body.splitlines() if line.startswith("user kvstore ")
    )
    assert re.findall(r"\+(\w+)", line) == COMMANDS.split()
