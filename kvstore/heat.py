"""How much a node is asked for at present, and how well it answers. Pure; time is passed in.

Rates fade with time: what happened a minute ago counts little more than a third of what happens
now.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Final

FADE_SECONDS: Final = 60.0
_NOTHING: Final = 1e-6
"""Blocks a second that are none: what is left of one after a quarter of an hour."""
_SHORTEST: Final = 0.2
"""Seconds between two looks, below which the first stands: rates of less would jump."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a node has counted since its start, in blocks.

    Attributes:
        asked: by match.
        held: of those, held here or by others.
        lookups: asked for by get.
        hits: of those, found.
        remote: of those, brought from others.
    """

    asked: int = 0
    held: int = 0
    lookups: int = 0
    hits: int = 0
    remote: int = 0

    def since(self, before: Counts) -> tuple[int, ...]:
        """What was counted after ``before``."""
        return (
            self.asked - before.asked,
            self.held - before.held,
            self.lookups - before.lookups,
            self.hits - before.hits,
            self.remote - before.remote,
        )


class Heat:
    """The rates of one node.

    Args:
        now: seconds on the node's clock.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._at = now
        self._before = Counts()
        self._rates = (0.0,) * len(self._before.since(self._before))

    def look(self, now: float, counts: Counts) -> None:
        """Take the node's counts into account, as they are now."""
        seconds = now - self._at
        if seconds < _SHORTEST:
            return
        # At first there is nothing to fade from: the mean since the start is the best guess.
        fading = exp(-seconds / FADE_SECONDS)
        kept = (1 - exp(-(self._at - self._began) / FADE_SECONDS)) * fading
        whole = 1 - exp(-(now - self._began) / FADE_SECONDS)
        self._rates = tuple(
            (rate * kept + done / seconds * (1 - fading)) / whole
            for rate, done in zip(self._rates, counts.since(self._before), strict=True)
        )
        self._at, self._before = now, counts

    def figures(self) -> dict[str, float]:
        """The rates by name.

        ``asked_per_second`` and ``lookups_per_second`` are blocks; ``hit_rate`` is the share of the
        blocks asked for by match that somebody holds, ``remote_share`` that of the blocks found by
        get that others brought. The last two are left out where there was nothing.
        """
        asked, held, lookups, hits, remote = self._rates
        found = {"asked_per_second": asked, "lookups_per_second": lookups}
        if asked > _NOTHING:
            found["hit_rate"] = held / asked
        if hits > _NOTHING:
            found["remote_share"] = remote / hits
        return found
