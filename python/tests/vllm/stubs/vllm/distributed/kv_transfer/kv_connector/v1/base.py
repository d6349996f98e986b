"""What a connector is made of."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource


class KVConnectorRole(enum.Enum):
    """Where it is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """From the scheduler to the workers."""


class KVConnectorHandshakeMetadata:
    """From a worker to the scheduler, at the start."""


class KVConnectorWorkerMetadata:
    """From a worker to the scheduler, after a step."""


class SupportsHMA:
    """That it knows cache groups."""


@dataclass
class KVConnectorTransferResults:
    """What has ended."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class KVConnectorBase_V1:
    """The base of all."""

    _cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        self._kv_transfer_config: KVTransferConfig = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._connector_metadata: KVConnectorMetadata | None = None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """What the scheduler says of this step."""
        self._connector_metadata = connector_metadata

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None
        return self._connector_metadata
