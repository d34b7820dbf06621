"""Who may open a session: which token opens which tenant.

A tenant that has a token of its own is opened by that token and no other, the node's general one
included. All other tenants are opened by the general token, or by anybody where there is none. What
one is refused for is the same in all cases, so that a refusal tells nothing of a tenant.

Another node of the pool opens a session for a tenant, to read its blocks, as any client of that
tenant does. So there is no token that opens them all, and all nodes must be given the same ones.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from kvstore.errors import AccessDenied, ConfigError

_log = structlog.get_logger(__name__)

_LONGEST_TOKEN: Final = 4096


class Admission:
    """The tokens of a node.

    Args:
        general: the token of all tenants without one of their own; None where they need none.
        files: files whose first lines are the tokens of single tenants, by tenant. They are read
            anew for each session, so that a token changes when its file does.
    """

    def __init__(self, general: str | None, files: Mapping[str, Path]) -> None:
        self._general = general
        self._files = dict(files)

    def __repr__(self) -> str:
        return f"<Admission tenants={sorted(self._files)}>"

    def check_files(self) -> None:
        """Read all files once.

        Raises:
            ConfigError: one cannot be read, or has no token.
        """
        for tenant, file in self._files.items():
            try:
                _read(file)
            except ValueError as error:
                raise ConfigError(f"tenants.{tenant}.token_file: {error}") from error

    def token_of(self, tenant: str) -> str | None:
        """What opens sessions of a tenant at the nodes of this pool; None where nothing is needed.

        Where a tenant's file can't be read now, it is a token that opens nothing.
        """
        file = self._files.get(tenant)
        if file is None:
            return self._general
        try:
            return _read(file)
        except ValueError as error:
            _log.error("token unreadable", tenant=tenant, error=str(error))
            return ""

    def admit(self, tenant: str, token: str | None) -> None:
        """Let a session in.

        Raises:
            AccessDenied: the token is not the one that opens this tenant.
        """
        expected = self.token_of(tenant)
        if expected is None:
            return
        given = (token or "").encode("utf-8", "surrogatepass")
        if not hmac.compare_digest(expected.encode(), given) or not expected:
            raise AccessDenied("the session token is missing or wrong")


def _read(file: Path) -> str:
    """The token in a file.

    Raises:
        ValueError: there is none.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            token = opened.readline(_LONGEST_TOKEN).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read") from error
    if not token:
        raise ValueError(f"the first line of {file} is empty")
    return token
