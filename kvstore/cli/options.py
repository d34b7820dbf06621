"""Options that several commands share, and the node they lead to."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

if TYPE_CHECKING:
    from kvstore.control.client import ControlClient
    from kvstore.units import Address

T = TypeVar("T")


def offered(*values: str) -> Callable[[str], list[str]]:
    """What the shell completes an option with."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Configuration file.",
        show_default="$KVSTORE_CONFIG, or /etc/kvstore/kvstore.toml if there",
    ),
]
Control = Annotated[
    str | None,
    typer.Option(
        "--control",
        envvar="KVSTORE_CONTROL",
        help="Control address of the node, as HOST:PORT.",
        show_default="listen.control of the configuration",
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer.")
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="Namespace: the beginning of its fingerprint, or (part of) its model's name. Not "
        "needed where the node holds one only.",
    ),
]
Tier = Annotated[
    str | None,
    typer.Option(
        "--tier",
        help="Only this tier: hbm, dram or ssd.",
        autocompletion=offered("hbm", "dram", "ssd"),
    ),
]


class Remote(NamedTuple):
    """Which node to ask, as the command line says."""

    control: str | None
    config: Path | None
    timeout: float = 10.0


def ask(remote: Remote, question: Callable[["ControlClient"], Awaitable[T]]) -> T:
    """Connect, await ``question`` with the node's client and return its answer.

    Raises:
        ConfigError: the address or the configuration that would give it is wrong.
        Unavailable: nothing answers there.
    """
    import asyncio

    from kvstore.control.client import ControlClient

    address, token = _destination(remote)

    async def asking() -> T:
        async with ControlClient(address, token=token, timeout=remote.timeout) as node:
            return await question(node)

    return asyncio.run(asking())


def _destination(remote: Remote) -> "tuple[Address, str | None]":
    from kvstore.errors import ConfigError
    from kvstore.sources import load
    from kvstore.units import parse_address

    config = load(remote.config).config
    address = config.listen.control
    if remote.control is not None:
        try:
            address = parse_address(remote.control)
        except ValueError as error:
            raise ConfigError(f"--control: {error}") from error
    if address is None:
        raise ConfigError("listen.control: the control plane is off; name one with --control")
    if address.host in ("0.0.0.0", "::"):  # noqa: S104 - where a server listens everywhere
        address = address._replace(host="127.0.0.1" if address.host == "0.0.0.0" else "::1")  # noqa: S104
    return address, config.control_token
