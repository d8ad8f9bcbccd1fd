"""The replay's worker: it drives the worker half of a chain and knows what it has under way."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

from tiers.connector.multi.multi_connector import MultiConnectorMetadata, MultiWorkerMetadata
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.worker.loading import LOADERS
from tiers.contract.messages import (
    JobResult,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from tiers.lab.replay.clock import Clock
from tiers.lab.replay.links import Link
from tiers.lab.replay.requests import StepOutput

TURN = 20e-6
"""Seconds of the machine that the driver leaves to threads which have real work to do."""

GIVEN_UP_TURNS = 20
"""How many of them where not all threads that have work can be told."""


class Jobs:
    """Jobs of one tier under way on the worker, by their ids; until when each load may take."""

    def __init__(self) -> None:
        self.loads: dict[int, float] = {}
        self.stores: set[int] = set()

    @property
    def threads(self) -> int:
        """How many of the tier's threads have a job: it has `LOADERS` to load and one to store."""
        return min(LOADERS, len(self.loads)) + min(1, len(self.stores))

    def begin_loads(self, orders: OffloadingConnectorMetadata, now: float) -> None:
        """A step's loads are with the threads."""
        self.loads |= {job.job_id: now + job.seconds for job in orders.reqs_to_load}

    def begin_stores(self, orders: OffloadingConnectorMetadata) -> None:
        """A step's stores are with the threads."""
        self.stores.update(job.job_id for job in orders.reqs_to_store)

    def end(self, said: OffloadingWorkerMetadata | None) -> None:
        """These jobs have ended."""
        if said is not None:
            for job_id in said.jobs:
                self.loads.pop(job_id, None)
            self.stores -= said.jobs.keys()


class Passing:
    """Stores of a tier in host memory: gathered already, and not told until they have passed the
    tier's link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        # They pass in order. One of `dict` would be slow to tell its first after many have gone.
        self._moments: OrderedDict[int, float] = OrderedDict()
        self._results: dict[int, JobResult] = {}

    def begin(self, orders: OffloadingConnectorMetadata, now: float) -> None:
        """These stores wait for all that came before."""
        for job in orders.reqs_to_store:
            self._moments[job.job_id] = self._link.stored_at(len(job.items), now)

    def hold(
        self, said: OffloadingWorkerMetadata | None, now: float
    ) -> OffloadingWorkerMetadata | None:
        """What the tier says, with the stores that have passed for those that it says."""
        jobs = said.jobs if said is not None else {}
        for job_id in jobs.keys() & self._moments.keys():
            self._results[job_id] = jobs.pop(job_id)
        while self._moments:
            job_id, moment = next(iter(self._moments.items()))
            if moment > now or job_id not in self._results:
                break
            del self._moments[job_id]
            said = said or OffloadingWorkerMetadata()
            said.jobs[job_id] = self._results.pop(job_id)
        return said

    def next_end(self) -> float | None:
        """When the next of them has passed."""
        return next(iter(self._moments.values()), None)


class TraceWorker:
    """One rank. A step's loads begin with it and its stores when it ends; several steps may be
    under way, one on each GPU. `links`: of the tiers in host memory, by their places."""

    def __init__(self, half: MultiWorker, clock: Clock, links: Mapping[int, Link]) -> None:
        self._half = half
        self._clock = clock
        self._passing = {place: Passing(link) for place, link in links.items()}
        self._jobs = [Jobs() for _ in half.children]
        self._silence: list[OffloadingWorkerMetadata | None] = [None] * len(half.children)
        self._nothing = MultiConnectorMetadata(
            tuple(OffloadingConnectorMetadata() for _ in half.children), {}
        )

    @property
    def busy(self) -> bool:
        """Whether any transfer is under way."""
        return any(jobs.loads or jobs.stores for jobs in self._jobs) or self.next_end() is not None

    @property
    def is_loading(self) -> bool:
        """Whether any load is."""
        return any(jobs.loads for jobs in self._jobs)

    def begin(self, orders: MultiConnectorMetadata) -> None:
        """A step begins: wait until nothing is read that it overwrites, and begin its loads."""
        self._half.handle_preemptions(orders)
        self._half.bind_connector_metadata(orders)
        self._half.start_load_kv(None)
        self._half.clear_connector_metadata()
        for jobs, part in zip(self._jobs, orders.metadata, strict=True):
            jobs.begin_loads(part, self._clock.now())

    def end(self, orders: MultiConnectorMetadata) -> None:
        """The step is computed: begin its stores."""
        # The requests that it saves were counted when it began.
        self._half.bind_connector_metadata(replace(orders, extra_async_saves={}))
        self._half.wait_for_save()
        self._half.clear_connector_metadata()
        for jobs, part in zip(self._jobs, orders.metadata, strict=True):
            jobs.begin_stores(part)
        for place, passing in self._passing.items():
            passing.begin(orders.metadata[place], self._clock.now())

    def next_end(self) -> float | None:
        """When the next store in host memory has passed its link, or a load has had its time; None:
        none is under way."""
        now = self._clock.now()
        stores = (passing.next_end() for passing in self._passing.values())
        loads = (until for jobs in self._jobs for until in jobs.loads.values() if until > now)
        moments = (one for one in (*stores, *loads) if one is not None and one < math.inf)
        return min(moments, default=None)

    def poll(self) -> StepOutput:
        """What has ended since the last call."""
        half, output = self._half, StepOutput()
        half.bind_connector_metadata(self._nothing)
        results = half.get_transfer_results(set())
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = half.get_block_ids_with_load_errors()
        said = half.build_connector_worker_meta()
        half.clear_connector_metadata()
        parts = list(said.metadata) if isinstance(said, MultiWorkerMetadata) else self._silence[:]
        for jobs, part in zip(self._jobs, parts, strict=True):
            jobs.end(part)
        for place, passing in self._passing.items():
            parts[place] = passing.hold(parts[place], self._clock.now())
        if any(part is not None for part in parts):
            output.kv_connector_worker_meta = MultiWorkerMetadata(tuple(parts))
        return output

    def settle(self, take: Callable[[StepOutput], None]) -> None:
        """Hand over what has ended. Where time is counted, first wait until every thread that has
        a job sleeps on its link: what is left to do then is to wait."""
        quiet = 0
        while True:
            wakes = self._clock.wakes
            output = self.poll()
            said = output.kv_connector_worker_meta is not None or output.finished_recving
            if said:
                take(output)
            if not self._clock.is_counted:
                return
            at_work = sum(jobs.threads for jobs in self._jobs) - self._clock.sleepers
            quiet = quiet + 1 if at_work <= 0 and not said and wakes == self._clock.wakes else 0
            # The thread of a load that was given up sleeps on, and hides one that works.
            if quiet > (0 if at_work == 0 else GIVEN_UP_TURNS):
                return
            if not said:
                time.sleep(TURN)
