from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rdma.verbs.plan import Work
from rdma.verbs.schedule import READ, WRITE, Chain, Flow, Schedule, Transfer


def transfer(*lengths: int, kind: str = WRITE) -> Transfer:
    return Transfer(kind, [Work(0, 0, (), length) for length in lengths])


def drain(schedule: Schedule) -> list[tuple[Flow, Chain]]:
    taken = []
    while (turn := schedule.next()) is not None:
        taken.append(turn)
    return taken


def test_work_is_taken_in_chains() -> None:
    schedule, flow = Schedule(1000, 4), Flow(100, 10_000)
    schedule.add(flow, transfer(*[1] * 10))
    assert [len(chain.works) for _, chain in drain(schedule)] == [4, 4, 2]
    assert flow.works_out == schedule.works_out == 10


def test_flows_take_turns() -> None:
    schedule, flows = Schedule(1000, 2), [Flow(100, 10_000) for _ in range(3)]
    for flow in flows:
        schedule.add(flow, transfer(*[1] * 4))
    assert [flow for flow, _ in drain(schedule)] == flows * 2


def test_a_flow_is_bounded_by_number_and_bytes() -> None:
    schedule = Schedule(1000, 100)
    deep, wide = Flow(3, 1 << 40), Flow(100, 1000)
    schedule.add(deep, transfer(*[1] * 5))
    schedule.add(wide, transfer(*[300] * 5))
    drain(schedule)
    assert deep.works_out == 3
    assert (wide.works_out, wide.bytes_out) == (3, 900)


def test_the_device_is_bounded_over_all_flows() -> None:
    schedule, flows = Schedule(5, 2), [Flow(100, 10_000) for _ in range(3)]
    for flow in flows:
        schedule.add(flow, transfer(*[1] * 4))
    drain(schedule)
    assert schedule.works_out == 5
    assert [flow.works_out for flow in flows] == [2, 2, 1]


def test_a_completion_stands_for_all_before_it() -> None:
    schedule, flow = Schedule(100, 2), Flow(100, 10_000)
    first, second = transfer(1, 1, 1), transfer(1, kind=READ)
    schedule.add(flow, first)
    schedule.add(flow, second)
    chains = [chain for _, chain in drain(schedule)]
    assert [chain.kind for chain in chains] == [WRITE, WRITE, READ]
    assert schedule.complete(flow, chains[0].number) == []
    assert schedule.complete(flow, chains[2].number) == [first, second]
    assert schedule.complete(flow, chains[1].number) == []
    assert flow.idle
    assert schedule.works_out == 0


def test_what_was_not_posted_can_be_withdrawn() -> None:
    schedule, flow = Schedule(1, 1), Flow(100, 10_000)
    first, second = transfer(1), transfer(1)
    schedule.add(flow, first)
    schedule.add(flow, second)
    drain(schedule)
    assert schedule.withdraw(flow, second)
    assert not schedule.withdraw(flow, first)
    assert drain(schedule) == []


def test_a_flow_that_is_removed_gives_its_room_back() -> None:
    schedule, gone, other = Schedule(2, 2), Flow(100, 10_000), Flow(100, 10_000)
    lost = [transfer(1, 1, 1), transfer(1)]
    for one in lost:
        schedule.add(gone, one)
    waiting = transfer(1)
    drain(schedule)
    schedule.add(other, waiting)
    assert drain(schedule) == []
    assert schedule.remove(gone) == lost
    assert [flow for flow, _ in drain(schedule)] == [other]


def test_a_transfer_without_work_is_done() -> None:
    schedule, flow = Schedule(2, 2), Flow(100, 10_000)
    schedule.add(flow, transfer())
    assert flow.idle
    assert drain(schedule) == []


class ScheduleMachine(RuleBasedStateMachine):
    """Whatever happens: nothing is lost, nothing is done twice, no bound is broken."""

    DEPTH, BYTES, WORKS, CHAIN = 6, 100, 10, 3

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(self.WORKS, self.CHAIN)
        self.flows = [Flow(self.DEPTH, self.BYTES) for _ in range(3)]
        self.open: dict[Transfer, Flow] = {}

    @rule(index=st.integers(0, 2), lengths=st.lists(st.integers(1, 100), min_size=1, max_size=12))
    def add(self, index: int, lengths: list[int]) -> None:
        one = transfer(*lengths)
        self.open[one] = self.flows[index]
        self.schedule.add(self.flows[index], one)

    @rule()
    def take(self) -> None:
        self.schedule.next()

    @precondition(lambda self: any(flow.out for flow in self.flows))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        flow = data.draw(st.sampled_from([flow for flow in self.flows if flow.out]))
        number = data.draw(st.sampled_from([chain.number for chain in flow.out]))
        for done in self.schedule.complete(flow, number):
            assert self.open.pop(done) is flow

    @rule(index=st.integers(0, 2))
    def remove(self, index: int) -> None:
        flow = self.flows[index]
        lost = self.schedule.remove(flow)
        assert sorted(map(id, lost)) == sorted(
            id(one) for one, its in self.open.items() if its is flow
        )
        for one in lost:
            del self.open[one]
        self.flows[index] = Flow(self.DEPTH, self.BYTES)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(list(self.open)))
        if self.schedule.withdraw(self.open[one], one):
            del self.open[one]

    @invariant()
    def bounds_hold(self) -> None:
        for flow in self.flows:
            assert flow.works_out == sum(len(chain.works) for chain in flow.out) <= self.DEPTH
            assert flow.bytes_out == sum(chain.length for chain in flow.out) <= self.BYTES
        assert self.schedule.works_out == sum(flow.works_out for flow in self.flows) <= self.WORKS

    def teardown(self) -> None:
        for _ in range(1000):
            for flow, chain in drain(self.schedule):
                for done in self.schedule.complete(flow, chain.number):
                    del self.open[done]
            for flow in self.flows:
                if flow.out:
                    for done in self.schedule.complete(flow, flow.out[-1].number):
                        del self.open[done]
            if not self.open:
                return
        raise AssertionError("work is stuck")


TestSchedule = ScheduleMachine.TestCase
