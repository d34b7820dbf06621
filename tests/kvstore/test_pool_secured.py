"""A pool with everything on: TLS between all, tokens, and a Redis with TLS and a user of its own.

The nodes are real processes, started as operators start them, and no secret of theirs is to be
seen anywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.config import Config
from kvstore.directory.scripts import COMMANDS
from kvstore.errors import AccessDenied
from tests.kvstore.directory.servers import RedisServer, free_port, require_redis
from tests.kvstore.peer import BLOCK, NAMESPACE, content
from tests.kvstore.watched import chain
from tests.running import make_config, wait_for
from tests.tls import Authority

HASHES = chain("secured", length=12)
SESSION, CONTROL, PASSWORD = "sesame-of-sessions", "sesame-of-control", "sesame-of-redis"
SECRETS = (SESSION, CONTROL, PASSWORD)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def redis(tmp_path: Path, authority: Authority) -> Iterator[RedisServer]:
    """One that talks TLS with certificates of both ends, and has a user for the pool."""
    require_redis()
    files = authority.files("redis")
    server = RedisServer(
        tmp_path / "redis",
        tcp=True,
        tls_cert_file=files.certificate,
        tls_key_file=files.key,
        tls_ca_cert_file=files.ca,
        tls_auth_clients="yes",
    )
    server.options |= {"tls-port": server.port, "port": 0}
    server.start()
    try:
        allowed = [f"+{command}" for command in COMMANDS.split()]
        server.do("ACL", "SETUSER", "kv", "on", f">{PASSWORD}", "~kvs:*", "-@all", *allowed)
        server.do("ACL", "SETUSER", "default", ">of-the-administrator")
        server.password = "of-the-administrator"
        yield server
    finally:
        server.kill()


class Served:
    """A node, by ``kvstore serve`` with a file and the environment."""

    def __init__(self, directory: Path, config: Config, port: int) -> None:
        self.url = f"tls://localhost:{port}"
        self.unix = f"unix://{config.listen.unix}"
        self.log = directory / "log"
        self.file = directory / "kvstore.toml"
        self.file.write_text(_toml(config.model_dump(mode="json", exclude_defaults=True)))
        self.environ = os.environ | {"KVSTORE_AUTH__CONTROL_TOKEN": CONTROL}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvstore", "serve", "-c", str(self.file)],
                env=self.environ,
                stderr=log,
            )

    @property
    def listens(self) -> bool:
        """Whether it does."""
        assert self.process.poll() is None, self.log.read_text()
        return "serving" in self.log.read_text()

    def command(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the same machine."""
        return subprocess.run(
            [sys.executable, "-m", "kvstore", *words],
            env=self.environ | environ,
            capture_output=True,
            text=True,
            timeout=50,
        )

    def stop(self) -> None:
        """SIGTERM, and wait."""
        self.process.terminate()
        self.process.wait(30)


def _toml(tree: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, values in tree.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_value(value)}" for key, value in values.items()]
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


class Secured:
    """Makes nodes of one pool."""

    def __init__(
        self, stack: ExitStack, directory: Path, authority: Authority, redis: RedisServer
    ) -> None:
        self._stack = stack
        self._directory = directory
        self._authority = authority
        self._redis = redis
        self.session_token = directory / "session-token"
        self.session_token.write_text(f"{SESSION}\n")
        self.password = directory / "redis-password"
        self.password.write_text(f"{PASSWORD}\n")

    def start(self, name: str, tls: dict[str, object] | None = None) -> Served:
        """A node; ``tls`` is its section, where that is another than the pool's."""
        mine = self._authority.files(f"{name}-redis")
        directory = self._directory / name
        directory.mkdir()
        port = free_port()
        config = make_config(
            directory,
            node={"name": name},
            listen={"tcp": f"127.0.0.1:{port}", "control": f"127.0.0.1:{free_port()}"},
            dram={"capacity": "32MiB"},
            tls=tls or self._authority.section(name, "certificate"),
            auth={"session_token_file": str(self.session_token)},
            cluster={
                "directory": f"rediss://kv@localhost:{self._redis.port}",
                "advertise": f"localhost:{port}",
                "password_file": str(self.password),
                "ca": str(mine.ca),
                "certificate": str(mine.certificate),
                "key": str(mine.key),
                "lookup_deadline": "500ms",
                "heartbeat": "500ms",
            },
            log={"level": "debug"},
        )
        served = Served(directory, config, port)
        self._stack.callback(served.stop)
        return served

    def client(self, node: Served, **given: Any) -> kvstore.Client:
        """A client with all that it needs."""
        files = self._authority.files("engine", hosts=("engine",))
        options: dict[str, Any] = {
            "token": SESSION,
            "ca": files.ca,
            "certificate": files.certificate,
            "key": files.key,
            "deadline": 10.0,
        }
        return self._stack.enter_context(kvstore.connect(node.url, NAMESPACE, **(options | given)))


@pytest.fixture
def secured(tmp_path: Path, authority: Authority, redis: RedisServer) -> Iterator[Secured]:
    with ExitStack() as stack:
        yield Secured(stack, tmp_path, authority, redis)


def test_nodes_read_from_each_other_over_tls_and_strangers_do_not(
    secured: Secured, tmp_path: Path
) -> None:
    one, other = secured.start("one"), secured.start("other")
    # In the same Redis, and with the right token; yet nobody of the pool vouches for it.
    stranger = secured.start("stranger", Authority(tmp_path / "others").section("stranger"))
    for node in (one, other, stranger):
        wait_for(lambda node=node: node.listens, 30)
    first, second = secured.client(one), secured.client(other)
    assert first.put(HASHES, [content(block) for block in HASHES]).stored == len(HASHES)
    wait_for(lambda: second.match(HASHES).blocks == len(HASHES), 30)
    assert set(second.match(HASHES).tiers) == {"remote"}
    into = [bytearray(BLOCK) for _ in HASHES]
    assert set(second.get(HASHES, into).tiers) == {"remote"}
    assert into == [content(block) for block in HASHES]
    third = secured._stack.enter_context(
        kvstore.connect(stranger.unix, NAMESPACE, token=SESSION, deadline=10.0)
    )
    wait_for(lambda: third.match(HASHES).blocks == len(HASHES), 30)  # so it is told
    got = third.get(HASHES, [bytearray(BLOCK) for _ in HASHES])
    assert (got.found, got.failure) == (0, None)


def test_no_secret_is_seen_anywhere(secured: Secured) -> None:
    node = secured.start("one")
    wait_for(lambda: node.listens, 30)
    client = secured.client(node)
    assert client.put(HASHES[:2], [content(block) for block in HASHES[:2]]).stored == 2
    with pytest.raises(AccessDenied) as refused:
        secured.client(node, token="sesame-of-a-guesser")
    # What operators get to see, in every form.
    shown = [
        node.command("config", "-c", str(node.file)),
        node.command("config", "-c", str(node.file), "--json"),
        node.command("status", "-c", str(node.file)),
        node.command("status", "-c", str(node.file), "--json"),
    ]
    assert [each.returncode for each in shown] == [0] * len(shown), shown
    assert all("**" in each.stdout for each in shown[:2])
    refusals = [
        node.command("status", "-c", str(node.file), KVSTORE_AUTH__CONTROL_TOKEN="sesame-guessed"),
        node.command("serve", "-c", str(node.file), "--set", f"auth.session_token={SESSION}"),
        node.command("serve", "-c", str(node.file), "--directory", f"redis://a:{PASSWORD}@b"),
        node.command("serve", "-c", str(node.file), KVSTORE_AUTH__CONTROL_TOKENS=CONTROL),
    ]
    assert all(each.returncode for each in refusals), refusals
    wait_for(lambda: "session opened" in node.log.read_text())
    assert "certificate=engine" in node.log.read_text()
    seen = [each.stdout + each.stderr for each in shown + refusals]
    seen += [node.log.read_text(), repr(refused.value), repr(client), repr(client.stats())]
    seen.append(Path(f"/proc/{node.process.pid}/cmdline").read_text())
    for text in seen:
        assert text
        assert not [secret for secret in (*SECRETS, "sesame-") if secret in text], text
