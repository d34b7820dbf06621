"""The blocking client."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Literal, TypeVar, overload

from client import following, forks, operations, putting
from client.buffers import Buffers, PutBlocks
from client.endpoint import Settings
from client.gpu_views import view_on_gpus
from client.lane import Lane
from client.layout import Layout
from client.operations import Operation, Seen, Terms
from client.prefix import Prefixes
from client.registration import Registered, register
from client.results import FAILED, Changes, ClientStats, GetResult, Match, PutResult
from client.tally import NO_SESSION, Tally
from client.views import BlockViews, DeviceViews, Views
from client.wire import Wire
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, Unavailable
from kvstore.identity import ROOT_PARENT, Namespace, check_hash
from rdma.gpu_segments import GpuView

logger = logging.getLogger("kvstore.client")

S = TypeVar("S")
T = TypeVar("T")
V = TypeVar("V", bound="memoryview | GpuView")

MAX_LANES: Final = 4
"""Sessions that one client opens at most: more than one only where threads call at once."""


class Client:
    """Stores and fetches blocks of one namespace; thread-safe.

    Every call returns within its deadline, whatever the node does. A node that is gone, slow or
    full gives misses, whose ``failure`` says why; sessions are opened again as calls need them.
    Only mistakes of the caller raise: ``InvalidRequest`` and its subclasses.

    Threads that call at once get sessions of their own, up to four; more wait for each other. No
    thread runs between calls, except one that fills page tables for a while after memory was
    mapped, which ``close`` ends. In the child of a fork a client opens sessions of its own; views
    that the parent had open are not ``valid`` there.

    Args:
        settings: where the node is and what is asked of it.
        deadline: seconds that a call may take where it doesn't say.

    Attributes:
        namespace: of the blocks.
        deadline: as above.
    """

    def __init__(self, settings: Settings, deadline: float) -> None:
        self.namespace: Namespace = settings.namespace
        self.deadline = deadline
        self._settings = settings
        self._tally = Tally()
        self._lanes: list[Lane] = []
        self._idle: deque[Lane] = deque()
        self._changed = threading.Condition()
        self._waiting = 0
        self._closed = False
        self._session = NO_SESSION
        forks.watch(self)

    # --- blocks --------------------------------------------------------------------------------

    def match(
        self,
        hashes: Sequence[bytes],
        *,
        prefetch: bool = False,
        deadline: float | None = None,
    ) -> Match:
        """Say how far a prefix reaches, over all shards.

        Args:
            hashes: a chain, each block the parent of the next.
            prefetch: whether the node shall begin to bring up what lies in a slower tier.
            deadline: seconds.

        Raises:
            InvalidRequest: a hash is not 32 bytes.
        """
        try:
            return self._run(lambda terms: operations.match(terms, hashes, prefetch), deadline)
        except KVStoreError as error:
            operations.check_hashes(hashes)
            return Match(b"", self._failed(error))

    def exists(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> GetResult:
        """Say which blocks this shard holds, each by itself.

        Args:
            hashes: the blocks.
            deadline: seconds.

        Raises:
            InvalidRequest: a hash is not 32 bytes.
        """
        operations.check_hashes(hashes)
        try:
            return self._run(lambda terms: operations.exists(terms, hashes), deadline)
        except KVStoreError as error:
            return GetResult(bytes(len(hashes)), self._failed(error))

    def get(
        self,
        hashes: Sequence[bytes],
        into: Buffers,
        *,
        offset: int = 0,
        length: int | None = None,
        wait: bool = False,
        deadline: float | None = None,
    ) -> GetResult:
        """Copy blocks, or the same byte range of each, into buffers.

        Args:
            hashes: the blocks, each by itself.
            into: one writable buffer for each: bytes-like, numpy or a torch tensor on the CPU.
                Buffers of blocks that were missed hold anything afterwards.
            offset: first byte wanted of each block.
            length: bytes wanted of each block; to its end where left out.
            wait: whether to wait, within the deadline, for blocks that another session is writing.
            deadline: seconds.

        Returns:
            Which blocks were found. Nothing is written to the buffers after the return.

        Raises:
            InvalidRequest: a buffer is too small, read-only or no buffer, their number is not that
                of the hashes, a hash is not 32 bytes, or the range lies outside a block.
        """
        operations.check_hashes(hashes)
        wanted = operations.byte_range(self.namespace, offset, length)
        buffers = operations.destinations(into, len(hashes), wanted)
        try:
            result = self._run(
                lambda terms: operations.get(terms, hashes, buffers, offset, wait), deadline
            )
        except KVStoreError as error:
            result = GetResult(bytes(len(hashes)), self._failed(error))
        self._tally.got(len(hashes), result.found, wanted)
        return result

    @overload
    def view(
        self,
        hashes: Sequence[bytes],
        *,
        device: Literal[False] = False,
        deadline: float | None = None,
    ) -> BlockViews: ...
    @overload
    def view(
        self, hashes: Sequence[bytes], *, device: Literal[True], deadline: float | None = None
    ) -> DeviceViews: ...
    @overload
    def view(
        self, hashes: Sequence[bytes], *, device: bool, deadline: float | None = None
    ) -> Views[memoryview | GpuView]: ...
    def view(
        self, hashes: Sequence[bytes], *, device: bool = False, deadline: float | None = None
    ) -> Views[memoryview | GpuView]:
        """Show blocks without copying them: ``with client.view(hashes) as views``.

        Over ``shm`` the views lie in the node's own memory, pinned until the ``with`` block ends.
        Over another transport they lie in memory of the client.

        Args:
            hashes: the blocks, each by itself.
            device: whether blocks that lie on a GPU of the node may be shown there, by a
                ``GpuView``, where the client was made with a ``gpu`` that reaches it. The ``with``
                block must not end before the copies that were queued from them have ended.
            deadline: seconds.

        Raises:
            InvalidRequest: a hash is not 32 bytes.
        """
        views: Views[memoryview | GpuView]
        try:
            if device:
                views = self._view(DeviceViews, view_on_gpus, hashes, deadline)
            else:
                views = self._view(BlockViews, operations.view, hashes, deadline)
        except KVStoreError as error:
            operations.check_hashes(hashes)
            kind = DeviceViews if device else BlockViews
            views = kind.missed(len(hashes), self._failed(error))
        self._tally.got(len(hashes), views.found, self.namespace.block_bytes)
        return views

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: PutBlocks,
        *,
        parent: bytes = ROOT_PARENT,
        replicas: int | None = None,
        deadline: float | None = None,
    ) -> PutResult:
        """Store a chain of blocks; what is held, or being written by another, is skipped.

        Args:
            hashes: a chain, each block the parent of the next.
            blocks: the bytes of each: bytes-like, numpy or a torch tensor on the CPU; or a
                ``BlockSource``, which is asked to write those that the node wants. The deadline
                doesn't cut it short. What it raises is raised here; blocks stored by then stay.
            parent: the block before the first; left out where the first begins a prefix.
            replicas: how many nodes are to hold the chain, this one counted, each on another
                machine; the others copy it in the background, as far as there are any. As the node
                is configured where left out.
            deadline: seconds.

        Raises:
            InvalidRequest: a hash is not 32 bytes, there are not as many blocks, or ``replicas`` is
                not from 1 to 16.
            NamespaceMismatch: a block has not the size of the namespace's blocks.
            ParentAbsent: the parent is not held.
        """
        operations.check_hashes(hashes)
        check_hash(parent)
        copies = putting.copies_of(replicas)
        filling = putting.filling_of(self.namespace, hashes, blocks)
        try:
            result = self._run(
                lambda terms: putting.put(terms, hashes, filling, parent, copies), deadline
            )
        except KVStoreError as error:
            result = PutResult(bytes([FAILED]) * len(hashes), self._failed(error))
        self._tally.put(result.stored, self.namespace.block_bytes)
        filling.check()
        return result

    # --- what the node gains and loses -----------------------------------------------------------

    def follow(
        self, after: int, *, limit: int = following.LIMIT, deadline: float | None = None
    ) -> Changes:
        """Say which blocks this shard of the node gained and lost since a position.

        Call it with 0 to begin, then with the ``sequence`` of the last answer, again at once while
        an answer brings changes. The node records from the first such call on, until the sessions
        in which it was made have ended, and remembers the last 65,536 changes. Where a follower
        has missed some, because it was away for longer or the node was started anew, the answer is
        not ``complete``: then ask the node with ``exists`` for whatever was believed of it. To
        begin is such a case, too.

        Args:
            after: the position.
            limit: how many changes the answer may bring, up to 65,536.
            deadline: seconds.

        Raises:
            InvalidRequest: ``after`` is no position, or ``limit`` is out of range.
        """
        following.check(after, limit)
        try:
            return self._run(lambda terms: following.follow(terms, after, limit), deadline)
        except KVStoreError as error:
            return Changes(after, True, failure=self._failed(error))

    # --- memory ----------------------------------------------------------------------------------

    def register(self, buffer: object) -> Registered:
        """Register memory once for all calls to come: ``with client.register(pool)``, or close it.

        For an engine's pool of KV memory: over ``rdma`` a call registers what it is given for its
        own time otherwise, which costs more than moving it where blocks are small. Calls may use
        any part of the buffer, from any client of this process. Over ``shm`` and ``tcp`` this does
        nothing.

        Args:
            buffer: bytes-like, numpy or a torch tensor on the CPU; kept alive until it is closed.

        Raises:
            InvalidRequest: it is no buffer.
            ConfigError: it can't be registered; the message says what mends it.
        """
        return register(self._settings, self._session.transport, buffer)

    # --- prefixes ------------------------------------------------------------------------------

    def prefixes(self, layout: Layout) -> Prefixes:
        """The prefix level: token ids and KV tensors instead of hashes and bytes.

        Args:
            layout: how tensors become block bytes.

        Raises:
            NamespaceMismatch: the namespace is of another layout.
        """
        return Prefixes(self, layout)

    # --- the client ----------------------------------------------------------------------------

    def stats(self) -> ClientStats:
        """What the client has done so far, and how it is connected."""
        lanes = list(self._lanes)
        return self._tally.stats(
            self._settings.endpoint.url,
            [lane.counters for lane in lanes],
            connected=any(lane.state == "connected" for lane in lanes),
            session=self._session,
        )

    def open(self) -> None:
        """Open the first session now.

        Raises:
            KVStoreError: why that can't be done.
        """
        end = time.monotonic() + self.deadline
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = self._wait_for_lane(end)
        try:
            lane.ready(end)
            self._session = lane.session
        finally:
            self._check_in(lane)

    def close(self) -> None:
        """End all sessions and give back all memory; calls under way return misses."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while len(self._idle) < len(self._lanes):
                for lane in self._lanes:
                    if lane not in self._idle and (wire := lane.wire) is not None:
                        wire.interrupt()
                self._changed.wait(0.01)
            for lane in self._lanes:
                lane.close()
            self._lanes.clear()
            self._idle.clear()

    def begin_anew(self) -> None:
        """Leave all sessions to the parent, in the child of a fork. Called by ``client.forks``."""
        for lane in self._lanes:
            if lane.wire is not None:
                lane.wire.disown()
        self._lanes = []
        self._idle = deque()
        self._changed = threading.Condition()
        self._waiting = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- inside --------------------------------------------------------------------------------

    def _run(self, begin: Callable[[Terms], Operation[T]], deadline: float | None) -> T:
        end = time.monotonic() + (self.deadline if deadline is None else deadline)
        self._tally.calls += 1
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = self._wait_for_lane(end)
        try:
            return lane.run(begin, end)
        finally:
            if lane.wire is not None:
                self._session = lane.session
            self._check_in(lane)

    def _view(
        self,
        kind: Callable[[Seen[V], Wire | None, Callable[[list[int]], object]], S],
        how: Callable[[Terms, Sequence[bytes]], Operation[Seen[V]]],
        hashes: Sequence[bytes],
        deadline: float | None,
    ) -> S:
        end = time.monotonic() + (self.deadline if deadline is None else deadline)
        self._tally.calls += 1
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = self._wait_for_lane(end)
        try:
            seen = lane.run(lambda terms: how(terms, hashes), end)
            wire = lane.wire
            return kind(seen, wire, lambda leases: self._unpin(lane, wire, leases))
        finally:
            if lane.wire is not None:
                self._session = lane.session
            self._check_in(lane)

    def _unpin(self, lane: Lane, wire: Wire | None, leases: list[int]) -> None:
        """Give leases back now, or leave that to whoever uses the lane."""
        if wire is None or wire.closed:
            return
        try:
            self._idle.remove(lane)
        except ValueError:
            lane.releases.append((wire, leases))
            try:
                self._idle.remove(lane)
            except ValueError:
                return
        else:
            wire.release(leases, time.monotonic() + self.deadline)
        self._check_in(lane)

    def _wait_for_lane(self, end: float) -> Lane:
        with self._changed:
            self._waiting += 1
            try:
                while True:
                    if self._closed:
                        raise Unavailable("the client is closed")
                    if self._idle:
                        return self._idle.pop()
                    if len(self._lanes) < MAX_LANES:
                        lane = Lane(self._settings)
                        self._lanes.append(lane)
                        return lane
                    if not self._changed.wait(end - time.monotonic()):
                        raise DeadlineExceeded("all sessions were in use until the deadline")
            finally:
                self._waiting -= 1

    def _check_in(self, lane: Lane) -> None:
        """Make a lane free again, with all that others asked of it meanwhile done."""
        while True:
            if lane.releases:
                lane.flush(time.monotonic() + self.deadline)
            self._idle.append(lane)
            if not lane.releases:
                break
            try:
                self._idle.remove(lane)
            except ValueError:
                break
        if self._waiting or self._closed:
            with self._changed:
                self._changed.notify()

    def _failed(self, error: KVStoreError) -> str:
        """The code of an error that is a miss.

        Raises:
            InvalidRequest: it is the caller's mistake.
        """
        if isinstance(error, InvalidRequest):
            raise error
        self._tally.failed(error)
        return error.code
