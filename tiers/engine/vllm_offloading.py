"""How does vLLM's OffloadingConnector host our tiers? By a spec, KVTiersOffloadingSpec.

vLLM's connector decides what to store and load. Ours keeps it: a `HostedManager` over a
`HostedTier` in the scheduler's process, and a `HostedWorker` in each worker.
"""
# ruff: noqa: E402

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm import __version__ as vllm_version

from tiers.engine.versions import check_version

check_version(vllm_version)  # before importing what another version may lack

from vllm.config import get_current_vllm_config
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.kv_offload.base import OffloadingSpec

from spec.fields import format_size
from spec.load import load_chain
from spec.offloading import StoreContext, StoreSpec
from tiers.block import namespace
from tiers.connector.hosted.hosted_tier import HostedTier
from tiers.connector.hosted.shared_slots import SlotRegion, attach_region, create_region
from tiers.contract.block_copier import Copier
from tiers.contract.engine_info import MOMENT
from tiers.contract.messages import WorkerHandshake
from tiers.contract.pool_size import PoolSize
from tiers.engine.content_marks import refuse_unmarked_media
from tiers.engine.hosted_chain import hosted_tiers
from tiers.engine.identity.facts import config_facts
from tiers.engine.vllm_groups import STATES_ON_V2, refuse_model
from tiers.engine.vllm_hosted_manager import HostedManager
from tiers.engine.vllm_hosted_worker import HostedWorker
from tiers.engine.vllm_identity import late_facts
from tiers.engine.vllm_watch import before_resets, caller, copies_in_step, worker_weights
from tiers.errors import TierUnusable
from tiers.gpu.copier import open_copiers
from tiers.host.slot_memory import slot_stride
from tiers.host.spare_memory import spare_memory
from tiers.wrappers.guard import Guarded
from tiers.wrappers.guarded_residency import open_residency
from tiers.wrappers.opening import log_name, open_guarded

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger(__name__)


class KVTiersOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """Makes both sides of the `chain` in the connector's extra config. Raises SpecError for an
    invalid chain, ValueError for one that can't be hosted."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if "chain" not in self.extra_config:
            raise ValueError(
                "kv_connector_extra_config has no chain: the path of a chain's YAML file"
            )
        if self.blocks_per_chunk != 1:
            raise ValueError(
                "kv_connector_extra_config makes chunks of several blocks; kvtiers keeps blocks. "
                "Leave out blocks_per_chunk and block_size."
            )
        self._chain = load_chain(self.extra_config["chain"])
        self._host, self._store = hosted_tiers(self._chain)
        if "store" in self._chain.model_fields_set:
            self.offload_prompt_only = self._chain.store == "prompt"

    def get_manager(self) -> HostedManager:
        """Make the scheduler's side. Raises TierUnusable if it can't share workers' memory."""
        ranks = range(self.config.parallel.world_size)
        regions = [attach_region(self.config.engine_id, rank) for rank in ranks]
        open_store = None
        if self._store is not None:
            payload = max(region.handshake.payload_bytes for region in regions)
            open_store = partial(self._open_store, self._store, payload)
        residency = partial(open_residency, self._host)
        events = self.kv_events_config.enable_kv_cache_events
        tier = HostedTier(regions, residency, open_store, events=events)
        scheduler = caller(SchedulerInterface)
        if scheduler is not None:
            before_resets(scheduler, partial(_end, tier))
        return HostedManager(tier, self._store)

    def _open_store(self, store: StoreSpec, payload_bytes: int) -> Guarded | None:
        try:
            return open_guarded(store, StoreContext(payload_bytes, self.config.parallel.world_size))
        except TierUnusable as error:
            logger.error(
                "tier %r is unusable; host memory serves alone: %s", log_name(store), error
            )
            return None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostedWorker:
        """Make a worker's side. Raises TierUnusable without room for one block."""
        copiers = copiers_of(kv_caches, copies_in_step(get_current_vllm_config(), told=False))
        payload = max(copier.payload_bytes for copier in copiers)
        handshake = WorkerHandshake(self.config.parallel.rank, b"", payload)
        slots = self._num_slots(payload)
        region = create_region(self.config.engine_id, handshake, slots, copiers[0].pin)
        facts = self._facts(copiers)
        if self._store is not None:
            self._name(region, facts, self._store.tier_name)
        return HostedWorker(region, copiers, worker_weights())

    def _num_slots(self, payload_bytes: int) -> int:
        """Return the slots of one rank, for blocks of `payload_bytes`. Raises TierUnusable."""
        ranks = self.config.parallel.world_size
        slots = self._pool_size(ranks).slots(payload_bytes)
        if slots == 0:
            raise TierUnusable(
                f"host memory of {format_size(self._host.capacity)} over {ranks} rank(s) is less "
                f"than one block of {format_size(payload_bytes)}"
            )
        need, spare = slots * slot_stride(payload_bytes) * ranks, spare_memory()
        if need > spare:
            raise TierUnusable(
                f"host memory of {format_size(need)} over {ranks} rank(s) is more than the machine "
                f"or the control group has left, {format_size(spare)}; lower capacity, or staging "
                "where the chain has no cpu tier"
            )
        return slots

    def _pool_size(self, ranks: int) -> PoolSize:
        """Return the host tier's memory; without one, what blocks on their way need."""
        if self._host in self._chain.tiers:
            return PoolSize(self._host.capacity, 0, 0, ranks)
        tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
        blocks = sum(-(-tokens // group.tokens_per_block) for group in self.config.groups)
        return PoolSize(0, self._chain.staging, blocks, ranks)

    def _name(self, region: SlotRegion, facts: Mapping[str, str], tier: str) -> None:
        """Write the namespace of this worker's blocks into `region`, once its facts are known."""
        late = late_facts(get_current_vllm_config(), self._chain.salt)

        def name(seconds: float) -> bool:
            more = late.known(seconds)
            if more is not None:
                rank, world_size = region.handshake.rank, self.config.parallel.world_size
                region.name(namespace({**facts, **more}, rank, world_size))
            return more is not None

        def wait_and_name() -> None:
            while not name(60.0):
                pass

        if name(MOMENT):
            return
        if region.handshake.rank == 0:
            logger.info(
                "the model's weights are being identified, beside the engine's work. Until that is "
                "done, nothing is stored in, or loaded from, tier %r",
                tier,
            )
        threading.Thread(target=wait_and_name, name="kvtiers-name", daemon=True).start()

    def _facts(self, copiers: Sequence[Copier]) -> dict[str, str]:
        """Return all facts that make KV interchangeable, except the late ones. Raises ValueError
        for an engine that can't be hosted."""
        vllm_config = get_current_vllm_config()
        refuse_model(vllm_config)
        refuse_unmarked_media(vllm_config, self._chain.trust_client_ids)
        if vllm_config.lora_config is not None:
            raise ValueError(
                "vLLM's OffloadingConnector does not tell two adapters of one name apart: with "
                "LoRA, use KVTiersConnector"
            )
        self._refuse_states(vllm_config)
        changes = getattr(vllm_config, "weight_transfer_config", None) is not None
        if changes and self._store is not None:
            raise ValueError(
                "the engine has a weight_transfer_config, and under vLLM's OffloadingConnector a "
                "store's keys name the weights that the engine started with: use KVTiersConnector, "
                f"or leave tier {self._store.tier_name!r} out"
            )
        return {
            **config_facts(vllm_config, vllm_version),
            "salt": self._chain.salt,
            "host": "vllm-offloading",
            "layout": str(getattr(self.config, "kv_cache_layout", None)),
            "pages": " ".join(copier.layout for copier in copiers),
            "groups": repr([(g.tokens_per_block, g.layer_names) for g in self.config.groups]),
        }

    def _refuse_states(self, vllm_config: VllmConfig) -> None:
        """Raise ValueError where vLLM would load or store other states than it means to."""
        model = vllm_config.model_config
        # Of some models with images, such as Qwen3.5, vLLM says the second alone.
        if not (model.has_inner_state or model.is_hybrid):
            return
        if getattr(vllm_config, "use_v2_model_runner", False):
            raise ValueError(
                f"kvtiers can't serve the recurrent layers of {model.model}: {STATES_ON_V2}."
            )
        if self.extra_config.get("sync_load_budget_bytes"):
            raise ValueError(
                f"{model.model} has recurrent layers: with sync_load_budget_bytes vLLM reads their "
                "states before it loads them, and answers wrongly. Leave that key out of "
                "kv_connector_extra_config."
            )


def _end(tier: HostedTier) -> None:
    """The engine's own prefix cache is about to be reset. If the connector's is reset with it, the
    tier begins anew."""
    tier.weights_changed()
    logger.info(
        "the engine's prefix cache is reset: the hosted tiers serve and keep nothing from now on, "
        "but after a reset with reset_connector=True"
    )


def copiers_of(kv_caches: CanonicalKVCaches, in_step: bool = False) -> Sequence[Copier]:
    """Make the copier of each KV cache group, which the caller closes.

    Pages of states are padded to the length of others, and only a part of each is theirs.
    """
    tensors = [one.tensor for one in kv_caches.tensors]
    groups = [
        {str(r.tensor_idx): tensors[r.tensor_idx][:, : r.page_size_bytes] for r in refs}
        for refs in kv_caches.group_data_refs
    ]
    return open_copiers(groups, tensors[0].shape[0], in_step)
