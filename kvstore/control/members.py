"""Which member of a pool somebody means, and whether a node is the one that is meant. Pure."""

from collections.abc import Sequence

from kvstore.control.pool import LoadReport, MemberReport
from kvstore.errors import Unavailable
from kvstore.units import Address, parse_address


def find_member(members: Sequence[MemberReport], text: str) -> MemberReport:
    """The member that ``text`` names: a node's name, a number, an address or an incarnation.

    Of several starts of a node at one address, the last is meant.

    Raises:
        ValueError: it names none, or several.
    """
    for meant in (
        [one for one in members if one.node == text],
        [one for one in members if text == str(one.number)],
        [one for one in members if text in (one.control, one.data, one.incarnation)],
    ):
        latest = {(one.node, one.data): one for one in sorted(meant, key=lambda one: one.number)}
        if len(latest) == 1:
            return next(iter(latest.values()))
        if latest:
            raise ValueError(
                f"several nodes are called {text!r}; name one by number or address:"
                + _listed(list(latest.values()))
            )
    raise ValueError(f"no member of the pool is called {text!r}; members are:" + _listed(members))


def _listed(members: Sequence[MemberReport]) -> str:
    return "".join(
        f"\n  {one.number}  {one.node}  {one.control or 'no control address'}" for one in members
    )


def control_address(member: MemberReport) -> Address:
    """The control address of a member.

    Raises:
        Unavailable: it has none, or one that makes no sense.
    """
    if not member.control:
        raise Unavailable(f"{member.node} has no control plane: its listen.control is off")
    try:
        return parse_address(member.control)
    except ValueError as error:
        raise Unavailable(f"the control address of {member.node}: {error}") from error


def check_same(member: MemberReport, found: LoadReport) -> None:
    """Make sure that who answered is who was meant.

    A control plane that listens on loopback is reached from its own machine only; from another one
    its address leads to whatever node listens there.

    Raises:
        Unavailable: it is another node, or another start of it.
    """
    if found.incarnation == member.incarnation:
        return
    if found.node == member.node:
        raise Unavailable(f"{member.node} has been started anew; ask again in a moment")
    raise Unavailable(
        f"{found.node} answers at {member.control}, not {member.node}, whose control plane may "
        "listen on its own machine only: see listen.control"
    )
