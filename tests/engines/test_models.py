"""The tiny models can tell a wrong block from a right one, or no other test here means anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.asking import Ask, prompt
from tests.engines.conftest import StartEngine
from tests.engines.models import MLA_OPTIONS, make_llama, make_mla, make_sliding
from tests.engines.process import BLOCK


@pytest.mark.parametrize(
    ("make", "options"), [(make_llama, {}), (make_mla, MLA_OPTIONS), (make_sliding, {})]
)
def test_an_answer_depends_on_the_first_block(
    start_engine: StartEngine, tmp_path: Path, make: Callable[[Path], Path], options: dict[str, Any]
) -> None:
    engine = start_engine(make(tmp_path / "model"), **options)
    one = prompt(1, 8 * BLOCK)
    # One at a time: vLLM's MLA for CPUs mixes up the prompts of one step.
    same, again, other = (
        engine.generate([Ask(each)])[0] for each in (one, one, prompt(2, BLOCK) + one[BLOCK:])
    )
    assert same.tokens == again.tokens
    assert same.tokens != other.tokens
    assert np.abs(np.subtract(same.scores, other.scores)).max() > 0.1
