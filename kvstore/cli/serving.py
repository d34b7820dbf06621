"""``serve`` runs a node; ``config`` shows what it would run with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.cli.options import AsJson, ConfigFile, offered
from kvstore.cli.output import console, print_json, table

if TYPE_CHECKING:
    from kvstore.config import DramSection, TlsSection
    from kvstore.sources import Effective

FLAGS: Final = {
    "node.name": "--name",
    "node.state_directory": "--state-directory",
    "listen.unix": "--unix",
    "listen.tcp": "--tcp",
    "listen.control": "--control",
    "listen.metrics": "--metrics",
    "listen.insecure": "--insecure",
    "hbm.capacity": "--hbm",
    "hbm.gpus": "--hbm-gpus",
    "dram.capacity": "--dram",
    "ssd.capacity": "--ssd",
    "ssd.directory": "--ssd-directory",
    "cluster.directory": "--directory",
    "log.level": "--log-level",
    "log.format": "--log-format",
}
"""The flags that name a key; all others are set with ``--set``."""

_SIZES: Final = (
    "hbm.capacity",
    "hbm.segment",
    "dram.capacity",
    "dram.segment",
    "ssd.capacity",
    "ssd.region",
    "rdma.bytes_in_flight",
    "limits.max_payload",
)
_DURATIONS: Final = (
    "node.grace",
    "limits.request_deadline_max",
    "cluster.heartbeat",
    "cluster.lookup_deadline",
)

Name = Annotated[str | None, typer.Option("--name", help="Name of the node.")]
StateDirectory = Annotated[
    Path | None, typer.Option("--state-directory", help="Where the node keeps its state.")
]
Unix = Annotated[str | None, typer.Option("--unix", help="Unix socket to listen on.")]
Tcp = Annotated[str | None, typer.Option("--tcp", help="TCP address to listen on, as HOST:PORT.")]
ControlListen = Annotated[
    str | None, typer.Option("--control", help="Address of the control plane, or off.")
]
MetricsListen = Annotated[
    str | None, typer.Option("--metrics", help="Address of the Prometheus metrics, or off.")
]
Insecure = Annotated[
    bool | None, typer.Option("--insecure", help="Allow other networks without a token.")
]
Hbm = Annotated[
    str | None,
    typer.Option("--hbm", help="HBM capacity of each GPU, such as 40GiB; 0: none."),
]
HbmGpus = Annotated[
    str | None,
    typer.Option("--hbm-gpus", help="Numbers of the GPUs that have it, such as 0,1."),
]
Dram = Annotated[str | None, typer.Option("--dram", help="DRAM capacity, such as 8GiB.")]
Ssd = Annotated[str | None, typer.Option("--ssd", help="SSD capacity, such as 200GB; 0: none.")]
SsdDirectory = Annotated[
    Path | None, typer.Option("--ssd-directory", help="Directory of the SSD tier.")
]
Directory = Annotated[
    str | None,
    typer.Option("--directory", help="Redis that the pool of nodes shares, as redis://HOST."),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        help="debug, info, warning or error.",
        autocompletion=offered("debug", "info", "warning", "error"),
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format", help="console or json.", autocompletion=offered("console", "json")
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any key, as in policy.dram=arc; may be repeated."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command()(serve)
    app.command("config")(show_config)


def serve(
    config: ConfigFile = None,
    name: Name = None,
    state_directory: StateDirectory = None,
    unix: Unix = None,
    tcp: Tcp = None,
    control: ControlListen = None,
    metrics: MetricsListen = None,
    insecure: Insecure = None,
    hbm: Hbm = None,
    hbm_gpus: HbmGpus = None,
    dram: Dram = None,
    ssd: Ssd = None,
    ssd_directory: SsdDirectory = None,
    directory: Directory = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    settings: Settings = None,
) -> None:
    """Run a node until SIGTERM.

    Values come from the configuration file, then KVSTORE_SECTION__KEY variables, then flags; later
    ones win. `kvstore config` prints the outcome.
    """
    given = _named(
        (name, state_directory, unix, tcp, control, metrics, insecure, hbm, hbm_gpus),
        (dram, ssd, ssd_directory, directory, log_level, log_format),
    )
    effective = _load(config, given, settings or [])
    from kvstore import daemon, logs

    _check_tls(effective.config.tls)
    _check_memory(effective.config.dram)
    logs.configure(effective.config.log)
    raise typer.Exit(daemon.serve(effective.config))


def _check_tls(tls: "TlsSection") -> None:
    """Refuse what looks like TLS and is none; a command that asks a node needs no more.

    Raises:
        ConfigError: there is a CA, and no certificate.
    """
    from kvstore.errors import ConfigError

    if tls.ca is not None and not tls.on:
        raise ConfigError(
            "tls.ca: without tls.certificate the node would not speak TLS at all: give it one"
        )


def _check_memory(dram: "DramSection") -> None:
    """Refuse what the kernel would end the node for, minutes later, while pages are touched.

    Raises:
        ConfigError: the capacity is more than the memory at hand.
    """
    from kvstore.doctor import check_capacity
    from kvstore.errors import ConfigError

    found = check_capacity(dram)
    if found.state == "failure":
        raise ConfigError(
            f"dram.capacity: {found.detail}\n{found.remedy}   "
            "# or --set dram.overcommit=true, if you know better"
        )


def show_config(
    config: ConfigFile = None,
    as_json: AsJson = False,
    name: Name = None,
    state_directory: StateDirectory = None,
    unix: Unix = None,
    tcp: Tcp = None,
    control: ControlListen = None,
    metrics: MetricsListen = None,
    insecure: Insecure = None,
    hbm: Hbm = None,
    hbm_gpus: HbmGpus = None,
    dram: Dram = None,
    ssd: Ssd = None,
    ssd_directory: SsdDirectory = None,
    directory: Directory = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    settings: Settings = None,
) -> None:
    """Print the configuration that `serve` with the same options would use, and its sources."""
    given = _named(
        (name, state_directory, unix, tcp, control, metrics, insecure, hbm, hbm_gpus),
        (dram, ssd, ssd_directory, directory, log_level, log_format),
    )
    effective = _load(config, given, settings or [])
    rows = effective.rows()
    if as_json:
        print_json({key: {"value": value, "source": str(origin)} for key, value, origin in rows})
        return
    shown = [(key, _shown(key, value), origin) for key, value, origin in rows]
    console().print(table(("KEY", "VALUE", "SOURCE"), shown))


def _shown(key: str, value: object) -> object:
    """A value as it is written in a file or a flag."""
    from kvstore.units import format_duration, format_size

    if value is None or value == "":
        return "unset"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and (key in _SIZES or key.startswith("tenants.")):
        return format_size(value)
    if isinstance(value, int) and key == "ssd.write_budget":
        return f"{format_size(value)}/s"
    if isinstance(value, float):
        return format_duration(value).replace(".0", "", 1) if key in _DURATIONS else f"{value:.4g}"
    return value


def _named(*values: Sequence[object]) -> dict[str, object]:
    flat = [value for part in values for value in part]
    texts = [str(value) if isinstance(value, Path) else value for value in flat]
    return dict(zip(FLAGS, texts, strict=True))


def _load(path: Path | None, given: Mapping[str, object], settings: Sequence[str]) -> "Effective":
    from kvstore.sources import load

    flags = dict(given)
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise typer.BadParameter(f"{setting!r}: expected KEY=VALUE", param_hint="--set")
        if flags.get(key) is not None:
            raise typer.BadParameter(f"{key} is given twice", param_hint="--set")
        flags[key] = value
    spelled = {key: FLAGS[key] for key, value in given.items() if value is not None}
    return load(path, flags=flags, flag_names=spelled)
