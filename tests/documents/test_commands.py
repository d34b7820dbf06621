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

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _lines() -> list[str]:
    texts = [body for document in DOCUMENTS for body in FENCE.findall(document.read_text())]
    whole = [text.replace("\\\n", " ") for text in texts]
    lines = [line.partition(" #")[0].strip(" &") for text in whole for line in text.splitlines()]
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
