"""Entry point of the ``kvstore`` command: assembles the sub-commands, turns errors into statuses.

Exit statuses: 0 done, or the answer is yes; 1 failed, or the answer is no (a prefix is not held as
a whole, a block is corrupt, a check fails); 2 wrong usage or configuration; 3 the daemon is not
there or does not answer; 4 some nodes of the pool did not answer; 130 interrupted.
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from inspect import cleandoc
from io import TextIOWrapper
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, Unavailable

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_THERE: Final = 3
INTERRUPTED: Final = 130

_GROUPS: Final = (
    "serving",
    "overview",
    "cluster",
    "blocks",
    "changes",
    "draining",
    "events",
    "diagnosis",
    "bench",
    "replay",
    "simulate",
)

_TOLD: Final = {
    "bench": ("URL and control address", "--url and --control"),
    "replay": ("URL", "--url or KVSTORE_URL"),
}
"""What names the node, and the options for it, where that isn't the control address alone."""

app = typer.Typer(
    name="kvstore",
    help="Tiered KV cache storage for LLM inference: run a node, and look into it.",
    epilog="Exit status: 0 done or yes, 1 failed or no, 2 wrong usage or configuration, "
    "3 the daemon is not there, 4 some nodes of the pool did not answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> str:
    """The installed version, or ``unknown`` in a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("tiered-kvstore")
    except PackageNotFoundError:
        return "unknown"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstore {version()}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Options that come before the command."""


class _Command(TyperCommand):
    """A command whose help doesn't look as if its flags took a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        for one in params:
            if getattr(one, "is_flag", False):
                one.metavar = ""
        return params


def _paragraphs(text: str) -> str:
    """A docstring whose paragraphs fit any terminal: Typer would keep their line breaks."""
    return "\n\n".join(part.replace("\n", " ") for part in cleandoc(text).split("\n\n"))


for _group in _GROUPS:
    import_module(f"kvstore.cli.{_group}").register(app)
for _command in app.registered_commands:
    _command.cls = _Command
    _command.help = _paragraphs((_command.callback and _command.callback.__doc__) or "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: without the program's name; by default those of the process.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Names are any text, and a terminal may be of a locale that lacks some of it.
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="kvstore")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DONE if end.code is None else FAILED
    except KVStoreError as error:
        _complain(error, arguments)
        return _status(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def _status(error: KVStoreError) -> int:
    if isinstance(error, ConfigError):
        return USAGE
    return NOT_THERE if isinstance(error, (Unavailable, DeadlineExceeded)) else FAILED


def _complain(error: KVStoreError, arguments: Sequence[str]) -> None:
    if "--json" in arguments:
        fields = {"error": error.code, "message": str(error), "retry": error.retry}
        typer.echo(json.dumps(fields), err=True)
        return
    typer.echo(f"kvstore: {error}", err=True)
    if _status(error) == NOT_THERE:
        told = _TOLD.get(arguments[0], ("control address", "--control or KVSTORE_CONTROL"))
        typer.echo(
            f"Start a daemon with `kvstore serve`, or name the {told[0]} of a running one "
            f"with {told[1]}.\n`kvstore doctor` checks this machine.",
            err=True,
        )
