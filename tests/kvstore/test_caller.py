import math
import os
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvstore.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    ProtocolError,
    Unavailable,
)
from kvstore.protocol.caller import Call, Caller
from kvstore.protocol.frames import FrameDecoder, HeaderReceived, encode
from kvstore.protocol.messages import (
    Abort,
    AbortAnswer,
    Answer,
    Exists,
    ExistsAnswer,
    Get,
    GetAnswer,
    Incoming,
    Match,
    MatchAnswer,
    Ping,
    PingAnswer,
    Release,
    Reserve,
    ReserveAnswer,
    Segments,
    SegmentsAnswer,
    answer_header,
    error_header,
    parse_request,
)

H = [bytes([n]) * 32 for n in range(4)]
SIZE = 100


def feed(caller: Caller, data: bytes) -> list[Call[Answer]]:
    done = []
    while data:
        buffer = caller.get_buffer()
        if not len(buffer):
            break
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        data = data[size:]
        done += caller.buffer_updated(size)
    return done


def reply(call: Call[Answer], answer: Answer, payload: bytes = b"") -> bytes:
    return encode(answer_header(call.request_id, answer), len(payload)) + payload


def asked(frame: bytes) -> Incoming:
    decoder = FrameDecoder()
    decoder.get_buffer()[: len(frame)] = frame
    (event,) = decoder.buffer_updated(len(frame))
    assert isinstance(event, HeaderReceived)
    return parse_request(event.header)


def get(
    caller: Caller, buffers: Sequence[bytearray], deadline: float = 10.0, now: float = 0.0
) -> Call[GetAnswer]:
    """Begin a GET of ``len(buffers)`` blocks whose payload lands in the buffers of those found."""

    def sink(answer: GetAnswer) -> list[memoryview]:
        return [
            memoryview(buffer) for buffer, tier in zip(buffers, answer.tiers, strict=True) if tier
        ]

    return caller.begin(Get(H[: len(buffers)]), deadline, now, sink)[0]


def test_a_call_is_answered() -> None:
    caller = Caller()
    call, frame = caller.begin(Match(H), deadline=1.0, now=0.5)
    incoming = asked(frame)
    assert incoming.request == Match(tuple(H))
    assert 480 <= incoming.deadline_ms < 500
    assert feed(caller, reply(call, MatchAnswer(b"\x02"))) == [call]
    assert call.result() == MatchAnswer(b"\x02")
    assert caller.pending == 0
    assert caller.counters.calls == caller.counters.answers == 1


def test_answers_come_in_any_order() -> None:
    caller = Caller()
    first, _ = caller.begin(Ping(), 1.0, 0.0)
    second, _ = caller.begin(Exists(H[:1]), 1.0, 0.0)
    data = reply(second, ExistsAnswer(b"\x03")) + reply(first, PingAnswer())
    assert feed(caller, data) == [second, first]


def test_a_result_before_the_answer_is_a_mistake() -> None:
    call, _ = Caller().begin(Ping(), 1.0, 0.0)
    with pytest.raises(ValueError, match="no answer yet"):
        call.result()


def test_an_error_fails_its_call_alone() -> None:
    caller = Caller()
    first, _ = caller.begin(Ping(), 1.0, 0.0)
    second, _ = caller.begin(Ping(), 1.0, 0.0)
    feed(caller, encode(error_header(first.request_id, AccessDenied("no"))))
    with pytest.raises(AccessDenied):
        first.result()
    assert feed(caller, reply(second, PingAnswer())) == [second]
    assert caller.counters.errors == 1


def test_a_protocol_error_of_one_request_does_not_break_the_connection() -> None:
    caller = Caller()
    call, _ = caller.begin(Ping(), 1.0, 0.0)
    feed(caller, encode(error_header(call.request_id, ProtocolError("twice"))))
    assert isinstance(call.error, ProtocolError)
    assert caller.broken is None


def test_a_malformed_request_is_not_in_flight() -> None:
    caller = Caller()
    with pytest.raises(InvalidRequest):
        caller.begin(Match([b"short"]), 1.0, 0.0)
    assert caller.pending == 0


def test_a_deadline_that_has_passed_sends_nothing() -> None:
    caller = Caller()
    with pytest.raises(DeadlineExceeded):
        caller.begin(Ping(), 1.0, 1.0)
    assert caller.pending == 0


@pytest.mark.parametrize(
    ("seconds", "low", "high"),
    [
        (0.001, 1, 1),
        (1.0, 980, 999),
        (1e9, 86_400_000, 86_400_000),
        (math.inf, 86_400_000, 86_400_000),
    ],
)
def test_the_node_is_told_to_answer_a_little_earlier(seconds: float, low: int, high: float) -> None:
    _, frame = Caller().begin(Ping(), seconds, 0.0)
    assert low <= asked(frame).deadline_ms <= high


def test_payload_lands_in_the_memory_of_its_call() -> None:
    caller = Caller()
    buffers = [bytearray(SIZE) for _ in range(3)]
    call = get(caller, buffers)
    payload = b"a" * SIZE + b"b" * SIZE
    assert feed(caller, reply(call, GetAnswer(0, b"\x02\x00\x03"), payload)) == [call]  # type: ignore[arg-type]
    assert buffers == [b"a" * SIZE, bytes(SIZE), b"b" * SIZE]
    assert call.sink is None


@pytest.mark.parametrize("length", [0, SIZE - 1, SIZE + 1, 1 << 30])
def test_payload_that_does_not_fit_breaks_the_connection(length: int) -> None:
    caller = Caller()
    buffer = bytearray(SIZE)
    call = get(caller, [buffer])
    head = encode(answer_header(call.request_id, GetAnswer(0, b"\x02")), length)
    assert feed(caller, head) == [call]
    assert isinstance(caller.broken, ProtocolError)
    with pytest.raises(Unavailable):
        call.result()
    assert buffer == bytes(SIZE)


def test_payload_that_nobody_expects_breaks_the_connection() -> None:
    caller = Caller()
    call, _ = caller.begin(Ping(), 1.0, 0.0)
    feed(caller, reply(call, PingAnswer(), b"x"))
    assert isinstance(caller.broken, ProtocolError)


@pytest.mark.parametrize("landed", [0, 1, SIZE - 1])
def test_nothing_lands_after_a_call_was_given_up(landed: int) -> None:
    caller = Caller()
    buffer = bytearray(SIZE)
    call = get(caller, [buffer])
    other, _ = caller.begin(Ping(), 10.0, 0.0)
    data = reply(call, GetAnswer(7, b"\x02"), b"x" * SIZE)  # type: ignore[arg-type]
    start = len(data) - SIZE + landed
    feed(caller, data[:start])
    assert caller.expire(10.0) == [call, other]
    assert caller.abandon(call) == []
    assert feed(caller, data[start:]) == []
    assert buffer == b"x" * landed + bytes(SIZE - landed)
    with pytest.raises(DeadlineExceeded):
        call.result()
    assert asked(b"".join(caller.take_outbox())).request == Release([7])
    assert caller.take_outbox() == []
    assert feed(caller, reply(other, PingAnswer())) == []
    assert caller.pending == 0
    assert caller.broken is None


def test_giving_up_uncovers_what_had_come_behind_the_payload() -> None:
    caller = Caller()
    call = get(caller, [bytearray(SIZE)])
    other, _ = caller.begin(Ping(), 10.0, 0.0)
    feed(caller, reply(call, GetAnswer(0, b"\x02"), b"x" * SIZE)[:-1])  # type: ignore[arg-type]
    assert caller.abandon(call) == []
    assert feed(caller, b"x" + reply(other, PingAnswer())) == [other]


def test_a_late_answer_gives_back_what_it_brought() -> None:
    caller = Caller()
    lease, _ = caller.begin(Get(H[:1]), 1.0, 0.0)
    reserve, _ = caller.begin(Reserve(H[0], H[1:2]), 1.0, 0.0)
    caller.expire(2.0)
    heard = caller.heard
    assert feed(caller, reply(lease, GetAnswer(7, b"\x02", [1]))) == []
    assert feed(caller, reply(reserve, ReserveAnswer(9, b"\x00", [1]))) == []
    assert caller.heard == heard + 2
    released, aborted = map(asked, caller.take_outbox())
    assert released.request == Release([7])
    assert aborted.request == Abort(9)
    assert caller.counters.late_answers == 2
    assert feed(caller, encode(answer_header(aborted.request_id, AbortAnswer()))) == []
    assert caller.pending == 0


def test_a_late_error_is_forgotten() -> None:
    caller = Caller()
    call, _ = caller.begin(Ping(), 1.0, 0.0)
    caller.expire(1.0)
    assert feed(caller, encode(error_header(call.request_id, AccessDenied("no")))) == []
    assert caller.pending == 0
    assert caller.counters.late_answers == 1
    assert caller.counters.errors == 0


def test_deadlines() -> None:
    caller = Caller()
    assert caller.next_deadline() is None
    first, _ = caller.begin(Ping(), 2.0, 0.0)
    caller.begin(Ping(), 3.0, 0.0)
    assert caller.next_deadline() == 2.0
    assert caller.expire(1.9) == []
    assert caller.expire(2.0) == [first]
    assert caller.next_deadline() == 3.0
    assert caller.counters.timeouts == 1


@pytest.mark.parametrize(
    "data",
    [
        encode([99, 0]),
        encode([1]),
        encode(["1", 0]),
        encode([1, 0, "too", "many"]),
        encode([1, 2, "x", "y", False]),
        encode([1, 1, "x"]),
        encode(error_header(0, Unavailable("stopping"))),
        encode([0, 0]),
        b"not a frame at all",
    ],
)
def test_what_breaks_the_connection_fails_all_calls(data: bytes) -> None:
    caller = Caller()
    calls = [caller.begin(Ping(), 1.0, 0.0)[0] for _ in range(2)]
    assert feed(caller, data) == calls
    assert caller.broken is not None
    assert not len(caller.get_buffer())
    for call in calls:
        with pytest.raises(Unavailable):
            call.result()
    with pytest.raises(Unavailable):
        caller.begin(Ping(), 1.0, 0.0)
    assert caller.counters.lost_calls == 2


def test_the_end_of_the_stream_fails_all_calls() -> None:
    caller = Caller()
    call, _ = caller.begin(Ping(), 1.0, 0.0)
    assert caller.feed_eof() == [call]
    assert isinstance(caller.broken, Unavailable)
    assert caller.lose(Unavailable("again")) == []


def test_a_lost_connection_lets_go_of_the_callers_memory() -> None:
    caller = Caller()
    buffer = bytearray(SIZE)
    call = get(caller, [buffer])
    feed(caller, reply(call, GetAnswer(0, b"\x02"), b"x" * SIZE)[:-1])  # type: ignore[arg-type]
    assert caller.lose(Unavailable("reset")) == [call]
    assert not len(caller.get_buffer())
    buffer += b"a bytearray grows only while no view of it is left"


def test_request_ids_in_flight_are_not_used_again() -> None:
    caller = Caller()
    first, _ = caller.begin(Ping(), 1.0, 0.0)
    caller._last_id = 0xFFFF_FFFF
    second, _ = caller.begin(Ping(), 1.0, 0.0)
    assert second.request_id != first.request_id
    assert second.request_id > 0


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def pipe_ends(number: int) -> list[int]:
    ends = []
    for _ in range(number):
        read, write = os.pipe()
        os.close(write)
        ends.append(read)
    return ends


def test_file_descriptors_go_with_their_segments() -> None:
    caller = Caller()
    assert not caller.expects_fds
    call, _ = caller.begin(Segments([1, 2]), 1.0, 0.0)
    assert caller.expects_fds
    fds = pipe_ends(2)
    caller.feed_fds(fds)
    assert feed(caller, reply(call, SegmentsAnswer([(1, 4096), (2, 4096)]))) == [call]
    assert call.fds == fds
    assert all(map(is_open, fds))
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_wrong_number_of_file_descriptors_breaks_the_connection(number: int) -> None:
    caller = Caller()
    call, _ = caller.begin(Segments([1, 2]), 1.0, 0.0)
    fds = pipe_ends(number)
    if fds:
        caller.feed_fds(fds)
    feed(caller, reply(call, SegmentsAnswer([(1, 4096), (2, 4096)])))
    assert isinstance(caller.broken, ProtocolError)
    assert not any(map(is_open, fds))
    assert call.fds == []


def test_file_descriptors_that_nobody_wants_are_closed() -> None:
    caller = Caller()
    unasked = pipe_ends(1)
    caller.feed_fds(unasked)
    call, _ = caller.begin(Segments([1]), 1.0, 0.0)
    caller.expire(1.0)
    late = pipe_ends(1)
    caller.feed_fds(late)
    feed(caller, reply(call, SegmentsAnswer([(1, 4096)])))
    caller.begin(Segments([2]), 3.0, 2.0)
    lost = pipe_ends(1)
    caller.feed_fds(lost)
    caller.lose(Unavailable("reset"))
    assert not any(map(is_open, [*unasked, *late, *lost]))


class CallerMachine(RuleBasedStateMachine):
    """Random calls, answers, expiries and cuts: every call ends once, no byte lands wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.caller = Caller()
        self.now = 0.0
        self.unanswered: dict[int, Call[GetAnswer]] = {}
        self.memory: dict[int, bytearray] = {}
        self.frozen: dict[int, bytes] = {}
        self.wire = bytearray()
        self.finished: list[int] = []

    @initialize()
    def start(self) -> None:
        self.begin(0.5)

    @precondition(lambda self: self.caller.broken is None)
    @rule(patience=st.floats(0.1, 2.0))
    def begin(self, patience: float) -> None:
        buffer = bytearray(SIZE)
        call = get(self.caller, [buffer], self.now + patience, self.now)
        self.unanswered[call.request_id] = call
        self.memory[call.request_id] = buffer

    @precondition(lambda self: self.unanswered)
    @rule(pick=st.integers(0), kind=st.sampled_from(["found", "miss", "error"]))
    def answer(self, pick: int, kind: str) -> None:
        ids = sorted(self.unanswered)
        call = cast("Call[Answer]", self.unanswered.pop(ids[pick % len(ids)]))
        if kind == "found":
            payload = bytes([call.request_id % 255 + 1]) * SIZE
            self.wire += reply(call, GetAnswer(0, b"\x02"), payload)
        elif kind == "miss":
            self.wire += reply(call, GetAnswer(0, b"\x00"))
        else:
            self.wire += encode(error_header(call.request_id, AccessDenied("no")))

    @rule(share=st.floats(0, 1))
    def arrive(self, share: float) -> None:
        size = math.ceil(share * len(self.wire))
        self.take(feed(self.caller, bytes(self.wire[:size])))
        del self.wire[:size]

    @rule(passed=st.floats(0, 1))
    def expire(self, passed: float) -> None:
        self.now += passed
        self.take(self.caller.expire(self.now))

    @rule(chance=st.integers(0, 9))
    def lose(self, chance: int) -> None:
        if not chance:
            self.take(self.caller.lose(Unavailable("reset")))

    def take(self, done: list[Call[Answer]]) -> None:
        for call in done:
            self.finished.append(call.request_id)
            self.frozen[call.request_id] = bytes(self.memory[call.request_id])
            self.check_outcome(call)
        assert len(set(self.finished)) == len(self.finished)
        for request_id, content in self.frozen.items():
            assert self.memory[request_id] == content, "written to after the call was done"

    def check_outcome(self, call: Call[Answer]) -> None:
        content = self.frozen[call.request_id]
        try:
            answer = call.result()
        except KVStoreError:
            return
        assert isinstance(answer, GetAnswer)
        if answer.tiers == b"\x02":
            assert content == bytes([call.request_id % 255 + 1]) * SIZE
        else:
            assert content == bytes(SIZE)

    def teardown(self) -> None:
        self.take(feed(self.caller, bytes(self.wire)))
        self.take(self.caller.lose(Unavailable("over")))
        assert sorted(self.finished) == sorted(self.memory)


TestCaller = CallerMachine.TestCase
