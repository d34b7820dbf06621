"""Runs of bytes: copied one by one they are the blocks of the definition."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from client.paged_layers import fuse, layer_of, spans
from client.paged_runs import batches, runs_of
from tests.client.test_paged import Engine, moves, naive_blocks
from tests.client.test_paged import torch as torch  # skips without torch


def groups_of(engine: Engine, tensors: dict[str, Any]) -> list[Any]:
    from client.paged import _strided

    return fuse(
        [
            layer_of(name, _strided(name, tensor), engine.blocks, engine.block_axis)
            for name, tensor in tensors.items()
        ]
    )


@given(moves())
def test_runs_are_the_bytes_of_blocks(move: Any) -> None:
    engine, _, ids, layers = move
    tensors = engine.tensors()
    groups = groups_of(engine, tensors)
    runs = runs_of(groups, spans(groups, *layers))
    found = []
    for block in ids:
        buffer = bytearray()
        for run in runs:
            assert run.offset == len(buffer)
            buffer += ctypes.string_at(run.address + block * run.stride, run.length)
        found.append(bytes(buffer))
    assert found == naive_blocks(engine, tensors, ids, layers)


@given(moves(), st.sampled_from([1, 2, 4, 8, 16, 64]))
def test_a_batch_can_be_copied_word_by_word(move: Any, alignment: int) -> None:
    engine, _, ids, layers = move
    groups = groups_of(engine, engine.tensors())
    runs = runs_of(groups, spans(groups, *layers))
    cut = batches(runs, alignment)
    assert [run for batch in cut for run in batch.runs] == runs
    for batch in cut:
        assert alignment % batch.word == 0
        for run in batch.runs:
            assert run.length == batch.length
            for block in ids:
                place = run.address + block * run.stride
                assert (place % batch.word, run.offset % batch.word) == (0, 0)
            assert run.length % batch.word == 0


def test_a_model_of_common_shape_has_one_run_a_layer() -> None:
    whole = np.zeros((32, 8, 2, 16, 8, 128), np.uint16)
    tensors = {str(number): whole[number] for number in range(32)}
    from client.paged import _strided

    groups = fuse([layer_of(name, _strided(name, one), 8, 0) for name, one in tensors.items()])
    (batch,) = batches(runs_of(groups, spans(groups, 0, 32)), 4096)
    assert len(batch.runs) == 32
    assert (batch.length, batch.word) == (64 << 10, 16)
