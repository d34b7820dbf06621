"""What a check says."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "info", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found: a state, what was looked at, and how to mend it."""

    check: str
    state: State
    detail: str
    remedy: str = ""
