"""A scheduler of requests in one another's way: preempted, aborted, or computed ahead of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.replay.tables import STATE, CachePool, WindowTables
from tiers.contract.connector import SchedulerConnector
from tiers.lab.replay.blocks import Tables
from tiers.lab.replay.requests import ReplayRequest as PlainRequest
from tiers.lab.replay.requests import Status, Step, StepOutput
from tiers.lab.replay.scheduler import Match, ReplayScheduler


@dataclass(eq=False)
class ReplayRequest(PlainRequest):
    """`unknown`: tokens of the answer that steps in flight sample, where the next step does not
    wait for them."""

    kv_hints: object = None
    unknown: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False


@dataclass
class BlockState:
    """The states that a step leaves at the ends of blocks."""

    boundary_state_offloads: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)


@dataclass
class StateStep(Step):
    """`moves_states`: the step leaves nothing in the blocks from which it takes states."""

    kv_connector_block_state: BlockState = field(default_factory=BlockState)
    moves_states: bool = False


class CrowdedScheduler(ReplayScheduler):
    """Decides as vLLM's scheduler does where requests are more than the blocks. With `runs_ahead`
    a step may compute the token which the one before samples, as with vLLM's asynchronous
    scheduling. `drops_last`: see `EngineInfo`.

    Counts `preemptions`, and as `external_hits` the tokens that requests not preempted were to
    load.
    """

    pool: CachePool
    requests: dict[str, ReplayRequest]  # type: ignore[assignment]
    _tables: WindowTables

    def __init__(
        self,
        connector: SchedulerConnector,
        pool: CachePool,
        block_tokens: int,
        batch_tokens: int,
        windows: Sequence[int | None],
        drops_last: bool,
        runs_ahead: bool,
    ) -> None:
        tables = WindowTables(pool, block_tokens, windows)
        super().__init__(connector, tables, batch_tokens)
        self._windows, self._drops_last, self._runs_ahead = windows, drops_last, runs_ahead
        self.preemptions = 0
        self.external_hits = 0

    # -- a step ------------------------------------------------------------------------------

    def plan(self) -> StateStep:
        """As the scheduler, and describe the states that the step leaves at the ends of blocks."""
        moves = not self.pool.caches_prefixes
        step = StateStep(**vars(super().plan()), moves_states=moves)
        for work in step.work:
            end = work.start + step.num_scheduled_tokens[work.request_id]
            hand_over(self.requests[work.request_id], step, self._windows, end)
        return step

    def _go_on(self, step: Step, budget: int) -> int:
        preemptions = self.preemptions
        for request in list(self._running):
            if request in self._running and (self._runs_ahead or not request.is_computing):
                budget -= self._run(request, step, budget)
        # A token of whoever was preempted may still be in flight.
        return 0 if self._runs_ahead and self.preemptions > preemptions else budget

    def give_orders(self, step: Step) -> None:
        super().give_orders(step)
        for work in step.work:
            self.requests[work.request_id].unknown += self._runs_ahead and work.samples

    def _find_prefix(self, request: PlainRequest) -> Tables:
        assert isinstance(request, ReplayRequest)
        if request.skip_reading_prefix_cache:
            return self._tables.find_prefix([])
        tables = super()._find_prefix(request)
        if self._drops_last and tables[0]:
            return self._tables.find_prefix(request.block_hashes[: len(tables[0]) - 1])
        return tables

    def _match(self, request: PlainRequest) -> Match:
        assert isinstance(request, ReplayRequest)
        matched = super()._match(request)
        if matched is Match.BEGINS and not request.num_preemptions:
            self.external_hits += request.loaded_tokens
        return matched

    def _to_begin(self, request: PlainRequest, known: int) -> int:
        """Only what is there or loaded: all else has room once it is computed."""
        return known

    def _ask(self, request: PlainRequest, computed: int) -> int | None:
        assert isinstance(request, ReplayRequest)
        external = super()._ask(request, computed)
        assert not (external and request.skip_reading_prefix_cache)
        return external

    def _run(self, request: PlainRequest, step: Step, budget: int) -> int:
        """As the scheduler; what no window reaches any more has room for its next tokens."""
        if self._next(request, budget)[0] > 0:
            self._tables.drop_behind(request.tables, request.num_computed_tokens)
        return super()._run(request, step, budget)

    def _next(self, request: PlainRequest, budget: int) -> tuple[int, bool]:
        assert isinstance(request, ReplayRequest)
        end = request.num_tokens + request.unknown
        left = end - request.num_computed_tokens
        if request.unknown and end == request.num_prompt_tokens + request.max_tokens:
            return 0, False
        count = up_to_a_block(request, self._windows, min(left, budget))
        return count, count == left

    def _take(self, request: PlainRequest, step: Step, count: int) -> list[int] | None:
        """Take blocks for a request, from later requests if need be."""
        while (fresh := super()._take(request, step, count)) is None:
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

    def _preempt(self, request: PlainRequest) -> None:
        assert isinstance(request, ReplayRequest)
        self.preemptions += 1
        request.num_preemptions += 1
        self._running.remove(request)
        self._restart(request)
        request.status = Status.WAITING
        self._waiting.appendleft(request)

    def _restart(self, request: PlainRequest) -> None:
        assert isinstance(request, ReplayRequest)
        self._free(request)
        request.num_computed_tokens = request.unknown = 0

    def _describe_run(self, request: PlainRequest, step: Step, added: Tables, start: int) -> None:
        if request.has_run and request.status is Status.WAITING:
            step.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
            added = [*request.get_block_ids()]
        super()._describe_run(request, step, added, start)

    # -- ends --------------------------------------------------------------------------------

    def end_step(self, step: Step, sampled: dict[str, int]) -> None:
        """As the scheduler, of requests that may have been preempted or aborted since."""
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
            if work.samples:
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
        """As the scheduler; requests that were aborted while they loaded end with that."""
        invalid = output.invalid_block_ids
        assert not (invalid and self._windows != (None,)), "what precedes a block is not enough"
        super().end_transfers(output)
        for request_id in output.finished_recving:
            request = self.requests[request_id]
            if request.status is not Status.LOADING:
                assert request.status is Status.FINISHED
                self._received.discard(request_id)
                self._drop(request)

    def _know_blocks(self, request: PlainRequest) -> None:
        assert isinstance(request, ReplayRequest)
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
        self._end(request)
        if not loading:
            self._drop(request)


def up_to_a_block(request: ReplayRequest, windows: Sequence[int | None], count: int) -> int:
    """Shorten a step of the next `count` tokens of a request to the end of a block.

    Only models with states need it, while they compute a prompt: one step ends with its last full
    block.
    """
    if STATE not in windows:
        return count
    start, size = request.num_computed_tokens, request.block_tokens
    last = request.num_tokens - request.num_tokens % size
    if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
        return count
    if start + count < last:
        return count - count % size
    return last - start if start < last else count


def hand_over(
    request: ReplayRequest, step: StateStep, windows: Sequence[int | None], computed: int
) -> None:
    """Describe the states that a step leaves of a request, if it ends at a block's end."""
    blocks, rest = divmod(computed, request.block_tokens)
    if rest or blocks > len(request.block_hashes) or STATE not in windows:
        return
    step.kv_connector_block_state.boundary_state_offloads[request.request_id] = [
        (group, request.tables[group][blocks - 1], computed)
        for group, window in enumerate(windows)
        if window == STATE
    ]
