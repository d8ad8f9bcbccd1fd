"""What benches tell a scheduler half in an engine's place: steps, and what workers have done."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiers.connector.multi.multi_connector import MultiWorkerMetadata
from tiers.contract.messages import (
    JobResult,
    LoadJob,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    StoreJob,
)
from tiers.lab.replay.requests import CachedRequests, NewRequest


@dataclass
class Step:
    """A step of the engine, with requests that are new and others."""

    scheduled_new_reqs: list[NewRequest]
    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)


@dataclass
class Output:
    """What the one worker says."""

    kv_connector_worker_meta: MultiWorkerMetadata
    invalid_block_ids: set[int] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)


def all_done(orders: OffloadingConnectorMetadata) -> OffloadingWorkerMetadata:
    """Every job of a step has ended, whole."""
    jobs: list[LoadJob | StoreJob] = [*orders.reqs_to_load, *orders.reqs_to_store]
    return OffloadingWorkerMetadata({job.job_id: JobResult(1, set()) for job in jobs})
