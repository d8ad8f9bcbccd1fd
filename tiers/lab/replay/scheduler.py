"""The replay engine's scheduler: it chooses the requests of a step and takes in its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from tiers.contract.connector import SchedulerConnector
from tiers.lab.replay.blocks import BlockPool, BlockTables
from tiers.lab.replay.requests import (
    ReplayRequest,
    Status,
    Step,
    StepOutput,
    TracedRequest,
    Work,
    describe_run,
    hand_over,
    up_to_a_block,
)


class Match(Enum):
    """What becomes of a request that is to begin."""

    BEGINS = auto()
    """It computes, or loads."""
    NO_ROOM = auto()
    ASK_AGAIN = auto()


class ReplayScheduler:
    """Decides, as vLLM's scheduler does, and calls the connector where that would. Several steps
    may be in flight: each of other requests, or, with `runs_ahead`, also a step that computes the
    token which the one before samples, as with vLLM's asynchronous scheduling.

    Counts `preemptions`, and as `external_hits` the tokens that requests not preempted were to
    load. `whole_prompts`: a request takes all blocks of its prompt when it begins to load or run,
    so that nobody is preempted. `has_orders`: the connector has orders for the next step, even if
    that computes nothing.
    """

    def __init__(
        self,
        connector: SchedulerConnector,
        pool: BlockPool,
        block_tokens: int,
        batch_tokens: int,
        windows: Sequence[int | None] = (None,),
        drops_last: bool = False,
        whole_prompts: bool = False,
        runs_ahead: bool = False,
    ) -> None:
        self._drops_last = drops_last
        self._whole_prompts = whole_prompts
        self._runs_ahead = runs_ahead
        self.connector = connector
        self.pool = pool
        self._tables = BlockTables(pool, block_tokens, windows)
        self._windows = windows
        self.preemptions = 0
        self.external_hits = 0
        self.has_orders = False
        self.requests: dict[str, ReplayRequest] = {}
        self._block_tokens = block_tokens
        self._batch_tokens = batch_tokens
        self._waiting: deque[ReplayRequest] = deque()
        self._running: list[ReplayRequest] = []
        self._answering: list[ReplayRequest] = []
        self._received: set[str] = set()
        self._ended: set[str] = set()

    def add(self, request: ReplayRequest) -> None:
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self.connector.on_new_request(request)

    @property
    def busy(self) -> bool:
        """Whether another step is needed."""
        return bool(self.requests or self._ended) or self.connector.has_pending_push_work()

    # -- a step ------------------------------------------------------------------------------

    def plan(self) -> Step:
        """Choose the next step's requests and begin loads."""
        step = Step(moves_states=not self.pool.caches_prefixes)
        budget, preemptions = self._batch_tokens, self.preemptions
        for request in list(self._running):
            if request in self._running and (self._runs_ahead or not request.is_computing):
                budget -= self._run(request, step, budget)
        if self._runs_ahead and self.preemptions > preemptions:
            budget = 0  # a token of whoever was preempted may still be in flight
        for request in self._waiting:
            self._end_load(request)
        # As in vLLM, those that hold blocks come first: they alone can make room for the others.
        for request in sorted(self._waiting, key=lambda one: one.num_computed_tokens == 0):
            if budget <= 0:
                break
            if request.status is Status.LOADING:
                continue
            if request.num_computed_tokens == 0:
                matched = self._match(request)
                if matched is Match.NO_ROOM:
                    break
                if matched is Match.ASK_AGAIN:
                    continue
            if request.status is not Status.WAITING:
                continue
            ran = self._run(request, step, budget)
            if ran == 0:
                break
            budget -= ran
            self._waiting.remove(request)
            self._running.append(request)
            request.status = Status.RUNNING
        if step.work or self.has_orders:
            for request in self._answering:
                describe_run(request, step, [], request.num_tokens)
                step.num_scheduled_tokens[request.request_id] = 0  # it runs, in no time
        return step

    def give_orders(self, step: Step) -> None:
        """Let the connector put its orders into a step, which begins."""
        step.finished_req_ids, self._ended = self._ended, set()
        step.kv_connector_metadata = self.connector.build_connector_meta(step)
        for work in step.work:
            request = self.requests[work.request_id]
            request.num_computed_tokens += step.num_scheduled_tokens[work.request_id]
            request.is_computing = True
            request.unknown += self._runs_ahead and work.samples

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _end_load(self, request: ReplayRequest) -> None:
        if request.request_id not in self._received:
            return
        self._received.discard(request.request_id)
        request.status = Status.WAITING
        if request.num_computed_tokens == 0:
            self._free(request)
            return
        self._know_blocks(request)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        self.connector.update_state_after_alloc(request, request, 0)

    def _match(self, request: ReplayRequest) -> Match:
        """Find the request's prefix here and in the connector, and begin it where there is room."""
        limit = (request.num_tokens - 1) // self._block_tokens
        hashes = [] if request.skip_reading_prefix_cache else request.block_hashes[:limit]
        tables = self._tables.find_prefix(hashes)
        if self._drops_last and tables[0]:
            tables = self._tables.find_prefix(hashes[: len(tables[0]) - 1])
        computed = len(tables[0]) * self._block_tokens
        external = self._ask(request, computed)
        if external is None:
            return Match.ASK_AGAIN
        assert not (external and request.skip_reading_prefix_cache)
        known = computed + external
        blocks = self._blocks(request.num_tokens if self._whole_prompts else known)
        self._tables.share(tables)
        fresh = self.pool.take(self._tables.missing(tables, blocks, known))
        if fresh is None:
            self._tables.release(tables)
            return Match.NO_ROOM
        self._tables.grow(tables, fresh, blocks, known)
        request.tables = tables
        request.num_computed_tokens = known
        request.local_tokens, request.loaded_tokens = computed, external
        if not request.num_preemptions:
            self.external_hits += external
        self.connector.update_state_after_alloc(request, request, external)
        if external:
            request.status = Status.LOADING
            self.has_orders = True
        return Match.BEGINS

    def _ask(self, request: ReplayRequest, computed: int) -> int | None:
        """Tokens that the connector loads behind `computed`; None: ask again."""
        external, is_async = self.connector.get_num_new_matched_tokens(request, computed)
        assert is_async or not external, "the replay engine loads beside its steps only"
        return external

    def _run(self, request: ReplayRequest, step: Step, budget: int) -> int:
        """Put a request's next tokens into the step; returns their number."""
        start, known = request.num_computed_tokens, request.num_tokens
        end = known + request.unknown
        count = up_to_a_block(request, self._windows, min(end - start, budget))
        is_last = request.unknown and end == request.num_prompt_tokens + request.max_tokens
        if count <= 0 or is_last:
            return 0
        if not request.tables:
            request.tables = [[] for _ in self._windows]
        self._tables.drop_behind(request.tables, start)
        blocks = self._blocks(start + count)
        fresh = self._take(request, step, self._tables.missing(request.tables, blocks, start))
        if fresh is None:
            return 0
        added = self._tables.grow(request.tables, fresh, blocks, start)
        tokens = request.contents(start, start + count)
        samples = start + count == end
        tables = request.get_block_ids()
        step.work.append(Work(request.request_id, tokens, start, tables, samples))
        step.num_scheduled_tokens[request.request_id] = count
        describe_run(request, step, added, start, resumed=request.status is Status.WAITING)
        hand_over(request, step, self._windows, start + count)
        return count

    def _take(self, request: ReplayRequest, step: Step, count: int) -> list[int] | None:
        """Take blocks for a request, from later requests if need be."""
        while (fresh := self.pool.take(count)) is None:
            if request.status is Status.RUNNING:
                idle = [r for r in self._running if r.request_id not in step.num_scheduled_tokens]
                self._preempt(idle[-1])
                if idle[-1] is request:
                    return None
            else:
                waiting = [r for r in self._waiting if r.status is Status.WAITING and any(r.tables)]
                if not waiting or waiting[-1] is request:
                    return None
                self._restart(waiting[-1])
        return fresh

    def _preempt(self, request: ReplayRequest) -> None:
        self.preemptions += 1
        request.num_preemptions += 1
        self._running.remove(request)
        self._restart(request)
        request.status = Status.WAITING
        self._waiting.appendleft(request)

    def _restart(self, request: ReplayRequest) -> None:
        self._free(request)
        request.num_computed_tokens = request.unknown = 0

    # -- ends --------------------------------------------------------------------------------

    def end_step(self, step: Step, sampled: dict[str, int]) -> None:
        """Take in the tokens that a step has computed and sampled."""
        for work in step.work:
            request = self.requests.get(work.request_id)
            if request is None or request.status in (Status.LOADING, Status.FINISHED):
                continue
            is_preempted = request.status is Status.WAITING
            if is_preempted and not self._runs_ahead:
                continue  # its step is computed again
            if not is_preempted:
                request.is_computing = False
                self._know_blocks(request)
            if not work.samples:
                continue
            if isinstance(request, TracedRequest):
                self._running.remove(request)
                self._answering.append(request)
                continue
            self._answered(request, sampled[work.request_id], is_preempted)

    def _answered(self, request: ReplayRequest, token: int, is_preempted: bool) -> None:
        """A token of a request's answer is known. `is_preempted`: since that step began."""
        request.tokens.append(token)
        request.unknown -= self._runs_ahead and not is_preempted
        ends = len(request.output) == request.max_tokens
        # When an engine learns of a token, the step that computes it is in flight.
        request.hash_blocks(unknown=0 if ends or self._runs_ahead else 1)
        if ends:
            (self._waiting if is_preempted else self._running).remove(request)
            self._finish(request)

    def end_transfers(self, output: StepOutput) -> None:
        """Take in the ends of transfers."""
        if output.invalid_block_ids or output.failed_recving:
            self._recompute(output.invalid_block_ids, output.failed_recving)
        self.connector.update_connector_output(output)
        # Room that came free is offered to requests that found none, while they answer.
        self.has_orders |= bool(self._answering)
        for request_id in output.finished_recving:
            request = self.requests[request_id]
            if request.status is Status.LOADING:
                self._received.add(request_id)
            else:
                assert request.status is Status.FINISHED
                self._drop(request)

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
        """The answer of a request has ended that was answered at once."""
        self._answering.remove(request)
        self._finish(request)

    def _recompute(self, invalid: set[int], failed: set[str]) -> None:
        assert not (invalid and self._windows != (None,)), "what precedes a block is not enough"
        for request in self._waiting:
            if request.status is not Status.LOADING:
                continue
            if request.request_id in failed:
                request.num_computed_tokens = 0
            count = request.num_computed_tokens // self._block_tokens
            bad = [i for i, block in enumerate(request.tables[0][:count]) if block in invalid]
            if bad:
                request.num_computed_tokens = bad[0] * self._block_tokens

    def _know_blocks(self, request: ReplayRequest) -> None:
        computed = request.num_computed_tokens - request.unknown
        self._tables.know(request.tables, request.block_hashes, computed)

    def abort(self, request_id: str) -> None:
        """End a request now."""
        request = self.requests.get(request_id)
        if request is None or request.status is Status.FINISHED:
            return
        loading = request.status is Status.LOADING and request_id not in self._received
        self._received.discard(request_id)
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._finish(request, keep_blocks=loading)

    def _finish(self, request: ReplayRequest, keep_blocks: bool = False) -> None:
        request.status = Status.FINISHED
        self.connector.request_finished_all_groups(request, request.get_block_ids())
        self._ended.add(request.request_id)
        self.has_orders = True
        if not keep_blocks:
            self._drop(request)

    def _drop(self, request: ReplayRequest) -> None:
        self._free(request)
        del self.requests[request.request_id]

    def _free(self, request: ReplayRequest) -> None:
        self._tables.release(request.tables)
        request.tables = []
