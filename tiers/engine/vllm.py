"""vLLM's side of the contract: the one module that imports vLLM.

`KVTiersConnector` is a connector as vLLM makes and calls it; it hands every call to the
engine-neutral `MultiConnector` of the chain that its configuration names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import Counter
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from spec.chain import ChainSpec
from spec.load import load_chain
from tiers.connector.base import EngineInfo, Role
from tiers.connector.chain import open_chain
from tiers.connector.multi import (
    MultiConnectorMetadata,
    MultiHandshakeMetadata,
    MultiWorkerMetadata,
)
from tiers.connector.stats import COUNTERS, TierStats
from tiers.engine.fingerprint import model_facts
from tiers.gpu.copier import open_copier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

# vLLM asks only that what crosses between processes is of these classes.
KVConnectorMetadata.register(MultiConnectorMetadata)
KVConnectorHandshakeMetadata.register(MultiHandshakeMetadata)
KVConnectorWorkerMetadata.register(MultiWorkerMetadata)


def engine_info(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineInfo:
    """What the chain must know of this engine. Raises ValueError for a model it can't serve."""
    if len(kv_cache_config.kv_cache_groups) != 1:
        groups = [type(g.kv_cache_spec).__name__ for g in kv_cache_config.kv_cache_groups]
        raise ValueError(
            f"kvtiers serves models with one KV cache group; this one has {', '.join(groups)}. "
            "Start vLLM with --disable-hybrid-kv-cache-manager."
        )
    (group,) = kv_cache_config.kv_cache_groups
    group_spec = group.kv_cache_spec
    inner = (
        list(group_spec.kv_cache_specs.values())
        if isinstance(group_spec, UniformTypeKVCacheSpecs)
        else [group_spec]
    )
    odd = sorted({type(s).__name__ for s in inner if not isinstance(s, FullAttentionSpec)})
    if odd:
        raise ValueError(f"kvtiers serves full attention; this model has {', '.join(odd)}.")
    block_tokens = group_spec.block_size
    return EngineInfo(
        facts=model_facts(vllm_config, vllm_version, get_none_hash_seed()),
        block_tokens=block_tokens,
        hash_tokens=getattr(kv_cache_config, "hash_block_size", None) or block_tokens,
        num_blocks=kv_cache_config.num_blocks,
        rank=vllm_config.parallel_config.rank,
        world_size=vllm_config.parallel_config.world_size,
    )


def configured_chain(vllm_config: VllmConfig) -> ChainSpec:
    """The chain that `kv_connector_extra_config` names. Raises ValueError when it can't be used."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a block that fails "
            'to load would fail its request. Set "kv_load_failure_policy": "recompute" in '
            "--kv-transfer-config, as `kvtiers config FILE` prints it."
        )
    extra = transfer.kv_connector_extra_config
    if set(extra) != {"chain"}:
        raise ValueError(
            f"kv_connector_extra_config has {sorted(extra)}; it takes one key, chain: the path of "
            "a chain's YAML file, or the chain itself."
        )
    return load_chain(extra["chain"])


class KVTiersConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """A chain of tiers as a vLLM connector."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        chain = configured_chain(vllm_config)
        info = engine_info(vllm_config, kv_cache_config)
        ours = Role.SCHEDULER if role is KVConnectorRole.SCHEDULER else Role.WORKER
        self._chain = open_chain(chain, info, ours, open_copier)

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is a later miss, nothing worse."""
        return False

    def shutdown(self) -> None:
        self._chain.shutdown()

    # -- scheduler ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._chain.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._chain.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiConnectorMetadata:
        return self._chain.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._chain.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._chain.request_finished(request, block_ids)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        self._chain.set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        self._chain.set_xfer_handshake_metadata(metadata)

    def has_pending_push_work(self) -> bool:
        return self._chain.has_pending_push_work()

    def reset_cache(self) -> bool:
        logger.error("kvtiers can't drop its tiers' blocks yet: restart with another salt.")
        return False

    # -- worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._chain.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> MultiHandshakeMetadata:
        return self._chain.get_handshake_metadata()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._chain.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._chain.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._chain.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._chain.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._chain.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._chain.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self._chain.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._chain.get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._chain.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        return self._chain.build_connector_worker_meta()

    # -- stats -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVTiersStats | None:
        stats = self._chain.get_kv_connector_stats()
        return KVTiersStats(stats.data) if stats is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTiersStats:
        return KVTiersStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTiersPromMetrics:
        return KVTiersPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class KVTiersStats(KVConnectorStats):  # type: ignore[misc]
    """Counters by tier name, in the clothes vLLM expects."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVTiersStats:
        self.data = TierStats(self.data).aggregate(TierStats(other.data)).data
        return self

    def reduce(self) -> dict[str, int | float]:
        return TierStats(self.data).reduce()

    def is_empty(self) -> bool:
        return TierStats(self.data).is_empty()


class KVTiersPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvtiers_<counter>{tier="<name>"}` beside vLLM's own metrics.

    The prefix is vLLM's because its offline `get_metrics` shows no others.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](
                name=f"vllm:kvtiers_{name}", documentation=what, labelnames=[*labelnames, "tier"]
            )
            for name, what in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for tier, counters in transfer_stats_data.items():
            for name, value in counters.items():
                self._counters[name].labels(*labels, tier).inc(value)
