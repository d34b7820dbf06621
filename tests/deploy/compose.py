"""What docker-compose.yml says, and its services as plain processes on this machine.

What is in a container is mapped to here: paths to the volumes, binds and secrets of the service,
names and ports of services to ports of loopback, capacities to small ones. All else is taken as it
is: commands, environment, health checks, configuration files.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.kvstore.directory.servers import free_port
from tests.running import wait_for

ROOT: Final = Path(__file__).parents[2]
SMALL: Final = {"KVSTORE_DRAM__CAPACITY": "32MiB", "KVSTORE_SSD__CAPACITY": "32MiB"}

_ADDRESS: Final = re.compile(r"([A-Za-z0-9.-]+):(\d+)")
_DIRECTORY: Final = re.compile(r"redis://(\w+)@([\w-]+)")
_REDIS_PORT: Final = 6379


def composition() -> dict[str, Any]:
    """The file."""
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(composed, dict)
    return composed


def dockerfile() -> str:
    """The Dockerfile, with continued lines joined."""
    return (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def instruction(name: str) -> Any:
    """The list that an instruction of the Dockerfile ends with, the last one of that name."""
    [*_, found] = re.findall(rf"^{name}\b[^\[\n]*(\[.*\])$", dockerfile(), re.MULTILINE)
    return yaml.safe_load(found)


def image_environment() -> dict[str, str]:
    """What the Dockerfile sets with ENV."""
    pairs = [line.split()[1:] for line in dockerfile().splitlines() if line.startswith("ENV ")]
    return dict(pair.split("=", 1) for line in pairs for pair in line)


def is_node(service: Mapping[str, Any]) -> bool:
    """Whether a service is one of ours."""
    return "build" in service


class Topology:
    """The services as processes; those that are not ours or Redis are left out.

    Args:
        directory: where volumes and secrets are; a short path.
    """

    def __init__(self, directory: Path) -> None:
        self.services: dict[str, Any] = composition()["services"]
        self.nodes = [name for name, service in self.services.items() if is_node(service)]
        self.secrets = directory / "secrets"
        self._directory = directory
        self._ports: dict[tuple[str, int], int] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        subprocess.run([ROOT / "deploy/make-secrets", self.secrets], check=True)

    def port(self, service: str, port: int) -> int:
        """The port of loopback that stands for one of a service."""
        if (service, port) not in self._ports:
            self._ports[service, port] = free_port()
        return self._ports[service, port]

    def path(self, service: str, path: str) -> str:
        """Where a path in a service's container is on this machine."""
        for target, source in self._mounts(service).items():
            if path == target or path.startswith(f"{target}/"):
                return f"{source}{path.removeprefix(target)}"
        return path

    def environment(self, service: str) -> dict[str, str]:
        """What a node's process gets of variables of ours."""
        given = image_environment() | self.services[service]["environment"]
        return {key: SMALL.get(key) or self._value(service, text) for key, text in given.items()}

    def start(self, service: str) -> None:
        """Run the command of a service, and wait until its health check passes."""
        if is_node(self.services[service]):
            words, environment = self._node(service), self._surroundings(service)
            for volume in self._mounts(service).values():
                Path(volume).mkdir(parents=True, exist_ok=True)
        else:
            words, environment = self._redis(service), dict(os.environ)
        with (self._directory / f"{service}.log").open("wb") as log:
            self._running[service] = subprocess.Popen(
                words, env=environment, stdout=log, stderr=log
            )
        wait_for(lambda: self._alive(service) and self.healthy(service), 60)

    def healthy(self, service: str) -> bool:
        """Whether its health check says so."""
        check = self.services[service].get("healthcheck")
        if check is not None:
            kind, program, *rest = check["test"]
            words = [program, "-p", str(self.port(service, _REDIS_PORT)), *rest]
        else:
            kind, words = "CMD", self._ours(instruction("HEALTHCHECK"))
        assert kind == "CMD"
        ran = subprocess.run(
            words, env=self._surroundings(service), capture_output=True, timeout=60, check=False
        )
        return ran.returncode == 0

    def stop(self, service: str) -> int:
        """End it as the engine does; its exit status."""
        process = self._running.pop(service)
        process.send_signal(signal.SIGTERM)
        return process.wait(60)

    def kill(self) -> None:
        """End all that runs."""
        for process in self._running.values():
            process.kill()
            process.wait()
        self._running.clear()

    def log(self, service: str) -> str:
        """What it wrote."""
        return (self._directory / f"{service}.log").read_text(errors="replace")

    def _alive(self, service: str) -> bool:
        status = self._running[service].poll()
        assert status is None, f"{service} ended with {status}: {self.log(service)[-2000:]}"
        return True

    def _node(self, service: str) -> list[str]:
        return self._ours([*instruction("ENTRYPOINT"), *self.services[service]["command"]])

    @staticmethod
    def _ours(words: list[str]) -> list[str]:
        assert words[0] == "kvstore"
        return [sys.executable, "-m", "kvstore", *words[1:]]

    def _redis(self, service: str) -> list[str]:
        program, configuration = self.services[service]["command"]
        found = shutil.which(program)
        assert found is not None
        text = Path(self.path(service, configuration)).read_text()
        for secret in self.services[service]["secrets"]:
            text = text.replace(f"/run/secrets/{secret}", str(self.secrets / secret))
        mapped = self._directory / "redis.conf"
        mapped.write_text(text)
        port = self.port(service, _REDIS_PORT)
        here = {"port": port, "bind": "127.0.0.1", "dir": self._directory}
        return [found, str(mapped), *(str(w) for k, v in here.items() for w in (f"--{k}", v))]

    def _surroundings(self, service: str) -> dict[str, str]:
        kept = {key: text for key, text in os.environ.items() if not key.startswith("KVSTORE_")}
        ours = self.environment(service) if is_node(self.services[service]) else {}
        return kept | ours | {"PYTHONPATH": str(ROOT)}

    def _mounts(self, service: str) -> dict[str, str]:
        mounts = {"/run/secrets": str(self.secrets)}
        for volume in self.services[service]["volumes"]:
            source, target, *_ = volume.split(":")
            bind = source.startswith(".")
            mounts[target] = str(ROOT / source if bind else self._directory / source)
        return mounts

    def _value(self, service: str, text: str) -> str:
        if found := _DIRECTORY.fullmatch(text):
            user, name = found.groups()
            return f"redis://{user}@127.0.0.1:{self.port(name, _REDIS_PORT)}"
        if found := _ADDRESS.fullmatch(text):
            host, port = found[1], int(found[2])
            name = service if host == "0.0.0.0" else host
            assert name in self.services, f"no service is called {name}"
            return f"127.0.0.1:{self.port(name, port)}"
        return self.path(service, text)
