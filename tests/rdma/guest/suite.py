"""`make test-rdma`: every test that needs a RoCEv2 device, in the machines that have one.

One machine for what one machine is enough for, then a pair for the rest. What couldn't be run is a
failure, and so is a test that skipped itself.
"""

from __future__ import annotations

import compileall
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.rdma.guest.boot import REPOSITORY, Wish, end_cleanly_on_sigterm, run
from tests.rdma.guest.errors import GuestError
from tests.rdma.guest.machine import SHARE

_COMPILED = ("client", "kvstore", "rdma", "tests", "tiers")
_REPORT = "report.xml"
_TEST_TIMEOUT = 120  # seconds; emulation is slow
_PYTEST = (
    # What the plugins cost is their import: only those are loaded that the configuration needs.
    *("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "python", "-m", "pytest"),
    *("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider"),
    *("-o", f"timeout={_TEST_TIMEOUT}", "--color=no", "--durations=5", "-ra"),
    f"--junit-xml={SHARE / 'results' / _REPORT}",
)


@dataclass(frozen=True)
class Part:
    """Tests that run in one go."""

    folder: str
    pair: bool
    timeout: float
    """Seconds, boot included."""


PARTS = (
    Part("tests/rdma/verbs", pair=False, timeout=420),
    Part("tests/rdma/lan", pair=True, timeout=200),
)


def main(selected: Sequence[str]) -> int:
    """Runs `selected` files or folders, by default all; 0 if every test passed."""
    began = time.monotonic()
    try:
        _compile()
        passed = [
            _run(part, tests)
            for part in PARTS
            if (tests := _tests_of(part, selected or [each.folder for each in PARTS]))
        ]
    except GuestError as error:
        print(f"test-rdma: {error}", file=sys.stderr)
        return 1
    except TimeoutError:
        print("test-rdma: ended for its time", file=sys.stderr)
        return 1
    if not passed:
        print(f"test-rdma: nothing of RDMA in {' '.join(selected)}", file=sys.stderr)
        return 1
    if None in passed:
        return 1
    total = sum(filter(None, passed))
    print(f"test-rdma: {total} passed over RoCEv2 in {time.monotonic() - began:.0f} s")
    return 0


def _tests_of(part: Part, selected: Sequence[str]) -> list[str]:
    return [name for name in selected if name.startswith(part.folder)]


def _run(part: Part, tests: Sequence[str]) -> int | None:
    """How many tests passed; None if any did anything else.

    Raises:
        GuestError: there was no guest, or no test in it.
        TimeoutError: it was ended for its time.
    """
    print(f"test-rdma: booting {'two machines' if part.pair else 'one machine'}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rdma-results-") as name:
        results = Path(name)
        status = run(
            Wish([*_PYTEST, *tests], pair=part.pair, timeout=part.timeout, results=results)
        )
        report = results / _REPORT
        if not report.exists():
            raise GuestError(f"pytest left no report (exit status {status})")
        passed, others = _count(report)
    if not passed and not others:
        raise GuestError(f"no tests in {' '.join(tests)}")
    if others or status:
        print(f"test-rdma: {others} of {passed + others} tests in {part.folder} did not pass")
        return None
    return passed


def _count(report: Path) -> tuple[int, int]:
    """Tests that passed, and tests that failed, skipped themselves or broke."""
    passed = others = 0
    for case in ElementTree.parse(report).iter("testcase"):
        bad = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        others, passed = others + bad, passed + (not bad)
    return passed, others


def _compile() -> None:
    """Compiles our modules once here, where that's fast; the guest can't keep what it compiles."""
    for folder in _COMPILED:
        compileall.compile_dir(REPOSITORY / folder, quiet=2)


if __name__ == "__main__":
    end_cleanly_on_sigterm()
    sys.exit(main(sys.argv[1:]))
