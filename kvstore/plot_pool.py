"""A picture of hit rate against the number of nodes, in a pool and without one.

Needs the ``plot`` extra, as `kvstore.plot` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.plot import COLOURS, MARKERS, finish, save
from kvstore.simulate import Configuration
from kvstore.simulate_pool import PoolOutcome
from kvstore.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Points = list[tuple[int, float, float]]


def plot_pool_hit_rate(
    outcomes: Sequence[PoolOutcome], path: Path, *, title: str, block_bytes: int
) -> None:
    """Draw two lines for each policy and capacity: with one pool, and with isolated nodes.

    Args:
        outcomes: what was simulated; all of one trace.
        path: the file, replaced if there.
        title: stands above the picture.
        block_bytes: bytes of a block, for the legend.

    Raises:
        MissingExtra: matplotlib is not installed.
        ConfigError: the file's ending names no format, its folder is missing, or there is nothing
            to draw.
        OSError: the file cannot be written.
    """
    if not outcomes:
        raise ConfigError("there is nothing to plot: no pool was simulated")
    lines: dict[Configuration, _Points] = {}
    for outcome in outcomes:
        one = outcome.configuration
        point = (one.nodes, 100 * outcome.hit_rate, 100 * outcome.isolated_hit_rate)
        lines.setdefault(one.total, []).append(point)
    save(path, lambda figure: _draw(figure, lines, title, block_bytes))


def _draw(
    figure: Figure, lines: dict[Configuration, _Points], title: str, block_bytes: int
) -> None:
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    for kind, (total, points) in enumerate(lines.items()):
        nodes, pooled, isolated = zip(*sorted(points), strict=True)
        for rates, word, dashes in ((pooled, "pool", "-"), (isolated, "isolated", "--")):
            axes.plot(
                nodes,
                rates,
                label=f"{word}, {_label(total, block_bytes)}",
                color=COLOURS[kind % len(COLOURS)],
                marker=MARKERS[kind % len(MARKERS)],
                linestyle=dashes,
                markersize=5,
                linewidth=1.6,
            )
    _scale(axes, sorted({point[0] for points in lines.values() for point in points}))
    finish(axes)
    axes.legend(loc="best", frameon=False)


def _label(total: Configuration, block_bytes: int) -> str:
    sizes = [("DRAM", total.dram_blocks), ("SSD", total.ssd_blocks)]
    words = [total.policy.upper()] if total.dram_blocks is not None else []
    for tier, blocks in sizes:
        if blocks != 0:
            size = "infinite" if blocks is None else format_size(blocks * block_bytes)
            words.append(f"{tier} {size}")
    return ", ".join(words)


def _scale(axes: Axes, nodes: Sequence[int]) -> None:
    """Nodes on a logarithmic scale, each number that was simulated marked while they are few."""
    from matplotlib.ticker import NullLocator, ScalarFormatter

    if nodes[-1] > 8 * nodes[0]:
        axes.set_xscale("log", base=2)
    if len(nodes) <= 12:
        axes.set_xticks(nodes)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("nodes, which share the capacity evenly")
