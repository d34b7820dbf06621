"""Whether what came back is what was put."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.payload import Payload


def wrong(
    payload: Payload,
    keys: Sequence[bytes],
    blocks: Sequence[memoryview],
    came: int,
    *,
    whole: bool = True,
) -> int:
    """How many of the blocks that came are not those of their keys.

    Args:
        payload: says what they are to be.
        keys: what was asked for.
        blocks: where it was to be copied to, wiped before.
        came: how many came, of which nobody says which.
        whole: look at every byte, not only at the stamps.
    """
    right = payload.equal if whole else payload.stamped
    good = sum(right(key, block) for key, block in zip(keys, blocks, strict=True))
    return max(0, came - good)
