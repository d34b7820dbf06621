"""Where Redis is, as an operator writes it, and how it is talked to. Pure but for files it reads.

- ``redis://[USER@]HOST[:PORT][/DATABASE]``: one Redis
- ``unix://[USER@]/PATH[?database=N]``: one on the same machine
- ``redis+sentinel://[USER@]HOST[:PORT],.../SERVICE[/DATABASE]``: whichever of SERVICE's servers the
  Sentinels say is the master
- ``redis+cluster://[USER@]HOST[:PORT],...``: a Redis Cluster, found by any of its nodes

``rediss`` in place of ``redis`` is the same over TLS. A password is never part of the address,
where it would end in a process list: it comes from a file or from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from kvstore.errors import ConfigError

Kind = Literal["single", "unix", "sentinel", "cluster"]

PASSWORD_VARIABLE: Final = "KVSTORE_REDIS_PASSWORD"
SENTINEL_PASSWORD_VARIABLE: Final = "KVSTORE_SENTINEL_PASSWORD"
_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_KINDS: Final[Mapping[str, tuple[Kind, bool]]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("unix", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where Redis is.

    Attributes:
        kind: what is there.
        hosts: of the server, the Sentinels or nodes of the cluster; empty for a Unix socket.
        path: of the Unix socket.
        service: what the Sentinels call the master.
        database: number of the logical database.
        user: whom to log in as; empty for Redis's default user.
        tls: whether to talk TLS.
    """

    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    database: int = 0
    user: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read a URL.

        Raises:
            ConfigError: it is none of the forms above, or has a password in it.
        """
        parts = urlsplit(url)
        if parts.scheme not in _KINDS:
            raise ConfigError(f"a directory's address begins with one of {', '.join(_KINDS)}://")
        if parts.password is not None:
            raise ConfigError(
                "a directory's address has no password: put it in a file or in "
                f"the variable {PASSWORD_VARIABLE}"
            )
        kind, tls = _KINDS[parts.scheme]
        user = unquote(parts.username or "")
        query = parse_qs(parts.query, keep_blank_values=True)
        if kind == "unix":
            database = _number("database", query.pop("database", ["0"])[-1], 1 << 20)
            _refuse_rest(query, parts)
            if not parts.path.startswith("/"):
                raise ConfigError("the address of a Unix socket is unix:///PATH")
            return cls("unix", path=unquote(parts.path), database=database, user=user)
        _refuse_rest(query, parts)
        hosts = _hosts(parts.netloc, _SENTINEL_PORT if kind == "sentinel" else _PORT)
        service, database = _path(kind, parts.path)
        return cls(kind, hosts, service=service, database=database, user=user, tls=tls)

    def __str__(self) -> str:
        hosts = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)
        scheme = next(name for name, form in _KINDS.items() if form == (self.kind, self.tls))
        return f"{scheme}://{hosts}{self.path}{'/' + self.service if self.service else ''}"


@dataclass(frozen=True, slots=True)
class Access:
    """What else is needed to be let in. Files are read anew for every connection.

    Attributes:
        password_file: holds the password on its first line; without it the variable
            ``KVSTORE_REDIS_PASSWORD`` counts, and without that none is sent.
        ca: certificates that the server's must be signed by; the system's where None.
        certificate: this node's, where the server asks for one.
        key: of the certificate.
        sentinel_password_file: the same for the Sentinels' own password, which few have; the
            variable is ``KVSTORE_SENTINEL_PASSWORD``.
    """

    password_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    sentinel_password_file: Path | None = None

    def password(self) -> str | None:
        """The password as it is now.

        Raises:
            ConfigError: the file can't be read, or is empty.
        """
        return _secret(self.password_file, PASSWORD_VARIABLE)

    def sentinel_password(self) -> str | None:
        """That of the Sentinels as it is now.

        Raises:
            ConfigError: the file can't be read, or is empty.
        """
        return _secret(self.sentinel_password_file, SENTINEL_PASSWORD_VARIABLE)


def _secret(path: Path | None, variable: str) -> str | None:
    """The first line of a file, or else what a variable holds."""
    if path is None:
        return os.environ.get(variable) or None
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the directory's password can't be read: {error}") from None
    if not lines or not lines[0]:
        raise ConfigError(f"the directory's password file {path} is empty")
    return lines[0]


def _hosts(netloc: str, port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for entry in netloc.rpartition("@")[2].split(","):
        host, separator, text = entry.rpartition(":")
        if not separator or text.endswith("]"):
            host, text = entry, ""
        host = host.removeprefix("[").removesuffix("]")
        if not host:
            raise ConfigError("a directory's address names no host")
        hosts.append((host, _number("port", text, 65_535) if text else port))
    return tuple(hosts)


def _path(kind: Kind, path: str) -> tuple[str, int]:
    parts = [part for part in path.split("/") if part]
    if kind == "cluster" and parts:
        raise ConfigError("a Redis Cluster has one database, so its address has no path")
    service = ""
    if kind == "sentinel":
        if not parts:
            raise ConfigError("the address of Sentinels ends in /SERVICE, the master's name")
        service = unquote(parts.pop(0))
    if len(parts) > 1:
        raise ConfigError("a directory's address ends in at most one database")
    return service, _number("database", parts[0], 1 << 20) if parts else 0


def _number(what: str, text: str, highest: int) -> int:
    if not (text.isascii() and text.isdigit()) or int(text[:9]) > highest or len(text) > 9:
        raise ConfigError(f"the {what} in a directory's address is no number up to {highest}")
    return int(text)


def _refuse_rest(query: Mapping[str, object], parts: SplitResult) -> None:
    if query or parts.fragment:
        raise ConfigError("a directory's address has options that are not known")
