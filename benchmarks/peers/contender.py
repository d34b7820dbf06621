"""Who takes part, and what is started for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

GIB = 1 << 30


class PeerFailed(Exception):
    """A store can't start, died, or did not answer; the message is what its row says."""


class Scene(StrEnum):
    """Where things are compared: only what stands in the same scene is.

    ``LOCAL``: payload is copied, on one host, by whatever is fastest there. ``TCP``: payload is
    copied over TCP between processes. ``VIEWS``: payload is seen where it lies. ``DISK``: payload
    is on disk.
    """

    LOCAL = "local"
    TCP = "tcp"
    VIEWS = "views"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Place:
    """What a contender has to work with.

    Attributes:
        directory: its own, empty, with a short path, on the disk to be measured.
        capacity: bytes of blocks that it is to hold in memory.
        disk: bytes of blocks that it is to hold on disk; 0: none.
        environments: the directory with an environment for each peer, as `scripts/setup-peers`
            makes it.
    """

    directory: Path
    capacity: int = 2 * GIB
    disk: int = 0
    environments: Path = Path(".venv-peers")


@dataclass(frozen=True, slots=True)
class Setup:
    """What its workers get, once its servers are up.

    Attributes:
        settings: for `Adapter.open`; ``block_bytes`` and ``capacity`` are added.
        environment: variables for the worker.
        prefix: what stands before the worker's command, such as ``ip netns exec peers``.
        python: the interpreter that runs the worker.
        pids: of its servers, by what they are.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: Sequence[str] = ()
    python: str = sys.executable
    pids: Mapping[str, int] = field(default_factory=dict)


Start = Callable[[Place], AbstractContextManager[Setup]]
"""Starts the servers of a contender, and stops them at the end of the block.

Raises:
    PeerFailed: why they can't be started.
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """A store in one of its modes.

    Attributes:
        key: short name, for the JSON and ``--peers``, such as ``mooncake-tcp``.
        title: what the table calls it.
        adapter: module of `benchmarks.peers.adapters`, or a full module name.
        kind: ours; a peer that ours is held against; or a limit of the machine.
        scenes: where it takes part.
        start: its servers.
        note: its configuration, said below the table.
        lacks: works that it can't do; ``share`` where no other client finds what one has put.
    """

    key: str
    title: str
    adapter: str
    kind: Literal["ours", "peer", "limit"]
    scenes: frozenset[Scene]
    start: Start
    note: str = ""
    lacks: frozenset[str] = frozenset()

    @property
    def family(self) -> str:
        """The store, whatever its mode: the key up to the first hyphen."""
        return self.key.partition("-")[0]

    @property
    def shared(self) -> bool:
        """Whether other clients find what one has put, as in a store of several engines."""
        return "share" not in self.lacks
