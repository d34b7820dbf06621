"""`scripts/rdma-guest`: runs a command of this repository where there is RoCEv2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.rdma.guest.boot import Wish, end_cleanly_on_sigterm, run
from tests.rdma.guest.errors import GuestError

TIMED_OUT = 124
"""Exit status when the guest was ended for its time, as that of timeout(1)."""
NO_GUEST = 125
"""Exit status when there was no guest to run the command in."""


def main(arguments: Sequence[str]) -> int:
    """Runs one command; its exit status, or one of ours."""
    wish = _parse(arguments)
    try:
        return run(wish)
    except TimeoutError:
        print(f"rdma-guest: ended after {wish.timeout:g} s", file=sys.stderr)
        return TIMED_OUT
    except GuestError as error:
        print(f"rdma-guest: {error}", file=sys.stderr)
        return NO_GUEST


def _parse(arguments: Sequence[str]) -> Wish:
    parser = argparse.ArgumentParser(prog="scripts/rdma-guest", description=__doc__)
    parser.add_argument("--pair", action="store_true", help="a second machine, on one LAN with it")
    parser.add_argument(
        "--timeout", type=float, default=Wish.timeout, help="seconds, from QEMU's start"
    )
    parser.add_argument("--memory", default=Wish.memory, help="of each machine, as QEMU takes it")
    parser.add_argument("--results", type=Path, help="where files in $RDMA_GUEST_RESULTS go to")
    parser.add_argument("command", nargs="+", help="comes after --")
    return Wish(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    end_cleanly_on_sigterm()
    sys.exit(main(sys.argv[1:]))
