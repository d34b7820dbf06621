"""Bringing blocks into the tier that is to be measured, and memory into use."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

import torch

from client.blocking import Client

HBM: Final = 1
"""The tier code of a block on a GPU."""

LONGEST: Final = 20.0


def wait_for_hbm(client: Client, names: Sequence[bytes]) -> float:
    """Ask for blocks until all of them lie on the GPU.

    Args:
        client: one that computes there.
        names: of the blocks; fewer than HBM has room for.

    Returns:
        Seconds after the first time.

    Raises:
        RuntimeError: that takes too long.
    """
    began = time.perf_counter()
    while time.perf_counter() < began + LONGEST:
        with client.view(names, device=True) as views:
            codes = views.codes
        if codes == bytes([HBM]) * len(names):
            return time.perf_counter() - began
        time.sleep(0.005)
    raise RuntimeError(f"not in HBM after {LONGEST:.0f} s, but in tiers {sorted(set(codes))}")


def flush(tier: str, control: str) -> None:
    """Empty a tier of a node.

    Args:
        tier: its name.
        control: the node's control address.

    Raises:
        RuntimeError: it could not be emptied.
    """
    command = [sys.executable, "-m", "kvstore", "flush", tier, "--control", control]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"flush {tier}: {done.stdout[-500:]}{done.stderr[-500:]}")


def settle() -> None:
    """Wait until the memory of the node that the process has mapped is registered with CUDA.

    Raises:
        RuntimeError: that takes too long.
    """
    if torch.cuda.is_available():
        from client.pinning import pinned_segments

        if not pinned_segments().wait(60):
            raise RuntimeError("the node's memory is not registered after 60 s")
