"""What the documents and the container files run is what `kvstore` takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from kvstore.cli.main import app
from kvstore.sources import load

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _lines() -> list[str]:
    texts = [body for document in DOCUMENTS for body in FENCE.findall(document.read_text())]
    lines = [line.partition(" #")[0].strip() for text in texts for line in text.splitlines()]
    return sorted({line for line in lines if line.startswith("kvstore ")})


def _parse(arguments: list[str]) -> None:
    """Let the command line's own parser see the arguments, without running the command."""
    group: Any = get_command(app)
    if arguments[0].startswith("-"):
        assert arguments[0] in {option for item in group.params for option in item.opts}
        return
    name, *rest = arguments
    assert name in group.commands, f"no such command: {name}"
    with group.commands[name].make_context(name, rest):
        pass


@pytest.mark.parametrize("line", _lines())
def test_command_lines_in_documents_parse(line: str) -> None:
    _parse(shlex.split(line)[1:])


def _compose() -> dict[str, Any]:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(composed, dict)
    return composed


def test_compose_starts_a_node_that_would_start() -> None:
    node = _compose()["services"]["kvstore"]
    _parse(node["command"])
    effective = load(environ=node["environment"] | _image_environment())
    assert effective.config.ssd.capacity
    assert all(
        origin.kind == "environment"
        for key, origin in effective.origins.items()
        if key.startswith(("dram.capacity", "ssd.capacity", "listen.metrics"))
    )


def test_compose_gives_the_node_time_and_memory() -> None:
    node = _compose()["services"]["kvstore"]
    config = load(environ=node["environment"] | _image_environment()).config
    assert float(node["stop_grace_period"].removesuffix("s")) > config.node.grace
    assert int(node["mem_limit"].removesuffix("g")) << 30 > config.dram.capacity


def test_compose_keeps_state_and_socket_in_volumes() -> None:
    composed = _compose()
    mounted = dict(volume.split(":") for volume in composed["services"]["kvstore"]["volumes"])
    assert set(mounted) == set(composed["volumes"])
    environment = _image_environment()
    assert environment["KVSTORE_NODE__STATE_DIRECTORY"] in mounted.values()
    assert str(Path(environment["KVSTORE_LISTEN__UNIX"]).parent) in mounted.values()


def _image_environment() -> dict[str, str]:
    """What the Dockerfile sets with ENV."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    pairs = [line.split()[1:] for line in text.splitlines() if line.startswith("ENV ")]
    return dict(pair.split("=", 1) for line in pairs for pair in line)


def test_image_copies_what_is_there() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [
        name
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(f"!{name}" in ignored for name in copied)


def test_image_checks_health_and_runs_with_commands_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text()
    health = re.search(r"HEALTHCHECK .* CMD (\[.*\])", text)
    run = re.search(r"^CMD (\[.*\])", text, re.MULTILINE)
    assert health is not None
    assert run is not None
    _parse(yaml.safe_load(health[1])[1:])
    _parse(yaml.safe_load(run[1]))


def test_prometheus_scrapes_the_port_that_is_listened_on() -> None:
    scraped = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    (target,) = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    service, _, port = target.partition(":")
    node = _compose()["services"][service]
    assert node["environment"]["KVSTORE_LISTEN__METRICS"].endswith(f":{port}")
