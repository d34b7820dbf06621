"""The nodes of a pool, asked all at once: who answers, who doesn't, and what names stand for."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

import typer

from kvstore.cli.options import Remote, Way, destination
from kvstore.cli.output import console
from kvstore.control.interface import BlockName, NamespaceReport
from kvstore.control.members import check_same, control_address
from kvstore.control.pool import LoadReport, MemberReport, PoolReport
from kvstore.control.pool_client import PoolClient
from kvstore.control.pool_views import Answer, Failure, merge_names, merge_namespaces
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.units import Address

T = TypeVar("T")

PARTIAL: Final = 4
"""Exit status where some nodes of the pool did not answer."""
_AT_ONCE: Final = 64
"""Nodes that are asked at a time."""


class PoolCaller:
    """The members of a pool, for one command. Use it as an asynchronous context manager.

    Entering asks one node who the members are, and all of them who they are. One that does not
    answer then, or later, is in ``failed`` and is not asked again, so that it costs its deadline
    once.

    Args:
        address: control address of any node of the pool.
        way: how control planes are reached.

    Attributes:
        report: the pool, as that node sees it.
        loads: what those that answered say of themselves.
        failed: those that did not.
    """

    def __init__(self, address: "Address", way: Way) -> None:
        self.report: PoolReport
        self.loads: list[Answer[LoadReport]] = []
        self.failed: list[Failure] = []
        self._address = address
        self._way = way
        self._stack = AsyncExitStack()
        self._clients: dict[int, PoolClient] = {}
        self._members: list[MemberReport] = []
        self._last: KVStoreError | None = None
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> Self:
        """Ask who there is.

        Raises:
            KVStoreError: the node at the address does not say.
        """
        try:
            asked = await self._stack.enter_async_context(self._way.open(self._address, PoolClient))
            self.report = await asked.pool()
            for member in self.report.members:
                await self._prepare(member, asked)
            self.loads = await self.ask(self._introduce)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connections."""
        await self._stack.aclose()

    async def _prepare(self, member: MemberReport, asked: PoolClient) -> None:
        self._members.append(member)
        client = asked
        if not member.asked:
            try:
                address = control_address(member)
            except KVStoreError as error:
                self._fail(member, error)
                return
            client = await self._stack.enter_async_context(self._way.open(address, PoolClient))
        self._clients[member.number] = client

    async def _introduce(self, client: PoolClient, member: MemberReport) -> LoadReport:
        load = await client.load()
        check_same(member, load)
        return load

    def _fail(self, member: MemberReport, error: KVStoreError) -> None:
        self._last = error
        self._clients.pop(member.number, None)
        self.failed.append(
            Failure(member.number, member.node, member.control, error.code, str(error))
        )

    @property
    def members(self) -> Sequence[MemberReport]:
        """Those that have answered so far, by number."""
        return [member for member in self._members if member.number in self._clients]

    async def ask(
        self, question: Callable[[PoolClient, MemberReport], Awaitable[T]]
    ) -> list[Answer[T]]:
        """Ask all that have answered so far, at once; the answers of those that do now.

        Raises:
            KVStoreError: nobody answers.
        """
        found = await asyncio.gather(*(self._ask(member, question) for member in self.members))
        answers = [answer for answer in found if answer is not None]
        if not answers and self._last is not None:
            raise self._last
        return answers

    async def ask_one(
        self, member: MemberReport, question: Callable[[PoolClient], Awaitable[T]]
    ) -> T | None:
        """Ask one of them; None where it does not answer."""

        async def asking(client: PoolClient, _: MemberReport) -> T:
            return await question(client)

        answer = await self._ask(member, asking)
        return None if answer is None else answer.value

    async def _ask(
        self,
        member: MemberReport,
        question: Callable[[PoolClient, MemberReport], Awaitable[T]],
    ) -> Answer[T] | None:
        async with self._turns:
            try:
                return Answer(member, await question(self._clients[member.number], member))
            except KVStoreError as error:
                self._fail(member, error)
                return None

    # --- what names stand for ------------------------------------------------------------------

    async def namespaces(self) -> Sequence[NamespaceReport]:
        """Those that any node knows."""
        answers = await self.ask(lambda client, _: client.namespaces())
        return merge_namespaces(answer.value for answer in answers)

    async def find(
        self, beginning: str, namespace: bytes | None, limit: int
    ) -> Sequence[BlockName]:
        """Blocks that any node holds."""
        answers = await self.ask(lambda client, _: client.find(beginning, namespace, limit))
        return merge_names((answer.value for answer in answers), limit)


def ask_pool(remote: Remote, question: Callable[[PoolCaller], Awaitable[T]]) -> T:
    """Connect to the nodes of the pool, await ``question`` with them and return its answer.

    Raises:
        typer.BadParameter: one node is named as well.
        KVStoreError: the node that is to name the members does not, or nobody answers.
    """
    if remote.node is not None:
        raise typer.BadParameter("give --pool, or --node, and not both")
    address, way = destination(remote)

    async def asking() -> T:
        async with PoolCaller(address, way) as pool:
            return await question(pool)

    return asyncio.run(asking())


def parts(answers: Sequence[Answer[T]]) -> list[dict[str, object]]:
    """What each node said, for JSON."""
    return [
        {"number": one.member.number, "node": one.member.node, "answer": one.value}
        for one in answers
    ]


def end(failed: Sequence[Failure], *, as_json: bool, no: bool = False) -> None:
    """Name the nodes that did not answer, and end with the status that says so.

    Args:
        failed: those nodes.
        as_json: whether they are named in what was printed already.
        no: whether the answer of the others is no.
    """
    screen = console(errors=True)
    for one in () if as_json else failed:
        screen.print(f"{one.node} (number {one.number}) left out: {one.message}", soft_wrap=True)
    if failed:
        raise typer.Exit(PARTIAL)
    if no:
        raise typer.Exit(1)
