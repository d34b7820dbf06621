"""How answers are printed: JSON for scripts, tables for people."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvstore.control.interface import TierReport

PIPED_WIDTH: Final = 400
"""Columns when the output is no terminal: wide enough that no cell is cut."""
HASH_DIGITS: Final = 16
"""Hex digits of a hash shown in tables; enough to name the block in another command."""
_GAP: Final = 2
"""Columns of the screen between two columns of a table."""


def plain(value: Any) -> Any:
    """``value`` in the types of JSON: dataclasses as objects, bytes as hex."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def print_json(value: object, *, compact: bool = False) -> None:
    """One JSON document on standard output; ``compact`` keeps it on one line."""
    sys.stdout.write(json.dumps(plain(value), indent=None if compact else 2) + "\n")
    sys.stdout.flush()


def console(*, errors: bool = False) -> "Console":
    """A rich console without colours or cut cells where it does not write to a terminal."""
    from rich.console import Console

    stream = sys.stderr if errors else sys.stdout
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, spare: Sequence[str] = ()
) -> "Table":
    """A plain table.

    Args:
        columns: names; those that begin with ``>`` are aligned to the right. Only the last one may
            take more than one line.
        rows: their cells.
        spare: columns to leave out, in this order, until the rest fits the terminal's width; a line
            below the table says so.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    cells = [[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows]
    names = [name.removeprefix(">") for name in columns]
    gone = _left_out(names, cells, spare, console().width)
    kept = [at for at, name in enumerate(names) if name not in gone]
    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    if gone or not cells:
        made.caption = f"no room for {', '.join(gone)}; --json has all" if gone else "none"
        made.caption_justify = "left"
    for at in kept:
        justify: Any = "right" if columns[at].startswith(">") else "left"
        whole = at != kept[-1] or not sys.stdout.isatty()
        made.add_column(names[at], justify=justify, no_wrap=whole, overflow="fold")
    for row in cells:
        made.add_row(*(row[at] for at in kept))
    return made


def _left_out(
    names: Sequence[str], rows: "Sequence[Sequence[Text]]", spare: Sequence[str], room: int
) -> list[str]:
    widths = {
        name: max([len(name), *(row[at].cell_len for row in rows)]) for at, name in enumerate(names)
    }
    gone: list[str] = []
    for name in spare:
        if sum(widths.values()) + _GAP * len(widths) <= room:
            break
        del widths[name]
        gone.append(name)
    return gone


def short(hash: bytes) -> str:
    """A hash as tables show it."""
    return hash.hex()[:HASH_DIGITS] or "-"


def state(text: str, *, good: bool) -> object:
    """A word that is green or red where colours are shown."""
    from rich.text import Text

    return Text(text, style="green" if good else "bold red")


def share(part: int, whole: int) -> str:
    """A percentage, or a dash where there is no whole."""
    return f"{part / whole:.1%}" if whole else "-"


def counted(number: int, noun: str) -> str:
    """``1 block``, ``1,200 blocks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def tier_table(tiers: "Sequence[TierReport]", *, details: bool = True) -> "Table":
    """A table of tiers, as ``status`` and, without ``details``, ``top`` show it."""
    from kvstore.units import format_size

    rows = [
        (
            tier.name,
            format_size(tier.used),
            format_size(tier.capacity),
            share(tier.used, tier.capacity),
            tier.blocks,
            share(tier.lost, tier.capacity),
            state(tier.state, good=tier.state == "ok"),
            " ".join(f"{key}={value}" for key, value in sorted(tier.details.items())),
        )
        for tier in tiers
    ]
    columns = ("TIER", ">USED", ">CAPACITY", ">FULL", ">BLOCKS", ">OVERHEAD", "STATE", "DETAILS")
    shown = len(columns) if details else len(columns) - 1
    return table(columns[:shown], [row[:shown] for row in rows])
