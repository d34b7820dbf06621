"""The environments that `scripts/setup-peers` makes."""

from __future__ import annotations

from benchmarks.peers.contender import PeerFailed, Place


def interpreter(place: Place, peer: str) -> str:
    """The Python of a peer's environment.

    Raises:
        PeerFailed: there is no such environment.
    """
    # Absolute, but not resolved: the link is what tells an interpreter its environment.
    python = place.environments.absolute() / peer / "bin" / "python"
    if not python.exists():
        raise PeerFailed(f"{place.environments / peer} is not there: scripts/setup-peers makes it")
    return str(python)
