"""The process that drives one store, run by the interpreter of the store's environment.

``python -m benchmarks.peers.worker ADAPTER`` where ``ADAPTER`` is a module of
`benchmarks.peers.adapters`, or a full module name. One JSON object a line on stdin, one in answer
on stdout:

- ``{"do": "open", "settings": {...}}`` → ``{"seconds": ..., "zero_copy": ...}``
- ``{"do": "run", "work": NAME, "parameters": {...}}`` → an `Outcome`
- ``{"do": "memory"}`` → ``{"bytes": ...}``
- ``{"do": "close"}`` → ``{}``

An order that fails answers ``{"failed": "why"}``. The worker ends with its stdin. With
``parameters["at"]``, a time of ``time.monotonic()``, a run begins at that time: so several workers
begin together. What libraries print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.peers.adapter import Adapter
from benchmarks.peers.payload import Payload
from benchmarks.peers.subject import Subject
from benchmarks.peers.works import WORKS

Order = Mapping[str, Any]


class Worker:
    """Carries out one order after the other."""

    def __init__(self, make: Callable[[], Adapter]) -> None:
        self._make = make
        self._subject: Subject | None = None

    def order(self, order: Order) -> dict[str, Any]:
        """Do what a line says and return the answer.

        Raises:
            Exception: whatever the store or the order is at fault for.
        """
        orders = {
            "open": self._open,
            "run": self._run,
            "memory": lambda _: {"bytes": self._opened.adapter.memory()},
            "close": self._close,
        }
        return orders[order["do"]](order)

    @property
    def _opened(self) -> Subject:
        if self._subject is None:
            raise RuntimeError("the store is not open")
        return self._subject

    def _open(self, order: Order) -> dict[str, Any]:
        settings: Mapping[str, str] = order["settings"]
        adapter = self._make()
        began = time.perf_counter()
        adapter.open(settings)
        seconds = time.perf_counter() - began
        self._subject = Subject(adapter, Payload(int(settings["block_bytes"])), settings)
        return {"seconds": seconds, "zero_copy": adapter.zero_copy}

    def _run(self, order: Order) -> dict[str, Any]:
        work, parameters = WORKS[order["work"]], order["parameters"]
        if "at" in parameters:
            time.sleep(max(0.0, parameters["at"] - time.monotonic()))
        return work(self._opened, parameters).as_json()

    def _close(self, order: Order) -> dict[str, Any]:
        subject, self._subject = self._opened, None
        subject.kept.clear()
        subject.adapter.close()
        return {}


def main() -> None:
    """Serve orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name = sys.argv[1] if "." in sys.argv[1] else f"benchmarks.peers.adapters.{sys.argv[1]}"
    worker = Worker(lambda: importlib.import_module(name).Adapter())
    for line in sys.stdin:
        try:
            answer = worker.order(json.loads(line))
        # The boundary of a store's mistakes: each becomes a row that says what went wrong.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
