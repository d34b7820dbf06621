"""What the documents tell people to do exists."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import grimp
import pytest

import kvstore
from kvstore.sources import keys, load, tenant_keys

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
NAMES = [str(document.relative_to(ROOT)) for document in DOCUMENTS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MODULE = re.compile(r"(?:kvstore|tiers|rdma|client)(?:\.[a-z_]+)+")
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)


def _fenced(document: Path, *languages: str) -> list[str]:
    return [body for kind, body in FENCE.findall(document.read_text()) if kind in languages]


def _drawn_arrows() -> set[tuple[str, str]]:
    """Arrows between two modules of ours, in all flowcharts of the architecture page."""
    arrows = set()
    for body in _fenced(ROOT / "docs/architecture.md", "mermaid"):
        labels = dict(re.findall(r"(\w+)\[([^\]]+)\]", body))
        for left, right in re.findall(r"(\w+)(?:\[[^\]]+\])? --> (\w+)", body):
            arrows.add((labels.get(left, left), labels.get(right, right)))
    return {arrow for arrow in arrows if all(map(MODULE.fullmatch, arrow))}


def test_arrows_that_are_drawn_are_imports() -> None:
    arrows = _drawn_arrows()
    assert len(arrows) > 30
    graph = grimp.build_graph("kvstore", "tiers", "rdma", "client", cache_dir=None)
    wrong = [
        (importer, imported)
        for importer, imported in arrows
        if not graph.find_shortest_chains(importer, imported, as_packages=True)
        or min(map(len, graph.find_shortest_chains(importer, imported, as_packages=True))) > 2
    ]
    assert not wrong


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text())
    missing = [
        link for link in links if "://" not in link and not (document.parent / link).exists()
    ]
    assert not missing


@every_document
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = " ".join([*re.findall(r"`([^`\n]+)`", document.read_text()), *_fenced(document, "sh")])
    named = re.findall(r"\bmake ([a-z][a-z-]*)", code)
    assert set(named) <= targets


def test_every_failure_of_a_pool_that_is_tried_is_described() -> None:
    named = re.findall(r"`(test_[a-z_]+)`", (ROOT / "docs/operations.md").read_text())
    files = (ROOT / "tests/kvstore/pool_failures").glob("test_*.py")
    tried = [name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())]
    assert sorted(named) == sorted(tried)


@every_document
def test_python_examples_are_python(document: Path) -> None:
    for body in _fenced(document, "python"):
        ast.parse(body)


@every_document
def test_toml_examples_are_toml(document: Path) -> None:
    for body in _fenced(document, "toml"):
        tomllib.loads(body)


@every_document
def test_nobody_is_sent_to_somebody_elses_package(document: Path) -> None:
    assert not re.search(r"pip install (-\S+ )*kvstore\b", document.read_text())


@every_document
def test_pictures_are_closed(document: Path) -> None:
    assert document.read_text().count("```") % 2 == 0


def test_every_key_of_the_configuration_is_described() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    described: list[str] = []
    section = ""
    for line in text.splitlines():
        if heading := re.match(r"### `\[([\w.]+)\]`", line):
            section = heading[1]
        elif section and (row := re.match(r"\| `(\w+)` \|", line)):
            described.append(f"{section}.{row[1]}")
    assert described == [*keys(), *tenant_keys("NAME")]


def test_toml_in_the_configuration_page_loads(tmp_path: Path) -> None:
    for body in _fenced(ROOT / "docs/configuration.md", "toml"):
        file = tmp_path / "kvstore.toml"
        file.write_text(body)
        load(file, environ={})


@every_document
def test_modules_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    named = set(re.findall(r"(?<![\w/.])(?:kvstore|tiers|rdma|client)(?:\.[a-z_]+)+", text))
    files = {name for name in named if name.endswith((".sock", ".toml", ".md"))}
    assert [name for name in named - files if not _is_there(name)] == []


def _is_there(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    public = name.removeprefix("kvstore.") in kvstore.__all__
    return public or path.is_dir() or path.with_suffix(".py").is_file()
