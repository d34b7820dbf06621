"""Whose figures these are: versions of the peers, as their environments have them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "mooncake": ("mooncake-transfer-engine-non-cuda",),
    "lmcache": ("lmcache", "torch"),
    "nixl": ("nixl-cu12", "nixl"),
    "redis": ("redis", "hiredis"),
}
"""By environment, what of it the figures depend on."""


def versions(environments: Path) -> dict[str, str]:
    """Name and version of what is installed; peers that are not are left out."""
    found = {}
    for environment, wanted in PACKAGES.items():
        places = [str(each) for each in (environments / environment).glob("lib/*/site-packages")]
        for each in distributions(path=places) if places else ():
            name = each.metadata["Name"].lower()
            if name in wanted:
                found[name] = each.version
    return found | _redis_server()


def _redis_server() -> dict[str, str]:
    program = shutil.which("redis-server")
    if program is None:
        return {}
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    words = dict(word.split("=", 1) for word in said.stdout.split() if "=" in word)
    return {"redis-server": words.get("v", "unknown")}
