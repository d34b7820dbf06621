"""The command line against a fake node behind a real control socket."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import block_views, main, naming, watch
from kvstore.control import interface
from kvstore.control.server import ControlServer
from kvstore.control.service import ControlService
from kvstore.departures import DepartureReason
from kvstore.errors import OutOfSpace
from kvstore.units import Address
from tests.kvstore.fake_target import (
    HASHES,
    HELD,
    NAMESPACE,
    OTHER,
    TOKENS,
    FakeTarget,
    unknown_hash,
)

Cli = Callable[..., tuple[int, str, str]]
NOT_HELD = unknown_hash().hex()


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture
def address(target: FakeTarget) -> Iterator[Address]:
    """The fake's control plane on a loop of its own, as the CLI brings another one."""
    started: list[tuple[Address, asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def serve() -> None:
        server = ControlServer([ControlService(target)], Address("127.0.0.1", 0))
        await server.start()
        stop = asyncio.Event()
        started.append((server.address, asyncio.get_running_loop(), stop))
        ready.set()
        await stop.wait()
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    where, loop, stop = started[0]
    yield where
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("KVSTORE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def cli(
    address: Address, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cli:
    monkeypatch.setenv("KVSTORE_CONTROL", str(address))

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main.main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def answer(cli: Cli, *arguments: str, status: int = 0) -> Any:
    found, out, err = cli(*arguments, "--json")
    assert found == status, err
    return json.loads(out)


def test_status(cli: Cli) -> None:
    status, out, _ = cli("status")
    assert status == 0
    assert "node-a" in out
    assert "3h 12m" in out
    assert "75.0%" in out
    assert "failing: EIO" in out
    assert "\x1b" not in out
    assert answer(cli, "status")["tiers"][0]["details"] == {"policy": "lru"}


def test_tenants(cli: Cli) -> None:
    _, out, _ = cli("tenants")
    row = next(line for line in out.splitlines() if "search" in line)
    assert " ".join(row.split()) == "search 3 GiB 4 GiB 0 B - 2"
    assert answer(cli, "tenants") == [
        {
            "name": "search",
            "dram": 3 << 30,
            "ssd": 0,
            "dram_quota": 4 << 30,
            "ssd_quota": None,
            "sessions": 2,
        },
        {
            "name": "*",
            "dram": 1 << 30,
            "ssd": 6 << 20,
            "dram_quota": None,
            "ssd_quota": None,
            "sessions": 0,
        },
    ]


def test_namespaces(cli: Cli) -> None:
    _, out, _ = cli("namespaces")
    assert NAMESPACE.fingerprint.hex()[:16] in out
    assert "acme/llama-8b" in out
    assert f"{OTHER.revision[:12]} " in out
    assert OTHER.revision[:13] not in out
    listed = answer(cli, "namespaces")
    assert [one["fingerprint"] for one in listed] == [
        NAMESPACE.fingerprint.hex(),
        OTHER.fingerprint.hex(),
    ]


def test_ls_and_its_pages(cli: Cli) -> None:
    status, out, err = cli("ls", "--limit", "4")
    assert status == 0
    assert out.count("dram+ssd") == 3
    assert "deadbeef" in out
    assert "root" in out
    assert "--cursor" in err
    first = answer(cli, "ls", "--limit", "4")
    second = answer(cli, "ls", "--limit", "4", "--cursor", first["cursor"])
    assert [one["hash"] for one in first["blocks"] + second["blocks"]] == [
        one.hex() for one in HASHES[:HELD]
    ]
    status, out, _ = cli("ls", "--limit", "4", "--all", "--json")
    assert out.count('"cursor"') == 2
    assert cli("ls", "--cursor", "xyz")[0] == main.USAGE
    assert cli("ls", "--cursor", "0badf00d")[0] == main.FAILED


def test_ls_narrows(cli: Cli, target: FakeTarget) -> None:
    answer(cli, "ls", "-n", OTHER.fingerprint.hex()[:8], "--tier", "ssd", "--shard", "3")
    assert target.asked[-1] == (
        "list_blocks",
        interface.BlockQuery(OTHER.fingerprint, 3, "ssd", b"", 100),
    )
    assert cli("ls", "--tier", "tape")[0] == main.FAILED


@pytest.mark.parametrize("digits", [8, 20, 64])
def test_inspect_by_the_beginning_of_a_hash(cli: Cli, digits: int) -> None:
    status, out, _ = cli("inspect", HASHES[2].hex()[:digits].upper())
    assert status == 0
    assert HASHES[2].hex()[:16] in out
    assert HASHES[1].hex()[:16] in out
    assert "1h 1m" in out


def test_inspect_a_prefix(cli: Cli) -> None:
    found = answer(cli, "inspect", "--prefix", HASHES[4].hex())
    assert [one["hash"] for one in found] == [one.hex() for one in HASHES[:5]]
    assert len(answer(cli, "inspect", "-p", "--limit", "2", HASHES[4].hex())) == 2


def test_what_is_not_held_is_status_one(cli: Cli) -> None:
    where = NAMESPACE.fingerprint.hex()
    assert cli("inspect", NOT_HELD, "-n", where)[0] == main.FAILED
    assert answer(cli, "inspect", NOT_HELD, "-n", where, status=1) == []
    assert cli("match", NOT_HELD, "-n", where)[0] == main.FAILED
    assert cli("unpin", HASHES[0].hex())[0] == main.FAILED


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["inspect", "abc"], "at least 8"),
        (["inspect", "not-hex-at-all"], "is no hash"),
        (["inspect", NOT_HELD[:10]], "no block that is held begins so"),
        (["inspect", NOT_HELD], "several namespaces are held"),
        (["inspect", HASHES[0].hex(), "-n", "gpt"], "names no namespace"),
        (["inspect", HASHES[0].hex(), "-n", "acme"], "bfloat16 tenant default"),
        (["inspect", HASHES[0].hex(), "-n", "acme"], "names several namespaces"),
        (["match"], "give hashes, or --tokens"),
        (["match", HASHES[0].hex(), "--tokens", "1"], "and not both"),
        (["match", HASHES[0].hex(), "--lora", "x"], "go with --tokens"),
        (["match", "--tokens", "1,2,x", "-n", "e8"], "names no namespace"),
        (["match", "--tokens", "1", "-n", NAMESPACE.fingerprint.hex()], "fewer tokens than one"),
        (["match", "--tokens", "@/nowhere", "-n", OTHER.fingerprint.hex()], "cannot be read"),
        (["evict"], "give the hash of a block, or --all"),
        (["evict", HASHES[0].hex(), "--all"], "and not both"),
        (["pin", HASHES[0].hex(), "--ttl", "soon"], "expected a duration"),
        (["flush"], "Missing argument"),
        (["top", "--interval", "0"], "Invalid value"),
    ],
)
def test_wrong_usage_is_status_two(cli: Cli, arguments: list[str], complaint: str) -> None:
    status, _, err = cli(*arguments)
    assert status == main.USAGE
    assert complaint in " ".join(err.replace("│", " ").split())


def test_match_tokens(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = NAMESPACE.fingerprint.hex()[:12]
    file = tmp_path / "ids"
    file.write_text(json.dumps(TOKENS))
    status, out, _ = cli("match", "-n", name, "--tokens", f"@{file}")
    assert status == main.FAILED
    assert "6 of 10 blocks held (24 tokens)." in out
    file.write_text("\n".join(map(str, TOKENS[:12])))
    found = answer(cli, "match", "-n", name, "--tokens", f"@{file}")
    assert (found["asked"], found["blocks"], found["tokens"]) == (3, 3, 12)
    assert found["held"][2] == {"hash": HASHES[2].hex(), "tier": "dram"}
    with file.open("w") as stream:
        stream.write(",".join(map(str, TOKENS[:8])))
    with file.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert answer(cli, "match", "-n", name, "--tokens", "-")["blocks"] == 2
    for extra in ("--lora", "--cache-salt"):
        found = answer(cli, "match", "-n", name, "-t", "0,1,2,3", extra, "x", status=1)
        assert found["blocks"] == 0


def test_match_hashes(cli: Cli, tmp_path: Path) -> None:
    full = [one.hex() for one in HASHES[:HELD]]
    status, out, _ = cli("match", *(one[:10] for one in full))
    assert status == 0
    assert "6 of 6" in out
    file = tmp_path / "hashes"
    file.write_text("\n".join(full))
    assert answer(cli, "match", f"@{file}", "-n", NAMESPACE.fingerprint.hex())["blocks"] == HELD


@pytest.mark.parametrize("text", ["[1, 2", '[1, "2"]', "[true]", "1.5", "{}"])
def test_what_is_no_token_list(text: str) -> None:
    with pytest.raises(Exception, match="token ids"):
        naming.parse_tokens(text)


def test_runs_of_a_tier() -> None:
    assert block_views.runs(["dram", "dram", "ssd", "dram"]) == [
        (0, 1, "dram"), (2, 2, "ssd"), (3, 3, "dram"),
    ]  # fmt: skip
    assert block_views.runs([]) == []


def test_every_reason_to_leave_has_a_sentence() -> None:
    assert set(block_views._REASONS) == {str(reason) for reason in DepartureReason}


EXPLANATIONS = [
    ({"ending": "never_stored"}, "Nobody has stored"),
    ({"ending": "forgotten"}, "the node forgot"),
    ({"ending": "pending"}, "being written"),
    ({"ending": "corrupt"}, "checksum"),
    ({"ending": "node_gone"}, "left the cluster"),
    ({"ending": "shard_absent", "shard": 3}, "not by shard 3"),
    (
        {"ending": "departed", "tier": "ssd", "reason": "ssd_reclaim", "ago": 61.0},
        "left the ssd tier 1m 1s ago, when its region",
    ),
    (
        {
            "ending": "other_namespace",
            "nearest": OTHER.fingerprint,
            "differences": ("dtype: ours is bfloat16, theirs is float16",),
        },
        f"{OTHER.fingerprint.hex()[:16]}, which differs: dtype: ours is bfloat16",
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), EXPLANATIONS)
def test_explain_says_why(
    cli: Cli, target: FakeTarget, fields: dict[str, Any], sentence: str
) -> None:
    ending = interface.Ending(fields.pop("ending"))
    target.explanation = interface.Explanation(2, 1, ending, HASHES[1], **fields)
    arguments = ("explain", "-n", NAMESPACE.fingerprint.hex(), HASHES[0].hex(), NOT_HELD)
    status, out, _ = cli(*arguments)
    assert status == main.FAILED
    assert "1 of 2 blocks" in out
    assert sentence in out
    assert HASHES[1].hex() in out
    assert answer(cli, *arguments, status=1)["ending"] == ending.value


def test_explain_what_is_whole(cli: Cli) -> None:
    status, out, _ = cli("explain", HASHES[0].hex(), HASHES[1].hex()[:9])
    assert status == 0
    assert "The whole prefix is held." in out


def test_explain_takes_a_namespace_that_the_node_does_not_know(
    cli: Cli, target: FakeTarget
) -> None:
    cli("explain", "-n", NOT_HELD, HASHES[0].hex())
    assert target.asked[-1] == ("match", unknown_hash(), [HASHES[0]])


def test_pin_and_unpin(cli: Cli, target: FakeTarget) -> None:
    pinned = answer(cli, "pin", HASHES[2].hex()[:8], "--ttl", "1h30m")
    assert (pinned["blocks"], pinned["expires"]) == (3, 5400.0)
    assert "in 1h 30m" in cli("pins")[1]
    assert answer(cli, "pins") == [pinned]
    assert "never" in cli("pin", HASHES[2].hex())[1]
    assert answer(cli, "unpin", HASHES[2].hex())["blocks"] == 3
    assert "0 blocks" in cli("unpin", HASHES[2].hex())[1]


def test_what_the_node_refuses_is_status_one(cli: Cli, target: FakeTarget) -> None:
    status, _, err = cli("pin", HASHES[5].hex())
    assert status == main.FAILED
    assert err == "kvstore: too much would be pinned\n"
    target.failure = OutOfSpace("full")
    status, out, err = cli("status", "--json")
    assert (status, out) == (main.FAILED, "")
    assert json.loads(err) == {"error": "out_of_space", "message": "full", "retry": True}


def test_evict_and_flush(cli: Cli, target: FakeTarget) -> None:
    status, out, _ = cli("evict", HASHES[1].hex())
    assert status == main.FAILED
    assert out.strip() == "Dropped 4 blocks (4 MiB); 1 stayed: pinned or in use."
    assert target.asked[-1] == ("evict", NAMESPACE.fingerprint, HASHES[1])
    cli("evict", "--all", "-n", OTHER.fingerprint.hex())
    assert target.asked[-1] == ("evict", OTHER.fingerprint, None)
    assert answer(cli, "flush", "dram") == {"blocks": 3, "bytes": 3 << 20, "moved": 2, "kept": 0}
    assert cli("flush", "hbm")[0] == main.FAILED


def test_verify(cli: Cli, target: FakeTarget) -> None:
    status, out, err = cli("verify", "--tier", "ssd")
    assert (status, err) == (0, "")
    assert "Checked 6 blocks: 0 corrupt" in out
    assert target.asked[-1] == ("verify", None, "ssd")
    target.corrupt = 1
    found = answer(cli, "verify", status=1)
    assert found["names"] == [HASHES[0].hex()]
    assert (found["checked"], found["corrupt"], found["finished"]) == (6, 1, True)
    assert f"corrupt: {HASHES[0].hex()}" in cli("verify")[1]


def test_top_once(cli: Cli) -> None:
    seen = answer(cli, "top", "--once", "-i", "0.1")
    assert seen["lookups_per_second"] == 100
    assert seen["hit_share"] == 0.75
    assert seen["hit_rate"] == 0.2
    assert seen["bytes_per_second"] == {"shm out": 100 << 20}
    status, out, _ = cli("top", "--once", "-i", "0.1")
    assert status == 0
    assert "75.0%" in out
    assert "100 MiB/s" in out


def test_rates_of_a_node_that_was_restarted_are_not_negative() -> None:
    fake = FakeTarget()
    later = asyncio.run(fake.snapshot())
    fresh = asyncio.run(FakeTarget().snapshot())
    seen = watch.changes(later, fresh)
    assert seen["lookups_per_second"] == 0
    assert seen["hit_share"] is None


def test_what_others_hold_is_a_hit() -> None:
    before = replace(asyncio.run(FakeTarget().snapshot()), clock=0.0, matched={})
    matched = {"held": 1, "remote": 2, "absent": 1}
    after = replace(before, clock=1.0, matched=matched)
    assert watch.changes(before, after)["hit_rate"] == 0.75


def test_a_daemon_that_is_not_there_is_status_three(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_CONTROL", "127.0.0.1:1")
    assert main.main(["status"]) == main.NOT_THERE
    said = capsys.readouterr().err
    assert "nothing answers at 127.0.0.1:1: Connection refused" in said
    assert "kvstore serve" in said


def test_a_daemon_that_hangs_is_status_three(cli: Cli, target: FakeTarget) -> None:
    async def hang() -> interface.NodeStatus:
        await asyncio.sleep(30)
        raise AssertionError

    target.status = hang  # type: ignore[method-assign]
    started = time.monotonic()
    status, _, err = cli("status", "--timeout", "0.2")
    assert status == main.NOT_THERE
    assert "did not answer within 0.2 s" in err
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("value", ["nonsense", "127.0.0.1:x"])
def test_a_bad_control_address_is_status_two(cli: Cli, value: str) -> None:
    status, _, err = cli("status", "--control", value)
    assert status == main.USAGE
    assert "--control: expected an address" in err


def test_config_names_its_sources(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[dram]\ncapacity = "2GiB"\nprefault = false\n')
    monkeypatch.setenv("KVSTORE_LOG__LEVEL", "debug")
    monkeypatch.setenv("KVSTORE_AUTH__CONTROL_TOKEN", "hush")
    found = answer(
        cli, "config", "-c", str(file), "--dram", "3GiB", "--set", "policy.dram=arc", "--insecure"
    )
    assert found["dram.capacity"] == {"value": 3 << 30, "source": "flag --dram"}
    assert found["policy.dram"] == {"value": "arc", "source": "flag --set policy.dram"}
    assert found["listen.insecure"] == {"value": True, "source": "flag --insecure"}
    assert found["dram.prefault"] == {"value": False, "source": f"file {file}"}
    assert found["log.level"] == {"value": "debug", "source": "environment KVSTORE_LOG__LEVEL"}
    _, out, _ = cli("config", "-c", str(file))
    assert "2 GiB" in out
    assert "hush" not in out + str(found)


def test_the_configuration_is_printed_as_it_is_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(
        '[ssd]\nwrite_budget = "64MiB/s"\n[tenants.search]\ndram = "3GiB"\n', encoding="utf-8"
    )
    for name in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(name)
    _, out, _ = cli("config", "-c", str(file))
    shown = {line.split()[0]: line.split("  ") for line in out.splitlines() if line.strip()}
    values = {
        key: [one.strip() for one in row if one.strip()][1]
        for key, row in shown.items()
        if "." in key
    }
    assert values["ssd.write_budget"] == "64 MiB/s"
    assert values["tenants.search.dram"] == "3 GiB"
    assert values["rdma.bytes_in_flight"] == "16 MiB"
    assert values["cluster.host"] == "unset"
    assert values["cluster.lookup_deadline"] == "5ms"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--dram", "-1"], "dram.capacity: a size cannot be negative: '-1' (from flag --dram)"),
        (["--set", "dram.size=1"], "unknown key (from flag --set dram.size)"),
        (["--set", "auth.control_token=x"], "cannot be given as a flag"),
        (["--set", "dram"], "expected KEY=VALUE"),
        (["--dram", "1GiB", "--set", "dram.capacity=2GiB"], "is given twice"),
        (["--tcp", "0.0.0.0:9500"], "can be reached from other machines"),
        (["-c", "/nowhere.toml"], "cannot be read"),
        (["--set", "tls.ca=/ca.pem"], "the node would not speak TLS at all"),
        (["--set", "tls.certificate=/nowhere.pem"], "tls: /nowhere.pem can't be read"),
    ],
)
def test_serve_refuses_a_bad_configuration(cli: Cli, arguments: list[str], complaint: str) -> None:
    status, _, err = cli("serve", *arguments)
    assert status == main.USAGE
    assert complaint in " ".join(err.replace("│", " ").split())


def test_doctor_finds_the_daemon(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(f'[node]\nstate_directory = "{tmp_path}"\n[dram]\ncapacity = "64MiB"\n')
    found = answer(cli, "doctor", "-c", str(file))
    assert found[-1]["detail"].startswith("node-a is serving, process 4242")
    status, out, _ = cli("doctor", "-c", str(file), "--control", "127.0.0.1:1")
    assert status == 0
    assert "nothing answers at 127.0.0.1:1" in out
    assert cli("doctor", "-c", str(file), "--set", "x")[0] == main.USAGE
    file.write_text('[dram]\ncapacity = "500TiB"\n')
    status, out, _ = cli("doctor", "-c", str(file))
    assert status == main.FAILED
    assert "kvstore serve --dram" in out


def run_process(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *arguments],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_module_is_the_command() -> None:
    ended = run_process("--version")
    assert ended.returncode == 0
    assert ended.stdout.startswith("kvstore ")


def test_text_that_the_locale_lacks_is_no_crash(tmp_path: Path) -> None:
    missing = tmp_path / "schön"
    ended = run_process(
        "config", "--set", f"node.state_directory={missing}", PYTHONIOENCODING="ascii"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "sch?n" in ended.stdout


def test_help_needs_nothing_heavy() -> None:
    heavy = ("torch", "matplotlib", "numpy", "grpclib", "google.protobuf", "kvstore.config")
    probe = (
        "import sys; from kvstore.cli.main import main; main(['--help']); main(['ls', '--help']);"
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stderr.strip() == "[]"


@pytest.mark.parametrize("command", ["serve", "explain", "verify", "doctor", "top", "simulate"])
def test_every_command_has_help(cli: Cli, command: str) -> None:
    status, out, _ = cli(command, "--help")
    assert status == 0
    assert "--config" in out or command == "simulate"


def test_shell_completion_is_offered() -> None:
    ended = run_process(_KVSTORE_COMPLETE="complete_bash", COMP_WORDS="kvstore st", COMP_CWORD="1")
    assert "status" in ended.stdout
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("words", "offer"),
    [("flush d", "dram"), ("ls --tier ", "ssd"), ("simulate --policy f", "fifo")],
)
def test_shell_completion_knows_values(words: str, offer: str) -> None:
    count = str(len(words.split(" ")))
    ended = run_process(
        _KVSTORE_COMPLETE="complete_bash", COMP_WORDS=f"kvstore {words}", COMP_CWORD=count
    )
    assert offer in ended.stdout.split()


def test_a_reader_that_leaves_is_no_crash(address: Address) -> None:
    command = f"{sys.executable} -m kvstore ls --all --limit 1 --json | head -n 1"
    ended = subprocess.run(
        ["/bin/sh", "-c", command],
        env={"PATH": "/usr/bin:/bin", "KVSTORE_CONTROL": str(address)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout == "{\n"
    assert "Traceback" not in ended.stderr
