"""In which order a node hands over what it holds, the blocks of most worth first. Pure.

What was used last is worth most, as for the policy of DRAM. Blocks that another node has too come
after all others. Whatever is cut off at the end, what has been handed over is whole prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvstore.entry import Entry


def by_worth(entries: Sequence[Entry]) -> list[Entry]:
    """Sort blocks, those of most worth first; may be called in another thread.

    Args:
        entries: parents before their children where both were last used at the same time.
    """
    last_use = np.fromiter((entry.last_use for entry in entries), np.float64, len(entries))
    replica = np.fromiter((entry.replica for entry in entries), np.bool_, len(entries))
    order = np.argsort(-last_use, kind="stable")
    order = order[np.argsort(replica[order], kind="stable")]
    return [entries[at] for at in order.tolist()]


class Runs:
    """Blocks one after the other, cut into runs of which each block is the parent of the next.

    A block comes once, and after its parent. So what comes of the runs up to any one, is whole
    prefixes.
    """

    def __init__(self) -> None:
        self._passed: set[Entry] = set()

    def __len__(self) -> int:
        """Blocks handed out so far."""
        return len(self._passed)

    def forget(self, entries: Iterable[Entry]) -> None:
        """Have blocks handed out once more, as if they had not been."""
        self._passed.difference_update(entries)

    def of(self, entries: Iterable[Entry], most: int) -> Iterator[list[Entry]]:
        """Cut blocks into runs, without those handed out before and those that are gone.

        Args:
            entries: the one of most worth first.
            most: blocks of one run at most.
        """
        run: list[Entry] = []
        for entry in entries:
            for one in self._missing(entry):
                if run and (one.parent is not run[-1] or len(run) >= most):
                    yield run
                    run = []
                run.append(one)
        if run:
            yield run

    def _missing(self, entry: Entry) -> list[Entry]:
        """The block and those before it that have not been handed out, root first."""
        missing: list[Entry] = []
        if not entry.committed:
            return missing
        one: Entry | None = entry
        while one is not None and one not in self._passed:
            missing.append(one)
            one = one.parent
        missing.reverse()
        self._passed.update(missing)
        return missing
