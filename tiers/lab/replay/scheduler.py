"""The replay engine's scheduler: it chooses the requests of a step and takes in its results."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from tiers.contract.connector import SchedulerConnector
from tiers.lab.replay.blocks import BlockTables, Tables
from tiers.lab.replay.requests import NewRequest, ReplayRequest, Status, Step, StepOutput, Work


class Match(Enum):
    """What becomes of a request that is to begin."""

    BEGINS = auto()
    """It computes, or loads."""
    NO_ROOM = auto()
    ASK_AGAIN = auto()


class ReplayScheduler:
    """Decides, as vLLM's scheduler does, and calls the connector where that would. Several steps
    may be in flight, each of other requests. A request takes all blocks of its prompt when it
    begins to load or run, so that nobody is preempted.

    `has_orders`: the connector has orders for the next step, even if that computes nothing.
    """

    def __init__(
        self, connector: SchedulerConnector, tables: BlockTables, batch_tokens: int
    ) -> None:
        self.connector = connector
        self._tables, self.pool = tables, tables.pool
        self.has_orders = False
        self.requests: dict[str, ReplayRequest] = {}
        self._block_tokens = tables.block_tokens
        self._batch_tokens = batch_tokens
        self._waiting: deque[ReplayRequest] = deque()
        self._running: list[ReplayRequest] = []
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
        step = Step()
        budget = self._go_on(step, self._batch_tokens)
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
        return step

    def _go_on(self, step: Step, budget: int) -> int:
        """Put the next tokens of those that run into the step; returns what is left of its
        budget."""
        for request in self._running:
            if not request.is_computing:
                budget -= self._run(request, step, budget)
        return budget

    def give_orders(self, step: Step) -> None:
        """Let the connector put its orders into a step, which begins."""
        step.finished_req_ids, self._ended = self._ended, set()
        step.kv_connector_metadata = self.connector.build_connector_meta(step)
        for work in step.work:
            request = self.requests[work.request_id]
            request.num_computed_tokens += step.num_scheduled_tokens[work.request_id]
            request.is_computing = True

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
        tables = self._find_prefix(request)
        computed = len(tables[0]) * self._block_tokens
        external = self._ask(request, computed)
        if external is None:
            return Match.ASK_AGAIN
        known = computed + external
        blocks = self._blocks(self._to_begin(request, known))
        self._tables.share(tables)
        fresh = self.pool.take(self._tables.missing(tables, blocks, known))
        if fresh is None:
            self._tables.release(tables)
            return Match.NO_ROOM
        self._tables.grow(tables, fresh, blocks, known)
        request.tables = tables
        request.num_computed_tokens = known
        request.local_tokens, request.loaded_tokens = computed, external
        self.connector.update_state_after_alloc(request, request, external)
        if external:
            request.status = Status.LOADING
            self.has_orders = True
        return Match.BEGINS

    def _find_prefix(self, request: ReplayRequest) -> Tables:
        limit = (request.num_tokens - 1) // self._block_tokens
        return self._tables.find_prefix(request.block_hashes[:limit])

    def _to_begin(self, request: ReplayRequest, known: int) -> int:
        """Tokens that need room for a request to begin, of which `known` need not be computed."""
        return request.num_tokens

    def _ask(self, request: ReplayRequest, computed: int) -> int | None:
        """Tokens that the connector loads behind `computed`; None: ask again."""
        external, is_async = self.connector.get_num_new_matched_tokens(request, computed)
        assert is_async or not external, "the replay engine loads beside its steps only"
        return external

    def _run(self, request: ReplayRequest, step: Step, budget: int) -> int:
        """Put a request's next tokens into the step; returns their number."""
        start = request.num_computed_tokens
        count, samples = self._next(request, budget)
        if count <= 0:
            return 0
        blocks = self._blocks(start + count)
        fresh = self._take(request, step, self._tables.missing(request.tables, blocks, start))
        if fresh is None:
            return 0
        added = self._tables.grow(request.tables, fresh, blocks, start)
        tokens = request.contents(start, start + count)
        tables = request.get_block_ids()
        step.work.append(Work(request.request_id, tokens, start, tables, samples))
        step.num_scheduled_tokens[request.request_id] = count
        self._describe_run(request, step, added, start)
        return count

    def _next(self, request: ReplayRequest, budget: int) -> tuple[int, bool]:
        """How many tokens of a request a step computes next, and whether it then samples one."""
        left = request.num_tokens - request.num_computed_tokens
        return min(left, budget), left <= budget

    def _take(self, request: ReplayRequest, step: Step, count: int) -> list[int] | None:
        """Take blocks for a request; None: too few are free."""
        return self.pool.take(count)

    def _describe_run(self, request: ReplayRequest, step: Step, added: Tables, start: int) -> None:
        """Describe to connectors that a step runs a request from its token `start` on, in the
        blocks `added` besides."""
        if not request.has_run:
            request.has_run = True
            step.scheduled_new_reqs.append(
                NewRequest(request.request_id, request.get_block_ids(), start)
            )
            return
        cached = step.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(tuple(added) if any(added) else None)
        cached.num_computed_tokens.append(start)

    # -- ends --------------------------------------------------------------------------------

    def end_step(self, step: Step, sampled: dict[str, int]) -> None:
        for work in step.work:
            request = self.requests[work.request_id]
            request.is_computing = False
            self._know_blocks(request)
            if work.samples:
                self._take_in(request, sampled)

    def _take_in(self, request: ReplayRequest, sampled: dict[str, int]) -> None:
        """A token of a request's answer is known."""
        request.tokens.append(sampled[request.request_id])
        ends = len(request.output) == request.max_tokens
        # When an engine learns of a token, the step that computes it is in flight.
        request.hash_blocks(unknown=0 if ends else 1)
        if ends:
            self._running.remove(request)
            self._finish(request)

    def end_transfers(self, output: StepOutput) -> None:
        if output.invalid_block_ids or output.failed_recving:
            self._recompute(output.invalid_block_ids, output.failed_recving)
        self.connector.update_connector_output(output)
        self._received |= output.finished_recving

    def _recompute(self, invalid: set[int], failed: set[str]) -> None:
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
        self._tables.know(request.tables, request.block_hashes, request.num_computed_tokens)

    def _finish(self, request: ReplayRequest) -> None:
        self._end(request)
        self._drop(request)

    def _end(self, request: ReplayRequest) -> None:
        """Tell connectors that a request has ended; they may still move its blocks."""
        request.status = Status.FINISHED
        self.connector.request_finished_all_groups(request, request.get_block_ids())
        self._ended.add(request.request_id)
        self.has_orders = True

    def _drop(self, request: ReplayRequest) -> None:
        self._free(request)
        del self.requests[request.request_id]

    def _free(self, request: ReplayRequest) -> None:
        self._tables.release(request.tables)
        request.tables = []
