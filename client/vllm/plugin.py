"""What vLLM's plugin loader calls: it makes the connector known by its name."""

from __future__ import annotations

NAME = "KVStoreConnector"


def register() -> None:
    """Let ``"kv_connector": "KVStoreConnector"`` mean ours; may be called again.

    vLLM calls every plugin in every one of its processes, also where no connector is used, so this
    imports nothing but vLLM's registry.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "client.vllm.connector", NAME)
