"""Options that several commands share, and the node they lead to."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

if TYPE_CHECKING:
    import ssl

    from kvstore.control.channel import ControlChannel
    from kvstore.control.pool_client import PoolClient
    from kvstore.units import Address

T = TypeVar("T")
C = TypeVar("C", bound="ControlChannel")


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
        help="Control address of the node, as HOST:PORT; https:// before it says that it speaks "
        "TLS, which tls.ca and tls.certificate say as well.",
        show_default="listen.control of the configuration",
    ),
]
NodeName = Annotated[
    str | None,
    typer.Option(
        "--node",
        help="Ask this member of the node's pool instead: its name, number or control address.",
        show_default=False,
    ),
]
WholePool = Annotated[bool, typer.Option("--pool", help="Ask all nodes of the pool.")]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer.")
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="Namespace: the beginning of its fingerprint, or (part of) its model's name. Not "
        "needed where only one has blocks.",
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
    node: str | None = None
    """A member of that node's pool to ask in its place."""


class Way(NamedTuple):
    """How control planes are reached: the same for all nodes of a pool."""

    token: str | None
    timeout: float
    context: "ssl.SSLContext | None" = None
    """For TLS."""

    def open(self, address: "Address", kind: "type[C]") -> "C":
        """A client of the node at an address, not connected yet."""
        return kind(address, token=self.token, timeout=self.timeout, context=self.context)


def ask(remote: Remote, question: Callable[["PoolClient"], Awaitable[T]]) -> T:
    """Connect, await ``question`` with the node's client and return its answer.

    Raises:
        ConfigError: the address or the configuration that would give it is wrong.
        Unavailable: nothing answers there.
        typer.BadParameter: the pool has no such member.
    """
    import asyncio

    from kvstore.control.pool_client import PoolClient

    address, way = destination(remote)

    async def asking() -> T:
        where = await locate(address, way, remote.node)
        async with way.open(where, PoolClient) as node:
            return await question(node)

    return asyncio.run(asking())


async def locate(address: "Address", way: Way, node: str | None, hint: str = "--node") -> "Address":
    """The control address of a member of the pool.

    Args:
        address: of any node of the pool.
        way: how it is reached.
        node: the member's name, number or address; None for the node at ``address`` itself.
        hint: what gave the member.

    Raises:
        Unavailable: there is nobody, or not the one that is meant.
        InvalidRequest: the node at ``address`` is in no pool.
        typer.BadParameter: the pool has no such member, or several.
    """
    if node is None:
        return address
    from kvstore.control.members import check_same, control_address, find_member
    from kvstore.control.pool_client import PoolClient

    async with way.open(address, PoolClient) as asked:
        members = (await asked.pool()).members
    try:
        member = find_member(members, node)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from error
    if member.asked:
        return address
    where = control_address(member)
    async with way.open(where, PoolClient) as found:
        check_same(member, await found.load())
    return where


def destination(remote: Remote) -> "tuple[Address, Way]":
    """The control address that the command line or the configuration names, and how to reach it.

    Raises:
        ConfigError: one of them is wrong, or there is none.
    """
    from kvstore.errors import ConfigError
    from kvstore.sources import load
    from kvstore.tls import reaching
    from kvstore.units import parse_address

    config = load(remote.config).config
    address, scheme = config.listen.control, ""
    if remote.control is not None:
        scheme, separator, rest = remote.control.rpartition("://")
        try:
            if separator and scheme not in ("http", "https"):
                raise ValueError(f"expected https:// before an address, not {scheme}://")
            address = parse_address(rest)
        except ValueError as error:
            raise ConfigError(f"--control: {error}") from error
    if address is None:
        raise ConfigError("listen.control: the control plane is off; name one with --control")
    if address.host in ("0.0.0.0", "::"):  # noqa: S104 - where a server listens everywhere
        address = address._replace(host="127.0.0.1" if address.host == "0.0.0.0" else "::1")  # noqa: S104
    tls = config.tls
    secure = scheme == "https" or (not scheme and (tls.on or tls.ca is not None))
    context = reaching(tls) if secure else None
    return address, Way(config.control_token, remote.timeout, context)
