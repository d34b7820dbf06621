"""The class that vLLM loads, and the boundary behind which nothing of ours can fail the engine.

vLLM makes one in the scheduler's process and one in each worker. The worker's learns from its KV
tensors what the blocks are and says so to the scheduler's by vLLM's own handshake, so that both
speak of the same namespace.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from client.paged import PagedMemory
from client.vllm.counts import Counts
from client.vllm.jobs import LoadJob, SaveJob
from client.vllm.logs import join_log
from client.vllm.namespace import make_namespace
from client.vllm.progress import Finished
from client.vllm.publishing import locality_of
from client.vllm.replicas import replicas
from client.vllm.routers import Routers
from client.vllm.scheduler import SchedulerSide
from client.vllm.sessions import client_of, link_of, node_of, shard_clients
from client.vllm.settings import Settings, misspelled
from client.vllm.statistics import KVStorePromMetrics, KVStoreStats
from client.vllm.support import check_backends, check_company, check_supported
from client.vllm.worker import WorkerSide, in_order
from kvstore.identity import Namespace

logger = logging.getLogger("kvstore.client.vllm")

Method = TypeVar("Method", bound=Callable[..., Any])

SOURCES = {
    "hbm": CacheHitSource.DEVICE,
    "dram": CacheHitSource.HOST,
    "ssd": CacheHitSource.DISK,
    "remote": CacheHitSource.P2P,
}
"""What vLLM's metrics call our tiers."""


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler's side at the start.

    Attributes:
        namespace: the fields of the namespace of its blocks.
    """

    namespace: dict[str, str | int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler's side tells the workers in each step.

    Attributes:
        loads: in the order of admission.
        saves: after the step's forward.
        cancelled: requests that wait for blocks no longer.
        idle: whether the step computes nothing.
        pause: whether it is to take a moment nevertheless, as a node is to answer meanwhile.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    idle: bool = False
    pause: bool = False


@dataclass
class SaveReport(KVConnectorWorkerMetadata):
    """What workers tell the scheduler's side of saves that are over.

    Attributes:
        workers: how many workers were done with each save.
        held: how many leading blocks of each the store holds, in the worst case.
        orphaned: requests of which the store has lost blocks before those to be saved.
    """

    workers: dict[int, int]
    held: dict[int, int]
    orphaned: set[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SaveReport:
        """Add what another worker tells."""
        assert isinstance(other, SaveReport)
        for number, workers in other.workers.items():
            self.workers[number] = self.workers.get(number, 0) + workers
            held = other.held[number]
            self.held[number] = min(self.held.get(number, held), held)
        self.orphaned |= other.orphaned
        return self


def guarded(fallback: Callable[[], object]) -> Callable[[Method], Method]:
    """The boundary: whatever goes wrong in a call is logged and counted, and the engine goes on.

    Args:
        fallback: makes what the call returns then.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: KVStoreConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception("%s failed; the engine goes on without it", method.__name__)
                self.counts.add(guarded_errors=1)
                return fallback()

        return cast("Method", call)

    return decorate


def _nothing() -> None:
    """What most calls fall back to."""


class KVStoreConnector(KVConnectorBase_V1):
    """Loads KV blocks from the store before they would be computed, and saves what was computed.

    All loads and saves are asynchronous. What can't be loaded is computed.

    Raises:
        ConfigError: an option is wrong, or the engine's configuration is not supported.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_log("vllm")
        transfer = vllm_config.kv_transfer_config
        self.settings = Settings.read(
            transfer.kv_connector_extra_config or {},
            os.environ,
            only_saves=not transfer.is_kv_consumer,
        )
        self.counts = Counts()
        self._config = vllm_config
        self._scheduler: SchedulerSide | None = None
        self._routers: Routers | None = None
        self._worker: WorkerSide | None = None
        self._handshake: Handshake | None = None
        self._failed_blocks: set[int] = set()
        check_supported(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            # vLLM reads this right after making the connector. Its default ends a request whose
            # load failed; a store must not be able to do that.
            transfer.kv_load_failure_policy = "recompute"
            for sentence in misspelled(os.environ):
                logger.warning("%s", sentence)

    # --- the workers' side -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Find out what the blocks are, and connect.

        Raises:
            ConfigError: the KV tensors are of a kind that can't be laid out, or the connector is
                one of several that can't be together.
        """
        check_backends(self._config)
        self._check_company()
        config = self._kv_cache_config
        block_tokens = config.kv_cache_groups[0].kv_cache_spec.block_size
        memory = PagedMemory.of(in_order(kv_caches), config.num_blocks, block_tokens)
        alike = replicas(self._config, config)
        namespace = make_namespace(
            self._config,
            memory.layout,
            tp_size=self._config.parallel_config.tensor_parallel_size // alike,
            stage=get_pp_group().rank_in_group,
            stages=self._config.parallel_config.pipeline_parallel_size,
            settings=self.settings,
            float8=str(current_platform.fp8_dtype()),
            # What an attention backend writes into its blocks is its own affair, and may change.
            engine=f"vllm {vllm.__version__}",
        )
        rank = get_tensor_model_parallel_rank()
        client = client_of(self.settings, namespace, rank // alike, gpu=memory.gpu)
        self._handshake = Handshake(namespace.describe())
        saver = rank % alike == 0
        link = link_of(self.settings, client)
        self._worker = WorkerSide(
            self.settings, client, link, memory, saver=saver, counts=self.counts
        )
        self._worker.open()
        logger.info("blocks of %d bytes in %s", memory.layout.block_bytes, namespace)

    def _check_company(self) -> None:
        outer: Any = get_kv_transfer_group()
        if outer is not self:
            told = outer.get_handshake_metadata()
            other = None if isinstance(told, Handshake) else told
            check_company(outer._vllm_config.kv_transfer_config, other)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler's side has to know."""
        return self._handshake

    @guarded(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin with the step's loads; they are waited for by no one."""
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, StepMetadata):
            self._worker.load(metadata.loads)
            self._worker.cancel(metadata.cancelled)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all of its blocks are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are saved as wholes, after the forward."""

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        """Begin with the step's saves; vLLM keeps their blocks until they are over."""
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, StepMetadata):
            self._worker.save(metadata.saves)
            if metadata.idle:
                self._worker.rest(metadata.pause)

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose load is over, well or badly."""
        if self._worker is None:
            return None, None
        finished = self._worker.take_loads()
        self._failed_blocks |= finished.failed_blocks
        return None, finished.loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be loaded: vLLM computes them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The saves that are over."""
        if self._worker is None:
            return None
        finished = self._worker.take_saves()
        if not finished.saved:
            return None
        workers = dict.fromkeys(finished.saved, 1)
        return SaveReport(workers, finished.saved, finished.orphaned)

    # --- the scheduler's side --------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved is computed again."""
        return False

    @guarded(_nothing)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Connect to the namespaces of the workers."""
        told = [each for each in metadata.values() if isinstance(each, Handshake)]
        namespaces = list(dict.fromkeys(Namespace.parse(each.namespace) for each in told))
        transfer = self._kv_transfer_config
        self._routers = self._open_routers(namespaces)
        self._scheduler = SchedulerSide(
            self.settings,
            block_tokens=namespaces[0].block_tokens,
            nodes=[node_of(self.settings, namespace) for namespace in namespaces],
            workers=len(told),
            loads=transfer.is_kv_consumer and self.settings.load,
            saves=transfer.is_kv_producer,
            counts=self.counts,
            listener=self._routers,
        )
        logger.info(
            "prefixes are reused in steps of %d tokens; shorter prompts never are",
            namespaces[0].block_tokens,
        )
        if self._kv_cache_manager is not None:
            self._scheduler.bind(self._kv_cache_manager.block_pool)

    def _open_routers(self, namespaces: list[Namespace]) -> Routers | None:
        events = self._config.kv_events_config
        if events is None or not events.enable_kv_cache_events or self._kv_cache_manager is None:
            return None
        routers = Routers(
            shard_clients(self.settings, namespaces),
            pool=self._kv_cache_manager.block_pool,
            spec=self._kv_cache_config.kv_cache_groups[0].kv_cache_spec,
            block_tokens=namespaces[0].block_tokens,
            locality=locality_of(self.settings.url),
            counts=self.counts,
        )
        routers.open()
        return routers

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the engine's blocks, which saves pin."""
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    @guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        """Begin with a request."""
        if self._scheduler is not None:
            self._scheduler.begin(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens of a request the store holds beyond the engine's own."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.lookup(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note that a request was admitted."""
        if self._scheduler is None or not num_external_tokens:
            return
        ids = blocks.get_block_ids()[0]
        if not self._allocated(request, ids, num_external_tokens):
            # vLLM now waits for a load: one that fails lets it compute the blocks.
            self._scheduler.abandon(request.request_id, ids)

    @guarded(bool)
    def _allocated(self, request: Any, ids: list[int], num_external_tokens: int) -> bool:
        assert self._scheduler is not None
        self._scheduler.allocated(request.request_id, ids, num_external_tokens)
        return True

    @guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Which tiers the tokens lie in."""
        if self._scheduler is None or not num_external_tokens:
            return {}
        found = self._scheduler.sources(request.request_id, num_external_tokens)
        sources = {SOURCES[tier]: tokens for tier, tokens in found.items()}
        if rest := num_external_tokens - sum(found.values()):
            # Blocks that are waited for lie in no tier yet.
            sources[CacheHitSource.EXTERNAL_UNSPECIFIED] = rest
        return sources

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers are to do in this step."""
        if self._scheduler is None:
            return StepMetadata()
        self._plan_saves(scheduler_output.num_scheduled_tokens)
        step = self._scheduler.take_step()
        idle = not scheduler_output.num_scheduled_tokens
        return StepMetadata(step.loads, step.saves, step.cancelled, idle, step.pause)

    @guarded(_nothing)
    def _plan_saves(self, scheduled: Mapping[str, int]) -> None:
        if self._scheduler is not None and self._kv_cache_manager is not None:
            blocks_of = self._kv_cache_manager.get_block_ids
            self._scheduler.plan_saves(scheduled, lambda request: blocks_of(request)[0])

    @guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """Take note of what the workers have finished."""
        if self._scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        finished = Finished(
            loaded=set(connector_output.finished_recving or ()),
            failed_blocks=connector_output.invalid_block_ids,
        )
        workers: Mapping[int, int] = {}
        if isinstance(report, SaveReport):
            finished.saved, finished.orphaned = report.held, report.orphaned
            workers = report.workers
        self._scheduler.update(finished, workers)

    @guarded(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End with a request. Its blocks may be freed: those that a save needs are pinned."""
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must go on stepping, so that the ends of saves are heard of."""
        return self._scheduler is not None and self._scheduler.busy

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Use nothing stored so far: the model's weights may have changed."""
        if self._scheduler is not None:
            self._scheduler.begin_anew()
        if self._routers is not None:
            self._routers.clear()
        return True

    # --- both ------------------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. On GPUs vLLM asks while it builds its configuration, before it starts any process.

        Raises:
            ConfigError: an option is wrong.
        """
        Settings.read(extra_config, os.environ)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None in particular. vLLM asks before it measures how much memory there is for KV.

        Raises:
            ConfigError: an option is wrong, or the engine's configuration is not supported.
        """
        Settings.read(vllm_config.kv_transfer_config.kv_connector_extra_config or {}, os.environ)
        check_supported(vllm_config, None)
        return None

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        """What was done since the last call."""
        taken = self.counts.take()
        return KVStoreStats(data=taken) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats | None:
        """Statistics from what another process sent."""
        return KVStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStorePromMetrics:
        """Our metrics on vLLM's own page."""
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        """What the store gained and lost, for routers."""
        return () if self._routers is None else self._routers.take()

    @guarded(_nothing)
    def shutdown(self) -> None:
        """Finish the saves and end the sessions."""
        if self._routers is not None:
            self._routers.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
