"""Jobs: one tier's loads and stores, from their order to the end on the last rank.

The states of a load, from the lookup on:

| state | what happens | what follows |
|---|---|---|
| asked | `coverage` asks the tiers; those behind a network answer later | waiting, or no load |
| waiting | the engine has no room, or another request loads the blocks | asked or loading |
| loading | the blocks are allocated; a `LoadJob` is in flight on every rank | one of the others |
| received | the last rank of the last tier has ended, with all blocks | the request runs |
| failed | a block was missing or damaged | those before it are used, the rest is computed |
| late | `max_wait` is over; some blocks have not arrived | as when the first of those had failed |

Of a model with attention windows a load that fails in part is of no use: all is computed.
A request that a tier failed is not looked up in that tier again (`TierRequest.recompute`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from tiers.connector.policy.block_loader import SharedLoad
from tiers.connector.scheduler.tier_request import TierRequest
from tiers.contract.generation import Generation
from tiers.contract.messages import (
    JobResult,
    LoadItem,
    LoadJob,
    StoreItem,
    StoreJob,
)


@dataclass(kw_only=True)
class PendingLoad:
    """A load in flight. `blocks`: indexes of the blocks that it loads. `of_block[i]`: the block
    that item i belongs to. `shared`: the load of the request that it is a part of. `result`: of the
    ranks that have ended."""

    job: LoadJob
    tier_request: TierRequest
    blocks: list[int]
    of_block: list[int]
    shared: SharedLoad
    result: JobResult = field(default_factory=JobResult)


@dataclass(kw_only=True)
class PendingStore:
    """A store in flight. `tenant`, `tier_request`: of its request. `numbers[i]`: the key that item
    i has among the request's. `at_once`: whether the job stores all keys that there are so far, in
    one call of the store. `result`: of the ranks that have ended."""

    job: StoreJob
    tenant: str
    tier_request: TierRequest
    numbers: list[int]
    at_once: bool
    result: JobResult = field(default_factory=JobResult)


class Jobs:
    """The jobs in flight; used by the scheduler's thread alone."""

    def __init__(self, ranks: int, generation: Generation) -> None:
        self._ranks = ranks
        self._generation = generation
        self._ids = itertools.count()
        self._loading: dict[int, PendingLoad] = {}
        self._storing: dict[int, PendingStore] = {}
        # Counted up and down: thousands may be in flight, and every step tells how much.
        self._blocks_loading = self._blocks_storing = 0

    def __len__(self) -> int:
        return len(self._loading) + len(self._storing)

    def load(
        self,
        tier_request: TierRequest,
        items: list[LoadItem],
        *,
        blocks: list[int],
        of_block: list[int],
        shared: SharedLoad,
    ) -> LoadJob:
        """Begin a load, within what its request may still wait and what it is worth. `blocks`,
        `of_block`, `shared`: see `PendingLoad`."""
        request_state = tier_request.state
        request_id, left = request_state.request.request_id, request_state.wait_budget.left()
        seconds = min(left, request_state.choice.within)
        job = LoadJob(next(self._ids), request_id, items, seconds, self._generation.tag)
        self._blocks_loading += len(items)
        self._loading[job.job_id] = PendingLoad(
            job=job,
            tier_request=tier_request,
            blocks=blocks,
            of_block=of_block,
            shared=shared,
        )
        return job

    def store(
        self, tier_request: TierRequest, items: dict[int, StoreItem], tenant: str, at_once: bool
    ) -> StoreJob:
        """Begin to store `items`, by the numbers of their keys. `tenant`, `at_once`: see
        `PendingStore`."""
        adapter = tier_request.state.mark.adapter
        tag = self._generation.tag
        job = StoreJob(next(self._ids), list(items.values()), tag, adapter)
        self._blocks_storing += len(items)
        self._storing[job.job_id] = PendingStore(
            job=job,
            tenant=tenant,
            tier_request=tier_request,
            numbers=list(items),
            at_once=at_once,
        )
        return job

    def end(self, job_id: int, result: JobResult) -> PendingLoad | PendingStore | None:
        """Take in the `result` of some ranks; returns the job if these were the last of them."""
        one = self._storing.get(job_id) or self._loading.get(job_id)
        if one is None:
            return None
        one.result.fold(result)
        if one.result.ranks < self._ranks:
            return None
        if isinstance(one, PendingLoad):
            del self._loading[job_id]
            self._blocks_loading -= len(one.job.items)
        else:
            del self._storing[job_id]
            self._blocks_storing -= len(one.job.items)
        return one

    @property
    def any_loading(self) -> bool:
        """Whether there is a load."""
        return bool(self._loading)

    def gauges(self, block_bytes: int) -> dict[str, float]:
        """Counts and bytes of loads and stores in flight, over all ranks (see `stats`)."""
        return {
            "loading_jobs": float(len(self._loading)),
            "loading_bytes": float(self._blocks_loading * block_bytes),
            "storing_jobs": float(len(self._storing)),
            "storing_bytes": float(self._blocks_storing * block_bytes),
        }
