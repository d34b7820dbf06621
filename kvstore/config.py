"""The daemon's configuration: one typed tree, checked as a whole before anything starts.

The tree is plain data. Where values come from (file, environment, flags) is ``kvstore.sources``'s
business; the daemon only sees a ``Config``. All sizes are bytes, durations seconds, shares
fractions between 0 and 1.
"""

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    model_validator,
)

from kvstore.accounts import OTHERS, Quota
from kvstore.directory.address import Address as DirectoryAddress
from kvstore.errors import ConfigError
from kvstore.protocol.messages import MAX_COPIES
from kvstore.units import (
    Address,
    format_size,
    parse_address,
    parse_duration,
    parse_rate,
    parse_share,
    parse_size,
)

PAGE: Final = 4096
HUGE_PAGE: Final = 2 << 20
MAX_SOCKET_PATH: Final = 107
"""Longest Unix socket path in bytes: ``sun_path`` holds 108 with its closing NUL."""


def _nothing_is_off(value: object) -> object:
    return (
        None if isinstance(value, str) and value.strip().lower() in ("", "off", "none") else value
    )


def _number_or_nothing(value: object) -> object:
    """A literal number as the environment and flags give it: as text."""
    value = _nothing_is_off(value)
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def _text_or_empty(value: object) -> object:
    return "" if isinstance(value, str) and _nothing_is_off(value) is None else value


def _expanded(value: object) -> object:
    return os.path.expanduser(value) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Share = Annotated[float, BeforeValidator(parse_share)]
ListenAddress = Annotated[Address, BeforeValidator(parse_address), PlainSerializer(str)]
OptionalAddress = Annotated[ListenAddress | None, BeforeValidator(_nothing_is_off)]
OptionalRate = Annotated[
    Annotated[int, BeforeValidator(parse_rate), Field(gt=0)] | None,
    BeforeValidator(_nothing_is_off),
]
OptionalSize = Annotated[Size | None, BeforeValidator(_nothing_is_off)]
OptionalText = Annotated[str, BeforeValidator(_text_or_empty)]
"""Empty where it is unset."""
LocalPath = Annotated[Path, BeforeValidator(_expanded)]
OptionalPath = Annotated[LocalPath | None, BeforeValidator(_nothing_is_off)]


def default_state_directory() -> Path:
    """``/var/lib/kvstore`` for root, else ``$XDG_STATE_HOME/kvstore`` (``~/.local/state``)."""
    if os.geteuid() == 0:
        return Path("/var/lib/kvstore")
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "kvstore"


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "node"


class Section(BaseModel):
    """A group of keys. Unknown keys are errors; a built section cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class NodeSection(Section):
    """Who the node is and where it keeps its state."""

    name: str = Field(default_factory=_host_name, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the node in logs, metrics and ``status``."""
    state_directory: LocalPath = Field(default_factory=default_state_directory)
    """Holds the lock, the Unix socket and whatever must outlive the process."""
    grace: Duration = 10.0
    """Seconds that requests in flight get to finish after SIGTERM."""


class ListenSection(Section):
    """Where the node can be reached."""

    unix: OptionalPath = None
    """Unix socket of the data path. Unset: ``kvstore.sock`` in the state directory."""
    tcp: OptionalAddress = None
    """TCP address of the data path; unset means no TCP."""
    control: OptionalAddress = Address("127.0.0.1", 9400)
    """gRPC address of the control plane, which the CLI speaks to."""
    metrics: OptionalAddress = Address("127.0.0.1", 9401)
    """HTTP address of the Prometheus metrics."""
    insecure: bool = False
    """Allow addresses beyond loopback that ask neither for a token nor for a certificate."""


class TlsSection(Section):
    """TLS for what listens on an address: data path, control plane, metrics.

    Files are in PEM, and read anew when they have changed. More: docs/security.md.
    """

    certificate: OptionalPath = None
    """This node's certificate; with it TLS is on. Other nodes are shown it as well."""
    key: OptionalPath = None
    """The key of that certificate. Unset: it is in the same file."""
    ca: OptionalPath = None
    """Certificates that those of clients and of other nodes must be signed by. Unset: the
    system's, for other nodes."""
    clients: Literal["any", "certificate"] = "any"
    """``certificate``: only clients that have one are let in."""

    @property
    def on(self) -> bool:
        """Whether the node speaks TLS."""
        return self.certificate is not None

    @property
    def mutual(self) -> bool:
        """Whether clients need certificates."""
        return self.on and self.clients == "certificate"


class DramSection(Section):
    """The DRAM tier's arena."""

    capacity: Annotated[Size, Field(gt=0)] = 1 << 30
    """Bytes of block memory."""
    segment: Annotated[Size, Field(gt=0)] = 128 << 20
    """Bytes of one memfd segment: the largest block, and what one tenant has at least. Unset: an
    eighth of the capacity, from 64 MiB (or all of it) to 1 GiB."""
    huge_pages: Literal["auto", "never", "require"] = "auto"
    """Whether segments ask for 2 MiB pages."""
    prefault: bool = True
    """Touch all pages in the background after the start, so that no put pays for it."""
    overcommit: bool = False
    """Start even where less memory is available than the capacity."""


def _numbers(value: object) -> object:
    """Several numbers as the environment and flags give them: as in a file, or without brackets."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.strip().strip("[]").split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"expected numbers with commas between them, such as 0,1, not {value!r}")
    return parts


def _one_or_more(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError("expected one or more different numbers, such as 0,1")
    return numbers


class HbmSection(Section):
    """The HBM tier: memory of the machine's GPUs."""

    capacity: Size = 0
    """Bytes of each GPU; 0 turns the tier off. The GPU must have them free at the start."""
    gpus: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        BeforeValidator(_numbers),
        AfterValidator(_one_or_more),
        Field(max_length=16),
    ] = (0,)
    """Numbers of the GPUs, as the daemon's process sees them."""
    segment: Annotated[Size, Field(gt=0)] = 1 << 30
    """Bytes of one allocation: the largest block, and what one tenant has at least. Unset: an
    eighth of the capacity, from 64 MiB (or all of it) to 1 GiB."""
    promote_after: int = Field(default=2, ge=1, le=2)
    """At which get by a process that computes on a GPU a block is copied there."""


class SsdSection(Section):
    """The SSD tier's log."""

    capacity: Size = 0
    """Bytes on disk; 0 turns the tier off."""
    directory: OptionalPath = None
    """Directory of the log; needed where the capacity is not 0."""
    region: Annotated[Size, Field(gt=0)] = 64 << 20
    """Bytes of one region, the unit of space that is reclaimed."""
    queue_depth: int = Field(default=8, ge=1, le=1024)
    """Reads and writes in flight at once."""
    write_budget: OptionalRate = None
    """Bytes a second that demotion may write; unset means no limit."""


class RdmaSection(Section):
    """The RDMA device and its queue pairs. Why the defaults are as they are: docs/rdma.md."""

    mode: Literal["auto", "off", "require"] = "auto"
    """Whether sessions may use RDMA: where a device is found, never, or else not start."""
    device: OptionalText = ""
    """Name of the device, as ``rdma link`` lists it. Unset: the best there is."""
    port: int = Field(default=0, ge=0, le=255)
    """Number of its port. 0: any."""
    gid: OptionalText = ""
    """A RoCEv2 GID, its IPv4 address, or its index. Unset: the best there is."""
    mtu: Annotated[
        Literal[256, 512, 1024, 2048, 4096] | None, BeforeValidator(_number_or_nothing)
    ] = None
    """Bytes of payload in a packet. Unset: the most that both ports carry."""
    traffic_class: int = Field(default=104, ge=0, le=255)
    """Of the IP header; 104 is DSCP 26."""
    service_level: int = Field(default=0, ge=0, le=15)
    """Of the queue pairs; RoCEv2 takes its priority from the traffic class."""
    timeout: int = Field(default=14, ge=1, le=31)
    """A lost packet is sent again after 4.096 us x 2^timeout."""
    retry_count: int = Field(default=6, ge=0, le=6)
    """How often, before the peer counts as gone."""
    rnr_retry: int = Field(default=6, ge=0, le=6)
    """How often where the peer is not ready to receive."""
    reads: int = Field(default=16, ge=1, le=255)
    """RDMA READs under way at once on a queue pair (max_rd_atomic)."""
    depth: int = Field(default=128, ge=1, le=16384)
    """Work requests under way at once on a queue pair."""
    bytes_in_flight: Annotated[Size, Field(ge=1 << 20, le=1 << 40)] = 16 << 20
    """Payload under way at once on a queue pair."""
    busy_poll: bool = False
    """Poll for completions without rest while bytes are under way: saves some us, costs a core."""


class ClusterSection(Section):
    """The pool that the node is a member of. Without a directory the node is alone."""

    directory: OptionalText = ""
    """Where the Redis is that the nodes of the pool share, as ``redis://HOST:PORT``; unset: none.
    Also ``rediss://``, ``unix://``, ``redis+sentinel://`` and ``redis+cluster://``."""
    pool: str = Field(default="kvstore", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Name of the pool. Pools of other names in the same Redis know nothing of each other."""
    advertise: OptionalAddress = None
    """Where the other nodes reach the data path of this one. Unset: at ``listen.tcp``."""
    host: Annotated[OptionalText, Field(max_length=256)] = ""
    """Which machine the node runs on, or rack, or whatever else fails as one: copies of a block are
    kept on different ones. Unset: the machine's boot id."""
    replicas: int = Field(default=1, ge=1, le=MAX_COPIES)
    """How many nodes are to hold what is stored here, this one counted, where a put doesn't say."""
    heartbeat: Annotated[Duration, Field(gt=0, le=20)] = 1.0
    """Between signs of life. A node that has given none for three times as long is gone."""
    lookup_deadline: Annotated[Duration, Field(gt=0)] = 0.005
    """How long a match waits for the directory at most, within its own deadline."""
    password_file: OptionalPath = None
    """File whose first line is the password for the directory. Without it the variable
    ``KVSTORE_REDIS_PASSWORD`` counts."""
    sentinel_password_file: OptionalPath = None
    """The same for the Sentinels' own password, if they have one: ``KVSTORE_SENTINEL_PASSWORD``."""
    ca: OptionalPath = None
    """Certificates that the directory's must be signed by, with ``rediss://``. Unset: the
    system's."""
    certificate: OptionalPath = None
    """This node's certificate, where the directory asks for one."""
    key: OptionalPath = None
    """The key of that certificate."""


class PolicySection(Section):
    """What is kept, what leaves, and how carefully bytes are checked."""

    dram: Literal["lru", "arc", "fifo"] = "lru"
    """Eviction policy of the DRAM tier."""
    hbm: Literal["lru", "arc", "fifo"] = "lru"
    """Eviction policy of the HBM tier, for each GPU by itself."""
    low_watermark: Share = 0.85
    """Share of the DRAM capacity down to which demotion works."""
    high_watermark: Share = 0.95
    """Share of the DRAM capacity above which demotion starts."""
    integrity: Literal["ssd", "always"] = "ssd"
    """``always`` also checksums at put and verifies at every get."""
    departures: int = Field(default=65536, ge=0, le=1 << 24)
    """Evicted blocks remembered for ``explain``."""


class LimitsSection(Section):
    """What one client may ask for."""

    sessions: int = Field(default=1024, ge=1, le=1 << 20)
    """Sessions at once."""
    max_payload: Annotated[Size, Field(ge=PAGE, le=1 << 34)] = 1 << 30
    """Bytes of payload in one frame."""
    max_hashes: int = Field(default=65536, ge=1, le=65536)
    """Hashes in one request."""
    session_pinned: Annotated[Share, Field(gt=0)] = 0.5
    """Share of the DRAM capacity that one session may hold pinned or reserved."""
    request_deadline_max: Annotated[Duration, Field(gt=0)] = 60.0
    """Longest deadline that is honoured; longer ones are shortened to it."""


class AuthSection(Section):
    """Tokens. They come from a file or the environment, never from a flag, and are not printed."""

    session_token: SecretStr | None = None
    """Token that sessions must present in their HELLO."""
    session_token_file: OptionalPath = None
    """File whose first line is the session token."""
    control_token: SecretStr | None = None
    """Bearer token that control calls must carry."""
    control_token_file: OptionalPath = None
    """File whose first line is the control token."""


class TenantSection(Section):
    """What one tenant may hold, and what opens its sessions. More: docs/tenants.md."""

    dram: OptionalSize = None
    """Bytes of DRAM that are the tenant's; what it holds beyond goes first. Unset: no limit."""
    ssd: OptionalSize = None
    """Bytes of SSD, likewise."""
    token_file: OptionalPath = None
    """File whose first line is the tenant's session token, which then is the only one that opens
    its sessions. Read anew for each."""


class LogSection(Section):
    """What the daemon says about itself, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    format: Literal["console", "json"] = "console"
    """For people, or one JSON object a line."""


class Config(Section):
    """The whole configuration of one daemon."""

    node: NodeSection = NodeSection()
    listen: ListenSection = ListenSection()
    tls: TlsSection = TlsSection()
    dram: DramSection = DramSection()
    hbm: HbmSection = HbmSection()
    ssd: SsdSection = SsdSection()
    rdma: RdmaSection = RdmaSection()
    cluster: ClusterSection = ClusterSection()
    policy: PolicySection = PolicySection()
    limits: LimitsSection = LimitsSection()
    auth: AuthSection = AuthSection()
    log: LogSection = LogSection()
    tenants: dict[str, TenantSection] = Field(default_factory=dict)
    """By name; ``*`` stands for all tenants that have no section, together."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, tree: object) -> object:
        return derive(tree) if isinstance(tree, dict) else tree

    @property
    def session_token(self) -> str | None:
        """The token that sessions must present, or None where none is asked for."""
        return _revealed(self.auth.session_token)

    @property
    def control_token(self) -> str | None:
        """The bearer token of the control plane, or None where none is asked for."""
        return _revealed(self.auth.control_token)

    @property
    def quotas(self) -> dict[str, Quota]:
        """What tenants may hold, by name."""
        return {name: Quota(one.dram, one.ssd) for name, one in self.tenants.items()}

    @property
    def tenant_token_files(self) -> dict[str, Path]:
        """Where the tokens of tenants are that have one of their own, by name."""
        return {
            name: one.token_file for name, one in self.tenants.items() if one.token_file is not None
        }


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret is not None else None


def derive(tree: dict[str, object]) -> dict[str, object]:
    """The raw tree with the defaults filled in that follow from other values.

    They are the socket path (in the state directory), and segments and a region no larger than the
    capacities allow. Values that do not parse are left for validation to complain about.
    """
    sections = {name: dict(part) for name, part in tree.items() if isinstance(part, dict)}
    listen = sections.setdefault("listen", {})
    state = sections.get("node", {}).get("state_directory") or str(default_state_directory())
    if "unix" not in listen and isinstance(state, (str, Path)):
        listen["unix"] = str(Path(state).expanduser() / "kvstore.sock")
    _derive_size(sections, "dram", "segment", least=64 << 20, most=1 << 30)
    _derive_size(sections, "hbm", "segment", least=64 << 20, most=1 << 30)
    _derive_size(sections, "ssd", "region", least=PAGE, most=64 << 20)
    return tree | sections


def _derive_size(
    sections: dict[str, dict[str, object]], section: str, key: str, *, least: int, most: int
) -> None:
    """Make an eighth of the capacity the default of a part's size, within bounds."""
    values = sections.get(section, {})
    if key in values or "capacity" not in values:
        return
    try:
        capacity = parse_size(values["capacity"])
    except ValueError:
        return
    if capacity <= 0:
        return
    size = min(max(capacity // 8, least), most, capacity)
    step = HUGE_PAGE if size >= HUGE_PAGE else PAGE
    values[key] = max(size // step * step, PAGE)


Complaint = tuple[tuple[str, ...], str]
"""The keys that a rule concerns, and the sentence that says what is wrong with them."""


def complaints(config: Config) -> Iterator[Complaint]:
    """Rules that span keys and that ``config`` breaks. Each names its keys, first the main one."""
    yield from _space_complaints(config)
    yield from _listen_complaints(config)
    yield from _tls_complaints(config)
    if config.cluster.directory:
        yield from _cluster_complaints(config)
    if OTHERS in config.tenant_token_files:
        keys: tuple[str, ...] = (f"tenants.{OTHERS}.token_file",)
        yield keys, "tenants without a section have the general token: use auth.session_token_file"
    low, high = config.policy.low_watermark, config.policy.high_watermark
    if not low < high:
        keys = ("policy.low_watermark", "policy.high_watermark")
        yield keys, f"the low watermark ({low:.0%}) must be below the high one ({high:.0%})"


def _space_complaints(config: Config) -> Iterator[Complaint]:
    dram, ssd = config.dram, config.ssd
    if dram.capacity < dram.segment:
        yield (
            ("dram.capacity", "dram.segment"),
            f"{format_size(dram.capacity)} is less than one segment ({format_size(dram.segment)})",
        )
    step = HUGE_PAGE if dram.huge_pages == "require" else PAGE
    if dram.segment % step:
        yield ("dram.segment",), f"must be a multiple of {format_size(step)}"
    yield from _hbm_complaints(config)
    if not ssd.capacity:
        return
    if ssd.directory is None:
        yield ("ssd.directory", "ssd.capacity"), "an SSD tier needs a directory"
    if ssd.region % PAGE:
        yield ("ssd.region",), f"must be a multiple of {format_size(PAGE)}"
    if ssd.capacity < 2 * ssd.region:
        yield (
            ("ssd.capacity", "ssd.region"),
            f"{format_size(ssd.capacity)} is less than two regions of {format_size(ssd.region)}",
        )


def _hbm_complaints(config: Config) -> Iterator[Complaint]:
    hbm = config.hbm
    if "gpus" in hbm.model_fields_set and "capacity" not in hbm.model_fields_set:
        yield (
            ("hbm.gpus", "hbm.capacity"),
            "without hbm.capacity (--hbm) no GPU is used: say how much of each, or 0 for none",
        )
    if not hbm.capacity:
        return
    if hbm.segment % HUGE_PAGE:
        yield ("hbm.segment", "hbm.capacity"), f"must be a multiple of {format_size(HUGE_PAGE)}"
    if hbm.capacity < hbm.segment:
        yield (
            ("hbm.capacity", "hbm.segment"),
            f"{format_size(hbm.capacity)} is less than one segment ({format_size(hbm.segment)})",
        )
    if config.policy.integrity == "always":
        yield (
            ("hbm.capacity", "policy.integrity"),
            "copies on GPUs can't be verified at every get, so none would ever be used",
        )


def _listen_complaints(config: Config) -> Iterator[Complaint]:
    listen = config.listen
    if listen.unix is None and listen.tcp is None:
        yield ("listen.unix", "listen.tcp"), "the node must listen on a Unix socket, TCP, or both"
    if listen.unix is not None and len(os.fsencode(listen.unix)) > MAX_SOCKET_PATH:
        yield (
            ("listen.unix",),
            f"the socket path is longer than {MAX_SOCKET_PATH} bytes: {listen.unix}",
        )
    guarded: tuple[tuple[str, Address | None, str | None, str], ...] = (
        ("tcp", listen.tcp, config.session_token, "auth.session_token_file or "),
        ("control", listen.control, config.control_token, "auth.control_token_file or "),
        ("metrics", listen.metrics, None, ""),
    )
    for key, address, token, remedy in guarded:
        open_to_all = not (listen.insecure or config.tls.mutual) and token is None
        if address is not None and not address.loopback and open_to_all:
            yield (
                (f"listen.{key}",),
                f"{address} can be reached from other machines: set {remedy}"
                'tls.clients = "certificate", or listen.insecure = true if the network is trusted, '
                "or use 127.0.0.1",
            )


def _tls_complaints(config: Config) -> Iterator[Complaint]:
    tls = config.tls
    if not tls.on and tls.key is not None:
        yield ("tls.key", "tls.certificate"), "a key is of no use without its certificate"
    if not tls.on and tls.clients == "certificate":
        yield (
            ("tls.clients", "tls.certificate"),
            "clients can't be asked for certificates without TLS: the node needs one itself",
        )
    if tls.mutual and tls.ca is None:
        yield ("tls.clients", "tls.ca"), "clients' certificates can't be checked without tls.ca"


def _cluster_complaints(config: Config) -> Iterator[Complaint]:
    cluster, tcp = config.cluster, config.listen.tcp
    try:
        DirectoryAddress.parse(cluster.directory)
    except ConfigError as error:
        yield ("cluster.directory",), str(error)
    if tcp is None:
        keys = ("listen.tcp", "cluster.directory")
        yield keys, "the nodes of a pool reach each other over TCP: give the node an address"
    elif cluster.advertise is None and tcp.unspecified:
        keys = ("cluster.advertise", "listen.tcp")
        yield keys, f"other nodes can't reach this one at {tcp}: say under which address they can"
