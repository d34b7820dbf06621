"""Paged KV tensors: the bytes of their blocks are those of a naive definition, both ways."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client import paged_staging
from client.paged import PagedMemory
from client.paged_layers import MAX_NAME_BYTES
from client.prefix import check_layout
from kvstore.errors import ConfigError, InvalidRequest, NamespaceMismatch
from kvstore.identity import Namespace

torch = pytest.importorskip("torch")

VLLM = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn"]


@dataclass(frozen=True)
class Engine:
    """How an engine keeps its KV: one logical tensor, its axes in some order in memory.

    Attributes:
        axes: logical axes of one tensor, ``L`` for the layers left out; ``B`` counts blocks.
        order: all axes, outermost first in memory.
        inner: entries of the axes besides that of the blocks.
        split: kernel blocks in each block.
        pad: elements left free behind each page.
    """

    order: str
    axes: str = "BHNC"
    layers: int = 3
    blocks: int = 5
    inner: tuple[int, ...] = (2, 3, 4)
    split: int = 1
    dtype: str = "float32"
    pad: int = 0

    @property
    def block_axis(self) -> int:
        """Which axis of a tensor counts blocks."""
        return self.axes.index("B")

    @property
    def sizes(self) -> dict[str, int]:
        """Entries of each axis."""
        others = dict(zip(self.axes.replace("B", ""), self.inner, strict=True))
        return {"L": self.layers, "B": self.blocks * self.split} | others

    def tensors(self, seed: int = 0) -> dict[str, Any]:
        """One tensor for each layer, over one storage of random bytes."""
        grid_end = max(self.order.index("L"), self.order.index("B"))
        strides, step = {}, 1
        for position, axis in reversed(list(enumerate(self.order))):
            step += self.pad if position == grid_end else 0
            strides[axis] = step
            step *= self.sizes[axis]
        element = getattr(torch, self.dtype)
        generator = torch.Generator().manual_seed(seed)
        nbytes = (step + 8) * element.itemsize
        raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        logical = "L" + self.axes
        shape, steps = [self.sizes[axis] for axis in logical], [strides[axis] for axis in logical]
        shown = raw.view(element).as_strided(shape, steps, 8)
        return {f"layer {number}": shown[number] for number in range(self.layers)}

    def memory(self, tensors: dict[str, Any], **options: Any) -> PagedMemory:
        """The tensors by block."""
        return PagedMemory.of(
            tensors, self.blocks, 4 * self.split, block_axis=self.block_axis, **options
        )


def made(axes: str, orders: list[str], most: list[int]) -> st.SearchStrategy[Engine]:
    return st.builds(
        Engine,
        order=st.sampled_from(orders),
        axes=st.just(axes),
        layers=st.integers(1, 4),
        blocks=st.integers(1, 5),
        inner=st.tuples(*(st.integers(1, size) for size in most)),
        split=st.integers(1, 2),
        dtype=st.sampled_from(DTYPES),
        pad=st.sampled_from([0, 0, 3]),
    )


ENGINES = st.one_of(
    made("BHNC", VLLM, [3, 3, 4]),
    made("KBNHD", ["LKBNHD", "LKBHND", "BLKNHD"], [2, 3, 2, 3]),
    made("BKNHD", ["LBKNHD", "LBKHND", "BLKNHD"], [2, 3, 2, 3]),
)
PATHS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"staged": False}, {"staged": True}, {"staged": True, "stage_bytes": 150}]
)


@st.composite
def moves(draw: st.DrawFn) -> tuple[Engine, dict[str, Any], list[int], tuple[int, int]]:
    """An engine, the way to copy, some of its blocks and a range of its layers."""
    engine = draw(ENGINES)
    ids = draw(st.lists(st.integers(0, engine.blocks - 1), unique=True, max_size=4))
    first = draw(st.integers(0, engine.layers - 1))
    return engine, draw(PATHS), ids, (first, draw(st.integers(1, engine.layers - first)))


def naive(tensor: Any, block: int, blocks: int, block_axis: int) -> bytes:
    """One block of one layer, element by element, as they follow one another in memory."""
    split = tensor.shape[block_axis] // blocks
    inner = [range(size) for size in tensor.shape]
    inner[block_axis] = range(block * split, (block + 1) * split)
    ordered = sorted(product(*inner), key=lambda index: tensor[index].data_ptr())
    return b"".join(bytes(tensor[index].reshape(1).view(torch.uint8).tolist()) for index in ordered)


def naive_blocks(
    engine: Engine, tensors: dict[str, Any], ids: list[int], layers: tuple[int, int]
) -> list[bytes]:
    chosen = list(tensors.values())[layers[0] : layers[0] + layers[1]]
    return [
        b"".join(naive(tensor, block, engine.blocks, engine.block_axis) for tensor in chosen)
        for block in ids
    ]


def buffers(count: int, length: int, seed: int = 9) -> list[memoryview]:
    random = np.random.default_rng(seed)
    return [memoryview(bytearray(random.bytes(length))) for _ in range(count)]


def storage_of(tensors: dict[str, Any]) -> Any:
    storage = next(iter(tensors.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


# --- the contract of both paths --------------------------------------------------------------


@given(moves())
def test_gather_gives_the_bytes_of_the_definition(move: Any) -> None:
    engine, path, ids, layers = move
    tensors = engine.tensors()
    before = storage_of(tensors).clone()
    memory = engine.memory(tensors, **path)
    whole = buffers(len(ids), memory.layout.block_bytes)
    memory.gather(ids, whole, after=memory.mark())
    assert list(map(bytes, whole)) == naive_blocks(engine, tensors, ids, (0, engine.layers))
    offset, length = memory.layout.layer_range(*layers)
    part = buffers(len(ids), length)
    memory.gather(ids, part, layers=layers)
    assert list(map(bytes, part)) == naive_blocks(engine, tensors, ids, layers)
    assert part == [view[offset : offset + length] for view in whole]
    assert torch.equal(storage_of(tensors), before)


@given(moves())
def test_scatter_writes_these_blocks_and_nothing_else(move: Any) -> None:
    engine, path, ids, layers = move
    tensors = engine.tensors()
    memory = engine.memory(tensors, **path)
    blocks = buffers(len(ids), memory.layout.layer_range(*layers)[1])
    expected = storage_of(tensors).clone()
    fill(engine, expected, tensors, ids, layers, blocks)
    memory.scatter(blocks, ids, layers=layers, after=memory.mark())
    assert naive_blocks(engine, tensors, ids, layers) == list(map(bytes, blocks))
    assert torch.equal(storage_of(tensors), expected)


def fill(
    engine: Engine,
    storage: Any,
    tensors: dict[str, Any],
    ids: list[int],
    layers: tuple[int, int],
    blocks: list[memoryview],
) -> None:
    """Write blocks into a copy of the storage, byte by byte."""
    base = storage_of(tensors).data_ptr()
    axis, split = engine.block_axis, engine.split
    for block, source in zip(ids, blocks, strict=True):
        remaining = iter(source)
        for tensor in list(tensors.values())[layers[0] : layers[0] + layers[1]]:
            part = tensor.narrow(axis, block * split, split)
            places = sorted(part[i].data_ptr() for i in product(*map(range, part.shape)))
            for place in places:
                for byte in range(part.element_size()):
                    storage[place - base + byte] = next(remaining)


@given(
    one=made("BHNC", VLLM, [2, 2, 3]),
    order=st.sampled_from(VLLM),
    pad=st.sampled_from([0, 5]),
    path=PATHS,
)
def test_a_name_says_whether_engines_share_blocks(
    one: Engine, order: str, pad: int, path: dict[str, Any]
) -> None:
    one = replace(one, dtype="int32")
    other = replace(one, order=order, pad=pad)
    mine, theirs = one.tensors(1), other.tensors(2)
    for number, (tensor, twin) in enumerate(zip(mine.values(), theirs.values(), strict=True)):
        count = torch.arange(tensor.numel(), dtype=torch.int32).reshape(tensor.shape)
        tensor[:] = count + number * 1000
        twin[:] = -1
    source, target = one.memory(mine, **path), other.memory(theirs, **path)
    ids = list(range(one.blocks))
    blocks = buffers(len(ids), source.layout.block_bytes)
    source.gather(ids, blocks)
    target.scatter(blocks, ids)
    same = all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert same == (source.layout.name == target.layout.name)


@pytest.mark.parametrize("staged", [False, True])
def test_layers_of_several_sizes_and_types(staged: bool) -> None:
    def page(*shape: int, dtype: Any) -> Any:
        count = int(np.prod(shape))
        return (
            torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
            .view(dtype)
            .view(shape)
        )

    tensors = {}
    for number in range(3):
        tensors[f"mla {number}"] = page(4, 1, 2, 7, dtype=torch.uint8)
        tensors[f"indexer {number}"] = page(4, 2, 3, dtype=torch.float32)
    memory = PagedMemory.of(tensors, 4, 2, staged=staged)
    layout = memory.layout
    assert layout.layer_bytes == (14, 24) * 3
    assert (layout.block_bytes, layout.dtype) == (114, "uint8+float32")
    assert layout.layer_range(1, 3) == (14, 62)
    blocks = buffers(2, 114)
    memory.gather([3, 0], blocks)
    for block, got in zip([3, 0], blocks, strict=True):
        assert bytes(got) == b"".join(naive(t, block, 4, 0) for t in tensors.values())
    memory.scatter(buffers(1, 62, seed=4), [2], layers=(1, 3))
    again = buffers(1, 114)
    memory.gather([2], again)
    assert again[0][14:76] == buffers(1, 62, seed=4)[0]


@pytest.mark.parametrize("staged", [False, True])
def test_layers_that_share_memory_are_stored_once(staged: bool) -> None:
    engine = Engine("LBHNC")
    first, second, third = engine.tensors().values()
    tensors = {"a": first, "b": second, "c": first.view(first.shape), "d": third, "e": third}
    memory = engine.memory(tensors, staged=staged)
    assert memory.layer_numbers == {"a": 0, "b": 1, "c": 0, "d": 2, "e": 2}
    assert memory.layout == engine.memory(engine.tensors(), staged=staged).layout
    blocks = buffers(1, memory.layout.block_bytes)
    memory.gather([4], blocks)
    assert bytes(blocks[0]) == b"".join(naive(t, 4, 5, 0) for t in (first, second, third))


@pytest.mark.parametrize("staged", [False, True])
def test_layers_with_a_storage_each(staged: bool) -> None:
    tensors = {str(n): torch.randn(2, 6, 3, 2, 4) for n in range(4)}
    memory = PagedMemory.of(tensors, 6, 3, block_axis=1, staged=staged)
    blocks = buffers(6, memory.layout.block_bytes)
    memory.gather(range(6), blocks)
    for block in range(6):
        expected = b"".join(t[:, block].numpy().tobytes() for t in tensors.values())
        assert bytes(blocks[block]) == expected
    for tensor in tensors.values():
        tensor.zero_()
    memory.scatter(blocks, range(6))
    again = buffers(6, memory.layout.block_bytes)
    memory.gather(range(6), again)
    assert again == blocks


@given(st.permutations(range(5)), PATHS)
def test_layers_in_any_order(order: list[int], path: dict[str, Any]) -> None:
    engine = Engine("BLHNC", layers=5, inner=(1, 2, 2))
    laid = list(engine.tensors().values())
    tensors = {str(number): laid[number] for number in order}
    memory = engine.memory(tensors, **path)
    blocks = buffers(2, memory.layout.block_bytes)
    memory.gather([3, 1], blocks)
    assert list(map(bytes, blocks)) == naive_blocks(engine, tensors, [3, 1], (0, 5))


@pytest.mark.parametrize("staged", [False, True])
def test_threads_copy_at_once(staged: bool) -> None:
    engine = Engine("BLHNC", blocks=64, inner=(4, 16, 64))
    tensors = engine.tensors()
    memory = engine.memory(tensors, staged=staged, stage_bytes=1)
    size = memory.layout.block_bytes
    mine = [range(start, 64, 4) for start in range(4)]
    blocks = [buffers(16, size, seed) for seed in range(4)]
    got = [buffers(16, size) for _ in range(4)]

    def work(number: int) -> None:
        memory.scatter(blocks[number], mine[number])
        memory.gather(mine[number], got[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == blocks


# --- names and layouts -----------------------------------------------------------------------


def test_names() -> None:
    def name(engine: Engine) -> str:
        return engine.memory(engine.tensors()).layout.name

    assert name(Engine("LBHNC")) == "paged/1:3xabc[2x3x4]float32"
    assert name(Engine("BLNHC", split=2, pad=2)) == "paged/1:3xBbac[2x3x2x4]float32"
    assert name(Engine("LBNHC", inner=(1, 3, 4))) == "paged/1:3xab[3x4]float32"
    first = Engine("LKBNHD", axes="KBNHD", inner=(2, 3, 2, 4))
    second = Engine("LBKNHD", axes="BKNHD", inner=(2, 3, 2, 4))
    assert name(first) == name(second) == "paged/1:3xabcd[2x3x2x4]float32"
    assert name(replace(first, dtype="float16")).endswith("float16")


def test_names_fit_a_namespace_however_many_layers_there_are() -> None:
    def name(sizes: list[int]) -> str:
        tensors = {str(n): np.zeros((2, size), np.uint8) for n, size in enumerate(sizes)}
        return PagedMemory.of(tensors, 2, 1).layout.name

    long = [2, 3] * 200
    names = {name(long), name([*long[:-1], 4]), name(long[1:]), name(long[:-2])}
    assert len(names) == 4
    assert max(map(len, names)) <= MAX_NAME_BYTES + 10
    assert name([7] * 400) == "paged/1:400xa[7]uint8"


def test_the_layout_makes_blocks_of_a_namespace() -> None:
    engine = Engine("LBHNC", dtype="bfloat16")
    layout = engine.memory(engine.tensors()).layout
    check_layout(Namespace("m", "bfloat16", layout.name, 4, layout.block_bytes), layout)
    with pytest.raises(NamespaceMismatch):
        check_layout(Namespace("m", "float16", layout.name, 4, layout.block_bytes), layout)
    assert layout.layers == 3
    assert [layout.layer_range(number) for number in range(3)] == [(0, 48), (48, 48), (96, 48)]
    for first, count in [(-1, 1), (0, 0), (2, 2), (3, 1)]:
        with pytest.raises(InvalidRequest):
            layout.layer_range(first, count)


# --- how it is done --------------------------------------------------------------------------


@pytest.mark.parametrize("order", VLLM)
def test_a_block_is_one_copy(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(order, layers=32)
    memory = engine.memory(engine.tensors())
    blocks = buffers(2, memory.layout.block_bytes)
    copied = []
    monkeypatch.setattr(np, "copyto", lambda *_: copied.append(1))
    memory.gather([1, 2], blocks)
    memory.scatter(blocks, [1, 2])
    assert len(copied) == 4


def test_numpy_arrays() -> None:
    whole = np.arange(4 * 3 * 5 * 2, dtype=np.float16).reshape(4, 3, 5, 2)
    tensors = {str(n): whole[n].transpose(0, 2, 1) for n in range(4)}
    memory = PagedMemory.of(tensors, 3, 5)
    assert memory.layout.name == "paged/1:4xba[5x2]float16"
    blocks = buffers(1, memory.layout.block_bytes)
    memory.gather([2], blocks)
    assert bytes(blocks[0]) == whole[:, 2].tobytes()
    memory.scatter(blocks, [0])
    assert np.array_equal(whole[:, 0], whole[:, 2])


def test_the_tensors_are_kept_alive() -> None:
    tensors = {"a": np.full((3, 4), 7.0)}
    alive = weakref.ref(tensors["a"])
    memory = PagedMemory.of(tensors, 3, 4)
    del tensors
    gc.collect()
    assert alive() is not None
    del memory
    gc.collect()
    assert alive() is None


def test_a_queue_waits_for_the_mark_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Queue(paged_staging.HostQueue):
        def mark(self) -> Any:
            return "mark"

        def running(self, after: object | None) -> Any:
            done.append(after)
            return nullcontext()

        def finish(self) -> None:
            done.append("finished")

    monkeypatch.setattr(paged_staging, "HostQueue", Queue)
    engine = Engine("LBHNC")
    memory = engine.memory(engine.tensors(), staged=True, stage_bytes=1)
    blocks = buffers(2, memory.layout.block_bytes)
    memory.gather([0, 1], blocks, after=memory.mark())
    memory.scatter(blocks, [3, 4])
    assert done == ["mark", "finished"] * 2 + [None, "finished"] * 2


# --- mistakes --------------------------------------------------------------------------------


def overlapping() -> Any:
    return torch.zeros(16).as_strided((4, 4), (2, 1))


def read_only() -> Any:
    array = np.zeros((4, 4))
    array.flags.writeable = False
    return array


BAD = [
    ({}, {}, "at least 1"),
    ({"a": torch.zeros(4, 2)}, {"blocks": 0}, "at least 1"),
    ({"a": torch.zeros(5, 2)}, {}, "is not 4 blocks"),
    ({"a": torch.zeros(0, 2)}, {}, "is not 4 blocks"),
    ({"a": torch.zeros(4, 0)}, {}, "is not 4 blocks"),
    ({"a": torch.zeros(4, 2)}, {"block_axis": 2}, "no axis 2"),
    ({"a": torch.zeros(4, 2)}, {"block_axis": -1}, "no axis -1"),
    ({"a": overlapping()}, {}, "overlap"),
    ({"a": torch.zeros(4, 1).expand(4, 2)}, {}, "overlap"),
    ({"a": np.zeros((4, 2))[:, ::-1]}, {}, "overlap"),
    ({"a": read_only()}, {}, "read-only"),
    ({"a": [1, 2, 3, 4]}, {}, "list is no numpy array or tensor"),
    ({"a": torch.zeros(4, 2).to_sparse()}, {}, "no strides"),
    ({"a": torch.zeros(4, 2, device="meta")}, {}, "not supported"),
    ({"a": torch.zeros(4, 2, device="meta"), "b": torch.zeros(4, 2)}, {}, "several devices"),
    ({"a": np.zeros((4, 2))}, {"staged": True}, "only torch tensors"),
]


@pytest.mark.parametrize(("tensors", "options", "message"), BAD)
def test_tensors_that_cannot_be_laid_out(tensors: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagedMemory.of(tensors, **{"blocks": 4, "block_tokens": 2} | options)


def test_layers_that_share_a_part_of_their_memory() -> None:
    whole = torch.zeros(4, 6)
    with pytest.raises(ConfigError, match="not alike"):
        PagedMemory.of({"a": whole, "b": whole[:, :3]}, 4, 2)


@pytest.mark.parametrize("staged", [False, True])
def test_mistakes_of_the_caller_touch_nothing(staged: bool) -> None:
    engine = Engine("LBHNC")
    tensors = engine.tensors()
    memory = engine.memory(tensors, staged=staged)
    before = storage_of(tensors).clone()
    size = memory.layout.block_bytes
    good, short = buffers(1, size)[0], buffers(1, size - 1)[0]
    for ids, given_, error in [
        ([0, 5], [good, good], InvalidRequest),
        ([0, -1], [good, good], InvalidRequest),
        ([0, 1], [good], InvalidRequest),
        ([0, 1], [good, short], NamespaceMismatch),
    ]:
        copy = [bytes(buffer) for buffer in given_]
        with pytest.raises(error):
            memory.scatter(given_, ids)
        with pytest.raises(error):
            memory.gather(ids, given_)
        assert [bytes(buffer) for buffer in given_] == copy
    with pytest.raises(InvalidRequest, match="read-only"):
        memory.gather([0], [good.toreadonly()])
    with pytest.raises(InvalidRequest, match="layers"):
        memory.gather([0], [good], layers=(2, 2))
    assert torch.equal(storage_of(tensors), before)
