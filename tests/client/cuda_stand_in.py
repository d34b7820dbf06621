"""Stands in for CUDA: streams whose work is done late, in any order that their events allow.

What is asked of a stream is done when somebody waits. Some streams are far ahead of others, as
chance has it. So a missing wait shows as wrong bytes, which a real GPU would show now and then.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from client.paged_runs import Batch

_KERNELS = "client.paged_kernels"
_MODULES = ("client.paged_device", "client.paged_by_layer", "client.paged_cuda")


class Event:
    """Recorded behind what a stream had been asked for."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self._gpu.run_until(lambda: self.done)

    def wait(self) -> None:
        self._gpu.current.wait_event(self)

    def set(self) -> None:
        self.done = True


class Stream:
    """Work in its order."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.speed = gpu.random.random()
        self.work: deque[Event | Callable[[], object]] = deque()
        gpu.streams.append(self)

    @property
    def cuda_stream(self) -> Stream:
        return self

    def ask(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def wait_event(self, event: Any) -> None:
        self.work.append(event)

    def record_event(self) -> Event:
        event = Event(self._gpu)
        self.work.append(event.set)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def step(self) -> bool:
        """Do the next thing, unless it has to wait."""
        if not self.work or (isinstance(self.work[0], Event) and not self.work[0].done):
            return False
        work = self.work.popleft()
        if not isinstance(work, Event):
            work()
        return True


class Memory:
    """A tensor as far as copies use one; the copies are done late."""

    def __init__(self, gpu: Gpu, tensor: Any) -> None:
        self._gpu = gpu
        self.tensor = tensor

    def __getitem__(self, index: slice) -> Memory:
        return Memory(self._gpu, self.tensor[index])

    def data_ptr(self) -> int:
        address: int = self.tensor.data_ptr()
        return address

    def numpy(self) -> Any:
        return self.tensor.numpy()

    def copy_(self, other: Memory, *, non_blocking: bool) -> None:
        assert non_blocking
        self._gpu.current.ask(lambda: self.tensor.copy_(other.tensor))

    def to(self, device: Any, *, non_blocking: bool) -> Any:
        assert non_blocking
        there = torch.full_like(self.tensor, -1)
        self._gpu.current.ask(lambda: there.copy_(self.tensor))
        return there


class Gpu:
    """All streams; seen by the code as the module torch."""

    float32, uint8, int64 = torch.float32, torch.uint8, torch.int64

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.kernels = 0
        self.rows = 0
        self.cuda = SimpleNamespace(
            Stream=lambda device: Stream(self),
            current_stream=lambda device: self.current,
            stream=self._on,
            device=lambda device: self._on(self.current),
        )

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty(self, shape: Any, *, dtype: Any, device: Any = None, pin_memory: bool = False) -> Any:
        return Memory(self, torch.zeros(shape, dtype=dtype))

    def from_numpy(self, array: Any) -> Memory:
        return Memory(self, torch.from_numpy(array))

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            chosen = self.random.sample(self.streams, len(self.streams))
            fastest = sorted(self.streams, key=lambda stream: stream.speed)
            order = fastest if self.random.random() < 0.9 else chosen
            assert any(stream.step() for stream in order), "the streams wait for each other"

    def finish(self) -> None:
        """Do all that was asked for."""
        self.run_until(lambda: not any(stream.work for stream in self.streams))


class Launch:
    """The kernel, with the signature of the real one."""

    def __init__(self, gpu: Gpu, device: Any, batch: Batch) -> None:
        self._gpu = gpu
        self._runs = batch.runs

    def __call__(
        self, buffers: Any, blocks: Any, count: int, *, to_tensors: bool, programs: int
    ) -> None:
        def move() -> None:
            self._gpu.kernels += 1
            for far, block in zip(buffers.tolist()[:count], blocks.tolist(), strict=False):
                assert far > 0, "the places of the buffers are not there yet"
                for run in self._runs:
                    near_at, far_at = run.address + block * run.stride, far + run.offset
                    to, source = (near_at, far_at) if to_tensors else (far_at, near_at)
                    ctypes.memmove(to, source, run.length)

        self._gpu.current.ask(move)


class RowCopies:
    """Copies of rows, with the signature of the real ones."""

    def __call__(
        self, to: int, source: int, pitch: int, width: int, rows: int, stream: Stream
    ) -> None:
        def copy() -> None:
            stream._gpu.rows += rows
            for row in range(rows):
                ctypes.memmove(to + row * width, source + row * pitch, width)

        stream.ask(copy)


@contextmanager
def cuda_copies() -> Iterator[ModuleType]:
    """``client.paged_cuda`` over what stands in for kernels and copies, whether there is Triton."""
    kept = {name: sys.modules.pop(name, None) for name in (_KERNELS, *_MODULES)}
    kernels = ModuleType(_KERNELS)
    kernels.Launch = Launch  # type: ignore[attr-defined]
    sys.modules[_KERNELS] = kernels
    try:
        made = [importlib.import_module(name) for name in _MODULES]
        made[1].RowCopies = RowCopies  # type: ignore[attr-defined]
        yield made[2]
    finally:
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
