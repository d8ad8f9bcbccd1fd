"""The engine of a replay: it decides as vLLM's scheduler does, and computes by waiting."""

from __future__ import annotations

import time
from collections import deque

from tiers.connector.multi.multi_connector import MultiConnectorMetadata
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.policy.request_state import RequestTable
from tiers.contract.stats import Measures, TierStats
from tiers.lab.replay.blocks import BlockPool
from tiers.lab.replay.clock import Clock
from tiers.lab.replay.gpu_steps import Chunk, Gpus, GpuStep, Outcome, answer_step, take
from tiers.lab.replay.kv import PagedKV
from tiers.lab.replay.requests import Status, Step, StepOutput, describe_run
from tiers.lab.replay.trace_requests import TracedRequest
from tiers.lab.replay.trace_worker import TURN, TraceWorker
from tiers.tuning.machine import Machine

LOOK_SECONDS = 5.0
"""Of the machine: how long the counted time stands for a lookup at most."""


class TraceEngine:
    """Serves requests with the two halves of a chain, in the time of `clock`.

    As in vLLM a step goes on with the requests that run and then takes waiting ones in order, of
    which each is asked for when its turn comes; one that loads waits beside the steps. The GPUs
    share scheduler and KV, and each computes a step of its own; with one GPU nothing happens
    within a step. A request has all pages of its prompt from the moment it begins to load or run,
    until its answer is over.
    """

    def __init__(
        self,
        connector: MultiScheduler,
        states: RequestTable,
        worker: TraceWorker,
        kv: PagedKV,
        num_blocks: int,
        block_tokens: int,
        machine: Machine,
        clock: Clock,
    ) -> None:
        self.outcome = Outcome()
        self.stats = TierStats()
        self.requests: dict[str, TracedRequest] = {}
        self._connector = connector
        self._states = states
        self._worker = worker
        self._kv = kv
        self._pool = BlockPool(num_blocks, prefix_caching=True)
        self.block_tokens = block_tokens
        self._machine = machine
        self._clock = clock
        self._waiting: deque[TracedRequest] = deque()
        self._running: list[TracedRequest] = []
        self._answering: list[tuple[float, TracedRequest]] = []
        self._gpus = Gpus(machine.gpus)
        self._has_orders = False

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.requests)

    def add(self, request: TracedRequest) -> None:
        """A request arrives."""
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self._connector.on_new_request(request)

    def next_event(self) -> float | None:
        """When the next step or answer ends; None: none is under way."""
        return min((*self._gpus.ends(), *(end for end, _ in self._answering)), default=None)

    def turn(self) -> bool:
        """Do what is to be done at this moment; whether anything was."""
        now = self._clock.now()
        did = self._end_step(now) | self._end_answers(now)
        while self._gpus.has_idle:
            step = self._schedule()
            if step is None:
                break
            did = True
            self._begin(step, now)
        return did

    def take_stats(self) -> dict[str, Measures]:
        """What the chain has measured since the last call, which the totals gain."""
        stats = self._connector.get_kv_connector_stats() or TierStats()
        self.stats.aggregate(stats)
        return stats.data

    # -- deciding ----------------------------------------------------------------------------

    def _schedule(self) -> list[Chunk] | None:
        """What the next step computes; None: there is nothing for it and no order to give."""
        budget = self._machine.step_tokens
        chunks: list[Chunk] = []
        for request in self._running:
            if budget > 0 and not request.on_gpu:
                budget -= take(request, budget, chunks)
        for request in list(self._waiting):
            if budget <= 0:
                break
            if request.status is not Status.WAITING:
                continue
            if not request.pages and not self._match(request):
                if self._pool.num_free < request.more_pages(self.block_tokens):
                    break
                continue
            if request.status is Status.WAITING:
                self._waiting.remove(request)
                self._running.append(request)
                budget -= take(request, budget, chunks)
        return chunks if chunks or self._has_orders else None

    def _match(self, request: TracedRequest) -> bool:
        """Find its prefix here and in the chain; whether it loads or can run."""
        limit = (request.num_tokens - 1) // self.block_tokens
        pages = self._pool.find_prefix(request.block_hashes[:limit])
        computed = len(pages) * self.block_tokens
        external = self._ask(request, computed)
        if external is None:
            return False
        self._pool.share(pages)
        fresh = self._pool.take(request.more_pages(self.block_tokens) - len(pages))
        if fresh is None:
            self._pool.release(pages)
            return False
        request.pages = pages + fresh
        request.own, request.external, request.lost = computed, external, 0
        request.num_computed_tokens = computed + external
        self._connector.update_state_after_alloc(request, request, external)
        if external:
            request.status = Status.LOADING
            request.loaded_by = self._hits()
            self._has_orders = True
        return True

    def _ask(self, request: TracedRequest, computed: int) -> int | None:
        """What the chain has of a request; None: ask again. Where time is counted it stands while
        stores look."""
        connector, limit = self._connector, time.monotonic() + LOOK_SECONDS
        external, _ = connector.get_num_new_matched_tokens(request, computed)
        while external is None and self._clock.is_counted:
            if time.monotonic() > limit or not self._states.of(request).wait_budget.is_looking:
                break
            time.sleep(TURN)
            external, _ = connector.get_num_new_matched_tokens(request, computed)
        return external

    def _hits(self) -> dict[str, int]:
        """Tokens that each tier is to load for the request that was just begun."""
        hits = {tier: measures.get("hit_tokens") for tier, measures in self.take_stats().items()}
        return {tier: int(n) for tier, n in hits.items() if isinstance(n, int | float) and n}

    # -- steps -------------------------------------------------------------------------------

    def _begin(self, chunks: list[Chunk], now: float) -> None:
        """Give the orders; a step that computes takes a GPU."""
        step = Step(num_scheduled_tokens={c.request.request_id: c.stop - c.start for c in chunks})
        for chunk in chunks:
            describe_run(chunk.request, step, [], chunk.start)
        for _, request in self._answering:
            describe_run(request, step, [], request.num_tokens)
        self._has_orders = False
        orders = self._give(step)
        if not chunks:
            self._worker.end(orders)
            return
        tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        seconds = tokens / self._machine.prefill_rate + self._machine.step_overhead
        if chunks[0].request.counts:
            self.outcome.busy += seconds
        self._gpus.begin(GpuStep(chunks, now, now + seconds, orders))

    def _give(self, step: Step) -> MultiConnectorMetadata:
        orders = self._connector.build_connector_meta(step)
        orders.step = None  # the engine knows its rate
        self._worker.begin(orders)
        return orders

    def _end_step(self, now: float) -> bool:
        """End the step that is over first. What it leaves to compute goes on before others end."""
        step = self._gpus.take_ended(now)
        if step is not None:
            self._end(step)
        return step is not None

    def _end(self, step: GpuStep) -> None:
        for chunk in step.chunks:
            request = chunk.request
            if full := chunk.full(self.block_tokens):
                self._compute(request, full)
            request.on_gpu = False
        self._worker.end(step.orders)
        tokens = sum(chunk.stop - chunk.start for chunk in step.chunks)
        self._connector.computed(tokens, step.ends - step.began)
        for chunk in step.chunks:
            if chunk.stop == chunk.request.num_tokens:
                self._prompt_ends(chunk.request, step.ends)

    def _compute(self, request: TracedRequest, blocks: range) -> None:
        part = slice(blocks.start, blocks.stop)
        self._kv.compute(request.pages[part], request.ids[part])
        self._know(request, blocks)

    def _know(self, request: TracedRequest, blocks: range) -> None:
        for block in blocks:
            self._pool.know(request.pages[block], request.block_hashes[block])

    def _prompt_ends(self, request: TracedRequest, moment: float) -> None:
        self._running.remove(request)
        request.status = Status.ANSWERING
        end = moment + request.answer_tokens * self._machine.decode_seconds_per_token
        self._answering.append((end, request))
        if request.counts:
            self.outcome.count(request, moment)

    def _end_answers(self, now: float) -> bool:
        over = [pair for pair in self._answering if pair[0] <= now]
        self._answering = [pair for pair in self._answering if pair[0] > now]
        for _, request in over:
            if request.answer_ids:
                self._answer(request)
            self._connector.request_finished_all_groups(request, request.get_block_ids())
            self._pool.release(request.pages)
            del self.requests[request.request_id]
        self._has_orders |= bool(over)
        return bool(over)

    def _answer(self, request: TracedRequest) -> None:
        """Compute what an answer filled, in one step, where there is room for it."""
        more = self._pool.take(request.more_pages(self.block_tokens, request.answer_tokens - 1))
        if more is None:
            return
        filled = request.answer(more)
        orders = self._give(answer_step(request, more))
        self._compute(request, filled)
        self._worker.end(orders)

    # -- ends of transfers -------------------------------------------------------------------

    def take(self, output: StepOutput) -> None:
        """Take in what the worker says has ended."""
        for request in self._waiting:
            if request.status is Status.LOADING:
                failed = request.request_id in output.failed_recving
                request.cut(output.invalid_block_ids, failed, self.block_tokens)
        self._connector.update_connector_output(output)
        # Room that came free is offered to what found none, while its request still answers.
        self._has_orders |= bool(self._answering)
        for request_id in output.finished_recving:
            self._loaded(self.requests[request_id])

    def _loaded(self, request: TracedRequest) -> None:
        blocks = request.loading(self.block_tokens)
        if blocks:
            part = slice(blocks.start, blocks.stop)
            self._kv.verify(request.pages[part], request.ids[part], request.request_id)
            self._know(request, blocks)
        request.forget_lost()
        request.status = Status.WAITING
        if request.num_computed_tokens == 0:
            self._pool.release(request.pages)
            request.pages = []
            return
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
            request.lost += 1
        self._connector.update_state_after_alloc(request, request, 0)
