"""Sessions as a state machine: whatever they do to each other, accounts and bytes are right."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import InvalidRequest, ParentAbsent
from kvstore.identity import ROOT_PARENT
from kvstore.node import RESERVATION_SECONDS
from kvstore.protocol.messages import (
    BUSY,
    FILL,
    HELD,
    REFUSED,
    Abort,
    Get,
    GetAnswer,
    Release,
    Reserve,
    ReserveAnswer,
    Write,
    WriteAnswer,
)
from kvstore.reply import Reply
from kvstore.session import Session
from rdma.shm import ShmNodeTransport
from tests.kvstore.test_node import BLOCK, NAMESPACE, chain, content, make_node

MOST = 8
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


@dataclass
class Put:
    """A reservation as its client sees it: the blocks still to be written, and their places."""

    blocks: dict[int, bytes]
    places: dict[int, int]
    expires: float
    filled: set[int] = field(default_factory=set)


@dataclass
class Client:
    session: Session
    puts: dict[int, Put] = field(default_factory=dict)
    leases: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        return sum(len(put.blocks) for put in self.puts.values())

    @property
    def pinned(self) -> int:
        return sum(map(len, self.leases.values()))

    def ask(self, request: object) -> object:
        reply = self.session.handle(request, 0.0)  # type: ignore[arg-type]
        assert type(reply) is Reply, "nothing here has to wait"
        assert not reply.pinned
        self.session._node.touch(reply.used)
        return reply.answer


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.node = make_node()
        self.now = 0.0
        self.node.clock = lambda: self.now
        self.clients = [self._client() for _ in range(3)]
        self.lookups = 0
        self.paths: dict[bytes, tuple[int, ...]] = {}

    def _client(self) -> Client:
        session = Session(
            self.node,
            None,
            NAMESPACE,
            0,
            transport=ShmNodeTransport(),
            most_bytes=MOST * BLOCK,
            verify=False,
        )
        return Client(session)

    def teardown(self) -> None:
        for client in self.clients:
            client.session.close()
        assert (self.node.metrics.pins, self.node.metrics.reservations) == (0, 0)
        assert not self.shard.reserved
        assert self.node.dram.used == len(self.shard.committed) * BLOCK
        self.node.dram.close()

    @property
    def shard(self):  # type: ignore[no-untyped-def]
        return self.node.shard(NAMESPACE, 0)

    @rule(who=st.integers(0, 2), path=PATHS, skip=st.integers(0, 5))
    def reserve(self, who: int, path: tuple[int, ...], skip: int) -> None:
        client, hashes = self.clients[who], chain(path)
        self.paths.update((block, path[: end + 1]) for end, block in enumerate(hashes))
        skip = min(skip, len(path) - 1)
        parent = hashes[skip - 1] if skip else ROOT_PARENT
        hashes = hashes[skip:]
        known = not skip or self.shard.get(parent) is not None
        try:
            answer = client.ask(Reserve(parent, hashes))
        except ParentAbsent:
            assert not known
            return
        assert isinstance(answer, ReserveAnswer)
        verdicts = answer.verdicts
        assert len(verdicts) == len(hashes)
        rest = verdicts.lstrip(bytes([HELD])).lstrip(bytes([FILL]))
        assert set(rest) <= {BUSY} or set(rest) <= {REFUSED}
        wanted = [index for index, verdict in enumerate(verdicts) if verdict == FILL]
        assert len(wanted) == len(answer.locations or ())
        if wanted:
            client.puts[answer.reservation] = Put(
                {index: hashes[index] for index in wanted},
                dict(zip(wanted, answer.locations or (), strict=True)),
                self.now + RESERVATION_SECONDS,
            )

    @precondition(lambda self: self.shard.reserved)
    @rule(who=st.integers(0, 2), data=st.data(), digit=st.integers(0, 1))
    def reserve_below_what_is_written(self, who: int, data: st.DataObject, digit: int) -> None:
        path = data.draw(st.sampled_from(sorted(self.paths[one] for one in self.shard.reserved)))
        self.reserve(who, (*path, digit), len(path))

    def _a_put(self, data: st.DataObject) -> tuple[Client, int, Put]:
        writing = [client for client in self.clients if client.puts]
        client = data.draw(st.sampled_from(writing))
        number = data.draw(st.sampled_from(sorted(client.puts)))
        return client, number, client.puts[number]

    @precondition(lambda self: any(client.puts for client in self.clients))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        client, number, put = self._a_put(data)
        todo = sorted(set(put.blocks) - put.filled)
        chosen = data.draw(st.lists(st.sampled_from(todo), unique=True)) if todo else []
        for index in chosen:
            self.node.dram.view(put.places[index], BLOCK)[:] = content(put.blocks[index])
        answer = client.ask(Write(number, chosen))
        assert isinstance(answer, WriteAnswer)
        put.filled.update(chosen)
        for index in list(put.blocks):
            if index not in put.filled:
                break
            del put.blocks[index]
        for index, committed in zip(chosen, answer.committed, strict=True):
            assert not committed or index not in put.blocks
        if not put.blocks:
            del client.puts[number]

    @precondition(lambda self: any(client.puts for client in self.clients))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        client, number, _ = self._a_put(data)
        client.ask(Abort(number))
        del client.puts[number]
        try:
            client.ask(Abort(number))
        except InvalidRequest:
            return
        raise AssertionError("aborted twice")

    @rule(who=st.integers(0, 2), path=PATHS)
    def get(self, who: int, path: tuple[int, ...]) -> None:
        client, hashes = self.clients[who], chain(path)
        room = MOST - client.reserved - client.pinned
        held = [block in self.shard.committed for block in hashes]
        answer = client.ask(Get(hashes))
        assert isinstance(answer, GetAnswer)
        self.lookups += len(hashes)
        found = [block for block, tier in zip(hashes, answer.tiers, strict=True) if tier]
        assert len(found) == min(sum(held), room)
        assert found == hashes[: len(found)]
        if found:
            places = list(zip(answer.locations or (), found, strict=True))
            client.leases[answer.lease] = places
        else:
            assert answer.lease == 0

    @precondition(lambda self: any(client.leases for client in self.clients))
    @rule(data=st.data(), times=st.integers(1, 2))
    def release(self, data: st.DataObject, times: int) -> None:
        client = data.draw(st.sampled_from([one for one in self.clients if one.leases]))
        number = data.draw(st.sampled_from(sorted(client.leases)))
        client.ask(Release([number] * times))
        del client.leases[number]

    @rule(seconds=st.sampled_from([1.0, RESERVATION_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for client in self.clients:
            client.session.expire(self.now)

    @rule(who=st.integers(0, 2))
    def reconnect(self, who: int) -> None:
        self.clients[who].session.close()
        self.clients[who] = self._client()

    @invariant()
    def accounts_add_up(self) -> None:
        metrics = self.node.metrics
        assert metrics.pins == sum(client.pinned for client in self.clients)
        assert metrics.reservations == sum(client.reserved for client in self.clients)
        assert metrics.lookups == metrics.hits.total() + metrics.misses.total() == self.lookups
        for client in self.clients:
            assert client.session._held == client.reserved + client.pinned <= MOST

    @invariant()
    def no_name_is_taken_by_nobody(self) -> None:
        writing = {
            block
            for client in self.clients
            for put in client.puts.values()
            if put.expires > self.now
            for block in put.blocks.values()
        }
        assert set(self.shard.reserved) <= writing

    @invariant()
    def no_memory_is_used_twice_or_lost(self) -> None:
        places = {entry.dram for entry in self.shard.committed.values()}
        assert len(places) == len(self.shard.committed)
        written = [
            put.places[index]
            for client in self.clients
            for put in client.puts.values()
            for index in put.blocks
        ]
        assert len(set(written)) == len(written)
        assert places.isdisjoint(written)
        leased = {
            place
            for client in self.clients
            for lease in client.leases.values()
            for place, _ in lease
        }
        assert leased.isdisjoint(written)
        assert self.node.dram.used == len(places | set(written) | leased) * BLOCK

    @invariant()
    def what_can_be_read_is_right_and_whole(self) -> None:
        for block, entry in self.shard.committed.items():
            assert bytes(self.node.dram.view(entry.dram, BLOCK)) == content(block)
            assert entry.parent is None or entry.parent.committed
        for client in self.clients:
            for lease in client.leases.values():
                for place, block in lease:
                    assert bytes(self.node.dram.view(place, BLOCK)) == content(block)


TestSessionMachine = SessionMachine.TestCase
