"""The state directory's lock."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, StateLocked
from kvstore.state import StateDirectory


def test_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "a" / "b")
    state.open()
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    state.close()
    state.close()


def test_second_holder_is_told_who_has_it(tmp_path: Path) -> None:
    first, second = StateDirectory(tmp_path), StateDirectory(tmp_path)
    first.open()
    with pytest.raises(StateLocked, match=f"{tmp_path} is in use by process {os.getpid()}"):
        second.open()
    second.close()
    with pytest.raises(StateLocked):
        second.open()
    first.close()
    second.open()
    second.close()


def test_lock_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from kvstore.state import StateDirectory\n"
        "StateDirectory(Path(sys.argv[1])).open(); print('ready', flush=True); sys.stdin.read()"
    )
    state = StateDirectory(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        with pytest.raises(StateLocked, match=f"process {holder.pid}"):
            state.open()
        holder.kill()
    state.open()
    state.close()


def test_lock_is_not_inherited_by_other_programs(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    state.open()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        state.close()
        state.open()
    state.close()


def test_full_disk_does_not_keep_it_from_being_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first, second = StateDirectory(tmp_path), StateDirectory(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        first.open()
    with pytest.raises(StateLocked, match="in use by another process"):
        second.open()
    first.close()


def test_directory_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(ConfigError, match="node.state_directory"):
            StateDirectory(path).open()
