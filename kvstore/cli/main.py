"""Entry point of the ``kvstore`` command: assembles the sub-commands, turns errors into statuses.

Exit statuses: 0 done, or the answer is yes; 1 failed, or the answer is no (a prefix is not held as
a whole, a block is corrupt, a check fails); 2 wrong usage or configuration; 3 the daemon is not
there or does not answer; 130 interrupted.
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, Unavailable

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_THERE: Final = 3
INTERRUPTED: Final = 130

_GROUPS: Final = ("serving", "overview", "blocks", "changes", "diagnosis", "replay", "simulate")

app = typer.Typer(
    name="kvstore",
    help="Tiered KV cache storage for LLM inference: run a node, and look into it.",
    epilog="Exit status: 0 done or yes, 1 failed or no, 2 wrong usage or configuration, "
    "3 the daemon is not there.",
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


for _group in _GROUPS:
    import_module(f"kvstore.cli.{_group}").register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: without the program's name; by default those of the process.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        app(args=arguments, prog_name="kvstore")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else DONE if end.code is None else FAILED
    except KVStoreError as error:
        _complain(error, as_json="--json" in arguments)
        return _status(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def _status(error: KVStoreError) -> int:
    if isinstance(error, ConfigError):
        return USAGE
    return NOT_THERE if isinstance(error, (Unavailable, DeadlineExceeded)) else FAILED


def _complain(error: KVStoreError, *, as_json: bool) -> None:
    if as_json:
        fields = {"error": error.code, "message": str(error), "retry": error.retry}
        typer.echo(json.dumps(fields), err=True)
        return
    typer.echo(f"kvstore: {error}", err=True)
    if _status(error) == NOT_THERE:
        typer.echo(
            "Start a daemon with `kvstore serve`, or name the control address of a running one "
            "with --control or KVSTORE_CONTROL.\n`kvstore doctor` checks this machine.",
            err=True,
        )
