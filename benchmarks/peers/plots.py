"""Rate and latency against block size, a picture for each scene."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.report import quantity
from benchmarks.peers.row import FIGURES, Row
from kvstore.plot import COLOURS, MARKERS, save
from kvstore.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = (("local", "rate"), ("local", "p50"), ("tcp", "rate"), ("tcp", "p50"), ("views", "p50"))
"""Scenes and figures that get a picture."""
OURS, *PEERS = COLOURS
LIMIT = "#777777"


def draw(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Write the pictures that the rows allow, as SVG; return their paths.

    Args:
        rows: of any groups; those that vary the size of blocks are drawn.
        stem: path of the files, less scene, figure and ending.

    Raises:
        MissingExtra: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    written = []
    for scene, figure in DRAWN:
        own = [row for row in rows if row.labels.get("scene") == scene and _sized(row)]
        if len({row.labels["block_bytes"] for row in own}) > 1:
            path = stem.with_name(f"{stem.name}-{scene}-{figure}.svg")
            save(path, _Picture(own, scene, figure).draw)
            written.append(path)
    return written


def _sized(row: Row) -> bool:
    return "block_bytes" in row.labels


class _Picture:
    """Panels by work and count; a line for each contender."""

    def __init__(self, rows: Sequence[Row], scene: str, figure: str) -> None:
        self._rows = rows
        self._scene = scene
        self._figure = figure
        self._works = list(dict.fromkeys(row.labels["work"] for row in rows))
        self._counts = sorted({row.labels["count"] for row in rows})
        self._keys = list(dict.fromkeys(e.contender.key for row in rows for e in row.entries))

    def draw(self, figure: Figure) -> None:
        """Put the panels on an empty figure."""
        down, across = len(self._works), len(self._counts)
        figure.set_size_inches(5 * across, 3.4 * down + 0.6)
        panels = figure.subplots(down, across, squeeze=False, sharex=True)
        for work, line in zip(self._works, panels, strict=True):
            for count, axes in zip(self._counts, line, strict=True):
                self._panel(axes, work, count)
        info = FIGURES[self._figure]
        sense = "more" if info.more else "less"
        figure.suptitle(f"{info.title}, {self._scene} ({sense} is better)", fontweight="bold")
        handles = {
            label: handle
            for axes in panels.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)

    def _panel(self, axes: Axes, work: str, count: int) -> None:
        for number, key in enumerate(self._keys):
            points = self._points(work, count, key)
            if points:
                self._line(axes, number, key, points)
        axes.set_title(f"{work}, {count} a call" if count > 1 else f"{work}, single", loc="left")
        axes.set_xscale("log", base=2)
        if self._figure == "rate":
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
        sizes = sorted({row.labels["block_bytes"] for row in self._rows})
        axes.set_xticks(sizes, [format_size(size) for size in sizes])
        axes.yaxis.set_major_formatter(lambda value, _: quantity(value, self._figure))
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)

    def _line(self, axes: Axes, number: int, key: str, points: Sequence[tuple[int, float]]) -> None:
        kind = self._kind(key)
        sizes, values = zip(*points, strict=True)
        axes.plot(
            sizes,
            values,
            label=key,
            color={"ours": OURS, "limit": LIMIT}.get(kind, PEERS[number % len(PEERS)]),
            marker=MARKERS[number % len(MARKERS)],
            linestyle=":" if kind == "limit" else ("-", "--")[number // len(PEERS) % 2],
            linewidth=2.4 if kind == "ours" else 1.3,
        )

    def _points(self, work: str, count: int, key: str) -> list[tuple[int, float]]:
        return [
            (row.labels["block_bytes"], median)
            for row in self._rows
            if (row.labels["work"], row.labels["count"]) == (work, count)
            for each in row.entries
            if each.contender.key == key and (median := each.median(self._figure)) is not None
        ]

    def _kind(self, key: str) -> str:
        found = (e.contender for row in self._rows for e in row.entries)
        return next(each.kind for each in found if each.key == key)
