"""How does vLLM's OffloadingConnector host our tiers? By a spec, KVTiersOffloadingSpec.

It makes our chain into vLLM's own tiers: the cpu tier is its host memory, and each store is a
secondary tier, `KVTiersStore`, which vLLM's own TieringOffloadingSpec takes as well.
"""
# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version

from tiers.engine.versions import check_version

check_version(vllm_version)  # before importing what another version may lack

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from spec.chain import ChainSpec
from spec.fields import format_size
from spec.load import load_chain
from spec.offloading import STAGING, HostSpec, StoreSpec
from tiers.connector.policy.request_params import MEASURING
from tiers.engine.vllm_hosting import HostingEngine
from tiers.engine.vllm_region import ENGINE, NamedRegion
from tiers.engine.vllm_secondary_tier import KVTiersStore as KVTiersStore
from tiers.engine.vllm_secondary_tier import refuse_unhosted
from tiers.errors import TierUnusable

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingWorker,
        OffloadKey,
        PrepareStoreOutput,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

UNHOSTED_OF_CHAIN = (
    *("tenants", "record", "ghosts", "explain", "events", "max_wait", "max_retained"),
    *("report_cached_tokens", "warm", "control"),
)
"""Settings of a chain that vLLM's connector leaves nobody to obey."""
AS_HOSTED = {"load_policy": "stitched", "load_when": "always", "promote": True}
"""What vLLM's connector does, whatever a chain says."""
STAGING_ROWS = 1024
"""Blocks for which a chain without a cpu tier and `staging` has host memory, at least: a prompt is
loaded through half of them."""


def vllm_settings(chain: ChainSpec, row_bytes: int) -> dict[str, Any]:
    """Make a chain into what vLLM's TieringOffloadingSpec takes, for blocks of `row_bytes` over all
    ranks. Raises ValueError, naming the setting, for a chain that vLLM's OffloadingConnector can't
    host."""
    hosts = [tier for tier in chain.tiers if isinstance(tier, HostSpec)]
    if len(hosts) > 1 or any(host.type != "cpu" for host in hosts):
        raise ValueError(
            "vLLM's OffloadingConnector hosts at most one cpu tier, and no other tier in host "
            f"memory; the chain has {', '.join(host.tier_name for host in hosts)}. Use "
            "KVTiersConnector for all."
        )
    given = [key for key in UNHOSTED_OF_CHAIN if key in chain.model_fields_set]
    if unheard := [key for key in given if getattr(chain, key) not in (None, (), {})]:
        raise ValueError(
            f"the chain has {', '.join(unheard)}, which vLLM's OffloadingConnector does not obey; "
            "leave that out, or use KVTiersConnector"
        )
    for key, only in AS_HOSTED.items():
        if key in chain.model_fields_set and getattr(chain, key) != only:
            raise ValueError(
                f"the chain sets {key}, and with vLLM's OffloadingConnector it is "
                f"{str(only).lower()}: write that, leave it out, or use KVTiersConnector"
            )
    if chain.on_reset != "forget":
        raise ValueError(
            "the chain has on_reset: keep, but a reset ends the transfers of vLLM's "
            "OffloadingConnector; leave it out, or use KVTiersConnector"
        )
    if chain.store == "computed":
        raise ValueError(
            "the chain has store: computed, but vLLM's OffloadingConnector stores all of a request "
            "or its prompt; write store: all or store: prompt, or use KVTiersConnector"
        )
    for tier in chain.tiers:
        refuse_unhosted(tier)
    store = {"type": "KVTiersStore", "module_path": __name__}
    staging = chain.staging or max(STAGING, STAGING_ROWS * row_bytes)
    settings: dict[str, Any] = {
        "cpu_bytes_to_use": hosts[0].capacity if hosts else staging,
        "eviction_policy": getattr(hosts[0], "eviction", "lru") if hosts else "lru",
        "secondary_tiers": [
            {**store, "store": tier} for tier in chain.tiers if isinstance(tier, StoreSpec)
        ],
    }
    if "store" in chain.model_fields_set:
        settings["offload_prompt_only"] = chain.store == "prompt"
    return settings


class HostedManager(TieringOffloadingManager):  # type: ignore[misc]
    """vLLM's manager of tiers, which serves and keeps nothing of an engine that is outdated, and
    keeps nothing that was computed before a reset."""

    def __init__(self, made: TieringOffloadingManager, engine: HostingEngine) -> None:
        """Take over the tiers of `made`."""
        super().__init__(made.primary_tier, made.secondary_tiers)
        self._engine = engine
        self._stale: set[str] = set()

    def lookup(self, key: OffloadKey, req_context: ReqContext, **kwargs: Any) -> LookupResult:
        if self._engine.is_outdated or req_context.req_id.startswith(MEASURING):
            return LookupResult.MISS
        return super().lookup(key, req_context, **kwargs)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        name = req_context.req_id
        if self._engine.is_outdated or name in self._stale or name.startswith(MEASURING):
            keys = ()
        return super().prepare_store(keys, req_context)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._stale = set(self._req_state)
        self._engine.reset()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        super().on_schedule_end(context)
        self._engine.end_step()


class KVTiersOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Hosts the `chain` in the connector's extra config. Raises SpecError for an invalid chain,
    ValueError for one that can't be hosted, TierUnusable without room for one block."""

    _manager: Any
    _worker: Any

    def __init__(self, config: OffloadingConfig) -> None:
        if "chain" not in config.extra_config:
            raise ValueError(
                "kv_connector_extra_config has no chain: the path of a chain's YAML file"
            )
        self._chain = load_chain(config.extra_config["chain"])
        row_bytes = config.worker_kv_bytes_per_block * config.parallel.world_size
        settings = vllm_settings(self._chain, row_bytes)
        if twice := sorted(settings.keys() & config.extra_config.keys()):
            raise ValueError(
                f"kv_connector_extra_config has {', '.join(twice)}, which the chain decides: leave "
                "that out, or use vLLM's TieringOffloadingSpec without a chain"
            )
        more = {"extra_config": {**config.extra_config, **settings}}
        super().__init__(replace(config, engine_id=ENGINE + config.engine_id, **more))
        self._named: NamedRegion | None = None
        if not self._rows:
            size = format_size(settings["cpu_bytes_to_use"])
            raise TierUnusable(f"host memory of {size} over all ranks is less than one block")

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = super().build_metric_definitions(extra_config)
        return {**found, **KVTiersStore.build_metric_definitions(extra_config)}

    @property
    def _rows(self) -> int:
        return getattr(self, "num_chunks", 0) or getattr(self, "num_blocks", 0)  # before 0.30

    def get_manager(self) -> HostedManager:
        if isinstance(self._manager, HostedManager):
            return self._manager
        region = self._region()
        try:
            engine = HostingEngine(self, self._chain.salt, self._chain.trust_client_ids)
            for tier in self.secondary_tier_configs:
                tier["engine"] = engine
            manager = HostedManager(super().get_manager(), engine)
        finally:
            region.remove()  # all workers have mapped it
        self._manager = manager
        return manager

    def _region(self) -> NamedRegion:
        if self._named is None:
            self._named = NamedRegion(self.config.engine_id)
        return self._named

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make vLLM's own worker. It has none for its CPU platform, and raises what says so."""
        self._region()
        worker = super().get_worker(kv_caches)
        if (region := getattr(worker, "_mmap_region", None)) is not None:
            region._creator = False  # the scheduler's process removes the file
        return worker
