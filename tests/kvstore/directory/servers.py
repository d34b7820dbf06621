"""Real Redis servers for tests: one, a cluster, one behind Sentinels."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis as blocking


def require_redis() -> None:
    """Skip where there is no redis-server; `make test` installs it where it can."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed, and could not be (apt install redis-server)")


def free_port() -> int:
    """A TCP port nobody listens on, nor on the one 10,000 above, which a cluster's node takes."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            if port >= 50_000:
                continue
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + 10_000))
                return port


class RedisServer:
    """A redis-server that keeps nothing on disk, unless told to.

    Args:
        directory: its own.
        options: of its command line, without dashes, over the defaults.
        tcp: listen on a TCP port of 127.0.0.1 as well.
        prefix: words before the command, as of another command that runs it.
        environment: variables over those of this process.
    """

    def __init__(
        self,
        directory: Path,
        *,
        tcp: bool = False,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.path = directory / "redis.sock"
        self.port = free_port() if tcp else 0
        self.options: dict[str, object] = {
            "port": self.port,
            "bind": "127.0.0.1",
            "unixsocket": self.path,
            "dir": directory,
            "save": "",
            "appendonly": "no",
            "logfile": directory / "log",
            "enable-debug-command": "yes",
        } | {name.replace("_", "-"): value for name, value in options.items()}
        self.password: str | None = None
        self._prefix = prefix
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """By way of its Unix socket."""
        return f"unix://{self.path}"

    def start(self) -> None:
        """Start, and wait until it answers."""
        command = [*self._prefix, "redis-server"]
        for name, value in self.options.items():
            command += [
                f"--{name}",
                *(map(str, value) if isinstance(value, list) else [str(value)]),
            ]
        environment = os.environ | self._environment
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        _wait(self.answers, self.log)

    def answers(self) -> bool:
        """Whether it does."""
        try:
            return bool(self.do("PING"))
        except (blocking.ConnectionError, blocking.TimeoutError):
            return False

    def log(self) -> str:
        """What it wrote."""
        path = self.directory / "log"
        return path.read_text() if path.exists() else ""

    def do(self, *words: Any, timeout: float = 10.0) -> Any:
        """Run one command on a connection of its own."""
        with blocking.Redis(
            unix_socket_path=str(self.path), socket_timeout=timeout, password=self.password
        ) as client:
            return client.execute_command(*words)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP for the time of the block."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def cluster(directory: Path, masters: int = 3) -> Iterator[list[RedisServer]]:
    """A Redis Cluster of masters without replicas."""
    servers = [
        RedisServer(
            directory / str(number),
            tcp=True,
            cluster_enabled="yes",
            cluster_node_timeout=1000,
            cluster_require_full_coverage="no",
        )
        for number in range(masters)
    ]
    try:
        for number, server in enumerate(servers):
            server.start()
            first, last = number * 16384 // masters, (number + 1) * 16384 // masters - 1
            server.do("CLUSTER", "ADDSLOTSRANGE", first, last)
            server.do("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in servers[1:]:
            server.do("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        for server in servers:
            _wait(lambda server=server: _covers(server, masters), server.log)
        yield servers
    finally:
        for server in servers:
            server.kill()


def _covers(server: RedisServer, masters: int) -> bool:
    state = server.do("CLUSTER", "INFO").decode().split("\r\n")
    wanted = {"cluster_state:ok", f"cluster_size:{masters}", "cluster_slots_ok:16384"}
    return wanted <= set(state)


class Sentinels:
    """A master, a replica of it, and Sentinels that watch them as ``pool``."""

    def __init__(self, directory: Path, sentinels: int = 3, password: str | None = None) -> None:
        self._password = password
        self.servers = [RedisServer(directory / f"redis{n}", tcp=True) for n in range(2)]
        for server in self.servers:
            server.options["repl-diskless-sync-delay"] = 0
        self._directory = directory
        self._ports = [free_port() for _ in range(sentinels)]
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """By way of the Sentinels."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"redis+sentinel://{hosts}/pool"

    def start(self) -> None:
        """Start all, and wait until each Sentinel knows of the others and of the replica."""
        for server in self.servers:
            server.start()
        self.servers[1].do("REPLICAOF", "127.0.0.1", self.servers[0].port)
        _wait(lambda: "up" in str(self.servers[1].do("INFO", "replication")), self.servers[1].log)
        for port in self._ports:
            path = self._directory / f"sentinel{port}.conf"
            word = self._password
            secrets = f"requirepass {word}\nsentinel sentinel-pass {word}\n" if word else ""
            path.write_text(
                f"{secrets}port {port}\nbind 127.0.0.1\ndir {self._directory}\n"
                f"logfile {self._directory}/sentinel{port}.log\n"
                f"sentinel monitor pool 127.0.0.1 {self.servers[0].port} 2\n"
                "sentinel down-after-milliseconds pool 500\n"
                "sentinel failover-timeout pool 2000\n"
            )
            command = ["redis-server", str(path), "--sentinel"]
            self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for port in self._ports:
            _wait(lambda port=port: self._ready(port), lambda: "the Sentinels don't meet")

    def _ready(self, port: int) -> bool:
        try:
            with blocking.Redis(
                port=port, password=self._password, decode_responses=True, protocol=2
            ) as client:
                answer = client.execute_command("INFO", "sentinel")
        except blocking.ConnectionError:
            return False
        state = answer.get("master0", {})
        return state.get("slaves") == 1 and state.get("sentinels") == len(self._ports)

    def kill(self) -> None:
        """All of them."""
        for process in self._processes:
            process.kill()
            process.wait()
        for server in self.servers:
            server.kill()


def run_all(servers: Sequence[RedisServer], *words: Any) -> list[Any]:
    """One command on each."""
    return [server.do(*words) for server in servers]


def _wait(condition: Callable[[], bool], log: Callable[[], str], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log()
        time.sleep(0.02)
