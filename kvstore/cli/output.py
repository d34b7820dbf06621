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

    from kvstore.control.interface import TierReport

PIPED_WIDTH: Final = 400
"""Columns when the output is no terminal: wide enough that no cell is cut."""
HASH_DIGITS: Final = 16
"""Hex digits of a hash shown in tables; enough to name the block in another command."""


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


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> "Table":
    """A plain table; columns whose name begins with ``>`` are aligned to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        justify: Any = "right" if name.startswith(">") else "left"
        made.add_column(name.removeprefix(">"), justify=justify, no_wrap=not sys.stdout.isatty())
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


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


def tier_table(tiers: "Sequence[TierReport]") -> "Table":
    """A table of tiers, as ``status`` and ``top`` show it."""
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
    return table(
        ("TIER", ">USED", ">CAPACITY", ">FULL", ">BLOCKS", ">LOST", "STATE", "DETAILS"), rows
    )
