"""The replay engine's scheduler: which requests a step runs, and what their ends mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tiers.contract.connector import SchedulerConnector
from tiers.lab.replay.blocks import BlockPool, BlockTables
from tiers.lab.replay.requests import (
    ReplayRequest,
    Status,
    Step,
    StepOutput,
    Work,
    describe_run,
    hand_over,
    up_to_a_block,
)


class ReplayScheduler:
    """Decides, as vLLM's scheduler does, and calls the connector where that would. Counts
    `preemptions`, and as `external_hits` the tokens that requests not preempted were to load."""

    def __init__(
        self,
        connector: SchedulerConnector | None,
        pool: BlockPool,
        block_tokens: int,
        batch_tokens: int,
        windows: Sequence[int | None] = (None,),
        drops_last: bool = False,
    ) -> None:
        self._drops_last = drops_last
        self.connector = connector
        self.pool = pool
        self._tables = BlockTables(pool, block_tokens, windows)
        self._windows = windows
        self.preemptions = 0
        self.external_hits = 0
        self.requests: dict[str, ReplayRequest] = {}
        self._block_tokens = block_tokens
        self._batch_tokens = batch_tokens
        self._waiting: deque[ReplayRequest] = deque()
        self._running: list[ReplayRequest] = []
        self._received: set[str] = set()
        self._ended: set[str] = set()

    def add(self, request: ReplayRequest) -> None:
        """Queue a request. Raises ValueError for one that can never fit."""
        self.requests[request.request_id] = request
        self._waiting.append(request)
        if self.connector is not None:
            self.connector.on_new_request(request)

    @property
    def busy(self) -> bool:
        """Whether another step is needed."""
        pending = self.connector is not None and self.connector.has_pending_push_work()
        return bool(self.requests or self._ended) or pending

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Decide the next step and hand its orders to the connector."""
        step = Step(moves_states=not self.pool.caches_prefixes)
        budget = self._batch_tokens
        for request in list(self._running):
            if request in self._running:
                budget -= self._run(request, step, budget)
        for request in self._waiting:
            self._end_load(request)
        for request in list(self._waiting):
            if budget <= 0:
                break
            if request.status is Status.LOADING:
                continue
            if request.num_computed_tokens == 0 and not self._match(request):
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
        step.finished_req_ids, self._ended = self._ended, set()
        if self.connector is not None:
            step.kv_connector_metadata = self.connector.build_connector_meta(step)
        for work in step.work:
            self.requests[work.request_id].num_computed_tokens += len(work.tokens)
        return step

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
        assert self.connector is not None
        self.connector.update_state_after_alloc(request, request, 0)

    def _match(self, request: ReplayRequest) -> bool:
        """Find the request's prefix here and in the connector; False: it can't start now."""
        limit = (request.num_tokens - 1) // self._block_tokens
        hashes = [] if request.skip_reading_prefix_cache else request.block_hashes[:limit]
        tables = self._tables.find_prefix(hashes)
        if self._drops_last and tables[0]:
            tables = self._tables.find_prefix(hashes[: len(tables[0]) - 1])
        computed = len(tables[0]) * self._block_tokens
        external: int | None = 0
        is_async = False
        if self.connector is not None:
            external, is_async = self.connector.get_num_new_matched_tokens(request, computed)
        if external is None:
            return False
        assert not (external and request.skip_reading_prefix_cache)
        known = computed + external
        blocks = known // self._block_tokens
        self._tables.share(tables)
        fresh = self.pool.take(self._tables.lacking(tables, blocks, known))
        if fresh is None:
            self._tables.release(tables)
            return False
        self._tables.grow(tables, fresh, blocks, known)
        request.tables = tables
        request.num_computed_tokens = known
        request.loaded_tokens = external
        if not request.num_preemptions:
            self.external_hits += external
        if self.connector is not None:
            self.connector.update_state_after_alloc(request, request, external)
        if external:
            assert is_async, "the replay engine loads beside its steps only"
            request.status = Status.LOADING
        return True

    def _run(self, request: ReplayRequest, step: Step, budget: int) -> int:
        """Put a request's next tokens into the step; how many fit."""
        start = request.num_computed_tokens
        count = up_to_a_block(request, self._windows, min(request.num_tokens - start, budget))
        if count <= 0:
            return 0
        if not request.tables:
            request.tables = [[] for _ in self._windows]
        self._tables.drop_behind(request.tables, start)
        blocks = -(-(start + count) // self._block_tokens)
        fresh = self._take(request, step, self._tables.lacking(request.tables, blocks, start))
        if fresh is None:
            return 0
        added = self._tables.grow(request.tables, fresh, blocks, start)
        tokens = request.tokens[start : start + count]
        samples = start + count == request.num_tokens
        tables = request.get_block_ids()
        step.work.append(Work(request.request_id, tokens, start, tables, samples))
        step.num_scheduled_tokens[request.request_id] = count
        resumed = request.status is not Status.RUNNING
        describe_run(request, step, added, start, resumed)
        hand_over(request, step, self._windows, start + count)
        return count

    def _take(self, request: ReplayRequest, step: Step, count: int) -> list[int] | None:
        """Take blocks for a request, from others that are less far if need be."""
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
        request.num_computed_tokens = 0

    # -- ends --------------------------------------------------------------------------------

    def update(self, step: Step, output: StepOutput, sampled: dict[str, int]) -> None:
        """Take in a step's results."""
        self._recompute(output.invalid_block_ids, output.failed_recving)
        for work in step.work:
            request = self.requests.get(work.request_id)
            if request is None or request.status is not Status.RUNNING:
                continue
            self._know_blocks(request)
            if work.samples:
                request.tokens.append(sampled[work.request_id])
                ends = len(request.output) == request.max_tokens
                # The step is on its way that computes the token, when the engine learns of it.
                request.hash_blocks(unknown=0 if ends else 1)
                if ends:
                    self._running.remove(request)
                    self._finish(request)
        if self.connector is not None:
            self.connector.update_connector_output(output)
        for request_id in output.finished_recving:
            request = self.requests[request_id]
            if request.status is Status.LOADING:
                self._received.add(request_id)
            else:
                assert request.status is Status.FINISHED
                self._drop(request)
        for request_id in output.finished_sending:
            self._drop(self.requests[request_id])

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
        self._tables.know(request.tables, request.block_hashes, request.num_computed_tokens)

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
        saving = False
        if self.connector is not None:
            saving, _ = self.connector.request_finished_all_groups(request, request.get_block_ids())
        self._ended.add(request.request_id)
        if not saving and not keep_blocks:
            self._drop(request)

    def _drop(self, request: ReplayRequest) -> None:
        self._free(request)
        del self.requests[request.request_id]

    def _free(self, request: ReplayRequest) -> None:
        self._tables.release(request.tables)
        request.tables = []
