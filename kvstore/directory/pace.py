"""How often a node does what it does with its directory, and how long it waits. In seconds."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.directory.scripts import MOST_LEASE
from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pace:
    """All times of a directory in Redis.

    Attributes:
        heartbeat: between one sign of life and the next.
        patience: how long anything in the background may take.
        flush: how long changes gather before they are told.
        refresh: between one telling of everything and the next, which makes good for what Redis
            lost unnoticed, as it may in a failover.
        full: how long after Redis was found full everything is told again; doubles up to
            ``refresh``.
        sweep: between one look whether locations of dead members are to be swept and the next.
        grace: how long nobody must have died before a sweep: who was only held up is back by then.

    Raises:
        ConfigError: the lease would be longer than 60 s.
    """

    heartbeat: float = 1.0
    patience: float = 2.0
    flush: float = 0.01
    refresh: float = 600.0
    full: float = 5.0
    sweep: float = 60.0
    grace: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.lease <= MOST_LEASE:
            raise ConfigError(f"a heartbeat of {self.heartbeat} s is not above 0 and up to 20 s")

    @property
    def lease(self) -> int:
        """Milliseconds after which a silent member is dead."""
        return round(3000 * self.heartbeat)
