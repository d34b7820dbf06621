"""What fio reads from a disk, as the limit of the SSD tier."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

BLOCK: Final = 1 << 20
ENGINES: Final = ("io_uring", "libaio")


class Fio:
    """One file of written data, read once from its beginning to its end, turn by turn."""

    def __init__(self, file: Path, size: int, depth: int) -> None:
        """Write ``size`` bytes to ``file``, to be read with ``depth`` reads in flight.

        Raises:
            FioMissing: there is no fio here, or it has no engine that works.
        """
        self._file = file
        self._size = size
        self._depth = depth
        self._next = 0
        program = shutil.which("fio")
        if program is None:
            raise FioMissing("no fio: install the package fio")
        self._program = program
        self._engine = self._first_engine()

    def read(self, count: int) -> float:
        """Bytes a second at which the next ``count`` bytes of the file are read."""
        if self._next + count > self._size:
            self._next = 0
        start, self._next = self._next, self._next + count
        return self._run("read", self._engine, start, count)

    def write(self, count: int) -> float:
        """Bytes a second at which the first ``count`` bytes of the file are written anew."""
        return self._run("write", self._engine, 0, count)

    def _first_engine(self) -> str:
        failures = []
        for engine in ENGINES:
            try:
                self._run("write", engine, 0, self._size)
            except subprocess.CalledProcessError as error:
                failures.append(f"{engine}: {error.stderr.strip()[-200:]}")
            else:
                return engine
        raise FioMissing("; ".join(failures))

    def _run(self, direction: str, engine: str, start: int, count: int) -> float:
        command = [
            self._program,
            "--name=turn",
            f"--filename={self._file}",
            f"--rw={direction}",
            f"--bs={BLOCK}",
            f"--iodepth={self._depth}",
            f"--ioengine={engine}",
            "--direct=1",
            f"--offset={start}",
            f"--size={count}",
            "--output-format=json",
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return float(job[direction]["bw_bytes"])


class FioMissing(Exception):
    """There is no figure of fio's here; the message says why."""
