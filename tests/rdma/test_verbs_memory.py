import asyncio
import errno
import resource
import time
from types import SimpleNamespace
from typing import cast

import numpy
import pytest

from rdma.errors import RegionError
from rdma.region import address_of
from rdma.transport import place_of
from rdma.verbs.adapter import Adapter, Limits
from rdma.verbs.buffers import ClientMemory
from rdma.verbs.errors import TransferTimeout
from rdma.verbs.memory import Arena, Registration, VerbsRegistrar, refusal, register_dmabuf


class FakeRegistrar:
    """Counts what is registered; keys are numbers from 1 on."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int, bool]] = []
        self.live = 0

    def register(self, address: int, length: int, writable: bool) -> Registration:
        self.registered.append((address, length, writable))
        self.live += 1
        number = len(self.registered)
        return Registration(number, 100 + number, address, None)

    def deregister(self, registration: object) -> None:
        self.live -= 1


@pytest.fixture
def registrar() -> FakeRegistrar:
    return FakeRegistrar()


@pytest.fixture
def memory(registrar: FakeRegistrar) -> ClientMemory:
    return ClientMemory(registrar)


def test_a_buffer_is_registered_for_its_call(
    registrar: FakeRegistrar, memory: ClientMemory
) -> None:
    buffer = memoryview(bytearray(100))
    named, regions = memory.name([buffer])
    assert named == [address_of(buffer), 101, 100]
    assert registrar.live == 1
    memory.give_back(regions)
    assert registrar.live == 0


def test_neighbours_in_one_object_are_registered_together(
    registrar: FakeRegistrar, memory: ClientMemory
) -> None:
    pool = numpy.zeros(4 * 64, numpy.uint8)
    flat = memoryview(pool)
    start = address_of(flat)
    buffers = [flat[i * 64 : i * 64 + 64] for i in (1, 2, 3)]
    named, regions = memory.name(buffers)
    assert registrar.registered == [(start + 64, 192, True)]
    assert named == [n for i in (1, 2, 3) for n in (start + 64 * i, 101, 64)]
    memory.give_back(regions)
    assert registrar.live == 0


def test_neighbours_by_chance_are_not(registrar: FakeRegistrar, memory: ClientMemory) -> None:
    pool = bytearray(256)
    views = [memoryview(pool)[:64], memoryview(pool)[128:192], memoryview(pool)[64:128]]
    _, regions = memory.name(views)
    assert len(registrar.registered) == 3
    memory.give_back(regions)


def test_what_may_only_be_read_is_registered_so(
    registrar: FakeRegistrar, memory: ClientMemory
) -> None:
    data = memoryview(b"x" * 128)
    _, regions = memory.name([data[:64], data[64:]])
    assert [writable for _, _, writable in registrar.registered] == [False]
    memory.give_back(regions)


def test_registered_memory_costs_nothing_more(
    registrar: FakeRegistrar, memory: ClientMemory
) -> None:
    pool = bytearray(4096)
    region = memory.register(memoryview(pool))
    for offset in (0, 64, 4000):
        named, regions = memory.name([memoryview(pool)[offset : offset + 64]])
        assert named == [region.address + offset, 101, 64]
        assert not regions
    named, regions = memory.name([memoryview(pool).toreadonly()])
    assert not regions
    assert len(registrar.registered) == 1
    memory.release(region)
    assert registrar.live == 0
    _, regions = memory.name([memoryview(pool)[:64]])
    assert len(regions) == 1
    memory.give_back(regions)


def test_read_only_registrations_do_not_serve_for_writing(
    registrar: FakeRegistrar, memory: ClientMemory
) -> None:
    pool = bytearray(4096)
    region = memory.register(memoryview(pool).toreadonly())
    _, regions = memory.name([memoryview(pool)[:64]])
    assert len(regions) == 1
    memory.give_back(regions)
    memory.release(region)


def test_registering_twice_takes_releasing_twice(
    registrar: FakeRegistrar, memory: ClientMemory
) -> None:
    pool = bytearray(4096)
    regions = [memory.register(memoryview(pool)) for _ in range(2)]
    assert len(registrar.registered) == 1
    memory.release(regions[0])
    assert memory.name([memoryview(pool)[:8]])[1] == []
    memory.release(regions[1])
    assert registrar.live == 0
    with pytest.raises(RegionError):
        memory.release(regions[1])


def test_a_refusal_leaves_nothing_registered(memory: ClientMemory) -> None:
    class Refusing(FakeRegistrar):
        def register(self, address: int, length: int, writable: bool) -> Registration:
            if length == 7:
                raise RegionError("no")
            return super().register(address, length, writable)

    registrar = Refusing()
    with pytest.raises(RegionError):
        ClientMemory(registrar).name([memoryview(bytearray(n)) for n in (5, 7)])
    assert registrar.live == 0


class Segments:
    def __init__(self) -> None:
        self.made = {number: Segment() for number in (1, 2)}

    def segment(self, number: int) -> "Segment":
        return self.made[number]


class Segment:
    def __init__(self) -> None:
        self.view = memoryview(bytearray(4096))


async def test_segments_are_registered_once(registrar: FakeRegistrar) -> None:
    segments = Segments()
    populated: list[int] = []
    arena = Arena(registrar, segments, populated.append)
    assert arena.landing.key == 1
    arena.register(2)
    first, second = (address_of(segments.made[n].view) for n in (1, 2))
    places = [place_of(2, 64), place_of(1, 0), place_of(2, 128)]
    expected = [(second + 64, 2), (first, 3), (second + 128, 2)]
    assert arena.locate(places) is None
    assert await arena.prepare(places) == expected
    assert arena.locate(places) == await arena.prepare(places) == expected
    assert populated == [1]
    assert (registrar.live, arena.registered) == (3, 8192)
    arena.forget(2)
    arena.forget(2)
    assert (registrar.live, arena.registered) == (2, 4096)
    arena.close()
    assert registrar.live == 0
    with pytest.raises(RegionError):
        await arena.prepare(places)


async def test_memory_that_is_not_there_in_time_is_a_timeout(registrar: FakeRegistrar) -> None:
    arena = Arena(registrar, Segments(), lambda _: time.sleep(0.05))
    with pytest.raises(TransferTimeout):
        await arena.prepare([place_of(1, 0)], asyncio.get_running_loop().time() + 0.01)
    assert await arena.prepare([place_of(1, 0)])
    arena.close()


class Failure(Exception):
    def __init__(self, error_code: int) -> None:
        super().__init__("Failed to register a MR")
        self.error_code = error_code


def test_a_refused_registration_says_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    text = str(refusal(Failure(errno.ENOMEM), 1 << 20))
    assert "65536" in text
    assert "LimitMEMLOCK" in text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert "memlock" not in str(refusal(Failure(errno.ENOMEM), 1 << 20)).lower()
    assert "read-only" in str(refusal(Failure(errno.EFAULT), 4096))
    assert "Failed to register" in str(refusal(Failure(errno.EIO), 4096))


class FakeRegion:
    lkey, rkey = 11, 12

    def __init__(self, *args: object, **named: object) -> None:
        self.args = (*args[1:], *named.items())
        self.closed = False

    def close(self) -> None:
        self.closed = True


def fake_adapter(region: type = FakeRegion) -> Adapter:
    """A device that registers everything up to 1 MiB."""
    made = SimpleNamespace(
        binding=SimpleNamespace(mr=SimpleNamespace(MR=region, DmaBufMR=region), Error=Failure),
        domain=object(),
        limits=Limits(16, 128, 1000, 16, 16, 1 << 20),
        choice=SimpleNamespace(device="mlx5_0"),
    )
    return cast(Adapter, made)


LOCAL, WRITE, READ, RELAXED = 1, 2, 4, 1 << 20


@pytest.mark.parametrize(
    ("shared", "writable", "access"),
    [
        (False, True, LOCAL | RELAXED),
        (True, True, LOCAL | WRITE | READ),
        (True, False, READ),
    ],
)
def test_only_the_rights_that_are_needed_are_granted(
    shared: bool, writable: bool, access: int
) -> None:
    registrar = VerbsRegistrar(fake_adapter(), shared=shared)
    registration = registrar.register(4096, 8192, writable)
    assert registration.handle.args == (8192, access, ("address", 4096))
    assert (registration.local, registration.remote, registration.base) == (11, 12, 4096)
    registrar.deregister(registration)
    assert registration.handle.closed


def test_more_than_a_device_registers_at_once_is_refused() -> None:
    with pytest.raises(RegionError, match="max_mr_size 1048576"):
        VerbsRegistrar(fake_adapter(), shared=False).register(4096, (1 << 20) + 1, True)


def test_gpu_memory_is_registered_by_its_dmabuf() -> None:
    registration = register_dmabuf(fake_adapter(), 9, 65536, 4096)
    assert registration.handle.args == (4096, 7, ("dmabuf", 9), ("offset", 65536))
    assert registration.base == 65536


def test_gpu_memory_that_can_not_be_registered_is_a_typed_error() -> None:
    class Refusing(FakeRegion):
        def __init__(self, *args: object, **named: object) -> None:
            raise Failure(errno.EOPNOTSUPP)

    with pytest.raises(RegionError, match="this kind of memory"):
        register_dmabuf(fake_adapter(Refusing), 9, 0, 4096)
    with pytest.raises(RegionError, match="this kind of memory"):
        VerbsRegistrar(fake_adapter(Refusing), shared=True).register(4096, 4096, True)
