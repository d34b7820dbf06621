"""Payload by RDMA, against perftest on the same device and against our own TCP.

Needs an RDMA device and perftest; ``make bench-rdma`` runs it in a machine that has both, over
Soft-RoCE, where only the ratios mean anything.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.chains import chain, session, store
from benchmarks.measure import Row, Sample, Settings, alternate
from benchmarks.memory import blocks
from benchmarks.node import Node, node
from benchmarks.tcp import free_port
from client.blocking import Client
from tests.rdma.guest.perftest import measure as perftest

MIB: Final = 1 << 20
DEADLINE: Final = 60.0


class Shape(NamedTuple):
    """One size of blocks.

    Attributes:
        size: bytes of a block.
        batch: blocks of a call.
        get: the least ratio to ib_write_bw.
        put: the least ratio to ib_read_bw.
    """

    size: int
    batch: int
    get: float
    put: float

    @property
    def total(self) -> int:
        """Bytes of a call."""
        return self.size * self.batch

    def __str__(self) -> str:
        unit, name = (MIB, "MiB") if self.size >= MIB else (1 << 10, "KiB")
        return f"{self.size // unit} {name} blocks, {self.batch} a call"


SHAPES: Final = (Shape(MIB, 32, 0.9, 0.9), Shape(64 << 10, 128, 0.7, 0.7))


def measure(settings: Settings) -> Iterator[Row]:
    """The rows of RDMA."""
    with (
        tempfile.TemporaryDirectory(prefix="kvb-") as name,
        node(
            Path(name),
            dram__capacity="512MiB",
            dram__segment="256MiB",
            listen__tcp=f"127.0.0.1:{free_port()}",
            listen__insecure=True,
            rdma__mode="require",
        ) as daemon,
    ):
        for shape in SHAPES:
            yield from _against_perftest(settings, daemon, shape)
        yield from _against_tcp(settings, daemon, SHAPES[0])


class Calls:
    """A client's gets and puts of one shape, and the CPU time of both sides.

    Args:
        client: with its session open.
        shape: of the blocks.
        node: the process at the other end.
    """

    def __init__(self, client: Client, shape: Shape, node: Node) -> None:
        self._client = client
        self._shape = shape
        self._node = node
        pool = blocks(1, shape.total)[0]
        self._blocks = list(pool.reshape(shape.batch, shape.size))
        self._held = chain(shape.batch)
        self.registered = client.register(pool)
        self._moved = 0
        self._cpu = 0.0
        store(client, self._held, self._blocks)

    def get(self) -> None:
        """One get."""
        found = self._client.get(self._held, self._blocks, deadline=DEADLINE).found
        if found != self._shape.batch:
            raise RuntimeError(f"{found} of {self._shape.batch} blocks are there")

    def put(self) -> None:
        """One put of blocks that are new."""
        store(self._client, chain(self._shape.batch), self._blocks)

    def rate(self, call: Callable[[], None], calls: int) -> Sample:
        """A sample of the bytes a second that a number of calls move."""

        def turn() -> float:
            began, cpu = time.perf_counter(), self._cpu_now()
            for _ in range(calls):
                call()
            self._cpu += self._cpu_now() - cpu
            self._moved += calls * self._shape.total
            return calls * self._shape.total / (time.perf_counter() - began)

        return turn

    @property
    def cpu(self) -> float:
        """Seconds of CPU time of both processes for each 10^9 bytes, kernel included."""
        return self._cpu / self._moved * 1e9

    def _cpu_now(self) -> float:
        own = os.times()
        fields = Path(f"/proc/{self._node.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return own.user + own.system + ticks / os.sysconf("SC_CLK_TCK")


def _against_perftest(settings: Settings, daemon: Node, shape: Shape) -> Iterator[Row]:
    calls = settings.calls(max(1, (32 * MIB) // shape.total))
    iterations = max(5, calls * shape.batch)
    with session(daemon.tcp, shape.size, "rdma") as client:
        moving = Calls(client, shape, daemon)
        with moving.registered:
            for what, call, tool, goal in (
                ("get", moving.get, "ib_write_bw", shape.get),
                ("put", moving.put, "ib_read_bw", shape.put),
            ):
                rounds = alternate(
                    settings,
                    moving.rate(call, calls),
                    lambda tool=tool: perftest(tool, shape.size, iterations) * 1e6,  # type: ignore[misc]
                )
                yield Row(
                    f"rdma-{what}-{shape.size >> 10}k",
                    f"rdma {what}, {shape}",
                    tool,
                    "B/s",
                    "at least",
                    goal,
                    rounds,
                )


def _against_tcp(settings: Settings, daemon: Node, shape: Shape) -> Iterator[Row]:
    with ExitStack() as stack:
        by = {
            name: Calls(stack.enter_context(session(daemon.tcp, shape.size, name)), shape, daemon)
            for name in ("rdma", "tcp")
        }
        for calls in by.values():
            stack.enter_context(calls.registered)
        for what in ("get", "put"):
            rates = [each.rate(getattr(each, what), 1) for each in by.values()]
            rounds = alternate(settings, *rates)
            yield Row(
                f"rdma-{what}-tcp",
                f"rdma {what}, {shape}",
                f"tcp {what}",
                "B/s",
                "at least",
                1.0,
                rounds,
                note=", ".join(f"{name} {each.cpu:.1f} CPU s/GB" for name, each in by.items()),
            )
