"""FIFO: the item longest here goes first, used or not. The baseline to measure others against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from tiers.links import Link
from tiers.policy import SingleQueue


class Fifo(SingleQueue):
    """First in, first out."""

    name: ClassVar[str] = "fifo"

    def touch(self, items: Iterable[Link]) -> None:
        """A use changes nothing."""
