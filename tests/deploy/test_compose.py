"""docker-compose.yml: what it says is whole, and its nodes and their directory work together.

No Docker engine runs where these tests do, so the same services run as plain processes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvstore
from kvstore.directory.scripts import COMMANDS
from kvstore.errors import AccessDenied
from kvstore.sources import load
from tests.deploy.compose import ROOT, Topology, composition, image_environment, is_node
from tests.kvstore.directory.servers import require_redis
from tests.kvstore.peer import BLOCK, NAMESPACE, content
from tests.kvstore.watched import chain
from tests.running import wait_for

HASHES = chain("composed", length=24)


def nodes() -> dict[str, Any]:
    return {name: one for name, one in composition()["services"].items() if is_node(one)}


def compose_program() -> list[str]:
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]):
            ran = subprocess.run([*words, "version"], capture_output=True, check=False)
            if ran.returncode == 0:
                return words
    pytest.skip("Docker Compose is not installed")


def test_docker_compose_takes_the_file(tmp_path: Path) -> None:
    program = compose_program()
    for name in ("docker-compose.yml", "Dockerfile", "deploy"):
        source = ROOT / name
        copy: Any = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    subprocess.run([tmp_path / "deploy/make-secrets"], check=True)
    ran = subprocess.run(
        [*program, "config", "--quiet"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_what_services_name_is_there() -> None:
    composed = composition()
    services = composed["services"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        assert set(service.get("secrets", ())) <= composed["secrets"].keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            there = (ROOT / source).exists() if source.startswith("./") else False
            assert there or source in composed["volumes"]
    assert {"redis", "prometheus", "grafana"} <= services.keys()
    assert len(nodes()) == 3


def test_nothing_is_reachable_from_other_machines() -> None:
    for service in composition()["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_secrets_are_made_kept_and_not_committed(tmp_path: Path) -> None:
    def make() -> dict[str, str]:
        subprocess.run([ROOT / "deploy/make-secrets", tmp_path / "secrets"], check=True)
        return {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}

    made = make()
    declared = composition()["secrets"].values()
    assert {Path(secret["file"]).name for secret in declared} == made.keys()
    assert {Path(secret["file"]).parent for secret in declared} == {Path("deploy/secrets")}
    assert "/deploy/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    drawn = [text for name, text in made.items() if name != "redis-users"]
    assert len(set(drawn)) == len(drawn) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", text) for text in drawn)
    assert made["redis-password"] not in made["redis-users"]
    assert make() == made
    user = made["redis-users"].splitlines()[1].split()
    assert user[:3] == ["user", "kvstore", "on"]
    assert {f"+{command}" for command in COMMANDS.split()} == {w for w in user if w[0] == "+"}


@pytest.mark.parametrize("name", nodes())
def test_a_node_has_time_memory_and_volumes(name: str, tmp_path: Path) -> None:
    node, environment = nodes()[name], image_environment()
    files = {
        key: str(tmp_path / Path(text).name)
        for key, text in node["environment"].items()
        if text.startswith("/run/secrets/")
    }
    for path in files.values():
        Path(path).write_text("secret\n")
    config = load(environ=environment | node["environment"] | files).config
    assert config.node.name == name
    assert float(node["stop_grace_period"].removesuffix("s")) > config.node.grace
    assert int(node["mem_limit"].removesuffix("g")) << 30 > config.dram.capacity
    assert config.ssd.capacity
    assert config.session_token is not None
    assert config.control_token is not None
    mounted = [volume.split(":")[1] for volume in node["volumes"]]
    assert environment["KVSTORE_NODE__STATE_DIRECTORY"] in mounted
    assert str(Path(environment["KVSTORE_LISTEN__UNIX"]).parent) in mounted
    for other, service in nodes().items():
        shared = set(service["volumes"]) & set(node["volumes"])
        assert other == name or not shared


def test_the_directory_loses_nothing_that_counts_when_it_is_full() -> None:
    lines = (ROOT / "deploy/redis.conf").read_text().splitlines()
    given = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert given["maxmemory-policy"] == "noeviction"
    assert given["maxmemory"] == "1gb"
    assert int(composition()["services"]["redis"]["mem_limit"].removesuffix("g")) > 1


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    require_redis()
    running = Topology(tmp_path_factory.mktemp("pool"))
    try:
        for service in ("redis", *running.nodes):
            running.start(service)
        yield running
    finally:
        running.kill()


def connect(topology: Topology, node: str, token: str | None) -> kvstore.Client:
    unix = topology.environment(node)["KVSTORE_LISTEN__UNIX"]
    return kvstore.connect(f"unix://{unix}", NAMESPACE, deadline=10.0, token=token)


def reads_all(client: kvstore.Client, into: list[bytearray]) -> bool:
    """The lookup deadline of the file is short and this machine may be busy: so not at once."""
    found = client.match(HASHES).blocks
    return found == len(HASHES) == client.get(HASHES, into).found


@pytest.mark.timeout(180)
def test_what_one_node_of_the_file_holds_another_serves(topology: Topology) -> None:
    token = (topology.secrets / "session-token").read_text()
    first, *_, last = topology.nodes
    with connect(topology, first, token) as one, connect(topology, last, token) as other:
        assert one.put(HASHES, [content(block) for block in HASHES]).stored == len(HASHES)
        into = [bytearray(BLOCK) for _ in HASHES]
        wait_for(lambda: reads_all(other, into), 30)
        assert into == [content(block) for block in HASHES]
    with pytest.raises(AccessDenied):
        connect(topology, first, None)


@pytest.mark.timeout(180)
def test_prometheus_finds_every_node_where_its_file_says(topology: Topology) -> None:
    [job] = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"]
    [relabelling], [static] = job["relabel_configs"], job["static_configs"]
    assert (relabelling["source_labels"], relabelling["target_label"]) == (["__address__"], "node")
    seen = []
    for target in static["targets"]:
        found = re.fullmatch(relabelling["regex"], target)
        assert found is not None
        seen.append(found[1])
        port = topology.port(found[1], int(target.rpartition(":")[2]))

        def scrape(port: int = port) -> str:
            url = f"http://127.0.0.1:{port}{job.get('metrics_path', '/metrics')}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return str(answer.read().decode())

        assert f'node="{found[1]}"' in scrape()
        wait_for(lambda: "kvstore_directory_members 2.0" in scrape(), 30)
    assert seen == topology.nodes


@pytest.mark.timeout(180)
def test_redis_lets_in_who_has_the_password_and_to_what_is_needed(topology: Topology) -> None:
    import redis

    port = topology.port("redis", 6379)
    password = (topology.secrets / "redis-password").read_text()
    with redis.Redis(port=port) as stranger:
        assert stranger.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            stranger.get("kvs:{kvstore}:number")
    with redis.Redis(port=port, username="kvstore", password=password) as node:
        assert int(node.get("kvs:{kvstore}:number") or 0) > 0
        for words in (("FLUSHALL",), ("GET", "others"), ("CONFIG", "GET", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                node.execute_command(*words)


@pytest.mark.timeout(180)
def test_all_are_healthy_and_end_in_order(topology: Topology) -> None:
    assert all(map(topology.healthy, ("redis", *topology.nodes)))
    assert [topology.stop(service) for service in (*topology.nodes, "redis")] == [0, 0, 0, 0]
