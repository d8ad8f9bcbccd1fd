"""What does vLLM see? Our side of its contract: this module and its `vllm_*` parts import it.

`KVTiersConnector` is the connector that vLLM makes by name. It gets the half of the chain that its
role asks for, with members that speak in vLLM's own words.
"""
# ruff: noqa: E402

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from vllm import __version__ as vllm_version

from tiers.engine.versions import check_version

check_version(vllm_version)  # before what another version may not have

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import SchedulerInterface

from spec.chain import ChainSpec, EventsSpec
from spec.load import SpecError, load_chain
from tiers.connector.assembly import scheduler_parts, worker_parts
from tiers.connector.multi.multi_connector import (
    MultiConnectorMetadata,
    MultiHandshakeMetadata,
    MultiWorkerMetadata,
)
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo
from tiers.contract.marks import NO_ADAPTERS, RequestMarks
from tiers.contract.stats import OTHER_TENANTS, TENANT
from tiers.contract.weight_reports import Weights
from tiers.control.engine_control import Control
from tiers.engine.content_marks import media_marks
from tiers.engine.identity.facts import config_facts
from tiers.engine.vllm_children import (
    as_computed,
    child_class,
    child_configs,
    child_transfers,
    following,
    identity,
    load_policy,
    others_shake_hands,
    refuse_groups,
)
from tiers.engine.vllm_events import AsVllm, describe, group_kinds
from tiers.engine.vllm_groups import (
    REPORTS_FAILED_REQUESTS,
    block_sizes,
    drops_last,
    goes_on_right,
    kv_groups,
    overwrites_early,
)
from tiers.engine.vllm_identity import late_facts
from tiers.engine.vllm_stats import KVTiersPromMetrics, MultiKVConnectorStats, rebuild
from tiers.engine.vllm_watch import (
    before_resets,
    before_sleeps,
    caller,
    fill_scales,
    marks_of_requests,
    require_worker,
    seen_adapters,
    this_worker,
    waker,
    warn_of_hashes,
    worker_weights,
)
from tiers.gpu.copier import open_copier
from tiers.paths import this_host

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)

# vLLM asks only that what crosses between processes is of these classes.
KVConnectorMetadata.register(MultiConnectorMetadata)
KVConnectorHandshakeMetadata.register(MultiHandshakeMetadata)
KVConnectorWorkerMetadata.register(MultiWorkerMetadata)


def engine_info(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: KVConnectorRole, chain: ChainSpec
) -> EngineInfo:
    """What the chain must know of this engine. Raises ValueError for a model it can't serve."""
    groups = kv_groups(vllm_config, kv_cache_config)
    events = vllm_config.kv_events_config
    is_worker = role is KVConnectorRole.WORKER
    if not is_worker:  # else each rank would, too
        warn_of_hashes(vllm_config)
    world_size = vllm_config.parallel_config.world_size
    return EngineInfo(
        facts={
            **config_facts(vllm_config, vllm_version),
            "groups": json.dumps([[*group, layers] for group, layers in groups]),
        },
        block_tokens=math.lcm(*(group.tokens for group, _ in groups)),
        hash_tokens=block_sizes(vllm_config, kv_cache_config)[1],
        num_blocks=kv_cache_config.num_blocks,
        # external_launcher numbers engines of one rank by it.
        rank=vllm_config.parallel_config.rank % world_size,
        world_size=world_size,
        kv_events=bool(events and events.enable_kv_cache_events),
        describe=describe,
        caches_prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
        drops_last=drops_last(vllm_config),
        groups=tuple(group for group, _ in groups),
        marks=RequestMarks() if is_worker else marks_of_requests(vllm_config),
        adapters=seen_adapters(vllm_config) if is_worker else NO_ADAPTERS,
        host=this_host(),
        ranks_here=_ranks_here(vllm_config.parallel_config),
        replicated=getattr(kv_cache_config, "kv_tp_replicas", 1) == world_size > 1,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        lookahead_tokens=vllm_config.num_lookahead_tokens,
        weights_change=getattr(vllm_config, "weight_transfer_config", None) is not None,
        media=media_marks(
            vllm_config,
            kv_cache_config.num_blocks * max(group.tokens for group, _ in groups),
            chain.trust_client_ids,
        ),
        late_facts=late_facts(vllm_config, chain.salt) if is_worker else None,
        weights=worker_weights() if is_worker else Weights(),
        model=str(vllm_config.model_config.model),
        overwrites_early=overwrites_early(vllm_config, kv_cache_config),
        window_interval=getattr(vllm_config.cache_config, "prefix_cache_retention_interval", None),
        goes_on_right=goes_on_right(vllm_config, any(group.is_state for group, _ in groups)),
    )


def _ranks_here(parallel: Any) -> int:
    """Ranks on this host. Replicas of a dense model know nothing of each other, and count alone."""
    ranks = int(getattr(parallel, "local_world_size", parallel.world_size))
    devices = torch.cuda.device_count()
    if devices:  # of which a rank has one, also where Ray has placed ranks on several hosts
        ranks = min(ranks, devices)
    return ranks * max(1, int(parallel.data_parallel_size_local))


def configured_chain(vllm_config: VllmConfig) -> ChainSpec | None:
    """The chain that `kv_connector_extra_config` names; None: it lists connectors instead. Raises
    ValueError when it can't be used."""
    transfer = vllm_config.kv_transfer_config
    _refuse_policy(transfer)
    extra = transfer.kv_connector_extra_config
    if extra.get("connectors") and set(extra) <= {"connectors", "load_policy"}:
        return None
    if set(extra) != {"chain"}:
        raise ValueError(
            f"kv_connector_extra_config has {sorted(extra)}; it takes one key. chain: the path of "
            "a chain's YAML file, or the chain itself; or connectors: a list of connectors, with "
            "which load_policy may be given."
        )
    return load_chain(extra["chain"])


def _refuse_policy(transfer: KVTransferConfig) -> None:
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            f"{transfer.kv_connector}: kv_load_failure_policy is "
            f"{transfer.kv_load_failure_policy!r}: a block that fails to load would fail its "
            'request. Set "kv_load_failure_policy": "recompute" in --kv-transfer-config, as '
            "`kvtiers config FILE` prints it."
        )


def configured_tiers(vllm_config: VllmConfig) -> list[str]:
    """The names that metrics have of all tiers of an engine, open or not, and of its tenants. None
    where its chain is not to be read here: the process that shows the metrics may be on another
    host."""
    try:
        chain = configured_chain(vllm_config)
        if chain is not None:
            tenants = {rule.name or OTHER_TENANTS for rule in chain.tenants.values()}
            shown = [TENANT + name for name in sorted({OTHER_TENANTS, *tenants})]
            return [*(tier.tier_name for tier in chain.tiers), *shown]
        ours = [
            c for c in child_configs(vllm_config) if c.cls.__name__ == KVTiersConnector.__name__
        ]
        return [f"{one.name}/{tier}" for one in ours for tier in configured_tiers(one.vllm_config)]
    except (SpecError, ValueError) as error:
        logger.warning("metrics of tiers begin with the first step: %s", error)
        return []


class KVTiersConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """A chain of tiers, or a list of any connectors, as a vLLM connector.

    vLLM calls the class members here without an object. What it makes is one of `HALVES`, as the
    role says: each is complete, and has none of the other's members.
    """

    _makers: Mapping[str, dict[str, Any]] = {}

    def __new__(
        cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> KVTiersConnector:
        # A class of others that inherits from this one is no half: it is abstract and refused.
        made: KVTiersConnector = super().__new__(HALVES[role] if cls is KVTiersConnector else cls)
        return made

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout that children ask for. Raises ValueError, naming who asks for which."""
        asked = {
            child.name: layout
            for child in child_configs(vllm_config)
            if (layout := child.cls.get_required_kvcache_layout(child.vllm_config)) is not None
        }
        if len(set(asked.values())) > 1:
            wishes = ", ".join(f"{name}: {layout}" for name, layout in asked.items())
            raise ValueError(f"connectors ask for different KV cache layouts ({wishes})")
        return next(iter(asked.values()), None)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether every child bears that the memory of the paged KV goes away; our tiers do. One of
        an older vLLM, which has no such member, is asked by no engine."""
        extra, engine = kv_transfer_config.kv_connector_extra_config, kv_transfer_config.engine_id
        listed = child_transfers(extra, engine_id=engine, kv_role=kv_transfer_config.kv_role)
        return all(child_class(one).supports_sleep_mode(one) for one in listed)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether any child works layer by layer, which whole CUDA graphs would skip."""
        return any(
            child_class(one).requires_piecewise_for_cudagraph(one.kv_connector_extra_config)
            for one in child_transfers(extra_config, kv_role="kv_both")
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiKVConnectorStats:
        return rebuild(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTiersPromMetrics:
        args = vllm_config, metric_types, labelnames, per_engine_labelvalues
        return KVTiersPromMetrics(*args, configured_tiers(vllm_config))

    def _listed(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> tuple[list[Any], list[str], str]:
        """This role's halves of the listed connectors, their names, and what is the same for both
        roles of one list."""
        listed = child_configs(vllm_config)
        refuse_groups(listed, kv_cache_config)
        self._makers = {child.name: child.maker for child in listed}
        made = [child.cls(child.vllm_config, role, kv_cache_config) for child in listed]
        return made, [child.name for child in listed], identity(vllm_config)

    def _counted(self, by_child: Mapping[str, Any]) -> MultiKVConnectorStats | None:
        """Each child's stats, in a form that vLLM adds up."""
        if not by_child:
            return None
        whole = MultiKVConnectorStats()
        for name, stats in by_child.items():
            whole.add(name, stats, self._makers.get(name))
        return whole


def _another_roles(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands where vLLM's base class asks each connector for members of both roles."""
    raise TypeError(f"vLLM calls this on a connector of the other role than {self.role}")


_REPORTED: WeakSet[Any] = WeakSet()
"""Requests whose responses have an entry of ours."""


class SchedulerHalf(MultiScheduler, KVTiersConnector):
    """What decides, in the scheduler's process."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _another_roles

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        chain = configured_chain(vllm_config)
        scheduler: Any = caller(SchedulerInterface)
        whole = None if scheduler is None else scheduler.vllm_config.kv_transfer_config
        if whole is not None:  # under vLLM's MultiConnector its policy alone is obeyed
            _refuse_policy(whole)
        # Listed connectors may hear of resets themselves.
        self._hears_resets = chain is not None and chain.on_reset != "keep"
        events = EventsSpec() if chain is None else chain.events
        self._as_vllm = AsVllm(events, group_kinds(kv_cache_config))
        self._pid = os.getpid()
        self._control: Control | None = None
        if chain is not None:
            info = engine_info(vllm_config, kv_cache_config, role, chain)
            info = replace(info, is_alone=whole is vllm_config.kv_transfer_config)
            MultiScheduler.__init__(self, *scheduler_parts(chain, info, wake=waker()))
            named = vllm_config.kv_transfer_config.kv_connector_extra_config["chain"]
            file = Path(named).absolute() if isinstance(named, str | Path) else None
            self._control = Control(chain, self, file)
        else:
            settings = MultiSettings(
                RequestTable.of_connectors(block_sizes(vllm_config, kv_cache_config)[0]),
                load_policy(vllm_config, kv_cache_config),
                following=following(child_configs(vllm_config)),
                as_computed=as_computed,
            )
            listed, names, name = self._listed(vllm_config, role, kv_cache_config)
            MultiScheduler.__init__(self, listed, settings, names, name)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        # Here, since older engines have no such class, and then do not call this.
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        found = super().get_external_cache_hit_sources(request, num_external_tokens)
        return {CacheHitSource(source): tokens for source, tokens in found.items()}

    def entry_of_response(self, request: Request, cached: Mapping[str, int]) -> dict[str, Any]:
        """Only the first of an engine's chains adds an entry: vLLM's MultiConnector ends the engine
        where two connectors set one parameter."""
        entry = {} if request in _REPORTED else super().entry_of_response(request, cached)
        if entry:
            _REPORTED.add(request)
        return entry

    def take_events(self) -> Iterator[Any]:
        return self._as_vllm(super().take_events())

    def weights_changed(self) -> None:
        """As after a reset, of which the engine itself would tell listeners."""
        super().weights_changed()
        self._as_vllm.all_cleared()

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._hear_resets(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._hear_resets(gpu_block_pool)

    def _hear_resets(self, cache: Any) -> None:
        """Take a reset of the engine's own cache for one of the tiers."""
        notify = self.reset_cache if self._hears_resets else lambda: None
        before_resets(cache, notify, self._engine_reset)

    def _engine_reset(self, succeeded: bool) -> None:
        """An engine whose blocks are in use keeps them, and tells listeners nothing, where the
        tiers have forgotten all."""
        if succeeded:
            self._requests.cache_emptied()
        elif self._hears_resets:
            logger.warning_once(
                "the engine refused to reset its prefix cache, since requests have blocks of it: "
                "until a reset answers True, what begins with blocks that it kept is not stored "
                "(outdated_requests_total)"
            )
            self._as_vllm.all_cleared()

    def reset_cache(self) -> bool:
        """Never load again what was stored so far, or, with `on_reset: keep`, all of it; False:
        ask again, loads are in flight.

        vLLM calls this before weights change, after they have, and also where none will, such as
        for sleep, and says nothing of which. Its own prefix cache it also resets without calling
        this. An engine that starts later with the same facts finds what was stored before the
        first reset.
        """
        if self._hears_resets:
            logger.warning_once(
                "kvtiers was reset: this engine loads nothing again that it stored before. If its "
                "weights never change while it runs (sleep, pause and reset_prefix_cache reset "
                "too), set on_reset: keep in the chain."
            )
        return super().reset_cache()

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        stats = self.stats_by_child()
        if self._control is not None:
            self._control.board.measured(stats)
        return self._counted(stats)

    def shutdown(self) -> None:
        if os.getpid() != self._pid:
            return  # a fork that ends: sockets, journals and their locks are its parent's
        if self._control is not None:
            self._control.close()
        super().shutdown()


class WorkerHalf(MultiWorker, KVTiersConnector):
    """What moves bytes, in the process of each rank."""

    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = _another_roles

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._worker = this_worker()
        whole = getattr(self._worker, "vllm_config", vllm_config).kv_transfer_config
        self._is_silent = whole.kv_connector == "MultiConnector" and others_shake_hands(whole)
        chain = configured_chain(vllm_config)
        if chain is not None:
            info = engine_info(vllm_config, kv_cache_config, role, chain)
            MultiWorker.__init__(self, *worker_parts(chain, info, open_copier))
            before_sleeps(vllm_config, self._worker, self.unregister_kv_caches)
        else:
            MultiWorker.__init__(self, *self._listed(vllm_config, role, kv_cache_config))

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        require_worker(self._worker, this_worker())
        fill_scales(self._vllm_config)
        super().register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> MultiHandshakeMetadata | None:
        """Beside NIXL none: the scheduler learns the same with the first step."""
        return None if self._is_silent else super().get_handshake_metadata()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        try:
            from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
        except ImportError:
            # vLLM before 0.30 does not call this; an outer connector of ours does.
            return results
        return KVConnectorTransferResults(**vars(results))

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        return self._counted(self.stats_by_child())


HALVES = {KVConnectorRole.SCHEDULER: SchedulerHalf, KVConnectorRole.WORKER: WorkerHalf}
for _half in HALVES.values():
    # vLLM's MultiConnector sends a connector's stats and metrics by its class's name.
    _half.__name__ = KVTiersConnector.__name__

if REPORTS_FAILED_REQUESTS:
    # Else vLLM itself manages all layers as one group, since we don't say that we can do more.
    SupportsHMA.register(KVTiersConnector)
