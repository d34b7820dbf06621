"""One engine computes, others reuse: the same answers, and both sides count what was reused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines import node
from tests.engines.asking import Answer, Ask, assert_same, prompt
from tests.engines.conftest import Reference, StartEngine
from tests.engines.process import BLOCK, EngineProcess
from tests.running import DaemonProcess

ASKED = "vllm:external_prefix_cache_queries_total"
REUSED = "vllm:external_prefix_cache_hits_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"
FROM_DRAM = "vllm:prompt_tokens_cached_by_source_total{source=host}"
LOADED = "vllm:kvstore_loaded_blocks_total"
STORED = "vllm:kvstore_stored_blocks_total"
SERVED = "kvstore_hits_total{tier=dram}"

LONG = prompt(1, 200)
EXACT = prompt(2, 8 * BLOCK)
SHARED = prompt(3, 5 * BLOCK)
SHORT = prompt(4, BLOCK - 12)
"""With an answer it is still shorter than a block."""

Growth = Callable[[str], float]


@pytest.fixture(scope="module")
def first(start_shared_engine: StartEngine, shared_daemon: DaemonProcess) -> list[Answer]:
    """What an engine answered that computed the prompts and has ended."""
    engine = start_shared_engine(kv_transfer_config=node.connector(shared_daemon))
    answers = engine.generate([Ask(each) for each in (LONG, EXACT, SHARED, SHORT)])
    engine.wait_idle()
    assert engine.metrics()[STORED] == 6 + 8 + 5
    assert engine.stop() == 0
    return answers


@pytest.fixture(scope="module")
def shared_second(
    first: list[Answer], start_shared_engine: StartEngine, shared_daemon: DaemonProcess
) -> EngineProcess:
    return start_shared_engine(kv_transfer_config=node.connector(shared_daemon))


@pytest.fixture
def second(shared_second: EngineProcess) -> EngineProcess:
    """An engine that was started later, and holds nothing itself."""
    shared_second.wait_idle()
    shared_second.forget()
    return shared_second


@pytest.fixture(scope="module")
def chunked(
    first: list[Answer], start_shared_engine: StartEngine, shared_daemon: DaemonProcess
) -> EngineProcess:
    """An engine without a prefix cache of its own, that computes two blocks in a step."""
    return start_shared_engine(
        kv_transfer_config=node.connector(shared_daemon),
        enable_prefix_caching=False,
        max_num_batched_tokens=2 * BLOCK,
    )


def _growth(engine: EngineProcess) -> Growth:
    before = engine.metrics()
    return lambda name: engine.metrics().get(name, 0.0) - before.get(name, 0.0)


def test_answers_are_those_without_a_connector(first: list[Answer], reference: Reference) -> None:
    assert_same(first, reference([Ask(each) for each in (LONG, EXACT, SHARED, SHORT)]))
    assert [each.cached for each in first] == [0, 0, 0, 0]


def test_another_engine_reuses(second: EngineProcess, reference: Reference) -> None:
    growth = _growth(second)
    answers = second.generate([Ask(LONG)])
    assert_same(answers, reference([Ask(LONG)]))
    assert answers[0].cached == 6 * BLOCK
    assert growth(ASKED) == len(LONG)
    assert growth(REUSED) == growth(BY_SOURCE) == growth(FROM_DRAM) == 6 * BLOCK
    assert growth(LOADED) == 6


def test_the_node_counts_what_it_served(
    second: EngineProcess, shared_daemon: DaemonProcess
) -> None:
    before = node.metrics(shared_daemon)
    second.generate([Ask(LONG)])
    after = node.metrics(shared_daemon)
    assert after[SERVED] - before[SERVED] == 6
    moved = "kvstore_moved_bytes_total{direction=out,transport=shm}"
    block = node.command(shared_daemon, "namespaces")[0]["description"]["block_bytes"]
    assert after[moved] - before[moved] == 6 * block
    assert node.command(shared_daemon, "status")["blocks"] >= 6 + 8 + 5


def test_an_exact_multiple_of_the_block(second: EngineProcess, reference: Reference) -> None:
    growth = _growth(second)
    answers = second.generate([Ask(EXACT)])
    assert_same(answers, reference([Ask(EXACT)]))
    # vLLM computes the last token again: something has to be computed for there to be an answer.
    assert growth(REUSED) == len(EXACT)
    assert growth(LOADED) == 8


@pytest.mark.parametrize("length", [1, BLOCK - 12, BLOCK - 8])
def test_what_does_not_fill_a_block(
    second: EngineProcess, reference: Reference, length: int
) -> None:
    growth = _growth(second)
    ask = Ask(prompt(4, length))
    assert_same(second.generate([ask]), reference([ask]))
    second.wait_idle()
    assert growth(REUSED) == growth(LOADED) == growth(STORED) == 0


def test_requests_of_one_step_share_a_prefix(second: EngineProcess, reference: Reference) -> None:
    asks = [Ask(SHARED + prompt(10 + tail, 7 + 20 * tail)) for tail in range(5)]
    growth = _growth(second)
    answers = second.generate(asks)
    assert_same(answers, reference(asks))
    assert all(each.cached == len(SHARED) for each in answers)
    assert growth(REUSED) >= len(SHARED)


def test_a_prompt_that_goes_on_where_a_stored_one_ends(
    second: EngineProcess, reference: Reference
) -> None:
    ask = Ask(LONG[: 6 * BLOCK] + prompt(20, 3 * BLOCK))
    growth = _growth(second)
    answers = second.generate([ask])
    assert_same(answers, reference([ask]))
    assert growth(REUSED) == 6 * BLOCK
    second.wait_idle()
    assert growth(STORED) == 3
    second.forget()
    assert_same(second.generate([ask]), reference([ask]))
    assert growth(REUSED) == (6 + 9) * BLOCK


def test_what_the_engine_holds_itself_is_not_loaded(
    second: EngineProcess, reference: Reference
) -> None:
    second.generate([Ask(LONG[: 3 * BLOCK + 1])])
    growth = _growth(second)
    answers = second.generate([Ask(LONG)])
    assert_same(answers, reference([Ask(LONG)]))
    assert answers[0].cached == 6 * BLOCK
    assert growth(REUSED) == growth(LOADED) * BLOCK == 3 * BLOCK


def test_an_answer_is_reused_in_the_next_turn(second: EngineProcess, reference: Reference) -> None:
    turn = Ask(prompt(30, 50), tokens=3 * BLOCK)
    answers = second.generate([turn])
    assert_same(answers, reference([turn]))
    second.wait_idle()
    second.forget()
    following = Ask(turn.prompt + answers[0].tokens + prompt(31, 20))
    growth = _growth(second)
    answers = second.generate([following])
    assert_same(answers, reference([following]))
    # The last token of an answer is never computed.
    assert growth(REUSED) == (50 + 3 * BLOCK - 1) // BLOCK * BLOCK


def test_a_salt_keeps_requests_apart(second: EngineProcess, reference: Reference) -> None:
    growth = _growth(second)
    salted = Ask(LONG, salt="theirs")
    assert_same(second.generate([salted]), reference([Ask(LONG)]))
    assert growth(REUSED) == 0
    second.wait_idle()
    second.forget()
    assert_same(second.generate([salted]), reference([Ask(LONG)]))
    assert growth(REUSED) == 6 * BLOCK


def test_chunks_are_saved_and_loaded(
    chunked: EngineProcess, second: EngineProcess, reference: Reference
) -> None:
    asks = [Ask(prompt(40, 300)), Ask(prompt(41, 4 * BLOCK)), Ask(LONG)]
    growth = _growth(chunked)
    answers = chunked.generate(asks)
    assert_same(answers, reference(asks))
    assert growth(REUSED) == 6 * BLOCK
    chunked.wait_idle()
    assert growth(STORED) == 9 + 4
    # By the engine that saved them, which has no prefix cache, and by one that has.
    for engine in (chunked, second):
        growth = _growth(engine)
        assert_same(engine.generate(asks), reference(asks))
        assert growth(REUSED) == (9 + 4 + 6) * BLOCK


def test_no_block_is_left_in_use(
    chunked: EngineProcess, second: EngineProcess, reference: Reference
) -> None:
    asks = [Ask(prompt(50 + each, 40 * each + 1), tokens=BLOCK) for each in range(8)]
    for engine in (chunked, second):
        assert_same(engine.generate(asks), reference(asks))
        state = engine.wait_idle()
        assert state["requests"] == 0
        assert state["free_blocks"] == state["blocks"] - 1  # one is never used
