"""The HBM tier under copies that end late, in any order, as a state machine against a model."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.tiers.cpu_device import CpuDevice
from tests.tiers.tier_contract import payload, record
from tiers import HbmTier
from tiers.device import Event

KIB = 1 << 10
SEGMENT = 32 * KIB
SEGMENTS = 3
SIZES = [3000, 8 * KIB, 20 * KIB]
OWNERS = ["a", "b"]
STREAMS = 2


@dataclass
class Copy:
    """One copy of a block that is under way: where to, and what is to arrive."""

    stream: int
    there: int
    expected: bytes
    end: Event


@dataclass
class Shares:
    """How many processes of a tenant have a segment mapped, and where it lies."""

    owner: str
    address: int
    count: int = 0


class LateCopies(RuleBasedStateMachine):
    """Every copy brings what was in its block when it was queued, whatever came after.

    And no segment that a process has mapped is another tenant's, or gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = CpuDevice(100 * SEGMENT)
        self.tier = HbmTier(
            SEGMENTS * SEGMENT,
            device=self.device,
            segment_bytes=SEGMENT,
            lanes=1,
            buffer_bytes=4 * KIB,
        )
        self.tier.open()
        self.streams = [self.device.stream() for _ in range(STREAMS)]
        self.blocks: dict[int, tuple[str, bytes]] = {}
        self.copies: list[Copy] = []
        self.shares: dict[int, Shares] = {}
        self.places: set[int] = set()
        self.seed = 0

    def teardown(self) -> None:
        for stream in self.streams:
            self.device.run(stream)
        self.arrived()
        self.tier.close()
        assert set(self.device.live) == self.places

    def new_payload(self, size: int) -> bytes:
        self.seed += 1
        return payload(self.seed, size)

    def place(self, size: int) -> int:
        """Memory of the device outside the tier."""
        address = self.device.allocate(-(-size // 4096) * 4096)
        self.places.add(address)
        return address

    @rule(owner=st.sampled_from(OWNERS), size=st.sampled_from(SIZES), times=st.integers(1, 6))
    def store(self, owner: str, size: int, times: int) -> None:
        for _ in range(times):
            data = self.new_payload(size)
            extent = self.tier.store(record(self.seed, size), data, self.seed, owner=owner)
            if extent is None:
                break
            assert extent not in self.blocks
            self.blocks[extent] = owner, data

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), stream=st.integers(0, STREAMS - 1))
    def copy_out(self, data: st.DataObject, stream: int) -> None:
        extent = data.draw(st.sampled_from(sorted(self.blocks)))
        held = self.blocks[extent][1]
        there = self.place(len(held))
        end = self.tier.copy_out([(extent, there)], len(held), self.streams[stream])
        self.copies.append(Copy(self.streams[stream], there, held, end))

    @rule(
        owner=st.sampled_from(OWNERS),
        size=st.sampled_from(SIZES),
        stream=st.integers(0, STREAMS - 1),
        kept=st.booleans(),
    )
    def copy_in(self, owner: str, size: int, stream: int, kept: bool) -> None:
        extent = self.tier.reserve(owner, size, None)
        if extent is None:
            return
        data, there = self.new_payload(size), self.place(size)
        self.device.write(there, data)
        end = self.tier.copy_in([(extent, there)], size, self.streams[stream])
        if kept:
            end.wait()
            self.blocks[extent] = owner, data
        else:
            # As a put that is given up while its copy is under way.
            self.tier.free(extent)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), share=st.sampled_from([1, 2, 4]))
    def free(self, data: st.DataObject, share: int) -> None:
        some = data.draw(st.permutations(sorted(self.blocks)))[: -(-len(self.blocks) // share)]
        for extent in some:
            self.tier.free(extent)
            del self.blocks[extent]

    @rule(stream=st.integers(0, STREAMS - 1), steps=st.integers(1, 5))
    def go_on(self, stream: int, steps: int) -> None:
        for _ in range(steps):
            self.device.step(self.streams[stream])

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(sorted(self.blocks)))
        number, owner = self.tier.locate(extent)[0], self.blocks[extent][0]
        handle = self.tier.share(number, owner)
        shares = self.shares.setdefault(number, Shares(owner, int.from_bytes(handle, "little")))
        shares.count += 1

    @precondition(lambda self: self.shares)
    @rule(data=st.data())
    def unshare(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.shares)))
        self.tier.unshare(number)
        self.shares[number].count -= 1
        if not self.shares[number].count:
            del self.shares[number]

    @invariant()
    def arrived(self) -> None:
        for copy in [copy for copy in self.copies if copy.end.done()]:
            assert self.device.read(copy.there, len(copy.expected)) == copy.expected
            self.copies.remove(copy)

    @invariant()
    def blocks_hold_their_bytes(self) -> None:
        for extent, (owner, data) in self.blocks.items():
            number, offset = self.tier.locate(extent)
            segment = self.tier.segment(number)
            assert segment.owner == owner
            assert self.device.read(segment.address + offset, len(data)) == data

    @invariant()
    def what_is_mapped_is_there_and_nobody_elses(self) -> None:
        theirs = {segment.address: segment.owner for segment in self.tier.segments()}
        for shares in self.shares.values():
            assert shares.address in self.device.live
            assert theirs.get(shares.address, shares.owner) == shares.owner

    @invariant()
    def counts(self) -> None:
        found = self.tier.statistics()
        assert found.blocks == len(self.blocks)
        assert found.used == self.tier.used == sum(len(data) for _, data in self.blocks.values())
        assert found.used + found.free + found.lost == found.capacity == SEGMENTS * SEGMENT
        held = sum(self.device.live.values()) - sum(self.device.live[p] for p in self.places)
        assert held == SEGMENTS * SEGMENT


TestLateCopies = LateCopies.TestCase
