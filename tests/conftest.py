"""What every test runs under."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# `ci` gives the same examples in every run, so that a red build is red again at one's desk.
# `thorough` looks for new ones: HYPOTHESIS_PROFILE=thorough make test
settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough", settings.get_profile("ci"), derandomize=False, max_examples=2000
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
