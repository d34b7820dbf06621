"""The namespaces that a node remembers over restarts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgpack
import pytest

from kvstore.catalog import MAX_NAMESPACES, Catalog
from kvstore.identity import Namespace

ONE = Namespace("model", "float32", "NHD", 16, 4096)
TWO = dataclasses.replace(ONE, dtype="bfloat16", tenant="somebody")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "namespaces.msgpack"


def opened(path: Path | None) -> Catalog:
    catalog = Catalog(path)
    catalog.open()
    return catalog


def test_namespaces_are_known_after_a_restart(path: Path) -> None:
    first = opened(path)
    assert not path.exists()
    for namespace in (ONE, TWO, ONE):
        first.add(namespace)
    again = opened(path)
    assert list(again) == [ONE, TWO]
    assert len(again) == 2
    assert again.find(TWO.fingerprint) == TWO
    assert again.find(bytes(32)) is None
    assert [one.name for one in path.parent.iterdir()] == [path.name], "a draft was left"


def test_file_is_written_only_for_what_is_new(path: Path) -> None:
    catalog = opened(path)
    catalog.add(ONE)
    path.unlink()
    catalog.add(ONE)
    assert not path.exists()
    catalog.add(TWO)
    assert list(opened(path)) == [ONE, TWO]


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\xc1", msgpack.packb({"a": 1}), msgpack.packb(5), b"\x92\x80", b"\xdd\xff\xff\xff\xff"],
)
def test_damaged_file_costs_names_alone(path: Path, damaged: bytes) -> None:
    path.write_bytes(damaged)
    catalog = opened(path)
    assert len(catalog) == 0
    catalog.add(ONE)
    assert list(opened(path)) == [ONE]


def test_damaged_entry_costs_itself_alone(path: Path) -> None:
    wrong = [{}, 7, None, dict(ONE.describe(), block_bytes=-1), dict(ONE.describe(), color="red")]
    path.write_bytes(msgpack.packb([wrong[0], ONE.describe(), *wrong[1:], TWO.describe()]))
    assert list(opened(path)) == [ONE, TWO]


def test_huge_file_is_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert len(opened(path)) == 0


def test_file_that_cannot_be_read_or_written_costs_names_alone(path: Path) -> None:
    path.mkdir()
    catalog = opened(path)
    catalog.add(ONE)
    assert catalog.find(ONE.fingerprint) == ONE
    path.rmdir()
    catalog.add(TWO)
    assert list(opened(path)) == [ONE, TWO]


def test_catalog_in_memory() -> None:
    catalog = opened(None)
    catalog.add(ONE)
    assert list(catalog) == [ONE]


def test_only_so_many_are_remembered() -> None:
    catalog = Catalog(None)
    many = [
        Namespace(f"model {number}", "float32", "test", 16, 4096)
        for number in range(MAX_NAMESPACES + 2)
    ]
    for namespace in many:
        catalog.add(namespace)
    assert len(catalog) == MAX_NAMESPACES
    assert catalog.find(many[1].fingerprint) is None
    assert catalog.find(many[2].fingerprint) == many[2]
