"""HostedManager: a HostedTier as the scheduler of vLLM's OffloadingConnector calls it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from spec.offloading import HostSpec, StoreSpec
from tiers.connector.hosted.hosted_tier import Answer, HostedTier
from tiers.engine.vllm_hosted_worker import SlotsSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext

_RESULTS = {
    Answer.HIT: LookupResult.HIT,
    Answer.MISS: LookupResult.MISS,
    Answer.PENDING: LookupResult.RETRY,
}


class HostedManager(OffloadingManager):  # type: ignore[misc]
    """Translates vLLM's calls, from one thread, for `tier`, which it owns, and its `store`, if
    any."""

    def __init__(self, tier: HostedTier, store: StoreSpec | None) -> None:
        self.tier = tier
        self._store_source = store.hit_source if store is not None else ""

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return _RESULTS[self.tier.lookup(req_context.req_id, key)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """Return the source of a hit; vLLM 0.32 and later ask for it."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        stored = self.tier.came_from_store(req_context.req_id, key)
        return CacheHitSource(self._store_source if stored else HostSpec.hit_source)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> SlotsSpec:
        named = list(keys)
        ordered = _head_first(named, req_context)
        slots = dict(zip(ordered, self.tier.prepare_load(req_context.req_id, ordered), strict=True))
        return SlotsSpec([slots[key] for key in named], [], self.tier.generation)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.tier.touch(_head_first(keys, req_context))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.tier.complete_load(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Return the blocks to store; vLLM does not offer the others again for this request."""
        named = {key: place for place, key in enumerate(keys)}
        orders = self.tier.prepare_store(req_context.req_id, _head_first(named, req_context))
        orders.sort(key=lambda order: named[cast("OffloadKey", order[0])])
        slots = SlotsSpec(
            [slot for _, _, slot in orders], [key for _, key, _ in orders], self.tier.generation
        )
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
        """Yield, in order, runs of blocks that came to one tier or went from it."""
        for (in_host, stored), run in groupby(self.tier.take_happened(), lambda one: one[1:]):
            medium = Medium.CPU if in_host else Medium.STORAGE
            keys = [cast("OffloadKey", one.block) for one in run]
            yield OffloadingEvent(keys, medium, removed=not stored, removal_expected=in_host)

    def reset_cache(self) -> None:
        self.tier.reset()

    def shutdown(self) -> None:
        self.tier.close()


def _head_first(keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
    """The keys by their places in the prompt, so that what is evicted from the tail leaves blocks
    of all KV cache groups: vLLM names group by group, and since 0.32 says the places."""
    place_of = getattr(req_context, "get_offload_key_position", None)
    places = {} if place_of is None else {key: place_of(key) for key in keys}
    if not places or None in places.values():
        return list(keys)
    return sorted(keys, key=lambda key: places[key])
