"""Tests of verbs run where there is a device: in the guest that `make test-rdma` boots."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Set by tests/rdma/guest/__main__.py, in the guest.
_NEEDS = {"verbs": "RDMA_GUEST", "lan": "RDMA_GUEST_PEER"}
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.parent
        if folder.parent != _HERE or folder.name not in _NEEDS:
            continue
        item.add_marker("rdma")
        if _NEEDS[folder.name] not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs RoCEv2: make test-rdma"))
