"""Marks tests that need a real GPU, which skip with the reason where there is none."""

from __future__ import annotations

import pytest

from tiers.cuda import CudaDevice
from tiers.errors import TierConfigError


def _why_not() -> str | None:
    try:
        CudaDevice(0).open()
    except TierConfigError as error:
        return str(error)
    return None


_REASON = _why_not()
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]
"""To be a test module's ``pytestmark``."""
