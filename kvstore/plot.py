"""A picture of hit rate against capacity, for people who plan one.

Needs the ``plot`` extra (matplotlib). The picture is PNG or SVG, as the file's ending says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import ConfigError, MissingExtra
from kvstore.simulate import Outcome
from kvstore.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS: Final = (".png", ".svg")
"""File endings that name a format."""

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette: told apart with any colour vision."""
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: Final = ("-", "--", ":", "-.")


def check_plot(path: Path) -> None:
    """Find out before long work whether a plot can be made.

    Raises:
        ConfigError: the file's ending is neither ``.png`` nor ``.svg``, or its folder is missing.
        MissingExtra: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path}: a plot's file must end in .png or .svg")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtra.named("plot", "drawing a plot") from error


def plot_hit_rate(outcomes: Sequence[Outcome], path: Path, *, title: str, block_bytes: int) -> None:
    """Draw one line for each policy (and SSD capacity) and write the picture to ``path``.

    Infinite capacities become a horizontal line that no policy can exceed.

    Args:
        outcomes: what was simulated; all of one trace.
        path: the file, replaced if there.
        title: stands above the picture.
        block_bytes: bytes of a block, for the upper axis.

    Raises:
        MissingExtra: matplotlib is not installed.
        ConfigError: the file's ending names no format, its folder is missing, or there is nothing
            to draw.
        OSError: the file cannot be written.
    """
    check_plot(path)
    if not outcomes:
        raise ConfigError("there is nothing to plot: no capacity was simulated")
    save(path, lambda figure: _draw(figure, _Data(outcomes, block_bytes), title))


def save(path: Path, draw: Callable[[Figure], None]) -> None:
    """Write a picture that `draw` puts on an empty figure.

    Raises:
        MissingExtra: matplotlib is not installed.
        ConfigError: the file's ending names no format, or its folder is missing.
        OSError: the file cannot be written.
    """
    check_plot(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "kvstore"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
        draw(figure)
        figure.savefig(path, format=path.suffix.lower()[1:], metadata=_metadata(path))


def _metadata(path: Path) -> dict[str, str | None]:
    """No date in an SVG, so that the same outcomes give the same file."""
    return {"Date": None} if path.suffix.lower() == ".svg" else {}


class _Data:
    """Outcomes as lines: which capacity varies along the axis, and what tells lines apart."""

    def __init__(self, outcomes: Sequence[Outcome], block_bytes: int) -> None:
        self.unique = outcomes[0].unique
        self.block_bytes = block_bytes
        self.by_ssd = len({o.ssd_blocks for o in outcomes}) > len({o.dram_blocks for o in outcomes})
        self.policies = list(dict.fromkeys(outcome.policy for outcome in outcomes))
        self.others = list(dict.fromkeys(self._other(outcome) for outcome in outcomes))
        self.lines: dict[tuple[str, int | None], list[tuple[float, float]]] = {}
        self.ceiling: float | None = None
        for outcome in outcomes:
            self._add(outcome)

    @property
    def tier(self) -> str:
        """The tier whose capacity varies along the axis."""
        return "SSD" if self.by_ssd else "DRAM"

    @property
    def shares(self) -> list[float]:
        """Capacities along the axis, in percent of the unique blocks."""
        return sorted({share for line in self.lines.values() for share, _ in line})

    def dash(self, policy: str, other: int | None) -> int:
        """Which dashes a line has: by the other tier, or by policy so that lines show through."""
        if len(self.others) > 1:
            return self.others.index(other)
        return self.policies.index(policy)

    def label(self, policy: str, other: int | None) -> str:
        """What the legend calls a line."""
        if len(self.others) == 1 and not other:
            return policy.upper()
        tier = "DRAM" if self.by_ssd else "SSD"
        amount = "infinite" if other is None else format_size(other * self.block_bytes)
        return (
            f"{policy.upper()}, {tier} {amount}" if other != 0 else f"{policy.upper()}, no {tier}"
        )

    def _other(self, outcome: Outcome) -> int | None:
        return outcome.dram_blocks if self.by_ssd else outcome.ssd_blocks

    def _add(self, outcome: Outcome) -> None:
        capacity = outcome.ssd_blocks if self.by_ssd else outcome.dram_blocks
        rate = 100 * outcome.hit_rate
        if outcome.dram_blocks is None or capacity is None:
            self.ceiling = max(self.ceiling or 0.0, rate)
            return
        line = self.lines.setdefault((outcome.policy, self._other(outcome)), [])
        line.append((100 * capacity / self.unique, rate))


def _draw(figure: Figure, data: _Data, title: str) -> None:
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    for (policy, other), points in data.lines.items():
        kind = data.policies.index(policy)
        shares, rates = zip(*sorted(points), strict=True)
        axes.plot(
            shares,
            rates,
            label=data.label(policy, other),
            color=COLOURS[kind % len(COLOURS)],
            marker=MARKERS[kind % len(MARKERS)],
            linestyle=_DASHES[data.dash(policy, other) % len(_DASHES)],
            markersize=5,
            linewidth=1.6,
        )
    if data.ceiling is not None:
        label = f"infinite: {data.ceiling:.1f} %"
        axes.axhline(data.ceiling, color="#777777", linestyle=(0, (1, 2)), label=label)
    _scale(axes, data)
    axes.legend(loc="best", frameon=False)


def _scale(axes: Axes, data: _Data) -> None:
    """Axes with units; capacity on a logarithmic scale where it spans more than a factor of 8."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    shares = data.shares
    if shares and shares[0] > 0 and shares[-1] > 8 * shares[0]:
        axes.set_xscale("log")
    if 0 < len(shares) <= 9:
        axes.set_xticks(shares)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda share, _: f"{round(share, 2) or share:g} %")
    )
    axes.set_xlabel(f"{data.tier} capacity (% of the trace's {data.unique:,} unique blocks)")
    finish(axes)
    _size_axis(axes, data)


def finish(axes: Axes) -> None:
    """What all pictures of hit rates share: the upright axis, a grid, no frame."""
    axes.set_ylabel("hit rate (% of block accesses)")
    axes.set_ylim(bottom=0)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _size_axis(axes: Axes, data: _Data) -> None:
    """The same capacities in bytes, above the picture."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    upper = axes.secondary_xaxis("top")
    upper.set_xticks(axes.get_xticks())
    upper.xaxis.set_minor_locator(NullLocator())
    upper.xaxis.set_major_formatter(
        FuncFormatter(
            lambda share, _: format_size(round(share * data.unique / 100) * data.block_bytes)
        )
    )
    upper.tick_params(labelsize=8, colors="#777777")
    upper.spines["top"].set_visible(False)
    upper.set_xlabel(f"with blocks of {format_size(data.block_bytes)}", fontsize=8, color="#777777")
