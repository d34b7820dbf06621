"""One guest: a QEMU process from its start to its end."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rdma.guest.errors import GuestError

SHARE = Path("/run/guest")
"""Where a guest sees its share, the folder that it and the host both write."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Description:
    """What a guest is to be."""

    name: str
    kernel: Path
    initramfs: Path
    share: Path
    """The host's folder behind `SHARE`. Its console log and exit status land there as well."""
    processors: int = 2
    memory: str = "3G"
    network: Sequence[str] = ()
    """QEMU's arguments for a network device."""
    reboots: bool = False
    """Boots again after a reset, where others end."""
    setup: Sequence[Sequence[str]] = ()
    """Commands that make the RoCE device, before anything else."""
    environment: dict[str, str] = field(default_factory=dict)
    directory: Path = Path("/")
    """Where the command runs."""


class Machine:
    """A running guest. As a context manager it's gone at the end, however that came."""

    def __init__(
        self,
        description: Description,
        command: Sequence[str],
        output: Callable[[bytes], None],
    ) -> None:
        """Boots the guest; `output` gets what the command writes, from a thread, as it comes."""
        self._description = description
        self._files = description.share / description.name
        self._files.mkdir()
        self._write_start(command)
        self._process = subprocess.Popen(
            self._arguments(),
            stdin=subprocess.PIPE,  # its end would close the guest's port for output as well
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )
        self._reader = threading.Thread(target=self._read, args=(output,), name=description.name)
        self._reader.start()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends the guest at once, as a power cut would."""
        self._process.kill()
        self._end()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status of the command, once the guest has powered off.

        Raises:
            TimeoutError: it still runs after `timeout` seconds.
            GuestError: it's gone and left no exit status.
        """
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        self._end()
        try:
            return int((self._files / "status").read_text())
        except (FileNotFoundError, ValueError):
            raise GuestError(
                f"guest {self._description.name} left no exit status; its console:\n"
                + self.console()
            ) from None

    def console(self) -> str:
        """The end of what the kernel and init said."""
        try:
            return (self._files / "console").read_text(errors="replace")[-4000:]
        except FileNotFoundError:
            return "(nothing)"

    def _end(self) -> None:
        self._process.wait()
        self._reader.join()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _read(self, output: Callable[[bytes], None]) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                output(data)

    def _write_start(self, command: Sequence[str]) -> None:
        description = self._description
        lines = ["set -e", f"hostname {shlex.quote(description.name)}"]
        lines += [shlex.join(step) for step in description.setup]
        lines += [
            f"export {name}={shlex.quote(value)}" for name, value in description.environment.items()
        ]
        lines += [f"cd {shlex.quote(str(description.directory))}", f"exec {shlex.join(command)}"]
        (self._files / "start").write_text("\n".join(lines) + "\n")

    def _arguments(self) -> list[str]:
        description = self._description
        return [
            "qemu-system-x86_64",
            *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off"),
            *("-smp", str(description.processors), "-m", description.memory),
            *("-nodefaults", "-no-user-config", "-display", "none"),
            *(() if description.reboots else ("-no-reboot",)),
            *("-kernel", str(description.kernel), "-initrd", str(description.initramfs)),
            "-append",
            "console=ttyS0 quiet mitigations=off panic=-1 tsc=reliable no_timer_check "
            f"guest={description.name}",
            *("-serial", f"file:{self._files / 'console'}"),
            *("-device", "virtio-serial-pci", "-chardev", "stdio,id=output,signal=off"),
            *("-device", "virtserialport,chardev=output,name=output"),
            *("-device", "virtio-rng-pci"),
            "-virtfs",
            "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap",
            *("-virtfs", f"local,path={description.share},mount_tag=share,security_model=none"),
            *description.network,
        ]


def _die_with_parent() -> None:
    """Has the kernel end QEMU when this process ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
