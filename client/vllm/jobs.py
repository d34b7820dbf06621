"""What the scheduler's side of the connector asks of the workers' side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks of one request that are to be read from the store.

    Attributes:
        request: vLLM's id of the request.
        hashes: a chain of prefix hashes.
        blocks: the engine's ids of the blocks to fill, one for each hash.
        wait: seconds that blocks not stored yet are waited for; 0 where all were found.
    """

    request: str
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Full blocks of one request that are to be stored.

    The engine's blocks are pinned until every worker has said that it is done with the job.

    Attributes:
        number: identifies the job within its engine.
        request: vLLM's id of the request.
        parent: prefix hash of the block before the first.
        hashes: a chain of prefix hashes.
        blocks: the engine's ids of the blocks to read, one for each hash.
    """

    number: int
    request: str
    parent: bytes
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]
