"""One kernel that copies blocks between paged KV tensors and buffers, in either direction.

The buffers may lie on the device, on another one that it can reach, or in host memory that is
registered with it: a unified address is all that the kernel needs. On an H200 sixteen programs fill
the bus to the host (51 GB/s), with whatever layout.

Importing this needs Triton.
"""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from client.paged_runs import Batch

_WARPS: Final = 8
_WIDTHS: Final = (2048, 64)
"""Words that one turn of a program copies. Each is another kernel to compile."""
_MOST_ITEMS: Final = (1 << 31) - 1


# Triton reads annotations too, and knows none but its own.
@triton.jit(
    do_not_specialize=["runs", "words", "items"],
    do_not_specialize_on_alignment=["buffers", "blocks", "addresses", "strides", "offsets"],
)  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    buffers,
    blocks,
    addresses,
    strides,
    offsets,
    runs,
    words,
    items,
    TO_TENSORS: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    chunks = tl.cdiv(words, WIDTH)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        chunk = item % chunks
        run = (item // chunks) % runs
        block = item // chunks // runs
        near = tl.load(addresses + run) + tl.load(blocks + block) * tl.load(strides + run)
        far = tl.load(buffers + block) + tl.load(offsets + run)
        near_at = near.to(tl.pointer_type(ELEMENT))
        far_at = far.to(tl.pointer_type(ELEMENT))
        if ALIGNED:
            near_at = tl.multiple_of(near_at, 16)
            far_at = tl.multiple_of(far_at, 16)
        at = chunk * WIDTH + tl.arange(0, WIDTH)
        inside = at < words
        if TO_TENSORS:
            tl.store(near_at + at, tl.load(far_at + at, mask=inside), mask=inside)
        else:
            tl.store(far_at + at, tl.load(near_at + at, mask=inside), mask=inside)


class Launch:
    """A batch of runs, ready to be copied on one device.

    Args:
        torch: the module.
        device: where the KV tensors lie.
        batch: the runs.
    """

    def __init__(self, torch: Any, device: Any, batch: Batch) -> None:
        def table(values: list[int]) -> Any:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._addresses = table([run.address for run in batch.runs])
        self._strides = table([run.stride for run in batch.runs])
        self._offsets = table([run.offset for run in batch.runs])
        self._runs = len(batch.runs)
        element = min(batch.word, 8)
        self._element = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[element]
        self._words = batch.length // element
        self._width = next((one for one in _WIDTHS if one <= self._words), _WIDTHS[-1])
        self._aligned = batch.word == 16 and self._width == _WIDTHS[0]

    def __call__(
        self, buffers: Any, blocks: Any, count: int, *, to_tensors: bool, programs: int
    ) -> None:
        """Queue the copies on the current stream.

        Args:
            buffers: address of the buffer of each block, int64 on the device.
            blocks: number of each block in the tensors, likewise.
            count: how many blocks.
            to_tensors: the direction.
            programs: how many programs share the work; 0 for as many as there is work for.
        """
        most = max(_MOST_ITEMS // (self._runs * triton.cdiv(self._words, self._width)), 1)
        for first in range(0, count, most):
            part = min(most, count - first)
            items = part * self._runs * triton.cdiv(self._words, self._width)
            _move[(min(programs, items) if programs else items,)](
                buffers[first:],
                blocks[first:],
                self._addresses,
                self._strides,
                self._offsets,
                self._runs,
                self._words,
                items,
                TO_TENSORS=to_tensors,
                ELEMENT=self._element,
                ALIGNED=self._aligned,
                WIDTH=self._width,
                num_warps=_WARPS,
            )
