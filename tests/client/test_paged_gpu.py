"""Paged KV tensors on a GPU: the same bytes as on the CPU, in step with what the GPU is asked for.

Run by hand where there is one: `python3 -m pytest -c /dev/null tests/client/test_paged_gpu.py`.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given

from tests.client.test_paged import Engine, moves, torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

KV = Engine("LBHNC", layers=32, blocks=256, inner=(8, 16, 256), dtype="bfloat16")
"""Of a model of 8 B parameters: 2 MiB a block."""


def on_gpu(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same tensors, over the same one storage, on the GPU."""
    first = next(iter(tensors.values()))
    raw = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage()).cuda().view(first.dtype)
    return {
        name: raw.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        for name, tensor in tensors.items()
    }


def buffers(count: int, size: int) -> list[memoryview]:
    return [memoryview(bytearray(b"\xee" * size)) for _ in range(count)]


@given(moves())
def test_bytes_are_those_of_the_cpu(
    move: tuple[Engine, dict[str, Any], list[int], tuple[int, int]],
) -> None:
    engine, _, ids, layers = move
    here = engine.tensors()
    there = on_gpu(here)
    cpu, gpu = engine.memory(here), engine.memory(there, stage_bytes=150)
    assert gpu.layout == cpu.layout
    size = gpu.layout.layer_range(*layers)[1]
    expected, found = buffers(len(ids), size), buffers(len(ids), size)
    cpu.gather(ids, expected, layers=layers)
    gpu.gather(ids, found, layers=layers, after=gpu.mark())
    assert found == expected
    for number, buffer in enumerate(expected):
        buffer[:] = bytes((byte + number + 1) % 256 for byte in buffer)
    cpu.scatter(expected, ids, layers=layers)
    gpu.scatter(expected, ids, layers=layers, after=gpu.mark())
    for name, tensor in here.items():
        same = there[name].cpu().contiguous().view(torch.uint8)
        assert torch.equal(same, tensor.contiguous().view(torch.uint8))


def busy() -> None:
    """Keeps the current stream busy for some tens of milliseconds."""
    torch.cuda._sleep(100_000_000)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    return on_gpu(KV.tensors())


def test_a_gather_waits_for_what_was_asked_before_its_mark(tensors: dict[str, Any]) -> None:
    memory = KV.memory(tensors)
    for turn in range(3):
        busy()
        for tensor in tensors.values():
            tensor[5].fill_(turn + 1)
        mark = memory.mark()
        found = buffers(1, memory.layout.block_bytes)
        memory.gather([5], found, after=mark)
        whole = torch.frombuffer(found[0], dtype=torch.bfloat16)
        assert torch.equal(whole, torch.full_like(whole, turn + 1))


def test_a_gather_waits_for_nothing_that_was_asked_after_its_mark(tensors: dict[str, Any]) -> None:
    memory = KV.memory(tensors)
    torch.cuda.synchronize()
    mark, later = memory.mark(), torch.cuda.Event()
    busy()
    later.record()
    memory.gather([7], buffers(1, memory.layout.block_bytes), after=mark)
    assert not later.query(), "it waited for the whole device"
    torch.cuda.synchronize()


def test_a_scatter_waits_for_readers_before_its_mark(tensors: dict[str, Any]) -> None:
    memory = KV.memory(tensors)
    layer = next(iter(tensors.values()))
    layer[9].fill_(1)
    busy()
    read = layer[9].clone()
    mark = memory.mark()
    zeros = [memoryview(bytearray(memory.layout.block_bytes))]
    memory.scatter(zeros, [9], after=mark)
    torch.cuda.synchronize()
    assert torch.equal(read, torch.ones_like(read))
    assert not layer[9].any()


def test_threads_gather_and_scatter_at_once(tensors: dict[str, Any]) -> None:
    memory = KV.memory(tensors, stage_bytes=4 << 20)
    sound: list[int] = []

    def move(first: int) -> None:
        for turn in range(10):
            ids = list(range(first, first + 8))
            blocks = buffers(len(ids), memory.layout.block_bytes)
            for number, block in zip(ids, blocks, strict=True):
                block[:] = bytes([(number + turn) % 256]) * len(block)
            memory.scatter(blocks, ids, after=memory.mark())
            found = buffers(len(ids), memory.layout.block_bytes)
            memory.gather(ids, found, after=memory.mark())
            if found == blocks:
                sound.append(first)

    threads = [threading.Thread(target=move, args=(first,)) for first in (32, 64, 96, 128)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sound) == 40
