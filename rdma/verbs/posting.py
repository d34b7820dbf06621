"""Handing work requests to a queue pair, in either of the two ways that verbs have."""

from __future__ import annotations

from typing import Any, Final, Protocol

from rdma.verbs.binding import Binding
from rdma.verbs.schedule import READ, WRITE, Chain

__all__ = ["ChainPoster", "ExtendedPoster", "Poster"]

_SIGNALED: Final = 2
_OPCODES: Final = {WRITE: 0, READ: 4}
"""Of ``enum ibv_send_flags`` and ``enum ibv_wr_opcode`` of <infiniband/verbs.h>: ABI."""


class Poster(Protocol):
    """Posts chains on one queue pair."""

    def post(self, chain: Chain) -> None:
        """Post all of ``chain``, the last work request signalled, all numbered with its number.

        Raises:
            Exception: pyverbs' error; how much was posted isn't known then.
        """


class ExtendedPoster:
    """Posts with ``ibv_wr_*``: no object is made for a work request, and all or none is posted.

    Args:
        binding: pyverbs.
        queue: an extended queue pair.
    """

    def __init__(self, binding: Binding, queue: Any) -> None:
        self._queue = queue
        self._make = binding.wr.SGE
        self._pieces = [binding.wr.SGE(0, 0, 0)]

    def post(self, chain: Chain) -> None:
        """Post all of ``chain``; see :meth:`Poster.post`."""
        queue, works = self._queue, chain.works
        begin = queue.wr_rdma_write if chain.kind == WRITE else queue.wr_rdma_read
        single = self._pieces[0]
        queue.wr_start()
        queue.wr_id = chain.number
        queue.wr_flags = 0
        last = len(works) - 1
        for index, work in enumerate(works):
            if index == last:
                queue.wr_flags = _SIGNALED
            (queue.wr_rdma_read if work.proves else begin)(work.key, work.remote)
            if len(work.pieces) == 1:
                single.addr, single.length, single.lkey = work.pieces[0]
                queue.wr_set_sge(single)
            else:
                self._set_pieces(chain, index)
        queue.wr_complete()

    def _set_pieces(self, chain: Chain, index: int) -> None:
        pieces, own = chain.works[index].pieces, self._pieces
        while len(own) < len(pieces):
            own.append(self._make(0, 0, 0))
        for element, piece in zip(own, pieces, strict=False):
            element.addr, element.length, element.lkey = piece
        self._queue.wr_set_sge_list(len(pieces), own)


class ChainPoster:
    """Posts with ``ibv_post_send``, for devices that lack the extended way.

    Args:
        binding: pyverbs.
        queue: a queue pair.
    """

    def __init__(self, binding: Binding, queue: Any) -> None:
        self._queue = queue
        self._element = binding.wr.SGE
        self._request = binding.wr.SendWR

    def post(self, chain: Chain) -> None:
        """Post all of ``chain``; see :meth:`Poster.post`."""
        requests: list[Any] = []
        try:
            following = None
            for work in reversed(chain.works):
                flags = 0 if requests else _SIGNALED
                kind = READ if work.proves else chain.kind
                following = self._make(chain.number, kind, work.pieces, flags, following)
                following.set_wr_rdma(work.key, work.remote)
                requests.append(following)
            self._queue.post_send(following)
        finally:
            # pyverbs frees the C side of these on close only, and the device has copied it.
            for request in requests:
                request.close()

    def _make(self, number: int, kind: str, pieces: Any, flags: int, following: Any) -> Any:
        elements = [self._element(address, length, key) for address, length, key in pieces]
        try:
            return self._request(
                wr_id=number,
                opcode=_OPCODES[kind],
                num_sge=len(elements),
                sg=elements,
                send_flags=flags,
                next_wr=following,
            )
        finally:
            for element in elements:
                element.close()
