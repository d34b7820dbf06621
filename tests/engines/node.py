"""A daemon beside engines, and what it says of itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvstore.config import Config
from tests.running import DaemonProcess, make_config

PATIENT = {"lookup_deadline": 1.0, "load_deadline": 30.0, "save_deadline": 30.0}
"""Deadlines that a node meets on a machine that is busy with other tests, too."""


def config(directory: Path, **sections: dict[str, Any]) -> Config:
    """Room for a thousand blocks of a tiny model; ports that are known before it starts."""
    sections.setdefault("dram", {"capacity": "128MiB", "segment": "32MiB"})
    listen = {name: f"127.0.0.1:{free_port()}" for name in ("control", "metrics")}
    return make_config(directory, **sections, listen=listen)


def connector(daemon: DaemonProcess, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The option `kv_transfer_config` of an engine that uses it; `extra` over `PATIENT`."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"url": daemon.url} | PATIENT | extra,
    }


def metrics(daemon: DaemonProcess) -> dict[str, float]:
    """What it exposes to Prometheus: `name{label=value}` to value."""
    url = f"http://{daemon.config.listen.metrics}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def command(daemon: DaemonProcess, *arguments: str) -> Any:
    """What `kvstore ... --json` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", *arguments, "--json"],
        env=os.environ | {"KVSTORE_CONTROL": str(daemon.config.listen.control)},
        capture_output=True,
        timeout=30,
        check=True,
    )
    return json.loads(done.stdout)


def free_port() -> int:
    """One that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
