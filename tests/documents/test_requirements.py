"""The two files of pinned versions say the same, and have what the package asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _pinned(file: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {_name(name): version for name, version in pins}


def test_both_environments_have_the_same_versions() -> None:
    ordinary, vllm = _pinned("constraints.txt"), _pinned("vllm.txt")
    both = ordinary.keys() & vllm.keys()
    assert len(both) > 40
    assert {name for name in both if ordinary[name] != vllm[name]} == {"numpy"}


def test_the_environment_of_vllm_has_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {_name(each) for each in project["dependencies"]} <= _pinned("vllm.txt").keys()
