"""What people see: tables on narrow terminals, help texts, the progress of a replay."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvstore.cli import main, output
from kvstore.cli.main import app

COMMANDS: Any = get_command(app)
NAMES = sorted(COMMANDS.commands)
COLUMNS = ("NAME", "HASH", ">SIZE", "NOTE")
ROWS = [("a" * 10, "0123456789abcdef", "64 KiB", "x" * 30)]


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Make standard output, captured by now, look like a terminal of so many columns."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))


def printed(table: Any, capsys: pytest.CaptureFixture[str]) -> str:
    output.console().print(table)
    return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)


def test_nothing_is_left_out_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch, 70)
    whole = printed(output.table(COLUMNS, ROWS, spare=("NAME", "SIZE")), capsys)
    assert "a" * 10 in whole
    assert "no room" not in whole


def test_what_was_left_out_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch, 61)
    shown = printed(output.table(COLUMNS, ROWS, spare=("NAME", "SIZE")), capsys)
    assert "0123456789abcdef  64 KiB  " + "x" * 30 in shown
    assert "no room for NAME; --json has all" in shown
    assert max(map(len, shown.splitlines())) <= 61


def test_the_last_column_takes_more_lines_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch, 50)
    shown = printed(output.table(COLUMNS, ROWS), capsys)
    assert "0123456789abcdef" in shown
    assert shown.count("x") == 30
    assert "…" not in shown


def test_a_pipe_gets_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a" * 10 in printed(output.table(COLUMNS, ROWS, spare=("NAME",)), capsys)


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "none" in printed(output.table(COLUMNS, []), capsys)


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 blocks"), (1, "1 block"), (1200, "1,200 blocks")]
)
def test_counts_agree_with_their_nouns(number: int, said: str) -> None:
    assert output.counted(number, "block") == said


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_the_defaults_it_was_given(name: str) -> None:
    for one in COMMANDS.commands[name].params:
        assert "[default" not in (getattr(one, "help", "") or ""), "read as markup and swallowed"


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_its_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "<bool>" not in shown
    assert "[[" not in shown
    text = [line.strip() for line in shown.partition("╭")[0].splitlines()]
    early = [
        (one, other)
        for one, other in pairwise(text)
        if one and other and len(one) + 1 + len(other.split()[0]) < 78
    ]
    assert not early


def test_values_are_shown_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config", "--set", "node.grace=90s", "--insecure"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"node\.grace +1m 30s", shown)
    assert re.search(r"listen\.insecure +true", shown)
    assert re.search(r"listen\.tcp +unset", shown)


def test_a_replay_without_a_node_names_its_own_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n')
    url = f"unix://{tmp_path}/nobody.sock"
    assert main.main(["replay", str(trace), "--url", url]) == main.NOT_THERE
    assert "--url or KVSTORE_URL" in capsys.readouterr().err
