"""``doctor``: is this machine fit for a node, and does one answer?"""

from typing import TYPE_CHECKING

import typer

from kvstore.cli.options import AsJson, ConfigFile, Control, Remote, Timeout, ask
from kvstore.cli.output import console, print_json, table

if TYPE_CHECKING:
    from kvstore.doctor import Finding


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(doctor)


def doctor(
    as_json: AsJson = False, control: Control = None, config: ConfigFile = None,
    timeout: Timeout = 2.0,
) -> None:  # fmt: skip
    """Check this machine for the configured node, and say how to mend what is wrong.

    Exit status 1 if something keeps a node from running. That none is running is no failure.
    """
    from rich.text import Text

    from kvstore.doctor import examine
    from kvstore.sources import load

    findings = [*examine(load(config).config), _daemon(Remote(control, config, timeout))]
    if as_json:
        print_json(findings)
    else:
        styles = {"ok": "green", "info": "dim", "warning": "yellow", "failure": "bold red"}
        screen = console()
        rows = [
            (one.check, Text(one.state, style=styles[one.state]), one.detail) for one in findings
        ]
        screen.print(table(("CHECK", "STATE", "FOUND"), rows))
        remedies = [one for one in findings if one.remedy and one.state != "ok"]
        if remedies:
            screen.print(table(("CHECK", "REMEDY"), [(one.check, one.remedy) for one in remedies]))
    if any(one.state == "failure" for one in findings):
        raise typer.Exit(1)


def _daemon(remote: Remote) -> "Finding":
    from kvstore.doctor import Finding
    from kvstore.errors import AccessDenied, KVStoreError
    from kvstore.units import format_duration

    try:
        status = ask(remote, lambda node: node.status())
    except AccessDenied as error:
        remedy = "export KVSTORE_AUTH__CONTROL_TOKEN=...   # the token that the daemon was given"
        return Finding("daemon", "warning", str(error), remedy)
    except KVStoreError as error:
        return Finding("daemon", "info", str(error), "kvstore serve")
    up = format_duration(status.uptime)
    return Finding("daemon", "ok", f"{status.name} is {status.state}, process {status.pid}, {up}")
