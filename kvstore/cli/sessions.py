"""What the commands that open sessions of their own share: options, and where the nodes are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Transport = Annotated[str, typer.Option("--transport", help="auto, shm or tcp.")]
Deadline = Annotated[float, typer.Option("--deadline", min=0.001, help="Seconds a call may take.")]
Tenant = Annotated[str, typer.Option("--tenant", help="Whose blocks these are.")]


def destinations(urls: Sequence[str] | None, config: Path | None) -> tuple[list[str], str | None]:
    """Where the nodes are, and the token that their sessions present.

    Args:
        urls: as the command line names them; where it names none, the Unix socket of the
            configuration is meant.
        config: the configuration's file, as the command line names it.

    Raises:
        ConfigError: the configuration is wrong, or its node has no Unix socket.
    """
    from kvstore.errors import ConfigError
    from kvstore.sources import load

    effective = load(config).config
    if urls:
        return list(urls), effective.session_token
    if effective.listen.unix is None:
        raise ConfigError("listen.unix: the node has no Unix socket; name its TCP URL with --url")
    return [f"unix://{effective.listen.unix}"], effective.session_token
