"""Where configuration comes from: defaults, a TOML file, the environment, flags; later ones win.

The environment's names are ``KVSTORE_<SECTION>__<KEY>`` (two underscores), for example
``KVSTORE_DRAM__CAPACITY=8GiB``, and ``KVSTORE_TENANTS__<NAME>__<KEY>`` for a tenant. Keys are
written ``section.key`` everywhere else, and ``tenants.name.key``. Every value's origin is kept, so
that an error, and ``kvstore config``, can name the place to edit.
"""

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import SecretStr, ValidationError

from kvstore.config import Config, TenantSection, complaints, derive
from kvstore.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "KVSTORE_"
FILE_VARIABLE: Final = "KVSTORE_CONFIG"
DEFAULT_FILE: Final = Path("/etc/kvstore/kvstore.toml")
SECRETS: Final = ("auth.session_token", "auth.control_token")
_TENANTS: Final = "tenants"
_MAX_FILE: Final = 1 << 20
_MAX_TOKEN: Final = 4096


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value came from: the kind of source, and which one of that kind."""

    kind: Literal["default", "derived", "file", "environment", "flag"]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind


@dataclass(frozen=True, slots=True)
class Effective:
    """The configuration in force, and the origin of every key in it."""

    config: Config
    origins: Mapping[str, Origin]

    def rows(self) -> list[tuple[str, object, Origin]]:
        """Key, printable value (secrets masked) and origin of every key, in the tree's order."""
        tree = self.config.model_dump(mode="json")
        tenants = {f"{_TENANTS}.{name}": part for name, part in tree.pop(_TENANTS).items()}
        return [
            (f"{section}.{key}", value, self.origins[f"{section}.{key}"])
            for section, part in (tree | tenants).items()
            for key, value in part.items()
        ]


def keys() -> list[str]:
    """Every key of the configuration but those of tenants, as ``section.key``."""
    return [
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key in getattr(field.annotation, "model_fields", {})
    ]


def tenant_keys(name: str) -> list[str]:
    """Every key of one tenant, as ``tenants.NAME.key``."""
    return [f"{_TENANTS}.{name}.{key}" for key in TenantSection.model_fields]


def _split(key: str) -> tuple[str, ...]:
    """The path of a key in the tree: a tenant's name may have dots."""
    section, _, rest = key.partition(".")
    if section != _TENANTS:
        return section, rest
    name, _, last = rest.rpartition(".")
    return section, name, last


def load(
    path: Path | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    flag_names: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Effective:
    """The effective configuration.

    Args:
        path: the TOML file; without it ``$KVSTORE_CONFIG``, else ``/etc/kvstore/kvstore.toml`` if
            that exists. A file that was named must exist.
        flags: values given on the command line, by ``section.key``; None values are not given.
        flag_names: how the flags were spelled, by key; ``--set key`` where it is not here.
        environ: the environment, by default the process's.

    Raises:
        ConfigError: naming every key that is unknown or has an impossible value, and its source.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    for key in SECRETS:
        if key in given:
            raise ConfigError(f"{key}: a secret cannot be given as a flag, use {key}_file")
    _take(values, origins, *_file(path, environ))
    _take(values, origins, *_environment(environ))
    _take(values, origins, given, _flag_origins(given, flag_names or {}))
    _read_tokens(values, origins)
    return _build(values, origins)


def _flag_origins(keys_given: Iterable[str], names: Mapping[str, str]) -> dict[str, Origin]:
    return {key: Origin("flag", names.get(key, f"--set {key}")) for key in keys_given}


def _take(
    values: dict[str, object],
    origins: dict[str, Origin],
    found: Mapping[str, object],
    sources: Mapping[str, Origin],
) -> None:
    values.update(found)
    origins.update(sources)
    known = set(keys())
    for key in found:
        path = _split(key)
        if len(path) == 3 and path[1]:
            known.update(tenant_keys(path[1]))
    unknown = [key for key in found if key not in known]
    if unknown:
        raise ConfigError("\n".join(_unknown(key, sources[key], known) for key in unknown))


def _unknown(key: str, origin: Origin, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{key}: unknown key (from {origin}){hint}"


def _file(
    path: Path | None, environ: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, Origin]]:
    chosen = path or (Path(environ[FILE_VARIABLE]) if environ.get(FILE_VARIABLE) else None)
    if chosen is None:
        if not DEFAULT_FILE.is_file():
            return {}, {}
        chosen = DEFAULT_FILE
    try:
        if chosen.stat().st_size > _MAX_FILE:
            raise ConfigError(f"{chosen}: too large for a configuration file")
        tree = tomllib.loads(chosen.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{chosen}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{chosen}: not valid TOML: {error}") from error
    values: dict[str, object] = {}
    for section, part in tree.items():
        if not isinstance(part, dict):
            values[section] = part
            continue
        for key, value in part.items():
            if section == _TENANTS and isinstance(value, dict):
                values.update({f"{section}.{key}.{name}": one for name, one in value.items()})
            else:
                values[f"{section}.{key}"] = value
    return values, {key: Origin("file", str(chosen)) for key in values}


def _environment(environ: Mapping[str, str]) -> tuple[dict[str, object], dict[str, Origin]]:
    single = {_variable(key).replace("__", "_"): _variable(key) for key in keys()}
    values: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    for name, value in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name in single:
            raise ConfigError(f"{name}: not read; did you mean {single[name]}?")
        section, separator, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if section == _TENANTS:
            tenant, _, last = key.rpartition("__")
            key = f"{tenant}.{last}"
        if separator:
            values[f"{section}.{key}"] = value
            origins[f"{section}.{key}"] = Origin("environment", name)
    return values, origins


def _variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "__")


def _read_tokens(values: dict[str, object], origins: dict[str, Origin]) -> None:
    for key in SECRETS:
        named = values.get(f"{key}_file")
        if not named or values.get(key):
            continue
        origin = origins[f"{key}_file"]
        file = Path(str(named)).expanduser()
        try:
            with file.open(encoding="utf-8") as opened:
                token = opened.readline(_MAX_TOKEN).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{key}_file: {file} cannot be read (from {origin})") from error
        if not token:
            raise ConfigError(f"{key}_file: the first line of {file} is empty (from {origin})")
        values[key] = SecretStr(token)
        origins[key] = Origin("file", str(file))


def _build(values: Mapping[str, object], origins: Mapping[str, Origin]) -> Effective:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = _split(key)
        part = tree
        for step in path:
            part = part.setdefault(step, {})
        part[name] = value
    derived = derive(dict(tree))
    named = [key for tenant in tree.get(_TENANTS, ()) for key in tenant_keys(tenant)]
    complete = {
        key: origins.get(key) or Origin("derived" if _holds(derived, key) else "default")
        for key in (*keys(), *named)
    }
    try:
        config = Config.model_validate(derived)
    except ValidationError as error:
        raise ConfigError("\n".join(_explained(error, complete))) from None
    broken = [
        f"{concerned[0]}: {sentence} ({_from(concerned, complete)})"
        for concerned, sentence in complaints(config)
    ]
    if broken:
        raise ConfigError("\n".join(broken))
    return Effective(config, complete)


def _holds(tree: Mapping[str, object], key: str) -> bool:
    section, _, name = key.partition(".")
    part = tree.get(section)
    return isinstance(part, dict) and name in part


def _from(named: Iterable[str], origins: Mapping[str, Origin]) -> str:
    return ", ".join(f"{key} from {origins[key]}" for key in named)


def _explained(error: ValidationError, origins: Mapping[str, Origin]) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        depth = 3 if problem["loc"][:1] == (_TENANTS,) else 2
        key = ".".join(str(part) for part in problem["loc"][:depth])
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{key}: {message} (from {origins.get(key, 'default')})")
    return lines
