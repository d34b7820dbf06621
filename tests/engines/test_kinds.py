"""Models and configurations of other kinds: which share, which must not, which are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines import node
from tests.engines.asking import Answer, Ask, assert_same, prompt
from tests.engines.conftest import Reference, StartEngine
from tests.engines.models import MLA_OPTIONS, make_adapter, make_llama, make_mla, make_sliding
from tests.engines.process import BLOCK, EngineFailed, EngineProcess
from tests.running import DaemonProcess

REUSED = "vllm:external_prefix_cache_hits_total"
STORED = "vllm:kvstore_stored_blocks_total"
ERRORS = "vllm:kvstore_guarded_errors_total"

PATIENCE = 0.5
"""Seconds for a lookup: what is stored is to be found on a busy machine too."""

LONG = Ask(prompt(1, 200))
ELSEWHERE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


@pytest.fixture(scope="module")
def stored(start_shared_engine: StartEngine, shared_daemon: DaemonProcess) -> Answer:
    """What the engine said that stored LONG; it has ended."""
    started = start_shared_engine(
        kv_transfer_config=node.connector(shared_daemon, lookup_deadline=PATIENCE),
        env={"PYTHONHASHSEED": "1"},
    )
    [answer] = started.generate([LONG])
    started.wait_idle()
    assert started.metrics()[STORED] == 6
    assert started.stop() == 0
    return answer


def test_a_copy_of_the_model_shares(
    stored: Answer,
    start_engine: StartEngine,
    shared_daemon: DaemonProcess,
    llama: Path,
    tmp_path: Path,
    reference: Reference,
) -> None:
    """And so does an engine with other limits, or whose process hashes strings otherwise."""
    copied = start_engine(
        shutil.copytree(llama, tmp_path / "renamed"),
        env={"PYTHONHASHSEED": "2"},
        kv_transfer_config=node.connector(shared_daemon, lookup_deadline=PATIENCE),
        max_model_len=1024,
        max_num_seqs=2,
        seed=5,
        prefix_caching_hash_algo="sha256_cbor",
    )
    answers = copied.generate([LONG])
    assert answers[0].cached == 6 * BLOCK
    assert_same(answers, [stored])
    assert_same(answers, reference([LONG]))


OTHERS: dict[str, dict[str, Any]] = {
    "type": {"dtype": "bfloat16"},
    "type of KV": {"kv_cache_dtype": "fp8"},
    "block size": {"block_size": 2 * BLOCK},
    "rope": {"hf_overrides": ELSEWHERE},
    "weights": {},
}
"""In what an engine differs from that which stored LONG."""


@pytest.fixture(scope="module")
def others(
    stored: Answer,
    start_shared_engine: StartEngine,
    shared_daemon: DaemonProcess,
    llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, EngineProcess]:
    """Engines that differ in one thing, while they start."""
    # In a directory of the same name as the model's.
    retrained = make_llama(tmp_path_factory.mktemp("retrained") / llama.name, seed=1)
    transfer = node.connector(shared_daemon, lookup_deadline=PATIENCE)
    return {
        name: start_shared_engine(
            retrained if name == "weights" else llama,
            ready=False,
            kv_transfer_config=transfer,
            **options,
        )
        for name, options in OTHERS.items()
    }


@pytest.mark.parametrize("name", OTHERS)
def test_engines_with_other_bytes_do_not_share(
    others: dict[str, EngineProcess], shared_daemon: DaemonProcess, name: str
) -> None:
    other, size = others[name], OTHERS[name].get("block_size", BLOCK)
    other.wait_ready()
    [computed] = other.generate([LONG])
    assert computed.cached == 0
    other.wait_idle()
    own = other.generate([LONG])
    other.forget()
    loaded = other.generate([LONG])
    assert_same(loaded, own)
    assert loaded[0].cached == other.metrics()[REUSED] == len(LONG.prompt) // size * size
    assert other.stop() == 0


def test_each_of_them_has_a_namespace(
    others: dict[str, EngineProcess], shared_daemon: DaemonProcess
) -> None:
    for each in others.values():
        if not each.ended:
            each.wait_ready()
    assert len(node.command(shared_daemon, "namespaces")) == 1 + len(OTHERS)


def test_layers_that_see_a_window(
    start_engine: StartEngine, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Next to layers that see everything: vLLM then keeps all of both for a connector."""
    model = make_sliding(tmp_path / "model")
    plain = start_engine(model, ready=False, enable_prefix_caching=False)
    saving = start_engine(
        model, ready=False, kv_transfer_config=node.connector(daemon, lookup_deadline=PATIENCE)
    )
    for each in (plain, saving):
        each.wait_ready()
    asks = [LONG, Ask(prompt(2, 8 * BLOCK), tokens=3 * BLOCK), Ask(prompt(3, BLOCK + 1))]
    expected = plain.generate(asks)
    assert_same(saving.generate(asks), expected)
    saving.wait_idle()
    saving.forget()
    loaded = saving.generate(asks)
    assert_same(loaded, expected)
    assert [each.cached for each in loaded] == [6 * BLOCK, 8 * BLOCK, BLOCK]
    assert saving.metrics().get(ERRORS, 0) == 0


def test_adapters_do_not_share(
    stored: Answer, start_engine: StartEngine, shared_daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Of two adapters with the same name; the model without one shares as ever."""
    paths = [str(make_adapter(tmp_path / str(seed) / "adapter", seed)) for seed in (1, 2)]
    asks = [Ask(LONG.prompt, adapter=path) for path in paths]
    adapted = start_engine(
        kv_transfer_config=node.connector(shared_daemon, lookup_deadline=PATIENCE),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    )
    [plain] = adapted.generate([LONG])
    assert plain.cached == 6 * BLOCK
    assert plain.tokens == stored.tokens
    computed = [adapted.generate([ask])[0] for ask in asks]
    assert [each.cached for each in computed] == [0, 0]
    assert len({each.tokens for each in (*computed, stored)}) == 3
    adapted.wait_idle()
    adapted.forget()
    loaded = [adapted.generate([ask])[0] for ask in asks]
    assert_same(loaded, computed)
    assert [each.cached for each in loaded] == [6 * BLOCK, 6 * BLOCK]


# --- how it is named -----------------------------------------------------------------------------


def test_the_connector_by_its_module(
    start_engine: StartEngine, shared_daemon: DaemonProcess, stored: Answer
) -> None:
    """Where vLLM loads no plugins."""
    transfer = node.connector(shared_daemon, lookup_deadline=PATIENCE) | {
        "kv_connector_module_path": "client.vllm.connector"
    }
    started = start_engine(kv_transfer_config=transfer, env={"VLLM_PLUGINS": ""})
    answers = started.generate([LONG])
    assert answers[0].cached == 6 * BLOCK
    assert_same(answers, [stored])


REFUSED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"url": "unix:///nowhere", "lookup_deadlin": 1}, {}, "did you mean lookup_deadline"),
    ({"url": "nowhere"}, {}, r"url: expected unix:///path, tcp://host:port"),
    ({}, {"VLLM_PLUGINS": "another"}, "Unsupported connector type: KVStoreConnector"),
]
"""Options, environment, and what is said."""


def test_mistakes_end_the_start(start_engine: StartEngine) -> None:
    transfer = {"kv_connector": "KVStoreConnector", "kv_role": "kv_both"}
    engines = [
        start_engine(
            ready=False, kv_transfer_config=transfer | {"kv_connector_extra_config": extra}, env=env
        )
        for extra, env, _ in REFUSED
    ]
    for each, (_, _, expected) in zip(engines, REFUSED, strict=True):
        with pytest.raises(EngineFailed, match=expected):
            each.wait_ready()
        each.kill()


def test_pooling_that_takes_no_prefix_ends_the_start(
    start_engine: StartEngine, shared_daemon: DaemonProcess
) -> None:
    with pytest.raises(EngineFailed, match="this pooling is not supported"):
        start_engine(
            kv_transfer_config=node.connector(shared_daemon),
            runner="pooling",
            convert="embed",
            pooler_config={"seq_pooling_type": "MEAN"},
        )


def test_a_backend_that_takes_no_prefix_ends_the_start(
    start_engine: StartEngine, tmp_path: Path, shared_daemon: DaemonProcess
) -> None:
    model = make_mla(tmp_path / "model")
    with pytest.raises(EngineFailed, match="CPU_MLA is not supported"):
        start_engine(
            model,
            kv_transfer_config=node.connector(shared_daemon, lookup_deadline=PATIENCE),
            **MLA_OPTIONS,
        )
