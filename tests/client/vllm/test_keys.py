"""Prefix hashes of a request: equal to those of the whole sequence, apart where vLLM's are."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.vllm.keys import PrefixChain, RequestKeys, extra_keys_of
from kvstore.errors import InvalidRequest
from kvstore.identity import MAX_TEXT_BYTES, ExtraKey, prefix_hashes

BLOCK = 4
TOKENS = list(range(12))


def item(identifier: str | None, offset: int, length: int) -> SimpleNamespace:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def lora(name: str, path: str) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=1, load_inplace=False)


def request(**fields: Any) -> SimpleNamespace:
    base = {"prompt_embeds": None, "resumable": False, "mm_features": [], "lora_request": None}
    return SimpleNamespace(**base | {"cache_salt": None} | fields)


def hashes(tokens: list[int], asked: SimpleNamespace, **more: Any) -> list[bytes]:
    extra = extra_keys_of(asked, BLOCK, **more)
    assert extra is not None
    return PrefixChain(BLOCK, extra).extend(tokens)


keys = st.builds(
    RequestKeys,
    st.sampled_from([(), (ExtraKey.lora("a"),), (ExtraKey.lora("a"), ExtraKey.cache_salt("s"))]),
    st.dictionaries(
        st.integers(0, 12),
        st.lists(st.builds(ExtraKey.multimodal, st.binary(max_size=3)), max_size=2).map(tuple),
        max_size=4,
    ),
)


@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=30), max_size=6),
    st.integers(1, 9),
    keys,
)
@settings(max_examples=150)
def test_growing_chain_is_that_of_the_whole_sequence(steps, block_tokens, extra):
    chain, tokens = PrefixChain(block_tokens, extra), []
    for step in steps:
        tokens += step
        assert chain.extend(tokens) == prefix_hashes(tokens, block_tokens, extra)
    assert chain.hashes == prefix_hashes(tokens, block_tokens, extra)


class Counting(list[int]):
    """Remembers which tokens were read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: list[slice] = []

    def __getitem__(self, where: Any) -> Any:
        self.read.append(where)
        return super().__getitem__(where)


def test_hashed_blocks_are_not_read_again():
    tokens, chain = Counting(range(10)), PrefixChain(BLOCK)
    chain.extend(tokens)
    tokens.append(10)
    chain.extend(tokens)
    assert tokens.read == [slice(0, 8)]
    tokens.append(11)
    chain.extend(tokens)
    assert tokens.read == [slice(0, 8), slice(8, 12)]


def test_shrunken_sequence_is_refused():
    chain = PrefixChain(BLOCK)
    chain.extend(list(range(8)))
    with pytest.raises(InvalidRequest, match="1 full blocks of a sequence that had 2"):
        chain.extend(list(range(7)))
    assert len(chain.hashes) == 2


def test_plain_request_has_the_hashes_of_its_tokens():
    tokens = list(range(11))
    assert hashes(tokens, request()) == prefix_hashes(tokens, BLOCK)


def test_long_prompt_is_hashed_in_time():
    tokens = list(range(32768))
    best = min(_seconds(tokens) for _ in range(5))
    assert best < 0.03  # an order above what an idle machine takes


def _seconds(tokens: list[int]) -> float:
    begun = time.perf_counter()
    PrefixChain(16).extend(tokens)
    return time.perf_counter() - begun


class TestDistinctions:
    def differ(self, one: SimpleNamespace, other: SimpleNamespace, first: int = 0) -> None:
        """Equal up to block ``first``, different from it on."""
        a, b = hashes(TOKENS, one), hashes(TOKENS, other)
        assert [x == y for x, y in zip(a, b, strict=True)] == [i < first for i in range(len(a))]

    def test_lora_name_and_path(self):
        self.differ(request(), request(lora_request=lora("a", "/a")))
        self.differ(request(lora_request=lora("a", "/a")), request(lora_request=lora("b", "/a")))
        self.differ(request(lora_request=lora("a", "/a")), request(lora_request=lora("a", "/b")))
        self.differ(request(lora_request=lora("a/b", "c")), request(lora_request=lora("a", "b/c")))

    def test_contents_of_the_adapter(self):
        asked = request(lora_request=lora("a", "/a"))
        one, other, none = (
            hashes(TOKENS, asked, adapter_revision=revision) for revision in ("1", "2", "")
        )
        assert one[0] != other[0] != none[0] != one[0]

    def test_lora_as_the_command_line_gives_it(self):
        got = hashes(TOKENS, request(lora_request=lora("sql", "/x")), adapter_revision="r")
        assert got == prefix_hashes(TOKENS, BLOCK, [ExtraKey.lora('["sql","/x","r"]')])

    def test_salt(self):
        self.differ(request(), request(cache_salt="a"))
        self.differ(request(cache_salt="a"), request(cache_salt="b"))
        got = hashes(TOKENS, request(cache_salt="a"))
        assert got == prefix_hashes(TOKENS, BLOCK, [ExtraKey.cache_salt("a")])

    def test_salt_is_no_adapter(self):
        text = '["a","b"]'
        self.differ(request(cache_salt=text), request(lora_request=lora("a", "b")))

    def test_item_and_where_it_stands(self):
        self.differ(request(), request(mm_features=[item("i", 5, 2)]), 1)
        self.differ(
            request(mm_features=[item("i", 5, 2)]), request(mm_features=[item("j", 5, 2)]), 1
        )
        self.differ(
            request(mm_features=[item("i", 5, 2)]), request(mm_features=[item("i", 6, 2)]), 1
        )

    def test_item_marks_each_block_that_it_overlaps(self):
        got = extra_keys_of(request(mm_features=[item("i", 3, 6)]), BLOCK)
        assert got is not None
        assert got.by_block == {
            0: (ExtraKey.multimodal(b"i", 3),),
            1: (ExtraKey.multimodal(b"i", -1),),
            2: (ExtraKey.multimodal(b"i", -5),),
        }

    def test_long_values_are_digested_and_stay_apart(self):
        long = "x" * (MAX_TEXT_BYTES + 1)
        self.differ(request(cache_salt=long), request(cache_salt=long + "y"))
        self.differ(
            request(lora_request=lora(long, "p")), request(lora_request=lora(long + "y", "p"))
        )
        self.differ(
            request(mm_features=[item(long, 0, 1)]), request(mm_features=[item(long + "y", 0, 1)])
        )
        edge = "z" * (MAX_TEXT_BYTES - 3)
        self.differ(
            request(mm_features=[item(edge, 0, 1)]), request(mm_features=[item(edge + "z", 0, 1)])
        )

    def test_a_salt_that_looks_like_a_digest_is_not_taken_for_one(self):
        long = "x" * (MAX_TEXT_BYTES + 1)
        got = extra_keys_of(request(cache_salt=long), BLOCK)
        assert got is not None
        self.differ(request(cache_salt=long), request(cache_salt=got.always[0].value.decode()))

    def test_text_that_is_no_unicode(self):
        self.differ(request(cache_salt="\ud800"), request(cache_salt="\ud801"))


@pytest.mark.parametrize(
    "asked",
    [
        request(prompt_embeds=object()),
        request(resumable=True),
        request(mm_features=[item(None, 0, 1)]),
        request(mm_features=[item("i", 0, 1), item("", 2, 1)]),
    ],
)
def test_requests_that_cannot_be_named(asked):
    assert extra_keys_of(asked, BLOCK) is None


def vllm_names(asked: SimpleNamespace, tokens: list[int]) -> list[tuple[Any, ...]]:
    """What goes into each of vLLM's block hashes, and into those before it."""
    chained: list[tuple[Any, ...]] = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        end = start + BLOCK
        extra: list[Any] = []
        if asked.lora_request:
            extra.append((asked.lora_request.lora_name, asked.lora_request.lora_path))
        for each in asked.mm_features:
            offset, length = each.mm_position.offset, each.mm_position.length
            if offset < end and start < offset + length:
                extra.append((each.identifier, offset - start))
        if asked.cache_salt and start == 0:
            extra.append(asked.cache_salt)
        chained.append((*(chained[-1:] or [()]), tuple(tokens[start:end]), tuple(extra)))
    return chained


items = st.lists(
    st.tuples(st.sampled_from("ij"), st.integers(0, 12), st.integers(1, 6)), max_size=3
).map(lambda found: [item(*each) for each in sorted(found, key=lambda each: each[1])])
requests = st.builds(
    lambda adapter, salt, found: request(lora_request=adapter, cache_salt=salt, mm_features=found),
    st.sampled_from([None, lora("a", "p"), lora("a", "q"), lora("b", "p")]),
    st.sampled_from([None, "s", "t"]),
    items,
)


@given(requests, requests, st.lists(st.integers(0, 1), min_size=12, max_size=16), st.data())
@settings(max_examples=200)
def test_what_vllm_tells_apart_is_told_apart(one, other, tokens, data):
    changed = data.draw(st.sampled_from([tokens, [*tokens[:-1], 7], [7, *tokens[1:]]]))
    theirs = zip(vllm_names(one, tokens), vllm_names(other, changed), strict=True)
    ours = zip(hashes(tokens, one), hashes(changed, other), strict=True)
    assert [a == b for a, b in ours] == [a == b for a, b in theirs]
