"""What one node counts of its directory. Plain numbers, touched only on its event loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvstore.metrics import Histogram


@dataclass(slots=True)
class Statistics:
    """Since the start of the node.

    Attributes:
        operations: what was asked of the directory and answered, by kind: ``reach``, ``publish``,
            ``beat``, ``join``, ``roster``, ``sweep``, ``probe``.
        failures: what was not, by kind and the code of the error.
        reach_seconds: how long the answered lookups took.
        refused: lookups given up at once, because the directory had not answered before.
        published: changes of this node's blocks that were told.
        withdrawn: locations of others that were found wrong and taken away.
        dropped: changes that were not told: no room left in the directory, or too many to keep
            while it was gone. A later advertisement makes good for them.
        advertisements: how often everything held was told anew.
        joins: how often the node became a member: more than once where its membership lapsed.
        swept: locations of dead members that this node has cleared away.
        queued: changes that wait to be told, now.
        members: other live members, now.
    heard_at: when the directory answered a sign of life last, on the event loop's clock.
    failing_since: when one was not answered first after that; None where the last one was.
    """

    operations: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    reach_seconds: Histogram = field(default_factory=Histogram)
    refused: int = 0
    published: int = 0
    withdrawn: int = 0
    dropped: int = 0
    advertisements: int = 0
    joins: int = 0
    swept: int = 0
    queued: int = 0
    members: int = 0
    heard_at: float | None = None
    failing_since: float | None = None
