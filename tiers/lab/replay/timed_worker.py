"""The worker of a trace's replay: its KV shows ids of blocks, its transfers pass links."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiers.connector.multi.multi_connector import MultiConnectorMetadata, MultiWorkerMetadata
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.worker.offloading_worker import OffloadingWorker
from tiers.contract.messages import JobResult, OffloadingConnectorMetadata, OffloadingWorkerMetadata
from tiers.errors import KVTiersError
from tiers.lab.replay.clock import Clock
from tiers.lab.replay.links import Link
from tiers.lab.replay.model import ReplayModel
from tiers.lab.replay.requests import Step, StepOutput, TracedRequest
from tiers.lab.replay.scaling import CannotReplay
from tiers.lab.replay.worker import LocalWorker

if TYPE_CHECKING:
    import numpy.typing as npt

TURN = 20e-6
"""Seconds of the machine that the driver leaves to threads which have real work to do."""

GIVEN_UP_TURNS = 20
"""Quiet turns to wait for, where a thread that works may look like one that sleeps."""

MASK = (1 << 64) - 1
MAX_NAMED = 5


class WrongBytes(KVTiersError):
    """A tier served a block whose bytes are not those that were stored."""


@dataclass(frozen=True)
class TraceModel(ReplayModel):
    """Blocks of `width` words (int64), each of which shows the trace's id of its block."""

    def allocate(self, num_blocks: int) -> dict[str, torch.Tensor]:
        """Paged KV. Raises CannotReplay."""
        try:
            kv = torch.zeros((num_blocks, 1, self.width), dtype=torch.int64)
        except RuntimeError as error:  # torch has no other class for this
            raise CannotReplay(
                f"there is no memory for the engine's cache of {num_blocks} blocks of "
                f"{self.width * 8} bytes: take fewer bytes of KV a token, with --scale"
            ) from error
        return {"layers.0.attn": kv}

    def kv_of(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        # Ids that a trace may have are hashes of 64 bits; the products wrap.
        numbers = np.array([block & MASK for block in ids], dtype=np.uint64).astype(np.int64)
        return (numbers * 1_000_003)[:, None] + np.arange(self.width, dtype=np.int64)


class TierJobs:
    """Jobs of one tier in flight on the worker, by their ids; `loads`: until when each may take.
    Stores in host memory, whose tier has a `link` here, are gathered already, and reported once
    they have passed it."""

    def __init__(self, link: Link | None) -> None:
        self.loads: dict[int, float] = {}
        self.stores: set[int] = set()
        self._link = link
        # They pass in order. The first of a `dict` is found slowly after many deletions.
        self._moments: OrderedDict[int, float] = OrderedDict()
        self._results: dict[int, JobResult] = {}

    def store(self, orders: OffloadingConnectorMetadata, now: float) -> None:
        """These stores begin, and wait for all that came before."""
        for job in orders.reqs_to_store:
            self.stores.add(job.job_id)
            if self._link is not None:
                self._moments[job.job_id] = self._link.stored_at(len(job.items), now)

    def end(
        self, report: OffloadingWorkerMetadata | None, now: float
    ) -> OffloadingWorkerMetadata | None:
        """The jobs of a report have ended: the report, of the stores that have passed the link in
        place of those that wait for it."""
        jobs = report.jobs if report is not None else {}
        for job_id in jobs:
            self.loads.pop(job_id, None)
        self.stores -= jobs.keys()
        for job_id in jobs.keys() & self._moments.keys():
            self._results[job_id] = jobs.pop(job_id)
        while self._moments:
            job_id, moment = next(iter(self._moments.items()))
            if moment > now or job_id not in self._results:
                break
            del self._moments[job_id]
            report = report or OffloadingWorkerMetadata()
            report.jobs[job_id] = self._results.pop(job_id)
        return report

    def ends(self, now: float) -> Iterator[float]:
        """When the next store has passed the link, and when loads have had their time."""
        yield from islice(self._moments.values(), 1)
        yield from (until for until in self.loads.values() if now < until < math.inf)


class TimedWorker(LocalWorker):
    """One rank. A step's loads begin with it and its stores when it ends; several steps may be in
    flight, one on each GPU. `links`: of the tiers in host memory, by their places."""

    def __init__(
        self,
        model: TraceModel,
        num_blocks: int,
        half: MultiWorker,
        clock: Clock,
        links: Mapping[int, Link],
    ) -> None:
        super().__init__(model, num_blocks, half)
        self._half, self._clock, self._trace_model = half, clock, model
        # numpy needs no threads for so few bytes; the array is the tensor's memory.
        self._pages = next(iter(self.kv.values())).numpy()[:, 0]
        self._jobs = [TierJobs(links.get(place)) for place in range(len(half.children))]
        self._nothing = MultiConnectorMetadata(
            tuple(OffloadingConnectorMetadata() for _ in half.children), {}
        )

    @property
    def busy(self) -> bool:
        """Whether a thread has a transfer in flight."""
        return any(jobs.loads or jobs.stores for jobs in self._jobs)

    def begin(self, step: Step) -> None:
        """A step begins: wait until nothing is read that it overwrites, and begin its loads."""
        orders = step.kv_connector_metadata
        orders.step = None  # the engine knows its rate
        orders.weights = orders.weights._replace(step=None)  # it is bound twice, beside others
        self._half.handle_preemptions(orders)
        self._half.bind_connector_metadata(orders)
        self._half.start_load_kv(None)
        self._half.clear_connector_metadata()
        now = self._clock.now()
        for jobs, part in zip(self._jobs, orders.metadata, strict=True):
            jobs.loads |= {job.job_id: now + job.seconds for job in part.reqs_to_load}

    def end(self, step: Step) -> StepOutput:
        """The step is computed: begin its stores. `settle` reports the ends of transfers."""
        output, orders = StepOutput(self._forward(step)), step.kv_connector_metadata
        # The requests that it saves were counted when it began.
        self._half.bind_connector_metadata(replace(orders, extra_async_saves={}))
        self._half.wait_for_save()
        self._half.clear_connector_metadata()
        for jobs, part in zip(self._jobs, orders.metadata, strict=True):
            jobs.store(part, self._clock.now())
        return output

    def _forward(self, step: Step) -> dict[str, int]:
        for work in step.work:
            if ids := work.tokens:
                first = work.start // self._model.block_tokens
                pages = work.tables[0][first : first + len(ids)]
                self._pages[pages] = self._trace_model.kv_of(ids)
        return {}

    def verify(self, request: TracedRequest) -> None:
        """Compare every byte that was loaded for a request. Raises WrongBytes."""
        ids = request.contents(request.local_tokens, request.num_computed_tokens)
        if not ids:
            return
        first = request.local_tokens // self._model.block_tokens
        loaded = self._pages[request.tables[0][first : first + len(ids)]]
        wrong = (loaded != self._trace_model.kv_of(ids)).any(axis=1)
        if wrong.any():
            bad = [block for block, is_wrong in zip(ids, wrong, strict=True) if is_wrong]
            raise WrongBytes(
                f"{request.request_id}: {len(bad)} of {len(ids)} loaded blocks have wrong bytes, "
                f"of ids {bad[:MAX_NAMED]}: do not use this chain, and please report it"
            )

    def next_end(self) -> float | None:
        """When the next store in host memory has passed its link, or a load has had its time; None:
        none is in flight."""
        now = self._clock.now()
        return min((end for jobs in self._jobs for end in jobs.ends(now)), default=None)

    @property
    def _threads(self) -> int:
        """Threads of all tiers that have a job: a tier has one to store."""
        children = (child for child in self._half.children if isinstance(child, OffloadingWorker))
        loading = sum(child.loading_threads for child in children)
        return loading + sum(bool(jobs.stores) for jobs in self._jobs)

    def _poll(self) -> StepOutput:
        self._half.bind_connector_metadata(self._nothing)
        output = self._take_results(set())
        self._half.clear_connector_metadata()
        report = output.kv_connector_worker_meta
        parts = list(report.metadata) if report is not None else [None] * len(self._jobs)
        now = self._clock.now()
        parts = [jobs.end(part, now) for jobs, part in zip(self._jobs, parts, strict=True)]
        is_silent = all(part is None for part in parts)
        output.kv_connector_worker_meta = None if is_silent else MultiWorkerMetadata(tuple(parts))
        return output

    def settle(self, take: Callable[[StepOutput], None]) -> None:
        """Hand over the ends of transfers, and wait until every thread that has a job sleeps on its
        link: nothing is left to do then but to wait."""
        quiet = 0
        while True:
            wakes = self._clock.wakes
            output = self._poll()
            has_ends = output.kv_connector_worker_meta is not None or output.finished_recving
            if has_ends:
                take(output)
            at_work = self._threads - self._clock.sleepers
            quiet = quiet + 1 if at_work <= 0 and not has_ends and wakes == self._clock.wakes else 0
            # The thread of a load that was given up sleeps on, and hides one that works.
            if quiet > (0 if at_work == 0 else GIVEN_UP_TURNS):
                return
            if not has_ends:
                time.sleep(TURN)
