"""The one line that the documents give: vLLM's own server, with what a user types."""

from __future__ import annotations

from pathlib import Path

from tests.engines import node
from tests.engines.asking import Ask, prompt
from tests.engines.conftest import Reference, StartEngine
from tests.engines.process import BLOCK
from tests.engines.server import server
from tests.running import DaemonProcess

ONE_LINE = '{"kv_connector":"KVStoreConnector","kv_role":"kv_both"}'


def test_a_server_reuses_what_another_engine_computed(
    daemon: DaemonProcess,
    start_engine: StartEngine,
    reference: Reference,
    llama: Path,
    tmp_path: Path,
) -> None:
    """The node's address comes from the environment, and its blocks from another process."""
    ask = Ask(prompt(1, 200))
    engine = start_engine(kv_transfer_config=node.connector(daemon))
    engine.generate([ask])
    engine.wait_idle()
    engine.stop()
    variables = {"KVSTORE_URL": daemon.url}
    variables |= {f"KVSTORE_{name.upper()}": str(value) for name, value in node.PATIENT.items()}
    log = tmp_path / "server.log"
    with server(llama, log, "--kv-transfer-config", ONE_LINE, env=variables) as served:
        answer = served.complete(ask.prompt, ask.tokens)
        metrics = served.metrics()
    assert tuple(answer["choices"][0]["token_ids"]) == reference([ask])[0].tokens
    reused = [
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("vllm:external_prefix_cache_hits_total")
    ]
    assert reused == [6 * BLOCK]
    assert "vllm:kvstore_loaded_blocks_total" in metrics
