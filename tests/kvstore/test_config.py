"""Configuration: what each source may say, who wins, and what an impossible value is told."""

import contextlib
import io
import json
import logging
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kvstore import logs, sources, units
from kvstore.accounts import Quota
from kvstore.config import Config, LogSection
from kvstore.errors import ConfigError
from kvstore.sources import Effective, load
from kvstore.tls import warnings
from kvstore.units import Address

EVERYTHING = """
[node]
name = "node-a"
state_directory = "/srv/kvstore"
grace = "30s"
[listen]
tcp = "127.0.0.1:9500"
metrics = "off"
[dram]
capacity = "8GiB"
huge_pages = "require"
[ssd]
capacity = "100GB"
directory = "/srv/kvstore/ssd"
write_budget = "200MB/s"
[policy]
dram = "arc"
low_watermark = "70%"
high_watermark = 0.9
"""


def from_file(tmp_path: Path, text: str, **environ: str) -> Effective:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    return load(path, environ=environ)


def test_defaults_are_sound_and_say_so() -> None:
    effective = load(environ={})
    config = effective.config
    assert config.listen.unix == config.node.state_directory / "kvstore.sock"
    assert config.listen.tcp is None
    assert config.listen.control == Address("127.0.0.1", 9400)
    assert config.ssd.capacity == 0
    assert {str(origin) for _, _, origin in effective.rows()} == {"default", "derived"}
    assert Config() == config


def test_a_file_in_human_units(tmp_path: Path) -> None:
    config = from_file(tmp_path, EVERYTHING).config
    assert config.node.grace == 30.0
    assert config.listen.tcp == Address("127.0.0.1", 9500)
    assert config.listen.metrics is None
    assert config.listen.unix == Path("/srv/kvstore/kvstore.sock")
    assert config.dram.capacity == 8 << 30
    assert config.ssd.capacity == 100 * 10**9
    assert config.ssd.write_budget == 200 * 10**6
    assert (config.policy.low_watermark, config.policy.high_watermark) == (0.7, 0.9)


@pytest.mark.parametrize(("given", "found"), [("4096", 4096), (" 1024", 1024), ("off", None)])
def test_a_packet_size_comes_from_the_environment_too(
    tmp_path: Path, given: str, found: int | None
) -> None:
    config = from_file(tmp_path, "[rdma]\nmtu = 512\n", KVSTORE_RDMA__MTU=given).config
    assert config.rdma.mtu == found


@pytest.mark.parametrize(
    "key", ["rdma.device", "rdma.gid", "cluster.directory", "cluster.host", "rdma.mtu", "tls.ca"]
)
def test_off_unsets_what_may_be_unset(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    config = from_file(tmp_path, f'[{section}]\n{name} = "off"\n').config
    default = load(environ={}).config
    assert getattr(getattr(config, section), name) == getattr(getattr(default, section), name)


def test_flags_beat_the_environment_and_that_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text('[dram]\ncapacity = "1GiB"\nsegment = "64MiB"\nprefault = false\n')
    effective = load(
        path,
        flags={"dram.capacity": "3GiB", "log.level": None},
        environ={"KVSTORE_DRAM__CAPACITY": "2GiB", "KVSTORE_DRAM__SEGMENT": "128MiB"},
    )
    assert effective.config.dram.capacity == 3 << 30
    assert effective.config.dram.segment == 128 << 20
    assert effective.config.dram.prefault is False
    assert str(effective.origins["dram.capacity"]) == "flag --set dram.capacity"
    assert str(effective.origins["dram.segment"]) == "environment KVSTORE_DRAM__SEGMENT"
    assert str(effective.origins["dram.prefault"]) == f"file {path}"
    assert str(effective.origins["log.level"]) == "default"


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text('[node]\nname = "elsewhere"\n')
    assert load(environ={"KVSTORE_CONFIG": str(path)}).config.node.name == "elsewhere"


def test_small_capacities_get_small_segments_and_regions() -> None:
    environ = {
        "KVSTORE_DRAM__CAPACITY": "64MiB",
        "KVSTORE_SSD__CAPACITY": "80MiB",
        "KVSTORE_SSD__DIRECTORY": "/x",
    }
    effective = load(environ=environ)
    assert effective.config.dram.segment == 64 << 20
    assert effective.config.ssd.region == 10 << 20
    assert str(effective.origins["dram.segment"]) == "derived"


@pytest.mark.parametrize(
    ("capacity", "segment"),
    [("16MiB", 16), ("100MiB", 64), ("1GiB", 128), ("3GiB", 384), ("8GiB", 1024), ("1TiB", 1024)],
)
def test_a_node_has_segments_for_several_tenants(capacity: str, segment: int) -> None:
    config = load(environ={"KVSTORE_DRAM__CAPACITY": capacity}).config
    assert config.dram.segment == segment << 20


def test_gpus_are_numbers(tmp_path: Path) -> None:
    assert load(environ={}).config.hbm.gpus == (0,)
    effective = load(environ={"KVSTORE_HBM__CAPACITY": "40GiB"}, flags={"hbm.gpus": "1, 3"})
    assert effective.config.hbm.gpus == (1, 3)
    assert effective.config.hbm.segment == 1 << 30
    file = tmp_path / "kvstore.toml"
    file.write_text('[hbm]\ncapacity = "100MiB"\ngpus = [2, 0]\n')
    hbm = load(file, environ={}).config.hbm
    assert (hbm.gpus, hbm.segment) == ((2, 0), 64 << 20)
    assert load(file, environ={}, flags={"hbm.capacity": "0"}).config.hbm.capacity == 0


def test_defaults_agree_with_what_is_derived() -> None:
    config = load(environ={}).config
    derived = load(environ={"KVSTORE_DRAM__CAPACITY": str(config.dram.capacity)}).config
    assert derived.dram == config.dram


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KVSTORE_DRAM__CAPACITY": "-1"}, r"^dram.capacity: .*negative.*KVSTORE_DRAM__CAPACITY"),
        ({"KVSTORE_DRAM__CAPACITY": "0"}, r"^dram.capacity: .*greater than 0"),
        ({"KVSTORE_DRAM__CAPACITY": "lots"}, r"^dram.capacity: expected a size such as 8GiB"),
        ({"KVSTORE_DRAM__CAPACITY": "9EiB"}, r"^dram.capacity: expected a size"),
        ({"KVSTORE_DRAM__CAPACITY": "2000PB"}, r"^dram.capacity: .*above 1 EiB"),
        (
            {"KVSTORE_DRAM__CAPACITY": "1MiB", "KVSTORE_DRAM__SEGMENT": "2MiB"},
            r"^dram.capacity: 1 MiB is less than one segment \(2 MiB\).*DRAM__CAPACITY.*DRAM__SEGM",
        ),
        ({"KVSTORE_DRAM__SEGMENT": "1000"}, r"^dram.segment: must be a multiple of 4 KiB"),
        (
            {"KVSTORE_DRAM__SEGMENT": "3MiB", "KVSTORE_DRAM__HUGE_PAGES": "require"},
            r"^dram.segment: must be a multiple of 2 MiB",
        ),
        ({"KVSTORE_HBM__GPUS": "0,0"}, r"^hbm.gpus: expected one or more different.*HBM__GPUS"),
        ({"KVSTORE_HBM__GPUS": "first"}, r"^hbm.gpus: expected .* such as 0,1, not 'first' \(from"),
        ({"KVSTORE_HBM__GPUS": "0-1"}, r"^hbm.gpus: expected .* such as 0,1, not '0-1' \(from"),
        ({"KVSTORE_HBM__GPUS": "0,1"}, r"^hbm.gpus: .* hbm.capacity .*hbm.gpus from .*HBM__GPUS"),
        ({"KVSTORE_HBM__GPUS": "-1"}, r"^hbm.gpus: "),
        ({"KVSTORE_HBM__GPUS": ",".join(map(str, range(17)))}, r"^hbm.gpus: "),
        ({"KVSTORE_HBM__PROMOTE_AFTER": "3"}, r"^hbm.promote_after: "),
        (
            {"KVSTORE_HBM__CAPACITY": "1GiB", "KVSTORE_HBM__SEGMENT": "1MiB"},
            r"^hbm.segment: must be a multiple of 2 MiB",
        ),
        (
            {"KVSTORE_HBM__CAPACITY": "1GiB", "KVSTORE_HBM__SEGMENT": "2GiB"},
            r"^hbm.capacity: 1 GiB is less than one segment",
        ),
        (
            {"KVSTORE_HBM__CAPACITY": "1GiB", "KVSTORE_POLICY__INTEGRITY": "always"},
            r"^hbm.capacity: copies on GPUs can't be verified.*policy.integrity from",
        ),
        ({"KVSTORE_SSD__CAPACITY": "1GiB"}, r"^ssd.directory: an SSD tier needs a directory"),
        (
            {
                "KVSTORE_SSD__CAPACITY": "1GiB",
                "KVSTORE_SSD__DIRECTORY": "/x",
                "KVSTORE_SSD__REGION": "1GiB",
            },
            r"^ssd.capacity: 1 GiB is less than two regions",
        ),
        ({"KVSTORE_SSD__WRITE_BUDGET": "0"}, r"^ssd.write_budget: .*greater than 0"),
        ({"KVSTORE_POLICY__LOW_WATERMARK": "99%"}, r"^policy.low_watermark: .*below the high one"),
        ({"KVSTORE_POLICY__HIGH_WATERMARK": "1.5"}, r"^policy.high_watermark: expected a share"),
        ({"KVSTORE_POLICY__DRAM": "mru"}, r"^policy.dram: "),
        ({"KVSTORE_NODE__GRACE": "-3s"}, r"^node.grace: expected a duration"),
        ({"KVSTORE_NODE__NAME": "a b"}, r"^node.name: "),
        ({"KVSTORE_LISTEN__TCP": "0.0.0.0:1"}, r"^listen.tcp: .*other machines.*insecure"),
        ({"KVSTORE_LISTEN__CONTROL": "[::]:1"}, r"^listen.control: .*control_token_file"),
        ({"KVSTORE_LISTEN__METRICS": "10.0.0.1:1"}, r"^listen.metrics: .*insecure"),
        ({"KVSTORE_LISTEN__TCP": "node-1.example:1"}, r"^listen.tcp: .*other machines"),
        (
            {"KVSTORE_LISTEN__TCP": "0.0.0.0:1", "KVSTORE_TLS__CERTIFICATE": "/c.pem"},
            r"^listen.tcp: .*tls.clients = .certificate",
        ),
        ({"KVSTORE_TLS__KEY": "/k.pem"}, r"^tls.key: .*without its certificate"),
        ({"KVSTORE_TLS__CLIENTS": "certificate"}, r"^tls.clients: .*without TLS"),
        (
            {"KVSTORE_TLS__CERTIFICATE": "/c.pem", "KVSTORE_TLS__CLIENTS": "certificate"},
            r"^tls.clients: .*without tls.ca",
        ),
        ({"KVSTORE_TLS_CA": "/ca.pem"}, r"^KVSTORE_TLS_CA: .*mean KVSTORE_TLS__CA"),
        ({"KVSTORE_LISTEN__TCP": "127.0.0.1"}, r"^listen.tcp: expected an address"),
        ({"KVSTORE_LISTEN__TCP": "127.0.0.1:70000"}, r"^listen.tcp: expected an address"),
        ({"KVSTORE_LISTEN__UNIX": "off"}, r"^listen.unix: the node must listen"),
        ({"KVSTORE_LISTEN__UNIX": "/" + "x" * 200}, r"^listen.unix: .*longer than 107 bytes"),
        ({"KVSTORE_CLUSTER__DIRECTORY": "redis://r"}, r"^listen.tcp: the nodes .* over TCP"),
        ({"KVSTORE_CLUSTER__DIRECTORY": "http://r"}, r"^cluster.directory: .*begins with one of"),
        ({"KVSTORE_CLUSTER__DIRECTORY": "redis://a:b@r"}, r"^cluster.directory: .*no password"),
        (
            {
                "KVSTORE_CLUSTER__DIRECTORY": "redis://r",
                "KVSTORE_LISTEN__TCP": "0.0.0.0:1",
                "KVSTORE_LISTEN__INSECURE": "true",
            },
            r"^cluster.advertise: .*under which address",
        ),
        ({"KVSTORE_CLUSTER__HEARTBEAT": "30s"}, r"^cluster.heartbeat: .*20"),
        ({"KVSTORE_CLUSTER__POOL": "a b"}, r"^cluster.pool: "),
        ({"KVSTORE_DRAM__CAPACTY": "1"}, r"^dram.capacty: unknown key .*mean dram.capacity\?"),
        ({"KVSTORE_DRAM_CAPACITY": "1"}, r"^KVSTORE_DRAM_CAPACITY: .*mean KVSTORE_DRAM__CAPACITY"),
        ({"KVSTORE_AUTH__CONTROL_TOKEN_FILE": "/nowhere"}, r"^auth.control_token_file: /nowhere"),
        ({"KVSTORE_CONFIG": "/nowhere.toml"}, r"^/nowhere.toml: cannot be read"),
    ],
)
def test_impossible_values_name_key_and_source(environ: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(environ=environ)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[dram]\nsize = 1\n", r"^dram.size: unknown key \(from file .*kvstore.toml\)"),
        ("[tape]\ncapacity = 1\n", r"^tape.capacity: unknown key"),
        ("capacity = 1\n", r"^capacity: unknown key"),
        ("[dram\n", r"not valid TOML"),
        ("[dram]\ncapacity = true\n", r"^dram.capacity: .*not a boolean \(from file"),
        ("[dram]\ncapacity = [1]\n", r"^dram.capacity: expected a size"),
        ("[dram.capacity]\nx = 1\n", r"^dram.capacity: expected a size"),
    ],
)
def test_a_bad_file_is_told_where(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        from_file(tmp_path, text)


def test_all_complaints_come_at_once() -> None:
    environ = {"KVSTORE_LISTEN__TCP": "0.0.0.0:1", "KVSTORE_SSD__CAPACITY": "1GiB"}
    with pytest.raises(ConfigError) as caught:
        load(environ=environ)
    assert len(str(caught.value).splitlines()) == 2


def test_variables_of_container_hosts_are_none_of_ours() -> None:
    environ = {"KVSTORE_PORT_9400_TCP_ADDR": "10.0.0.7", "KVSTORE_SERVICE_HOST": "10.0.0.7"}
    load(environ=environ)


@pytest.mark.parametrize("insecure", [True, False])
def test_a_token_or_insecure_opens_other_networks(tmp_path: Path, insecure: bool) -> None:
    token = tmp_path / "token"
    token.write_text("hush\nsecond line\n")
    environ = {"KVSTORE_LISTEN__TCP": "0.0.0.0:1", "KVSTORE_LISTEN__CONTROL": "0.0.0.0:2"}
    if insecure:
        environ["KVSTORE_LISTEN__INSECURE"] = "true"
    else:
        environ["KVSTORE_AUTH__SESSION_TOKEN_FILE"] = str(token)
        environ["KVSTORE_AUTH__CONTROL_TOKEN"] = "hush"
    config = load(environ=environ).config
    assert config.session_token == config.control_token == (None if insecure else "hush")


def test_certificates_of_clients_open_other_networks() -> None:
    environ = {f"KVSTORE_LISTEN__{kind}": "0.0.0.0:1" for kind in ("TCP", "CONTROL", "METRICS")}
    environ |= {f"KVSTORE_TLS__{kind}": "/file.pem" for kind in ("CERTIFICATE", "CA")}
    config = load(environ=environ | {"KVSTORE_TLS__CLIENTS": "certificate"}).config
    assert config.tls.on
    assert config.tls.mutual


def test_a_token_that_can_be_read_on_the_way_is_warned_of() -> None:
    environ = {
        "KVSTORE_LISTEN__TCP": "0.0.0.0:1",
        "KVSTORE_LISTEN__CONTROL": "10.0.0.1:2",
        "KVSTORE_AUTH__SESSION_TOKEN": "hush",
        "KVSTORE_AUTH__CONTROL_TOKEN": "hush",
    }
    warned = list(warnings(load(environ=environ).config, rdma=True))
    assert [sentence.partition(" has no TLS")[0] for sentence in warned] == [
        "listen.tcp",
        "listen.control",
    ]
    assert "hush" not in "".join(warned)
    here = environ | {"KVSTORE_LISTEN__TCP": "127.0.0.1:1", "KVSTORE_LISTEN__CONTROL": "[::1]:2"}
    assert not list(warnings(load(environ=here).config, rdma=True))
    secure = load(environ=environ | {"KVSTORE_TLS__CERTIFICATE": "/c.pem"}).config
    assert not list(warnings(secure, rdma=False))
    assert "RDMA is not encrypted" in "".join(warnings(secure, rdma=True))


@pytest.mark.parametrize(
    ("directory", "warned"),
    [
        ("redis://cache", True),
        ("redis+sentinel://127.0.0.1,cache/main", True),
        ("redis://127.0.0.1", False),
        ("unix:///redis.sock", False),
        ("rediss://cache", False),
    ],
)
def test_a_password_that_can_be_read_on_the_way_is_warned_of(
    directory: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTORE_REDIS_PASSWORD", raising=False)
    environ = {"KVSTORE_LISTEN__TCP": "127.0.0.1:1", "KVSTORE_CLUSTER__DIRECTORY": directory}
    assert not list(warnings(load(environ=environ).config, rdma=False))
    environ["KVSTORE_CLUSTER__PASSWORD_FILE"] = "/password"
    found = list(warnings(load(environ=environ).config, rdma=False))
    assert [sentence.split()[0] for sentence in found] == ["cluster.directory"] * warned


def test_secrets_are_not_printed_and_no_flags(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hush\n")
    effective = load(
        environ={
            "KVSTORE_AUTH__SESSION_TOKEN_FILE": str(token),
            "KVSTORE_AUTH__CONTROL_TOKEN": "hush",
        }
    )
    printed = f"{effective.rows()} {effective} {effective.config.model_dump_json()}"
    assert "hush" not in printed
    assert str(effective.origins["auth.session_token"]) == f"file {token}"
    with pytest.raises(ConfigError, match="cannot be given as a flag"):
        load(flags={"auth.control_token": "hush"}, environ={})


def test_an_impossible_secret_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={"KVSTORE_AUTH__CONTROL_TOKEN": "hush", "KVSTORE_DRAM__CAPACITY": "-1"})
    assert "hush" not in str(caught.value)


def test_every_key_can_be_set_from_the_environment() -> None:
    for key, value, _ in load(environ={}).rows():
        if value is None or key.startswith("auth."):
            continue
        name = "KVSTORE_" + key.upper().replace(".", "__")
        # GPUs alone are refused: they need a capacity.
        effective = load(environ={"KVSTORE_HBM__CAPACITY": "0", name: str(value)})
        assert str(effective.origins[key]) == f"environment {name}"
        assert {name: found for name, found, _ in effective.rows()}[key] == value
    assert len(sources.keys()) == len(load(environ={}).rows())


@given(st.integers(0, 1 << 60))
def test_sizes_survive_their_plain_form(size: int) -> None:
    assert units.parse_size(size) == units.parse_size(str(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("8 gib", 8 << 30), ("8GB", 8 * 10**9), ("1.5K", 1500), ("1Ki", 1024)],
)
def test_sizes(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("10", 10.0), ("1h30m", 5400.0), ("2d", 172800.0), ("0.5s", 0.5), (3, 3.0)],
)
def test_durations(text: object, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "1y", "-1s", "1h 2x", None, True, float("nan")])
def test_no_durations(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        units.parse_duration(text)


@given(st.text(max_size=12))
def test_parsers_give_values_or_value_errors(text: str) -> None:
    for parse in (units.parse_size, units.parse_rate, units.parse_duration, units.parse_share):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0
    try:
        address = units.parse_address(text)
    except ValueError:
        return
    assert units.parse_address(str(address)) == address


def test_quantities_for_people() -> None:
    assert [units.format_size(size) for size in (0, 1023, 8 << 30, (1 << 20) * 3 // 2)] == [
        "0 B", "1023 B", "8 GiB", "1.5 MiB",
    ]  # fmt: skip
    spans = (0.000018, 0.0042, 4.2, 62, 3720, 90000)
    assert [units.format_duration(span) for span in spans] == [
        "18us", "4.2ms", "4.2s", "1m 2s", "1h 2m", "1d 1h",
    ]  # fmt: skip


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def test_json_logs_are_one_object_a_line(stream: io.StringIO) -> None:
    logs.configure(LogSection(format="json"), stream)
    log = structlog.get_logger("kvstore.test")
    log.debug("not shown")
    log.info("block stored", hash=b"\xab\xcd", size=4096)
    logging.getLogger("elsewhere").warning("from the %s", "library")
    try:
        raise OSError("disk")
    except OSError:
        log.exception("read failed")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[0]["event"] == "block stored"
    assert lines[0]["hash"] == "abcd"
    assert lines[0]["level"] == "info"
    assert lines[1]["event"] == "from the library"
    assert lines[2]["exception"][0]["exc_value"] == "disk"


def test_console_logs_have_no_colour_when_piped(stream: io.StringIO) -> None:
    logs.configure(LogSection(level="warning"), stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud", tier="ssd")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_tenants_from_every_source(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text('[tenants.a]\ndram = "1GiB"\nssd = "off"\n[tenants."*"]\ndram = "2GiB"\n')
    effective = load(
        path,
        flags={"tenants.with.dots.ssd": "3GiB"},
        environ={"KVSTORE_TENANTS__A_B__DRAM": "4GiB", "KVSTORE_TENANTS__A__DRAM": "5GiB"},
    )
    assert effective.config.quotas == {
        "a": Quota(5 << 30, None),
        "*": Quota(2 << 30, None),
        "with.dots": Quota(None, 3 << 30),
        "a_b": Quota(4 << 30, None),
    }
    rows = {key: (value, str(origin)) for key, value, origin in effective.rows()}
    assert rows["tenants.a.dram"] == (5 << 30, "environment KVSTORE_TENANTS__A__DRAM")
    assert rows["tenants.*.dram"] == (2 << 30, f"file {path}")
    assert rows["tenants.with.dots.ssd"] == (3 << 30, "flag --set tenants.with.dots.ssd")
    assert rows["tenants.a_b.token_file"] == (None, "default")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"tenants.a.drm": 1}, r"tenants\.a\.drm: unknown key .*did you mean tenants\.a\.dram"),
        ({"tenants.a": 1}, r"tenants\.a: unknown key"),
        ({"tenants": 1}, r"tenants: unknown key"),
        ({"tenants.a.dram": "much"}, r"tenants\.a\.dram: expected a size.*--set tenants\.a\.dram"),
        ({"tenants.*.token_file": "/x"}, r"tenants\.\*\.token_file: .*auth\.session_token_file"),
    ],
)
def test_impossible_tenants(flags: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(flags=flags, environ={})
