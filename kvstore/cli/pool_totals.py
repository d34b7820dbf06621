"""``status``, ``evict`` and ``verify`` over all nodes of a pool."""

import sys
from collections.abc import Sequence

from kvstore.cli.naming import find_block, find_namespace
from kvstore.cli.options import Remote
from kvstore.cli.output import console, counted, print_json, share, state, table
from kvstore.cli.pool import PoolCaller, ask_pool, end, parts
from kvstore.control.interface import MAX_CORRUPT, NodeStatus, Removal, VerifyProgress
from kvstore.control.pool import MemberReport
from kvstore.control.pool_client import PoolClient
from kvstore.control.pool_views import (
    Answer,
    PoolTotals,
    merge_progress,
    merge_removals,
    totals,
)
from kvstore.errors import InvalidRequest
from kvstore.units import format_duration, format_size

# --- status ---------------------------------------------------------------------------------------


def status(remote: Remote, *, as_json: bool) -> None:
    """Show how every node does, and all of them together."""

    async def question(pool: PoolCaller) -> None:
        answers = await pool.ask(lambda client, _: client.status())
        whole = totals(answers)
        if as_json:
            print_json({"pool": whole, "nodes": parts(answers), "failed": pool.failed})
        else:
            console().print(status_table(answers))
            console().print(_total_table(whole))
        end(pool.failed, as_json=as_json)

    ask_pool(remote, question)


def status_table(answers: Sequence[Answer[NodeStatus]]) -> object:
    """A row for each node, with its HBM where any node has some."""
    rows = []
    # Most pools have no GPUs, and most terminals no room to say so.
    with_hbm = any(tier.name == "hbm" for answer in answers for tier in answer.value.tiers)
    for answer in answers:
        found = answer.value
        full = {tier.name: share(tier.used, tier.capacity) for tier in found.tiers}
        rows.append(
            (
                found.name,
                answer.member.number,
                state(found.state, good=found.state == "serving"),
                format_duration(found.uptime),
                found.version,
                found.sessions,
                found.blocks,
                *((full.get("hbm", "-"),) if with_hbm else ()),
                full.get("dram", "-"),
                full.get("ssd", "-"),
                found.pins,
                found.reservations,
            )
        )
    columns = (
        "NODE", ">NUMBER", "STATE", ">UP", "VERSION", ">SESSIONS", ">BLOCKS",
        *((">HBM FULL",) if with_hbm else ()), ">DRAM FULL", ">SSD FULL", ">PINS", ">RESERVED",
    )  # fmt: skip
    return table(columns, rows, spare=("RESERVED", "PINS", "VERSION", "NUMBER", "UP"))


def _total_table(whole: PoolTotals) -> object:
    rows = [
        (
            name,
            format_size(tier.used),
            format_size(tier.capacity),
            share(tier.used, tier.capacity),
            tier.blocks,
        )
        for name, tier in whole.tiers.items()
    ]
    return table(("ALL NODES", ">USED", ">CAPACITY", ">FULL", ">BLOCKS"), rows)


# --- evict ----------------------------------------------------------------------------------------


def evict(remote: Remote, block: str | None, namespace: str | None, *, as_json: bool) -> None:
    """Drop a block and all that follow it from every node, or a namespace without ``block``."""

    async def question(pool: PoolCaller) -> None:
        if block is None:
            fingerprint, hash = (await find_namespace(pool, namespace)).fingerprint, None
        else:
            name = await find_block(pool, block, namespace)
            fingerprint, hash = name.namespace, name.hash
        answers = await pool.ask(lambda client, _: client.evict(fingerprint, hash))
        whole = merge_removals(one.value for one in answers)
        if as_json:
            print_json({"pool": whole, "nodes": parts(answers), "failed": pool.failed})
        else:
            _print_removals(answers, whole)
        end(pool.failed, as_json=as_json, no=bool(whole.kept))

    ask_pool(remote, question)


def _print_removals(answers: Sequence[Answer[Removal]], whole: Removal) -> None:
    rows = [
        (one.member.node, one.value.blocks, format_size(one.value.bytes), one.value.kept)
        for one in answers
    ]
    screen = console()
    screen.print(table(("NODE", ">DROPPED", ">SIZE", ">KEPT"), rows))
    text = f"Dropped {counted(whole.blocks, 'block')} ({format_size(whole.bytes)})"
    text += f"; {whole.kept:,} stayed: pinned or in use" if whole.kept else ""
    screen.print(text + ".")


# --- verify ---------------------------------------------------------------------------------------


def verify(remote: Remote, namespace: str | None, tier: str | None, *, as_json: bool) -> None:
    """Compare all blocks of all nodes with their checksums, at once."""

    async def question(pool: PoolCaller) -> None:
        chosen = (await find_namespace(pool, namespace)).fingerprint if namespace else None
        names: list[dict[str, str]] = []
        having = await _having(pool, tier)
        answers = await _verify(pool, chosen, tier, having, names)
        whole = merge_progress(one.value for one in answers)
        if as_json:
            rest = {"nodes": parts(answers), "failed": pool.failed}
            print_json({"pool": whole, "names": names[:MAX_CORRUPT], **rest})
        else:
            _print_progress(answers, whole, names)
        bad = not whole.finished or bool(whole.corrupt or whole.unreadable)
        end(pool.failed, as_json=as_json, no=bad)

    ask_pool(remote, question)


async def _having(pool: PoolCaller, tier: str | None) -> set[int]:
    """Numbers of the members that have the tier."""
    if tier is None:
        return {member.number for member in pool.members}
    answers = await pool.ask(lambda client, _: client.status())
    found = {
        one.member.number for one in answers if tier in (report.name for report in one.value.tiers)
    }
    if not found:
        raise InvalidRequest(f"no node of this pool has a tier {tier}")
    return found


async def _verify(
    pool: PoolCaller,
    namespace: bytes | None,
    tier: str | None,
    having: set[int],
    names: list[dict[str, str]],
) -> list[Answer[VerifyProgress]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("verify", BarColumn(), MofNCompleteColumn(), "blocks", TimeRemainingColumn())
    steps: dict[int, VerifyProgress] = {}
    with Progress(
        *columns, console=console(errors=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("verify", total=None)

        async def follow(client: PoolClient, member: MemberReport) -> VerifyProgress:
            if member.number not in having:
                return VerifyProgress(0, 0, 0, finished=True)
            last = VerifyProgress(0, 0, 0)
            async for last in client.verify(namespace, tier):
                names.extend({"node": member.node, "hash": one.hash.hex()} for one in last.names)
                steps[member.number] = last
                whole = merge_progress(steps.values())
                progress.update(task, total=whole.total, completed=whole.checked)
            return last

        return await pool.ask(follow)


def _print_progress(
    answers: Sequence[Answer[VerifyProgress]], whole: VerifyProgress, names: list[dict[str, str]]
) -> None:
    screen = console()
    for one in names[:MAX_CORRUPT]:
        screen.print(f"corrupt on {one['node']}: {one['hash']}", soft_wrap=True)
    rows = [
        (one.member.node, one.value.checked, one.value.corrupt, one.value.unreadable)
        for one in answers
    ]
    screen.print(table(("NODE", ">CHECKED", ">CORRUPT", ">UNREADABLE"), rows))
    screen.print(
        f"Checked {counted(whole.checked, 'block')}: {whole.corrupt} corrupt, "
        f"{whole.unreadable} unreadable."
    )
