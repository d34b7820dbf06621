"""What vLLM's native offloading lacks on the CPU: a worker that copies there.

Its specifications, managers and file-system tier are vLLM's own. Only the worker, which vLLM has
for GPUs alone, is replaced by this one. Imported by engines only.
"""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

_move = ctypes.CDLL(None).memmove
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies pages between the engine's tensors and the offloaded ones, on one thread.

    One ``memmove`` for each page, from a list of addresses, as vLLM's worker gives its GPU; the
    interpreter is free meanwhile.
    """

    def __init__(
        self, engine: list[torch.Tensor], offloaded: list[torch.Tensor], region: Any = None
    ) -> None:
        self._engine = engine
        self._offloaded = offloaded
        self._region = region
        self._thread = ThreadPoolExecutor(1)
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy from the engine."""
        return self._submit(job_id, self._engine, src_spec, self._offloaded, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy to the engine."""
        return self._submit(job_id, self._offloaded, src_spec, self._engine, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """Results that have not been told yet."""
        done = [number for number, job in self._jobs.items() if job.done()]
        return [self._jobs.pop(number).result() for number in done]

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs are done."""
        for number in job_ids & self._jobs.keys():
            self._jobs[number].result()

    def shutdown(self) -> None:
        """End the thread and give the memory back."""
        self._thread.shutdown()
        if self._region is not None:
            self._offloaded.clear()
            self._region.cleanup()

    def _submit(
        self, number: int, source: list[Any], origin: Any, target: list[Any], goal: Any
    ) -> bool:
        pairs = list(zip(origin.block_ids.tolist(), goal.block_ids.tolist(), strict=True))
        self._jobs[number] = self._thread.submit(_copy, number, source, target, pairs)
        return True


def _copy(
    number: int, source: list[torch.Tensor], target: list[torch.Tensor], pairs: list[Any]
) -> TransferResult:
    began = time.monotonic()
    copied = 0
    for read, write in zip(source, target, strict=True):
        page, read_at, write_at = read.shape[1], read.data_ptr(), write.data_ptr()
        for origin, goal in pairs:
            _move(write_at + goal * write.stride(0), read_at + origin * read.stride(0), page)
        copied += page * len(pairs)
    return TransferResult(number, True, copied, time.monotonic() - began)


def _pages(kv_caches: Any) -> list[torch.Tensor]:
    """The engine's tensors as ``(blocks, bytes of a page)``."""
    return [
        each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in kv_caches.tensors
    ]


class CopyingCPUOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU offloading with a worker that copies on the CPU."""

    _worker: CopyingWorker | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker, made at the first call."""
        if self._worker is None:
            engine = _pages(kv_caches)
            offloaded = [
                torch.zeros((self.num_chunks, each.shape[1]), dtype=torch.int8) for each in engine
            ]
            self._worker = CopyingWorker(engine, offloaded)
        return self._worker


class CopyingTieringOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiered offloading with a worker that copies on the CPU."""

    _worker: CopyingWorker | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker, made at the first call."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            engine = _pages(kv_caches)
            offloaded = [region.create_next_worker_view(each.shape[1]) for each in engine]
            self._worker = CopyingWorker(engine, offloaded, region)
        return self._worker
