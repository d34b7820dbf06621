"""What the commands that read a trace share: options, block sizes and the progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.cli.output import console

MAX_BLOCK_BYTES: Final = 1 << 30

TraceFile = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A request trace: one JSON object a line.")
]
BlockTokens = Annotated[
    int, typer.Option("--block-tokens", min=1, help="Tokens that one id of the trace stands for.")
]
BlockSize = Annotated[str, typer.Option("--block-size", help="Bytes of a block, such as 1MiB.")]
FirstRequests = Annotated[
    int | None, typer.Option("--requests", min=1, help="Only the first so many requests.")
]


def parse_block_size(
    text: str, option: str = "--block-size", at_most: int = MAX_BLOCK_BYTES
) -> int:
    """Bytes of a block, or of a batch of them, as `option` gives them.

    Raises:
        typer.BadParameter: it is no size, or not between 1 byte and `at_most`, usually 1 GiB.
    """
    from kvstore.units import format_size, parse_size

    try:
        size = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if not 1 <= size <= at_most:
        allowed = f"must be between 1 byte and {format_size(at_most)}"
        raise typer.BadParameter(allowed, param_hint=option)
    return size


@contextmanager
def progress_bar(total: int, label: str) -> Iterator[Callable[[int], object]]:
    """A progress bar on standard error where that is a terminal; yields what advances it."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    screen = console(errors=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
    ) as bars:
        task = bars.add_task(label, total=total)
        yield lambda done: bars.advance(task, done)
