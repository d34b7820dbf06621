"""Tries an installed package that has no extras: run by scripts/check-wheel, outside a checkout."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import kvstore
from kvstore.errors import MissingExtra
from kvstore.plot import plot_hit_rate

EXTRAS: Final = ("torch", "transformers", "matplotlib", "vllm")
IN_AN_ENGINE: Final = {
    f"client.vllm.{name}" for name in ("connector", "publishing", "routers", "statistics")
}
"""What only vLLM itself imports."""
ON_A_GPU: Final = {f"client.paged_{name}" for name in ("by_layer", "cuda", "device", "kernels")}
"""What needs Triton."""
IN_TORCH: Final = {f"client.transformers_{name}" for name in ("attention", "sequence")}
"""What torch's tensors, or classes of Transformers, are the base of."""


def main() -> None:
    """Each check ends the process with what is wrong."""
    _expect(not any(map(find_spec, EXTRAS)), "an extra is installed: this proves nothing")
    _every_module_imports()
    for name in kvstore.__all__:
        getattr(kvstore, name)
    _types_are_shipped()
    _missing_extras_are_named()
    _a_file_in_the_way_is_named()


def _expect(holds: bool, complaint: str) -> None:
    if not holds:
        sys.exit(f"installed package: {complaint}")


def _every_module_imports() -> None:
    for package in ("kvstore", "tiers", "rdma", "client"):
        home = importlib.import_module(package)
        for module in pkgutil.walk_packages(home.__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                _import(module.name)
    _expect(not set(EXTRAS) & set(sys.modules), "an extra was imported")


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        _expect(_lacks(name, error.name), f"{name} does not import: {error}")
    else:
        needy = IN_AN_ENGINE | ON_A_GPU | IN_TORCH
        _expect(name not in needy, f"{name} imports without what it needs")


def _lacks(name: str, missing: str | None) -> bool:
    """Whether a module may do without being imported where that is missing."""
    return (
        (name in IN_AN_ENGINE and missing == "vllm")
        or (name in ON_A_GPU and missing == "triton")
        or (name in IN_TORCH and missing in ("torch", "transformers"))
    )


def _types_are_shipped() -> None:
    for package in ("kvstore", "tiers", "rdma", "client"):
        marker = Path(str(importlib.import_module(package).__file__)).parent / "py.typed"
        _expect(marker.is_file(), f"{package} ships no py.typed")


def _missing_extras_are_named() -> None:
    attempts: dict[str, Callable[[], Any]] = {
        "plot": lambda: plot_hit_rate([], Path("plot.png"), title="", block_bytes=1),
        "transformers": lambda: kvstore.PrefixCache(None, None),
    }
    for extra, attempt in attempts.items():
        try:
            attempt()
        except MissingExtra as error:
            _expect(f"tiered-kvstore[{extra}]" in str(error), f"{extra} is not named: {error}")
        else:
            _expect(False, f"{extra} was not missed")


def _a_file_in_the_way_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        intruder = Path(folder).resolve() / "client.py"
        intruder.touch()
        done = subprocess.run(
            [sys.executable, "-c", "import kvstore; kvstore.connect"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        _expect(done.returncode != 0, "a client.py in the way was not noticed")
        _expect(str(intruder) in done.stderr, f"the file in the way is not named: {done.stderr}")


main()
