"""Our tiers hosted by vLLM's own OffloadingConnector: the spec that its configuration names.

vLLM's connector decides what to store and load, and ours keeps it: a `HostedTier` in the
scheduler's process, and in each worker the copies between paged KV and host slots.
"""
# ruff: noqa: E402

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from vllm import __version__ as vllm_version

from tiers.concurrency.executors import io_executor
from tiers.engine.versions import check_version

check_version(vllm_version)  # before what another version may not have

from vllm.config import get_current_vllm_config
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

from spec.chain import ChainSpec
from spec.fields import format_size
from spec.load import load_chain
from spec.offloading import HostSpec, StoreContext, StoreSpec
from spec.registry import tier_class
from tiers.block import namespace
from tiers.connector.contract.copier import Copier, Copy
from tiers.connector.contract.engine import MOMENT, LateFacts
from tiers.connector.contract.messages import WorkerHandshake
from tiers.connector.contract.pool_size import STAGING, PoolSize
from tiers.connector.hosted.joining import LateStore
from tiers.connector.hosted.shared_slots import SlotRegion, attach_region, create_region, stamp
from tiers.connector.hosted.tier import Answer, HostedTier
from tiers.engine.identity.facts import config_facts
from tiers.engine.media_identity import refuse_unmarked_media
from tiers.engine.vllm_groups import refuse_model
from tiers.engine.vllm_identity import late_facts
from tiers.errors import TierUnusable
from tiers.gpu.copier import open_copier
from tiers.host.memory import slot_stride
from tiers.host.spare_memory import spare_memory
from tiers.wrappers.guard import Guarded
from tiers.wrappers.opening import open_guarded
from tiers.wrappers.residency import open_residency

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger(__name__)

UNHOSTED = {"store_after", "queue", "store_rate", "load_rate", "write_budget", "verify"}
"""Settings that are about stores and loads which here are vLLM's own."""
COPIERS = 2
"""Loads under way at once in a worker."""


class KVTiersOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """A chain of at most one host tier and one store: `chain` in the connector's extra config.

    Raises SpecError for a chain that is none, ValueError for one that can't be hosted.
    """

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
        """The scheduler's side. Raises TierUnusable where it can't share the workers' memory."""
        ranks = range(self.config.parallel.world_size)
        regions = [attach_region(self.config.engine_id, rank) for rank in ranks]
        payload = max(region.handshake.payload_bytes for region in regions)
        store, late = None, None
        if self._store is not None and all(region.namespace for region in regions):
            store = self._open_store(payload)
        elif self._store is not None:
            late = LateStore(regions, partial(self._open_store, payload))
        residency = partial(open_residency, self._host)
        events = self.kv_events_config.enable_kv_cache_events
        tier = HostedTier(regions, residency, store, late=late, events=events)
        return HostedManager(tier, self._store)

    def _open_store(self, payload_bytes: int) -> Guarded | None:
        if self._store is None:
            return None
        name = self._store.tier_name
        try:
            site = StoreContext(payload_bytes, self.config.parallel.world_size)
            return open_guarded(self._store, site)
        except TierUnusable as error:
            logger.error("tier %r is unusable; host memory serves alone: %s", name, error)
            return None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> HostedWorker:
        """A worker's side. Raises TierUnusable when there is no room for one block."""
        tensors = [one.tensor for one in kv_caches.tensors]
        blocks = tensors[0].shape[0]
        copiers = [
            open_copier({str(ref.tensor_idx): tensors[ref.tensor_idx] for ref in refs}, blocks)
            for refs in kv_caches.group_data_refs
        ]
        payload = max(copier.payload_bytes for copier in copiers)
        parallel = self.config.parallel
        slots = self._pool_size(parallel.world_size).slots(payload)
        if slots == 0:
            raise TierUnusable(
                f"host memory of {self._host.capacity} bytes over {parallel.world_size} rank(s) "
                f"is less than one block of {payload} bytes"
            )
        need, spare = slots * slot_stride(payload) * parallel.world_size, spare_memory()
        if need > spare:
            raise TierUnusable(
                f"host memory of {format_size(need)} over {parallel.world_size} rank(s) is more "
                f"than the machine or the control group has left, {format_size(spare)}; lower "
                "capacity, or staging where the chain has no cpu tier"
            )
        handshake = WorkerHandshake(parallel.rank, b"", payload)
        region = create_region(self.config.engine_id, handshake, slots, copiers[0].pin)
        facts = self._facts(copiers)
        if self._store is not None:
            self._name(region, facts, late_facts(get_current_vllm_config(), self._chain.salt))
        return HostedWorker(region, copiers)

    def _pool_size(self, ranks: int) -> PoolSize:
        """The host tier's memory; where the chain has none, what blocks on their way need."""
        if self._host in self._chain.tiers:
            return PoolSize(self._host.capacity, 0, 0, ranks)
        tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
        blocks = sum(-(-tokens // group.tokens_per_block) for group in self.config.groups)
        return PoolSize(0, self._chain.staging, blocks, ranks)

    def _name(self, region: SlotRegion, facts: Mapping[str, str], late: LateFacts) -> None:
        """Say under which namespace the store keeps this worker's blocks, once that is known."""
        world_size = self.config.parallel.world_size

        def name(more: Mapping[str, str]) -> None:
            region.name(namespace({**facts, **more}, region.handshake.rank, world_size))

        def wait_and_name() -> None:
            while (more := late.known(seconds=60.0)) is None:
                pass
            name(more)

        at_once = late.known(MOMENT)
        if at_once is not None:
            name(at_once)
            return
        if region.handshake.rank == 0:
            logger.info(
                "the model's weights are being identified, beside the engine's work. Until that is "
                "done, nothing is stored in, or loaded from, tier %r",
                cast(StoreSpec, self._store).tier_name,
            )
        threading.Thread(target=wait_and_name, name="kvtiers-name", daemon=True).start()

    def _facts(self, copiers: Sequence[Copier]) -> dict[str, str]:
        """All that makes KV interchangeable, but for late facts; vLLM gives its layout by name,
        and pages as bytes."""
        vllm_config = get_current_vllm_config()
        refuse_model(vllm_config.model_config)
        refuse_unmarked_media(vllm_config, self._chain.trust_client_ids)
        if vllm_config.lora_config is not None:
            raise ValueError(
                "vLLM's OffloadingConnector does not tell two adapters of one name apart: with "
                "LoRA, use KVTiersConnector"
            )
        changes = getattr(vllm_config, "weight_transfer_config", None) is not None
        if changes and self._store is not None:
            raise ValueError(
                "the engine has a weight_transfer_config, and under vLLM's OffloadingConnector a "
                "store knows the weights by those that it starts with: use KVTiersConnector, or "
                f"leave tier {self._store.tier_name!r} out"
            )
        return {
            **config_facts(vllm_config, vllm_version),
            "salt": self._chain.salt,
            "host": "vllm-offloading",
            "layout": str(getattr(self.config, "kv_cache_layout", None)),
            "pages": " ".join(copier.layout for copier in copiers),
            "groups": repr([(g.tokens_per_block, g.layer_names) for g in self.config.groups]),
        }


def hosted_tiers(chain: ChainSpec) -> tuple[HostSpec, StoreSpec | None]:
    """The host tier of a chain, `staging` where it has none, and its store. Raises ValueError."""
    hosts = [tier for tier in chain.tiers if isinstance(tier, HostSpec)]
    stores = [tier for tier in chain.tiers if isinstance(tier, StoreSpec)]
    if len(hosts) > 1 or len(stores) > 1:
        raise ValueError(
            f"vLLM's OffloadingConnector hosts one cpu tier and one other at most; the chain has "
            f"{', '.join(tier.tier_name for tier in chain.tiers)}. Use KVTiersConnector for all."
        )
    if chain.tenants or "max_wait" in chain.model_fields_set:
        raise ValueError(
            "the chain has tenants or max_wait, to which vLLM's OffloadingConnector does not keep; "
            "leave them out, or use KVTiersConnector"
        )
    if chain.on_reset != "forget":
        raise ValueError(
            "the chain has on_reset: keep, but a reset ends the transfers of vLLM's "
            "OffloadingConnector; leave it out, or use KVTiersConnector"
        )
    for tier in chain.tiers:
        asked = tier.model_dump(include=UNHOSTED, exclude_defaults=True)
        if asked:
            raise ValueError(
                f"tier {tier.tier_name!r} has {', '.join(asked)}, which vLLM's OffloadingConnector "
                "does not keep to; leave that out, or use KVTiersConnector"
            )
    room = chain.staging or STAGING
    staging = tier_class("cpu").model_validate({"type": "cpu", "capacity": room})
    return hosts[0] if hosts else cast(HostSpec, staging), stores[0] if stores else None


@dataclass
class SlotsSpec(LoadStoreSpec):  # type: ignore[misc]
    """Host slots of a transfer and the keys of their blocks, in the order of its paged blocks."""

    slots: list[int]
    keys: list[bytes]


class HostedManager(OffloadingManager):  # type: ignore[misc]
    """A `HostedTier` as vLLM's scheduler calls it."""

    def __init__(self, tier: HostedTier, store: StoreSpec | None) -> None:
        self.tier = tier
        self._store_source = store.hit_source if store is not None else ""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        answer = self.tier.lookup(req_context.req_id, key)
        if answer is Answer.LATER:
            return LookupResult.RETRY
        return LookupResult.HIT if answer is Answer.HIT else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """Asked by vLLM 0.32 and later."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        stored = self.tier.came_from_store(req_context.req_id, key)
        return CacheHitSource(self._store_source if stored else HostSpec.hit_source)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> SlotsSpec:
        return SlotsSpec(self.tier.prepare_load(req_context.req_id, keys), [])

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.tier.touch(list(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.tier.complete_load(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """What is left out is not offered again for this request."""
        orders = self.tier.prepare_store(req_context.req_id, keys)
        slots = SlotsSpec([slot for _, _, slot in orders], [key for _, key, _ in orders])
        return PrepareStoreOutput([block for block, _, _ in orders], slots, evicted_keys=[])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.tier.complete_store(keys, success)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.tier.request_finished(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.tier.end_step(context.new_req_ids)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Runs of blocks that came to one tier, or went from it, in order."""
        for (in_host, stored), run in groupby(self.tier.take_happened(), lambda one: one[1:]):
            medium = Medium.CPU if in_host else Medium.STORAGE
            keys = [cast("OffloadKey", one.block) for one in run]
            yield OffloadingEvent(keys, medium, removed=not stored, removal_expected=in_host)

    def reset_cache(self) -> None:
        self.tier.reset()

    def shutdown(self) -> None:
        self.tier.close()


@dataclass
class _Job:
    future: Future[float]
    is_load: bool
    num_bytes: int


class HostedWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between paged KV and the slots of a region, one copier for each KV cache group."""

    def __init__(self, region: SlotRegion, copiers: Sequence[Copier]) -> None:
        self._region = region
        self._copiers = copiers
        self._jobs: dict[int, _Job] = {}
        self._loader = io_executor(COPIERS, "load")
        self._gatherer = io_executor(1, "gather-end")
        # Two loads from one slot may end at once: each would count its end from the same number.
        self._marking = threading.Lock()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: SlotsSpec) -> bool:
        rows = self._region.memory.rows
        with self._marking:
            self._region.clear(dst_spec.slots)
        copies = [
            copier.gather(blocks, rows, slots)
            for copier, blocks, slots in self._parts(src_spec, dst_spec.slots)
        ]
        future = self._gatherer.submit(self._end_store, copies, dst_spec, time.perf_counter())
        self._note(job_id, future, False, src_spec)
        return True

    def _end_store(self, copies: list[Copy], slots: SlotsSpec, began: float) -> float:
        held = [stamp(key) for key in slots.keys]
        try:
            for copy in copies:
                copy.wait()
        except RuntimeError as error:
            # vLLM takes no failed transfer; the missing stamps tell our side of the scheduler.
            logger.error("blocks were not copied to host memory: %s", error)
            held = [b""] * len(held)
        self._mark(slots.slots, held)
        return time.perf_counter() - began

    # `expedited` is said by vLLM 0.33 and later.
    def submit_load(
        self,
        job_id: int,
        src_spec: SlotsSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        parts = list(self._parts(dst_spec, src_spec.slots))
        fences = [copier.fence() for copier, _, _ in parts]
        future = self._loader.submit(self._load, parts, fences, src_spec.slots)
        self._note(job_id, future, True, dst_spec)
        return True

    def _load(
        self,
        parts: list[tuple[Copier, list[int], list[int]]],
        fences: list[object],
        slots: list[int],
    ) -> float:
        began = time.perf_counter()
        for (copier, blocks, rows), fence in zip(parts, fences, strict=True):
            copier.scatter(self._region.memory.rows, rows, blocks, fence)
        self._mark(slots, None)
        return time.perf_counter() - began

    def _mark(self, slots: Iterable[int], held: Iterable[bytes] | None) -> None:
        """Count the end of a transfer; `held`: what the slots hold now, None: what they held."""
        with self._marking:
            if held is None:
                for slot in slots:
                    self._region.count_end(slot)
                return
            for slot, one in zip(slots, held, strict=True):
                self._region.mark(slot, self._region.ended(slot) + 1, one)

    def _parts(
        self, paged: GPULoadStoreSpec, slots: list[int]
    ) -> Iterator[tuple[Copier, list[int], list[int]]]:
        """The blocks and slots of each KV cache group that has any."""
        start = 0
        for copier, size in zip(self._copiers, paged.group_sizes, strict=True):
            stop = start + size
            if size:
                yield copier, paged.block_ids[start:stop].tolist(), slots[start:stop]
            start = stop
        assert start == len(slots), f"{start} paged blocks for {len(slots)} slots"

    def _note(
        self, job_id: int, future: Future[float], is_load: bool, paged: GPULoadStoreSpec
    ) -> None:
        sizes = zip(self._copiers, paged.group_sizes, strict=True)
        num_bytes = sum(copier.payload_bytes * size for copier, size in sizes)
        self._jobs[job_id] = _Job(future, is_load, num_bytes)

    def get_finished(self) -> list[TransferResult]:
        """A load that failed is said to have failed, on which vLLM ends: the device is broken."""
        done = [job_id for job_id, job in self._jobs.items() if job.future.done()]
        return [self._result(job_id, self._jobs.pop(job_id)) for job_id in done]

    def _result(self, job_id: int, job: _Job) -> TransferResult:
        error = job.future.exception()
        if error is not None:
            logger.error("a %s failed: %s", "load" if job.is_load else "store", error)
            return TransferResult(job_id, success=False)
        return TransferResult(job_id, True, job.num_bytes, job.future.result())

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job_id].future for job_id in job_ids if job_id in self._jobs])

    def shutdown(self) -> None:
        self._loader.shutdown(wait=True)
        self._gatherer.shutdown(wait=True)
        for copier in self._copiers:
            copier.close()
        self._region.close()
