"""The engine of a replay: it decides as vLLM's scheduler does, and computes by waiting."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo
from tiers.lab.replay.blocks import BlockPool, BlockTables
from tiers.lab.replay.clock import Clock
from tiers.lab.replay.engine import ReplayEngine
from tiers.lab.replay.links import Link
from tiers.lab.replay.requests import ReplayRequest, Status, Step, StepOutput, TracedRequest
from tiers.lab.replay.scaling import CannotReplay
from tiers.lab.replay.scheduler import Match, ReplayScheduler
from tiers.lab.replay.timed_worker import TURN, TimedWorker, TraceModel
from tiers.tuning.machine import Machine
from tiers.tuning.report import Mark, RoomWait, Served, TierCounts

LOOK_SECONDS = 5.0
"""Of the machine: how long the counted time stands for a look-up at most."""
DROPPED = ("store_dropped_no_slot", "store_dropped_inflight", "store_dropped_budget")
"""Counters of blocks that a tier missed and its rules admitted."""


class GpuStep(NamedTuple):
    """A step on a GPU, until the moment `ends`."""

    step: Step
    began: float
    ends: float


class TimedScheduler(ReplayScheduler):
    """Serves requests of a trace, with a real chain, in the time of a clock."""

    def __init__(self, engine: TimedEngine, info: EngineInfo, states: RequestTable) -> None:
        pool = BlockPool(info.num_blocks, info.caches_prefixes)
        tables = BlockTables(pool, info.block_tokens)
        super().__init__(engine.connector, tables, info.step_tokens)
        self._engine = engine
        self._states = states
        self._answering: list[ReplayRequest] = []
        self._ahead: list[int] = []
        """Blocks that the step in the making computes, in place for whoever begins in it."""

    def plan(self) -> Step:
        """As the scheduler; steps on other GPUs do not find what this one computes."""
        self._ahead.clear()
        step = super().plan()
        self.pool.forget(self._ahead)
        if step.work or self.has_orders:
            for request in self._answering:
                self._describe_run(request, step, [], request.num_tokens)
                step.num_scheduled_tokens[request.request_id] = 0  # it runs, in no time
        return step

    def _run(self, request: ReplayRequest, step: Step, budget: int) -> int:
        count = super()._run(request, step, budget)
        first, end = request.num_computed_tokens, request.num_computed_tokens + count
        self._tables.know(request.tables, request.block_hashes, end)
        self._ahead += request.tables[0][first // self._block_tokens : end // self._block_tokens]
        return count

    def _ask(self, request: ReplayRequest, computed: int) -> int | None:
        """As the scheduler; time stands while stores look."""
        limit = time.monotonic() + LOOK_SECONDS
        while (external := super()._ask(request, computed)) is None:
            if time.monotonic() > limit or not self._states.of(request).wait_budget.is_looking:
                break
            time.sleep(TURN)
        return external

    def _match(self, request: ReplayRequest) -> Match:
        """As the scheduler, and note the tokens that each tier is to load."""
        assert isinstance(request, TracedRequest)
        matched = super()._match(request)
        now = self._engine.clock.now()
        if matched is Match.BEGINS:
            self._engine.room_wait.began(now)
            request.loaded_by = {}
        elif matched is Match.NO_ROOM:
            self._engine.room_wait.refused(now)
        if request.status is Status.LOADING:
            for tier, measures in self._engine.take_stats().items():
                hits = measures.get("hit_tokens")
                if isinstance(hits, int | float) and hits:
                    request.loaded_by[tier] = int(hits)
        return matched

    def _take_in(self, request: ReplayRequest, sampled: dict[str, int]) -> None:
        """Its whole answer is computed at once, later."""
        self._running.remove(request)
        self._answering.append(request)

    def end_transfers(self, output: StepOutput) -> None:
        """As the scheduler; room that came free is offered to requests that found none, while they
        answer."""
        super().end_transfers(output)
        self.has_orders |= bool(self._answering)

    def answer(self, request: TracedRequest) -> Step | None:
        """A step that computes a whole answer, which has ended; None: it finds no room."""
        count = request.max_tokens - 1
        if self._blocks(request.num_tokens + count) - len(request.tables[0]) > self.pool.num_free:
            return None
        request.answer()
        step = Step()
        self._run(request, step, count)
        return step

    def end_answer(self, request: ReplayRequest) -> None:
        self._answering.remove(request)
        self._finish(request)


class TimedEngine(ReplayEngine):
    """Serves the requests of a trace with the two halves of a chain, in the time of `clock`.

    The GPUs share scheduler and KV, and each computes a step of its own; with one GPU nothing
    happens within a step. Answers end after their time and compute nothing, but for one step where
    their blocks were recorded. `links`: of all tiers, by name.
    """

    scheduler: TimedScheduler
    worker: TimedWorker

    def __init__(
        self,
        model: TraceModel,
        info: EngineInfo,
        connector: MultiScheduler,
        states: RequestTable,
        worker: TimedWorker,
        machine: Machine,
        clock: Clock,
        links: Mapping[str, Link],
    ) -> None:
        self.served: list[Served] = []
        """The requests that count, in the order in which their prompts ended."""
        self._hit_tokens: Counter[str] = Counter()
        """Tokens of those that each tier loaded."""
        self._gpu_busy = 0.0
        self.room_wait = RoomWait()
        self.machine, self.clock = machine, clock
        self._states, self._links = states, links
        self._gpu_steps: list[GpuStep] = []
        self._answers: list[tuple[float, TracedRequest]] = []
        super().__init__(model, info, connector, worker)

    def _open_scheduler(self, info: EngineInfo) -> TimedScheduler:
        return TimedScheduler(self, info, self._states)

    def serve(
        self, requests: Iterable[TracedRequest], warm: int, progress: Callable[[int], None]
    ) -> tuple[Mark, Mark]:
        """Serve them all; counts of when the first came that is no longer `warm`, and of the
        end."""
        mark = self._mark()
        for number, request in enumerate(requests):
            self._pass_until(request.arrival)
            if number == warm:
                mark = self._mark()
            self.scheduler.add(request)
            progress(number)
        self._pass_until(None)
        return mark, self._mark()

    def _mark(self) -> Mark:
        self.take_stats()
        now = self.clock.now()
        tiers = [self._counts(name, link) for name, link in self._links.items()]
        return Mark(now, self._gpu_busy, self.room_wait.until(now), tiers)

    def _counts(self, tier: str, link: Link) -> TierCounts:
        def of(*counters: str) -> int:
            found = [self.stats.data.get(tier, {}).get(counter, 0) for counter in counters]
            return int(sum(count for count in found if isinstance(count, int | float)))

        return TierCounts(
            hit_tokens=self._hit_tokens[tier],
            loaded=of("loaded_blocks"),
            dropped=of(*DROPPED),
            stored=of("stored_blocks"),
            load_busy=link.loads.busy,
            store_busy=link.stores.busy,
        )

    def _pass_until(self, arrival: float | None) -> None:
        """Let time pass until then; None: until no request is left."""
        worker, clock = self.worker, self.clock
        while True:
            worker.settle(self._take)
            while self._turn():
                worker.settle(self._take)
            if clock.now() >= arrival if arrival is not None else not self.scheduler.requests:
                return
            ends = [step.ends for step in self._gpu_steps] + [end for end, _ in self._answers]
            moments = [*ends, clock.next_wake(), worker.next_end(), arrival]
            known = [moment for moment in moments if moment is not None]
            if not known and not worker.busy:
                raise CannotReplay("the engine is stuck: nothing is in flight")
            clock.advance(min(known, default=clock.now()))

    def _turn(self) -> bool:
        """Do all that can be done at this moment; False: there was nothing."""
        now = self.clock.now()
        worked = self._end_gpu_step(now) | self._end_answers(now)
        while len(self._gpu_steps) < self.machine.gpus:
            step = self.scheduler.plan()
            if not step.work and not self.scheduler.has_orders:
                break
            worked = True
            self._begin_gpu_step(step, now)
        return worked

    def _begin_gpu_step(self, step: Step, now: float) -> None:
        self.scheduler.has_orders = False
        self.begin(step)
        if not step.work:
            self.end(step)
            return
        tokens = sum(step.num_scheduled_tokens.values())
        seconds = tokens / self.machine.prefill_rate
        if self._request(step.work[0].request_id).counts:
            self._gpu_busy += seconds
        self._gpu_steps.append(GpuStep(step, now, now + seconds))

    def end(self, step: Step) -> None:
        """End a step; the ends of transfers are taken in at other moments, too."""
        self.worker.end(step)
        self.scheduler.end_step(step, {})

    def _end_gpu_step(self, now: float) -> bool:
        """End the step that is over first. Its requests go on before others end."""
        first = min(self._gpu_steps, key=lambda step: step.ends, default=None)
        if first is None or first.ends > now:
            return False
        self._gpu_steps.remove(first)
        step, began, ends = first
        self.end(step)
        self.connector.computed(sum(step.num_scheduled_tokens.values()), ends - began)
        for work in step.work:
            if work.samples:
                request = self._request(work.request_id)
                seconds = request.max_tokens * self.machine.decode_seconds_per_token
                self._answers.append((ends + seconds, request))
                if request.counts:
                    self._hit_tokens.update(request.loaded_by)
                    own, loaded = request.local_tokens, sum(request.loaded_by.values())
                    found = request.num_tokens, own, loaded, request.max_tokens
                    self.served.append(Served(ends - request.arrival, *found))
        return True

    def _end_answers(self, now: float) -> bool:
        over = [request for end, request in self._answers if end <= now]
        self._answers = [pair for pair in self._answers if pair[0] > now]
        for request in over:
            if request.answer_ids and (step := self.scheduler.answer(request)):
                self.begin(step)
                self.end(step)
            self.scheduler.end_answer(request)
        return bool(over)

    def _take(self, output: StepOutput) -> None:
        """Take in the ends of transfers; every loaded byte must be right."""
        self.scheduler.end_transfers(output)
        for request_id in output.finished_recving:
            request = self._request(request_id)
            self.worker.verify(request)
            request.end_load()

    def _request(self, request_id: str) -> TracedRequest:
        request = self.scheduler.requests[request_id]
        assert isinstance(request, TracedRequest)
        return request
