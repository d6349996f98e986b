"""What vLLM calls. It translates between vLLM's types and the two halves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...engines import Counters, Link, Settings
from .identity import ALSO, Options, check, identify
from .plan import Progress, Shape, Step
from .scheduler import SchedulerHalf
from .stats import KvstrataMetrics, KvstrataStats, Telling
from .worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["KvstrataConnector"]

_SOURCES = {"dram": CacheHitSource.HOST, "nvme": CacheHitSource.DISK}


@dataclass
class KvstrataStep(KVConnectorMetadata):
    """What the scheduler's half tells the workers."""

    step: Step = field(default_factory=Step)


@dataclass
class KvstrataShape(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler's half at the start."""

    shape: Shape


@dataclass
class KvstrataProgress(KVConnectorWorkerMetadata):
    """What a worker tells the scheduler's half after a step."""

    progress: Progress

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of both workers."""
        assert isinstance(other, KvstrataProgress)
        return KvstrataProgress(self.progress.merge(other.progress))


class KvstrataConnector(KVConnectorBase_V1, SupportsHMA):
    """See the package."""

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises `kvstrata.InvalidError` if a setting or the model cannot be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        settings, also = Settings.parse(transfer.kv_connector_extra_config, ALSO)
        options = Options.parse(also)
        block_tokens = check(vllm_config, kv_cache_config)
        self._counters = Counters()
        self._telling = Telling(self._counters)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
        link = Link(settings, self._counters, f"vllm {role.name.lower()}")
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                link,
                self._counters,
                identify(vllm_config, block_tokens, options),
                block_tokens=block_tokens,
                copies=kv_cache_config.kv_tp_replicas,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                # Drafted tokens that are refused may lie in a block until they are overwritten.
                prompt_only=vllm_config.speculative_config is not None,
            )
        else:
            rank = vllm_config.parallel_config.rank
            self._worker = WorkerHalf(
                link,
                self._counters,
                rank,
                options.staging_bytes,
                windows=len(kv_cache_config.kv_cache_groups) > 1,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """It is a cache: a save that is lost is a miss later."""
        return False

    # In the scheduler.

    @property
    def _plans(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The shapes of all workers, by (pipeline rank, tensor rank)."""
        shapes = {}
        for (pipeline, tensor), given in metadata.items():
            assert isinstance(given, KvstrataShape)
            shapes[pipeline * self._tensor_parallel + tensor] = given.shape
        self._plans.shapes(shapes)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """The shapes of all workers, by tensor rank."""
        self.set_xfer_handshake_metadata_pp_aware({(0, at): each for at, each in metadata.items()})

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `SchedulerHalf.matched`."""
        return self._plans.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerHalf.allocated`."""
        self._plans.allocated(request, lambda: blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Of the tokens that are loaded, how many come from where."""
        tiers = self._plans.sources(request, num_external_tokens)
        return {_SOURCES[tier]: tokens for tier, tokens in tiers.items()}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `SchedulerHalf.build`."""
        return KvstrataStep(self._plans.build(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """See `SchedulerHalf.update`."""
        told = connector_output.kv_connector_worker_meta
        progress = told.progress if isinstance(told, KvstrataProgress) else None
        self._plans.update(connector_output.finished_recving or (), progress)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerHalf.finished`."""
        return self._plans.finished(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerHalf.finished`."""
        return self._plans.finished(request), None

    def has_pending_push_work(self) -> bool:
        """See `SchedulerHalf.is_saving`."""
        return self._plans.is_saving()

    def reset_cache(self) -> bool | None:
        """See `SchedulerHalf.reset`."""
        self._plans.reset()
        return True

    # In a worker.

    @property
    def _moves(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    @property
    def _step(self) -> Step:
        given = self._get_connector_metadata()
        assert isinstance(given, KvstrataStep)
        return given.step

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See `WorkerHalf.register`."""
        config = self._kv_cache_config
        groups = [group.layer_names for group in config.kv_cache_groups]
        self._moves.register(kv_caches, groups, config.num_blocks)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler's half has to know of the tensors."""
        shape = self._moves.shape()
        return None if shape is None else KvstrataShape(shape)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See `WorkerHalf.preempt`."""
        assert isinstance(kv_connector_metadata, KvstrataStep)
        self._moves.preempt(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `WorkerHalf.load`."""
        self._moves.load(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded into what is being computed."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        """See `WorkerHalf.save`."""
        self._moves.save(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See `WorkerHalf.results`."""
        sent, received, failed = self._moves.results(self._step)
        return KVConnectorTransferResults(sent, received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `WorkerHalf.errors`."""
        return self._moves.errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See `WorkerHalf.progress`."""
        return KvstrataProgress(self._moves.progress())

    # In both.

    def shutdown(self) -> None:
        """Ends the connection; a worker waits for what it stores, for a bounded time."""
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.close()

    def get_kv_connector_stats(self) -> KvstrataStats | None:
        """What was counted since the last time."""
        stats = self._telling.take()
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvstrataStats:
        """Stats that came from another process."""
        return KvstrataStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvstrataMetrics:
        """The metrics that vLLM exports."""
        return KvstrataMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
