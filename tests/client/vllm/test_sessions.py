"""The clients of the connector: with the GPU where CUDA lets them have it, else without."""

from __future__ import annotations

from typing import Any

import pytest

from client.vllm import sessions
from client.vllm.sessions import client_of
from client.vllm.settings import Settings
from kvstore.errors import ConfigError
from kvstore.identity import Namespace

NAMESPACE = Namespace("m", "uint8", "raw", 16, 4096, tp_size=2)


@pytest.mark.parametrize("works", [True, False])
def test_a_worker_has_a_client_whether_its_gpu_can_be_used(
    works: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[dict[str, Any]] = []

    def prepare(url: str, namespace: Namespace, **options: Any) -> Any:
        asked.append(options)
        if "gpu" in options and not works:
            raise ConfigError("GPU 3 can't be used")
        return url, namespace, options["shard"]

    monkeypatch.setattr(sessions, "prepare", prepare)
    settings = Settings.read({"url": "unix:///run/k.sock"}, {})
    made: Any = client_of(settings, NAMESPACE, 1, gpu=3)
    assert made == ("unix:///run/k.sock", NAMESPACE, 1)
    assert asked[0]["gpu"] == 3
    assert ("GPU 3 can't be used" in caplog.text) is not works
    assert len(asked) == (1 if works else 2)


def test_what_is_wrong_besides_is_said_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.read({"url": "tcp://127.0.0.1:1"}, {})
    settings = settings.model_copy(update={"transport": "shm"})
    with pytest.raises(ConfigError, match="shm"):
        client_of(settings, NAMESPACE, gpu=0)
