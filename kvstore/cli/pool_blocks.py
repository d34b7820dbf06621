"""``ls``, ``inspect``, ``match`` and ``explain`` over all nodes of a pool."""

from collections.abc import Sequence

import typer

from kvstore.cli.block_views import block_table, runs, sentence
from kvstore.cli.naming import Prefix, find_block, find_namespace
from kvstore.cli.options import Remote
from kvstore.cli.output import console, counted, plain, print_json, short, table
from kvstore.cli.pool import PoolCaller, ask_pool, end, parts
from kvstore.control.interface import BlockPage, BlockQuery, BlockReport
from kvstore.control.pool import MemberReport
from kvstore.control.pool_client import PoolClient
from kvstore.control.pool_views import (
    Answer,
    Conclusion,
    Failure,
    Holder,
    Position,
    conclude,
    merge_matches,
    next_node,
    reach,
)

# --- ls -------------------------------------------------------------------------------------------


def ls(
    remote: Remote,
    namespace: str | None,
    tier: str | None,
    shard: int | None,
    limit: int,
    cursor: bytes,
    *,
    everything: bool,
    as_json: bool,
) -> None:
    """List the blocks of all nodes, those of one node after those of another."""
    try:
        start = Position.decode(cursor)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--cursor") from error

    async def question(pool: PoolCaller) -> Sequence[Failure]:
        chosen = (await find_namespace(pool, namespace)).fingerprint if namespace else None
        listing = _Listing(pool, BlockQuery(chosen, shard, tier, limit=limit), start)
        while True:
            found = await listing.page()
            _print_page(found, listing, as_json=as_json, last=not everything)
            if listing.at is None or not everything:
                return pool.failed

    end(ask_pool(remote, question), as_json=as_json)


class _Listing:
    """Pages of a pool's blocks; ``at`` is where the next one begins, None at the end."""

    def __init__(self, pool: PoolCaller, query: BlockQuery, start: Position) -> None:
        self.pool = pool
        self.at: Position | None = start
        self._query = query

    async def page(self) -> list[Answer[BlockReport]]:
        """The next blocks, up to the limit of the query."""
        found: list[Answer[BlockReport]] = []
        while self.at is not None and len(found) < self._query.limit:
            upcoming = next_node(self.pool.members, self.at)
            if upcoming is None:
                self.at = None
                break
            member, self.at = upcoming
            room = self._query.limit - len(found)
            page = await self._page_of(member, self.at.cursor, room)
            found += [Answer(member, block) for block in page.blocks]
            more = bool(page.cursor)
            self.at = Position(member.number, page.cursor) if more else self._after(member)
        return found

    async def _page_of(self, member: MemberReport, cursor: bytes, limit: int) -> BlockPage:
        wanted = self._query
        query = BlockQuery(wanted.namespace, wanted.shard, wanted.tier, cursor, limit)
        page = await self.pool.ask_one(member, lambda client: client.list_blocks(query))
        return page if page is not None else BlockPage(())

    def _after(self, member: MemberReport) -> Position | None:
        following = next_node(self.pool.members, Position(member.number + 1))
        return None if following is None else following[1]


def _print_page(
    found: Sequence[Answer[BlockReport]], listing: _Listing, *, as_json: bool, last: bool
) -> None:
    cursor = b"" if listing.at is None else listing.at.encode()
    if as_json:
        blocks = [_with_node(one) for one in found]
        print_json({"blocks": blocks, "cursor": cursor, "failed": listing.pool.failed})
        return
    console().print(block_table([one.value for one in found], [one.member.node for one in found]))
    if cursor and last:
        console(errors=True).print(f"More blocks: --all, or --cursor {cursor.hex()}")


def _with_node(one: Answer[BlockReport]) -> dict[str, object]:
    return {"node": one.member.node, "number": one.member.number, **plain(one.value)}


# --- inspect --------------------------------------------------------------------------------------


def inspect(
    remote: Remote, block: str, namespace: str | None, limit: int, *, prefix: bool, as_json: bool
) -> None:
    """Show a block on every node that holds it."""

    async def question(
        pool: PoolCaller,
    ) -> tuple[list[Answer[Sequence[BlockReport]]], list[Failure]]:
        name = await find_block(pool, block, namespace)

        async def look(client: PoolClient, _: MemberReport) -> Sequence[BlockReport]:
            return await client.inspect(name.namespace, name.hash, prefix=prefix, limit=limit)

        return await pool.ask(look), pool.failed

    answers, failed = ask_pool(remote, question)
    found = [Answer(one.member, report) for one in answers for report in one.value]
    if as_json:
        print_json({"blocks": [_with_node(one) for one in found], "failed": failed})
    elif found:
        nodes = [one.member.node for one in found]
        console().print(block_table([one.value for one in found], nodes))
    else:
        console(errors=True).print(
            "No node that answered holds this block; `kvstore explain --pool` says why."
        )
    end(failed, as_json=as_json, no=not found)


# --- match ----------------------------------------------------------------------------------------


def match(remote: Remote, prefix: Prefix, namespace: str | None, *, as_json: bool) -> None:
    """Show how far a prefix reaches over all nodes, and who holds which part of it."""

    async def question(pool: PoolCaller) -> None:
        where, wanted, block_tokens = await prefix.find(pool, namespace)
        answers = await pool.ask(lambda client, _: client.match(where.fingerprint, wanted))
        report = merge_matches(answers)
        tokens = report.blocks * block_tokens
        if as_json:
            held = [
                {"hash": one, "nodes": holders}
                for one, holders in zip(wanted, report.holders, strict=False)
            ]
            whole = {
                "asked": report.asked, "blocks": report.blocks, "tokens": tokens, "held": held,
            }  # fmt: skip
            print_json({"pool": whole, "nodes": parts(answers), "failed": pool.failed})
        else:
            rows = [
                (start, last, who, short(wanted[last]))
                for start, last, who in runs([_who(holders) for holders in report.holders])
            ]
            screen = console()
            if rows:
                screen.print(table((">FROM", ">TO", "HELD BY", "LAST HASH"), rows))
            text = f"{report.blocks} of {counted(report.asked, 'block')} held"
            screen.print(f"{text} ({counted(tokens, 'token')})." if block_tokens else f"{text}.")
        end(pool.failed, as_json=as_json, no=report.blocks < report.asked)

    ask_pool(remote, question)


def _who(holders: Sequence[Holder]) -> str:
    if not holders:
        return "others, says the directory"
    return ", ".join(f"{one.node} {one.tier}" for one in holders)


# --- explain --------------------------------------------------------------------------------------


def explain(remote: Remote, prefix: Prefix, namespace: str | None, *, as_json: bool) -> None:
    """Say why a prefix ends where it does over all nodes, and what each says of it."""

    async def question(pool: PoolCaller) -> None:
        where, wanted, _ = await prefix.find(pool, namespace)
        answers = await pool.ask(lambda client, _: client.explain(where.fingerprint, wanted))
        held = reach(answers)
        about = answers
        if held < len(wanted):
            missing = wanted[held : held + 1]
            about = await pool.ask(lambda client, _: client.explain(where.fingerprint, missing))
        found = conclude(answers, about, wanted, lost=bool(pool.report.gone))
        if as_json:
            whole = {**plain(found.explanation), "said_by": found.nodes}
            print_json({"pool": whole, "nodes": parts(answers), "failed": pool.failed})
        else:
            _print_conclusion(found)
            console().print(
                table(
                    ("NODE", ">HOLDS", ">OTHERS HOLD", "ITS OWN NEXT BLOCK"),
                    [
                        (one.member.node, one.value.blocks, one.value.remote, sentence(one.value))
                        for one in answers
                    ],
                )
            )
        end(pool.failed, as_json=as_json, no=held < len(wanted))

    ask_pool(remote, question)


def _print_conclusion(found: Conclusion) -> None:
    screen, told = console(), found.explanation
    screen.print(
        f"{told.blocks} of {counted(told.asked, 'block')} held by the pool.", soft_wrap=True
    )
    said = f" (So says {', '.join(found.nodes)}.)" if found.nodes else ""
    screen.print(f"{sentence(told)}{said}", soft_wrap=True)
    if told.hash:
        screen.print(f"The first block that no node holds is {told.hash.hex()}.", soft_wrap=True)
