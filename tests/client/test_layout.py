"""Layouts and buffers: bytes survive the way into blocks and back, whatever holds them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.buffers import flat_bytes, tensor_bytes, writable_bytes
from client.layout import HeadMajorLayout
from kvstore.errors import InvalidRequest, NamespaceMismatch

torch = pytest.importorskip("torch")


def blocks_of(layout: HeadMajorLayout, count: int) -> list[memoryview]:
    return [memoryview(bytearray(layout.block_bytes)) for _ in range(count)]


def random_tensors(layout: HeadMajorLayout, tokens: int, *, batch: bool = False) -> Any:
    shape = [1] * batch + [layout.kv_heads, tokens, layout.head_dim]
    dtype = getattr(torch, layout.dtype)
    return [tuple(torch.randn(shape).to(dtype) for _ in "kv") for _ in range(layout.layers)]


@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    dim=st.integers(1, 5),
    block_tokens=st.integers(1, 4),
    first=st.integers(0, 2),
    count=st.integers(0, 3),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn"]),
    batch=st.booleans(),
)
def test_pack_and_unpack_are_inverse(
    layers: int,
    heads: int,
    dim: int,
    block_tokens: int,
    first: int,
    count: int,
    dtype: str,
    batch: bool,
) -> None:
    layout = HeadMajorLayout(layers, heads, dim, dtype, block_tokens)
    tokens = (first + count) * block_tokens + 1
    source = random_tensors(layout, tokens, batch=batch)
    target = random_tensors(layout, tokens, batch=batch)
    blocks = blocks_of(layout, count)
    layout.pack(source, first, blocks)
    layout.unpack(blocks, target, first)
    span = slice(first * block_tokens, (first + count) * block_tokens)
    for pair, other in zip(source, target, strict=True):
        for one, two in zip(pair, other, strict=True):
            mine, theirs = (t.view(torch.uint8)[..., span, :] for t in (one, two))
            assert torch.equal(mine, theirs)


def test_bytes_of_a_block_are_as_documented() -> None:
    layout = HeadMajorLayout(layers=2, kv_heads=3, head_dim=4, dtype="float32", block_tokens=5)
    shape = (2, 2, 3, 10, 4)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    block = blocks_of(layout, 1)
    layout.pack([(values[i, 0], values[i, 1]) for i in range(2)], 1, block)
    assert bytes(block[0]) == values[:, :, :, 5:10, :].tobytes()
    offset, length = layout.layer_range(1)
    assert bytes(block[0][offset : offset + length]) == values[1, :, :, 5:10, :].tobytes()


def test_unpack_reads_read_only_blocks() -> None:
    layout = HeadMajorLayout(1, 1, 1, "uint8", 2)
    target = [(np.zeros((1, 2, 1), np.uint8), np.zeros((1, 2, 1), np.uint8))]
    layout.unpack([memoryview(b"\1\2\3\4")], target, 0)
    assert target[0][0].ravel().tolist() == [1, 2]
    assert target[0][1].ravel().tolist() == [3, 4]


def test_namespace_carries_the_layout() -> None:
    layout = HeadMajorLayout(2, 3, 4, "float16", 5)
    namespace = layout.namespace("m", revision="r", salt="s")
    assert namespace.block_bytes == layout.block_bytes == 2 * 2 * 3 * 5 * 4 * 2
    assert (namespace.layout, namespace.dtype) == (layout.name, "float16")
    assert namespace.block_tokens == 5
    assert HeadMajorLayout(2, 4, 3, "float16", 5).name != layout.name


def test_mismatches_are_named() -> None:
    layout = HeadMajorLayout(1, 2, 4, "float32", 5)
    good = random_tensors(layout, 5)
    layout.check(good, 5)
    other_heads = random_tensors(HeadMajorLayout(1, 3, 4, "float32", 5), 5)
    other_type = random_tensors(HeadMajorLayout(1, 2, 4, "float16", 5), 5)
    two_of_batch = [(torch.zeros(2, 2, 5, 4), torch.zeros(2, 2, 5, 4))]
    flat = [(torch.zeros(4), torch.zeros(4))]
    for bad in (good * 2, other_heads, other_type, two_of_batch, flat):
        with pytest.raises(NamespaceMismatch):
            layout.check(bad, 5)
    with pytest.raises(NamespaceMismatch, match="5 tokens"):
        layout.check(good, 6)
    with pytest.raises(NamespaceMismatch, match="bytes"):
        layout.pack(good, 0, [memoryview(bytearray(3))])
    with pytest.raises(InvalidRequest):
        layout.pack(good, 0, [memoryview(bytes(layout.block_bytes))])
    with pytest.raises(InvalidRequest):
        layout.layer_range(1)
    with pytest.raises(InvalidRequest):
        HeadMajorLayout(0, 1, 1, "float32")
    with pytest.raises(InvalidRequest):
        HeadMajorLayout(1, 1, 1, "complex9")


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(b"12345678"),
        lambda: memoryview(bytearray(b"12345678")).cast("I"),
        lambda: memoryview(bytearray(b"12345678")).cast("B", (2, 4)),
        lambda: array("d", [0.0]),
        lambda: np.zeros((2, 2), np.float16),
        lambda: np.zeros(1, np.complex64),
        lambda: torch.zeros(2, 2, dtype=torch.bfloat16),
        lambda: torch.zeros(1, dtype=torch.int64),
        lambda: torch.zeros(8, dtype=torch.bool),
        lambda: torch.nn.Parameter(torch.zeros(2)),
    ],
)
def test_any_buffer_is_seen_without_copying(make: Any) -> None:
    buffer = make()
    view = writable_bytes(buffer)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, 8)
    view[:] = b"\1" * 8
    assert bytes(flat_bytes(buffer)) == b"\1" * 8


@pytest.mark.parametrize(
    "make", [lambda: b"", lambda: np.zeros(0), lambda: np.zeros((3, 0)), lambda: torch.zeros(0)]
)
def test_empty_buffers(make: Any) -> None:
    assert flat_bytes(make()).nbytes == 0


@pytest.mark.parametrize(
    "bad",
    [
        3,
        "text",
        None,
        memoryview(b"123456")[::2],
        np.zeros((4, 4))[:, 1],
        np.array([object()]),
        torch.zeros(4, 4).t(),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
    ],
)
def test_what_is_no_flat_buffer(bad: Any) -> None:
    with pytest.raises(InvalidRequest):
        flat_bytes(bad)


def test_read_only_buffers_are_no_destination() -> None:
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    for buffer in (b"abc", memoryview(b"abc"), fixed):
        flat_bytes(buffer)
        with pytest.raises(InvalidRequest):
            writable_bytes(buffer)


def test_tensor_bytes_refuses_others() -> None:
    with pytest.raises(InvalidRequest):
        tensor_bytes(b"abc")
    with pytest.raises(InvalidRequest):
        tensor_bytes(np.zeros((4, 4)).T)
