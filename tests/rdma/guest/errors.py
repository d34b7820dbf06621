"""What goes wrong with a guest itself, as opposed to the command in it."""

from __future__ import annotations


class GuestError(Exception):
    """The guest couldn't be made, didn't come up, or ended without an exit status."""
