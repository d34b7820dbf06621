"""Our connector as one of several, in vLLM's `MultiConnector`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines import node
from tests.engines.asking import Ask, assert_same, prompt
from tests.engines.conftest import Reference, StartEngine
from tests.engines.process import BLOCK, EngineFailed
from tests.engines.recovery import assert_unharmed
from tests.running import DaemonProcess, daemon_process

WAIT = {"kvstore": {"wait": 3}}


@pytest.fixture
def other_daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon_process(node.config(tmp_path / "other")) as process:
        yield process


def _multi(*connectors: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    } | options


def test_nothing_is_saved_that_another_connector_still_loads(
    start_engine: StartEngine,
    daemon: DaemonProcess,
    other_daemon: DaemonProcess,
    reference: Reference,
) -> None:
    both = _multi(
        node.connector(daemon), node.connector(other_daemon), kv_load_failure_policy="recompute"
    )
    multi = start_engine(kv_transfer_config=both)
    second = start_engine(kv_transfer_config=node.connector(other_daemon))
    multi.generate([Ask(prompt(seed, 15 * BLOCK), tokens=1) for seed in range(700, 708)])
    multi.wait_idle()

    ask = Ask(prompt(710, 10 * BLOCK))
    # The first connector waits for blocks that nobody computes, into memory that others have used.
    (aborted,) = multi.generate([replace(ask, transfer=WAIT, abort_steps=3)])
    assert aborted.reason == "abort"
    multi.wait_idle()
    assert_same(second.generate([ask]), reference([ask]))

    known = Ask(prompt(700, 15 * BLOCK))
    answers = second.generate([known])
    assert_same(answers, reference([known]))
    assert answers[0].cached == 15 * BLOCK

    # A wait in vain: the blocks are computed, and stored in both nodes.
    late = Ask(prompt(711, 10 * BLOCK))
    assert_same(multi.generate([replace(late, transfer=WAIT)]), reference([late]))
    multi.wait_idle()
    answers = second.generate([late])
    assert_same(answers, reference([late]))
    assert answers[0].cached == 10 * BLOCK
    assert_unharmed(multi, 30.0)


def test_company_in_which_a_failed_load_ends_requests_is_refused(
    start_engine: StartEngine, daemon: DaemonProcess
) -> None:
    with pytest.raises(EngineFailed, match='put "kv_load_failure_policy":"recompute"'):
        start_engine(kv_transfer_config=_multi(node.connector(daemon)))
