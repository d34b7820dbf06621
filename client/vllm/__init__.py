"""The connector that vLLM loads: ``--kv-transfer-config '{"kv_connector": "KVStoreConnector"}'``.

``connector`` is the class that vLLM sees; everything it does is in modules that know nothing of
vLLM and are tested without it. ``docs/engines/vllm.md`` is for those who use it.
"""
