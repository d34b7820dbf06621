"""What the connector's user may choose: from the engine's command line, else the environment.

In ``kv_connector_extra_config`` options have the names of ``Settings``'s fields; in the environment
they are ``KVSTORE_<NAME>``. The token of the tenant comes from a file or the environment only, so
that it stands in no command line.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from client.endpoint import FORMS, Endpoint, hint
from kvstore.errors import ConfigError
from kvstore.identity import MAX_TEXT_BYTES

ENVIRONMENT_PREFIX: Final = "KVSTORE_"
EXTRA: Final = "kv_connector_extra_config"
"""What vLLM calls the options of a connector."""

_MAX_TOKEN: Final = 4096
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s|m|)")
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0}
_LONGEST: Final = 3600.0

_OF_OTHERS: Final = ("KVSTORE_CONFIG", "KVSTORE_CONTROL", "KVSTORE_REDIS_PASSWORD")
"""Variables of the daemon and its commands, beside those with a section (two underscores)."""
_NEAR: Final = 0.85
"""How much alike two names are of which one may be the other misspelled."""


def default_state_directory(environ: Mapping[str, str]) -> Path:
    """Where a daemon of the same user keeps its socket, unless it was told otherwise.

    ``/var/lib/kvstore`` for root, else ``$XDG_STATE_HOME/kvstore`` (``~/.local/state``).
    """
    if os.geteuid() == 0:
        return Path("/var/lib/kvstore")
    base = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "kvstore"


def _seconds(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a duration such as 5ms or 2s, not a boolean")
    if isinstance(value, str):
        found = _DURATION.fullmatch(value.strip())
        if not found:
            raise ValueError("expected a duration such as 5ms or 2s")
        return float(found[1]) * _SECONDS[found[2]]
    return value


def _share(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a share such as 0.25 or 25%, not a boolean")
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            raise ValueError("expected a share such as 0.25 or 25%") from None
    return value


def _fitting(value: str) -> str:
    if not 1 <= len(value.encode("utf-8", "replace")) <= MAX_TEXT_BYTES:
        raise ValueError(f"expected 1 to {MAX_TEXT_BYTES} bytes of text")
    return value


Duration = Annotated[float, BeforeValidator(_seconds), Field(ge=0, le=_LONGEST)]
Deadline = Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=_LONGEST)]
Share = Annotated[float, BeforeValidator(_share), Field(gt=0, le=1)]


class Settings(BaseModel):
    """The options of one engine's connector. Durations are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """The daemon: ``unix:///path``, ``tcp://host:port`` or ``tls://host:port``. Default: the socket
    of the same user's daemon."""
    transport: str = "auto"
    """``shm``, ``rdma``, ``tcp``, or ``auto``."""
    tenant: Annotated[str, AfterValidator(_fitting)] = "default"
    """Whose blocks these are."""
    token: SecretStr | None = None
    """Credential of the tenant; from ``KVSTORE_TOKEN`` or ``token_file``, never from JSON."""
    token_file: Path | None = None
    """File whose first line is the token."""
    ca: Path | None = None
    """For ``tls``: file of the authorities that the daemon's certificate must be signed by. Unset:
    the system's."""
    certificate: Path | None = None
    """For ``tls``: file of the engine's certificate, if the daemon wants one."""
    key: Path | None = None
    """File of the key of that certificate. Unset: it is in the same file."""
    model: str = ""
    """Name of the model in the namespace. Empty: found out from what the engine loads."""
    connect_deadline: Deadline = 1.0
    """For reaching the daemon."""
    lookup_deadline: Deadline = 0.005
    """For one lookup of a request's prefix in the scheduler."""
    lookup_patience: Duration = 0.1
    """How long a request whose lookup got no answer is put off, while a node that has just stopped
    answering may do so again, before it is computed."""
    load_deadline: Deadline = 2.0
    """Without progress, after which a load is given up and its blocks are recomputed."""
    save_deadline: Deadline = 5.0
    """For one save."""
    max_wait: Duration = 30.0
    """Longest that a decode request waits for blocks that its prefill engine still computes."""
    save: Literal["all", "prompt", "none"] = "all"
    """Which blocks are saved: those of prompt and output, of the prompt alone, or none."""
    load: bool = True
    """Whether blocks are loaded."""
    min_load_tokens: int = Field(default=0, ge=0)
    """Prefixes that bring fewer tokens than this are recomputed instead."""
    pinned_share: Share = 0.5
    """Share of the engine's blocks that saves may pin at once; all of them where the engine only
    prefills for others: what it does not save of a prompt, a decode engine waits for in vain."""

    @field_validator("transport")
    @classmethod
    def _reachable(cls, transport: str, info: ValidationInfo) -> str:
        if url := info.data.get("url"):
            try:
                Endpoint.parse(url).offers(transport)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return transport

    @field_validator("ca", "certificate", "key")
    @classmethod
    def _of_use(cls, file: Path | None, info: ValidationInfo) -> Path | None:
        url = info.data.get("url")
        if file is not None and url and Endpoint.parse(url).scheme != "tls":
            raise ValueError(f"certificates are for tls://, and {url} is not encrypted")
        return None if file is None else file.expanduser()

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        try:
            return Endpoint.parse(url).url
        except ConfigError as error:
            raise ValueError(f"expected {FORMS}{hint(url)}") from error

    def reveal_token(self) -> str | None:
        """The token that sessions present, or None where none was given."""
        return self.token.get_secret_value() if self.token is not None else None

    @classmethod
    def read(
        cls, extra: Mapping[str, Any], environ: Mapping[str, str], *, only_saves: bool = False
    ) -> Settings:
        """The settings in force.

        Args:
            extra: ``kv_connector_extra_config``.
            environ: the environment; what ``extra`` names too is not read from it, nor are empty
                variables.
            only_saves: whether the engine's role is to prefill for others.

        Raises:
            ConfigError: naming every option that is unknown or has an impossible value, what was
                given, and where.
        """
        _refuse_unknown(extra)
        values = dict(extra)
        sources = {name: f"{EXTRA}.{name}" for name in values}
        for name in cls.model_fields:
            variable = ENVIRONMENT_PREFIX + name.upper()
            if name not in values and environ.get(variable):
                values[name], sources[name] = environ[variable], variable
        _take_token(values, sources)
        if only_saves:
            values.setdefault("pinned_share", 1.0)
        if "url" not in values:
            values["url"] = f"unix://{default_state_directory(environ) / 'kvstore.sock'}"
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explained(error, values, sources))) from None


def misspelled(environ: Mapping[str, str]) -> list[str]:
    """Variables that mean nothing to anybody and look like one of an option; each a sentence.

    Others that begin like ours may be anybody's, a cluster's for a service of this name, say.

    Args:
        environ: the environment.
    """
    known = [ENVIRONMENT_PREFIX + name.upper() for name in Settings.model_fields]
    return [
        f"{name} in the environment means nothing; did you mean {near[0]}?"
        for name in sorted(environ)
        if name.startswith(ENVIRONMENT_PREFIX)
        and name not in (*known, *_OF_OTHERS)
        and "__" not in name
        and (near := difflib.get_close_matches(name, known, n=1, cutoff=_NEAR))
    ]


def _refuse_unknown(extra: Mapping[str, Any]) -> None:
    if "token" in extra:
        raise ConfigError(
            f"{EXTRA}.token: a secret cannot be given here; use token_file, or "
            f"{ENVIRONMENT_PREFIX}TOKEN in the environment"
        )
    known = sorted(Settings.model_fields)
    lines = []
    for name in extra:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            lines.append(f"{EXTRA}.{name}: unknown option{hint}")
    if lines:
        raise ConfigError("\n".join(lines))


def _take_token(values: dict[str, Any], sources: Mapping[str, str]) -> None:
    """Read the token's file, unless the environment has the token and only names the file too."""
    named = values.get("token_file")
    if not named or ("token" in values and not sources["token_file"].startswith(EXTRA)):
        return
    source = sources["token_file"]
    file = Path(str(named)).expanduser()
    try:
        with file.open(encoding="utf-8") as opened:
            token = opened.readline(_MAX_TOKEN).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file: {file} cannot be read (from {source})") from error
    if not token:
        raise ConfigError(f"token_file: the first line of {file} is empty (from {source})")
    values["token"] = SecretStr(token)


def _explained(
    error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, str]
) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        name = str(problem["loc"][0])
        message = problem["msg"].removeprefix("Value error, ")
        given = "" if name == "token" or name not in values else f", not {values[name]!r:.200}"
        lines.append(f"{name}: {message}{given} (from {sources.get(name, 'default')})")
    return lines
