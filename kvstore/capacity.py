"""Capacities for planning: blocks, bytes, or a share of a trace's unique blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvstore.errors import ConfigError
from kvstore.units import parse_size

_SHARE: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*%")
_BLOCKS: Final = re.compile(r"(\d+)\s*(?:blocks?)?", re.IGNORECASE)
_UNBOUNDED: Final = ("infinite", "inf", "unbounded")


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity whose number of blocks may depend on the trace; exactly one field is set.

    All three ``None`` stands for an infinite capacity.

    Attributes:
        share: fraction of the trace's unique blocks, 0 to 1 or above.
        blocks: a number of blocks.
        size: a number of bytes.
    """

    share: float | None = None
    blocks: int | None = None
    size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """Read ``5%`` (of unique blocks), ``4096`` or ``4096 blocks``, ``8GiB`` or ``infinite``.

        Raises:
            ConfigError: the text is none of these.
        """
        text = text.strip()
        if text.lower() in _UNBOUNDED:
            return cls()
        if found := _SHARE.fullmatch(text):
            return cls(share=float(found[1]) / 100)
        if found := _BLOCKS.fullmatch(text):
            return cls(blocks=int(found[1]))
        try:
            return cls(size=parse_size(text))
        except ValueError as error:
            raise ConfigError(
                f"expected a capacity such as 5%, 4096 blocks, 8GiB or infinite, not {text!r}"
            ) from error

    def in_blocks(self, unique_blocks: int, block_bytes: int) -> int | None:
        """Whole blocks that fit; ``None`` is infinite.

        Args:
            unique_blocks: what a share is of.
            block_bytes: bytes of one block.
        """
        if self.share is not None:
            return int(unique_blocks * self.share)
        if self.blocks is not None:
            return self.blocks
        return None if self.size is None else self.size // block_bytes
