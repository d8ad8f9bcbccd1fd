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
from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

from tiers.connector.policy.block_loader import SharedLoad
from tiers.connector.scheduler.tier import TierRequest
from tiers.contract.messages import NO_PLACE, JobResult, LoadJob, MoveJob, PromptPlace, StoreJob


@dataclass
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


class StoreShare(NamedTuple):
    """One request's blocks of a store. `numbers`: those that they have among the request's keys.
    `at_once`: whether these are all keys that there are so far, and the first one is put last."""

    tier_request: TierRequest
    numbers: list[int]
    at_once: bool


@dataclass
class PendingStore:
    """A store in flight. `shares`: of its requests, in the order of its items. `result`: of the
    ranks that have ended."""

    job: StoreJob
    shares: list[StoreShare] = field(default_factory=list)
    result: JobResult = field(default_factory=JobResult)

    def takes(self, blocks: int, adapter: bytes, place: PromptPlace, most: int) -> bool:
        """Whether another request's blocks may be stored by the same job, of `most` at most."""
        job = self.job
        is_alike = job.adapter == adapter and job.place is place is NO_PLACE
        return is_alike and len(job.items) + blocks <= most


@dataclass
class PendingSlots:
    """Blocks in flight into slots, for no request. `result`: of the ranks that have ended."""

    job: MoveJob | LoadJob
    result: JobResult = field(default_factory=JobResult)


Pending = PendingLoad | PendingStore | PendingSlots


class Jobs:
    """The jobs in flight; used by the scheduler's thread alone."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ids = itertools.count()
        self._in_flight: dict[int, Pending] = {}
        self._steps: dict[int, int] = {}
        """Which step orders a job."""
        # Counted up and down: thousands may be in flight, and every step reports how much.
        self._counts = {kind: [0, 0] for kind in (PendingLoad, PendingStore, PendingSlots)}
        """Jobs and blocks of each kind."""

    def __len__(self) -> int:
        return len(self._in_flight)

    def next_id(self) -> int:
        """The number of a new job, of any kind."""
        return next(self._ids)

    def begin(self, pending: Pending, step: int) -> None:
        self._in_flight[pending.job.job_id] = pending
        self._steps[pending.job.job_id] = step
        self._count(pending, 1)

    def _count(self, pending: Pending, sign: int) -> None:
        counts = self._counts[type(pending)]
        counts[0] += sign
        counts[1] += sign * len(pending.job.items)

    def end(self, job_id: int, result: JobResult) -> Pending | None:
        """Take in the `result` of some ranks; returns the job if these were the last of them."""
        pending = self._in_flight.get(job_id)
        if pending is None:
            return None
        pending.result.fold(result)
        if pending.result.ranks < self._ranks:
            return None
        del self._in_flight[job_id], self._steps[job_id]
        self._count(pending, -1)
        return pending

    def of_steps(self, steps: Set[int], then: int) -> list[Pending]:
        """The jobs that these steps order, which a step `then` orders from now on."""
        found = [job_id for job_id, step in self._steps.items() if step in steps]
        self._steps |= dict.fromkeys(found, then)
        return [self._in_flight[job_id] for job_id in found]

    @property
    def any_loading(self) -> bool:
        return self._counts[PendingLoad][0] > 0

    @property
    def any_into_slots(self) -> bool:
        return self._counts[PendingSlots][0] > 0

    def gauges(self, block_bytes: int) -> dict[str, float]:
        """Counts and bytes of loads and stores in flight, over all ranks (see `stats`)."""
        (loads, loading), (stores, storing), _ = self._counts.values()
        return {
            "loading_jobs": float(loads),
            "loading_bytes": float(loading * block_bytes),
            "storing_jobs": float(stores),
            "storing_bytes": float(storing * block_bytes),
        }
