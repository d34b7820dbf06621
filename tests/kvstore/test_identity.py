"""Identity: vectors, an independent second implementation, and what must never collide."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import timeit
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.identity import (
    ROOT_PARENT,
    ExtraKey,
    ExtraKind,
    Namespace,
    check_hash,
    prefix_hashes,
)

VECTORS = json.loads((Path(__file__).parent / "vectors" / "identity.json").read_text())
NAMESPACE = Namespace(
    model="llama",
    dtype="bfloat16",
    layout="layers/1",
    block_tokens=16,
    block_bytes=4096,
    revision="main",
    tp_size=2,
    pp_size=3,
    tenant="acme",
    salt="x",
)


def second_hashes(
    ids: list[int], block_tokens: int, extras: list[list[tuple[int, bytes]]], parent: bytes
) -> list[str]:
    """The definition written out again, without any code of the product."""
    out = []
    for block in range(len(ids) // block_tokens):
        message = bytearray(parent)
        for token in ids[block * block_tokens : (block + 1) * block_tokens]:
            message += token.to_bytes(4, "little")
        for kind, value in sorted(extras[block]):
            message += bytes([kind]) + len(value).to_bytes(4, "little") + value
        parent = hashlib.sha256(message).digest()
        out.append(parent.hex())
    return out


def second_fingerprint(description: dict[str, str | int]) -> str:
    message = b"kvstore namespace 1"
    for name in sorted(description):
        value = description[name]
        kind, raw = (
            (b"i", value.to_bytes(8, "little"))
            if isinstance(value, int)
            else (b"s", value.encode())
        )
        for part, tag in ((name.encode(), b""), (raw, kind)):
            message += tag + len(part).to_bytes(4, "little") + part
    return hashlib.sha256(message).hexdigest()


def extras_of(vector: dict[str, Any]) -> dict[int, list[ExtraKey]]:
    return {
        int(index): [ExtraKey(ExtraKind(kind), bytes.fromhex(value)) for kind, value in keys]
        for index, keys in vector["extra_keys"].items()
    }


@pytest.mark.parametrize("vector", VECTORS["prefix_hashes"], ids=lambda v: v["name"])
def test_prefix_hash_vectors(vector: dict[str, Any]) -> None:
    parent = bytes.fromhex(vector["parent"])
    got = prefix_hashes(vector["token_ids"], vector["block_tokens"], extras_of(vector), parent)
    blocks = len(vector["token_ids"]) // vector["block_tokens"]
    raw = [
        [(kind, bytes.fromhex(value)) for kind, value in vector["extra_keys"].get(str(i), [])]
        for i in range(blocks)
    ]
    assert [value.hex() for value in got] == vector["hashes"]
    assert vector["hashes"] == second_hashes(
        vector["token_ids"], vector["block_tokens"], raw, parent
    )


@pytest.mark.parametrize("vector", VECTORS["namespaces"], ids=lambda v: v["name"])
def test_namespace_vectors(vector: dict[str, Any]) -> None:
    namespace = Namespace.parse(vector["description"])
    assert namespace.fingerprint.hex() == vector["fingerprint"]
    assert namespace.fingerprint.hex() == second_fingerprint(vector["description"])
    assert Namespace.parse(namespace.describe()) == namespace


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_equal_in_every_process(seed: str) -> None:
    code = (
        "from kvstore.identity import *;"
        "print(prefix_hashes(list(range(40)), 16, (ExtraKey.lora('a'),))[-1].hex(),"
        " Namespace('m', 'f', 'l', 16, 64).fingerprint.hex())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.split()
    assert answer == [
        prefix_hashes(range(40), 16, (ExtraKey.lora("a"),))[-1].hex(),
        Namespace("m", "f", "l", 16, 64).fingerprint.hex(),
    ]


@pytest.mark.parametrize("field", sorted(NAMESPACE.describe()))
def test_one_differing_field_is_another_namespace(field: str) -> None:
    value = getattr(NAMESPACE, field)
    changed: Any = value + 1 if isinstance(value, int) else value + "x"
    other = replace(NAMESPACE, **{field: changed})
    assert other.fingerprint != NAMESPACE.fingerprint
    assert NAMESPACE.difference(other) == [field]


def test_text_cannot_slide_from_one_field_into_the_next() -> None:
    one = replace(NAMESPACE, model="ab", revision="c")
    two = replace(NAMESPACE, model="a", revision="bc")
    assert one.fingerprint != two.fingerprint


def test_kinds_of_extra_key_never_collide() -> None:
    name = "same name"
    keys = [
        (),
        (ExtraKey.lora(name),),
        (ExtraKey.cache_salt(name),),
        (ExtraKey.multimodal(name.encode()),),
        (ExtraKey.multimodal(name.encode(), 3),),
        (ExtraKey.lora("same"), ExtraKey.lora(" name")),
        (ExtraKey.lora(name), ExtraKey.cache_salt(name)),
    ]
    hashes = {prefix_hashes(range(16), 16, key)[0] for key in keys}
    assert len(hashes) == len(keys)


def test_order_of_extra_keys_does_not_matter() -> None:
    one, two = ExtraKey.lora("a"), ExtraKey.cache_salt("b")
    assert prefix_hashes(range(16), 16, (one, two)) == prefix_hashes(range(16), 16, (two, one))


def test_extra_keys_by_block() -> None:
    plain = prefix_hashes(range(48), 16)
    key = ExtraKey.multimodal(b"image")
    mapped = prefix_hashes(range(48), 16, {1: (key,)})
    called = prefix_hashes(range(48), 16, lambda index: (key,) if index == 1 else ())
    assert mapped == called
    assert mapped[0] == plain[0]
    assert mapped[1] != plain[1]
    assert mapped[2] != plain[2]


def test_every_kind_of_sequence_gives_the_same_hashes() -> None:
    torch = pytest.importorskip("torch")
    ids = [5, 0, 2**32 - 1, 7] * 8
    expected = prefix_hashes(ids, 16)
    for other in (tuple(ids), np.array(ids), np.array(ids, ">u4"), torch.tensor(ids)):
        assert prefix_hashes(other, 16) == expected


def test_a_hash_names_everything_before_it() -> None:
    whole = prefix_hashes(range(64), 16)
    assert prefix_hashes(range(32, 64), 16, parent=whole[1]) == whole[2:]
    assert prefix_hashes([99, *range(1, 64)], 16)[3] != whole[3]


@given(
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    block_tokens=st.integers(1, 9),
    values=st.lists(st.tuples(st.sampled_from(ExtraKind), st.binary(max_size=5)), max_size=3),
    parent=st.binary(min_size=32, max_size=32),
)
def test_agrees_with_the_second_implementation(
    ids: list[int], block_tokens: int, values: list[tuple[ExtraKind, bytes]], parent: bytes
) -> None:
    extras = [[(int(kind), value) for kind, value in values]] * (len(ids) // block_tokens)
    keys = tuple(ExtraKey(kind, value) for kind, value in values)
    got = prefix_hashes(ids, block_tokens, keys, parent)
    assert [value.hex() for value in got] == second_hashes(ids, block_tokens, extras, parent)


@pytest.mark.parametrize(
    "ids",
    [
        [-1] * 16,
        [2**32] * 16,
        [1.5] * 16,
        ["a"] * 16,
        np.array([-1] * 16),
        np.array([2**32] * 16),
        np.ones(16),
        np.ones((4, 4), int),
    ],
)
def test_bad_token_ids(ids: Any) -> None:
    with pytest.raises(InvalidRequest):
        prefix_hashes(ids, 16)


def test_bad_arguments() -> None:
    for block_tokens in (0, -1, True, 1.0, 1 << 17):
        with pytest.raises(InvalidRequest):
            prefix_hashes([1], block_tokens)  # type: ignore[arg-type]
    for parent in (b"", bytes(31), bytes(33), "x" * 32):
        with pytest.raises(InvalidRequest):
            prefix_hashes([1], 1, parent=parent)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        prefix_hashes([1], 1, {-1: ()})
    with pytest.raises(InvalidRequest):
        ExtraKey(7, b"")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        ExtraKey.lora("a" * 2000)
    with pytest.raises(InvalidRequest):
        ExtraKey.lora("\ud800")
    check_hash(ROOT_PARENT)


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"model": 1},
        {"model": "m" * 1025},
        {"tenant": "\ud800"},
        {"block_tokens": 0},
        {"block_tokens": True},
        {"block_tokens": "16"},
        {"block_bytes": 16 << 30},
        {"tp_size": 4096, "pp_size": 2},
        {"surprise": 1},
    ],
)
def test_bad_namespaces(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Namespace.parse({**NAMESPACE.describe(), **change})


@pytest.mark.parametrize("field", sorted(NAMESPACE.describe()))
def test_a_missing_field_is_named(field: str) -> None:
    description = NAMESPACE.describe()
    del description[field]
    with pytest.raises(InvalidRequest, match=field):
        Namespace.parse(description)


def test_not_a_map() -> None:
    others: list[Any] = [[], b"", None, 3]
    for other in others:
        with pytest.raises(InvalidRequest):
            Namespace.parse(other)


def test_shards() -> None:
    assert NAMESPACE.shards == 6


def test_hashing_costs_little_more_than_sha256_itself() -> None:
    ids = [(token * 7919) % 128_000 for token in range(32_768)]
    message = bytes(96)

    def bare() -> None:
        for _ in range(2048):
            hashlib.sha256(message).digest()

    ratios = []
    for _ in range(10):
        mine = min(timeit.repeat(lambda: prefix_hashes(ids, 16), number=1, repeat=5))
        ratios.append(mine / min(timeit.repeat(bare, number=1, repeat=5)))
    assert min(ratios) < 2.5
