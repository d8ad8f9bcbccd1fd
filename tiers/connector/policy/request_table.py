"""The requests of a chain, and what a step of the engine computes for each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from spec.chain import StoreScope
from tiers.connector.policy.node_weights import NodeWeights
from tiers.connector.policy.request_params import NOTHING, RequestReader
from tiers.connector.policy.request_state import (
    NO_BLOCKS,
    EngineStep,
    RequestState,
    Scheduled,
    WaitBudget,
)
from tiers.connector.policy.tenant_counts import TenantCounts
from tiers.contract.block_groups import BlockGroups
from tiers.contract.engine_info import EngineInfo
from tiers.contract.generation import Generation
from tiers.contract.marks import AdapterReports, MediaMark, joined
from tiers.contract.protocols import (
    NULL_BLOCK,
    BlockCopy,
    Blocks,
    BlockState,
    Request,
    SchedulerOutput,
)
from tiers.contract.stats import CHAIN


class RequestTable:
    """The unfinished requests of a chain; used by the scheduler's thread alone."""

    def __init__(
        self,
        engine: EngineInfo,
        generation: Generation | None = None,
        now: Callable[[], float] = time.monotonic,
        *,
        max_wait: float = math.inf,
        store: StoreScope = "all",
        tenants: TenantCounts | None = None,
    ) -> None:
        """`generation`: of the keys. `now`: seconds, never going back. `max_wait`: seconds that a
        request may wait for all tiers. `store`: what is stored of requests without a limit.
        `tenants`: counts what each gets of the tiers."""
        self.engine = engine
        self.tenants = tenants or TenantCounts()
        self.generation = generation or Generation()
        self.weights = NodeWeights(engine, self.generation, now)
        self.groups = BlockGroups(engine)
        keeps_all = self.groups.parts_kept == len(self.groups)
        self._interval = None if keeps_all else engine.window_interval
        self.step = EngineStep([], set(), set(), ())
        """The step whose orders are being made."""
        self._reader = RequestReader()
        self._media_late = self._outdated = 0
        self._now = now
        self._max_wait = max_wait
        self._store = store
        self._states: dict[str, RequestState] = {}
        self._unmarked: dict[str, WaitBudget] = {}
        """Of requests whose media are waited for."""
        self._allocated: set[int] = set()
        self._computed_since: set[int] | None = None
        """Paged blocks computed or loaded since a reset that left the engine its own cache; None:
        it has none of other weights."""
        self._is_empty = True
        """Whether the engine's own cache has nothing yet, or was emptied since."""

    @classmethod
    def of_connectors(cls, block_tokens: int) -> RequestTable:
        """The requests of a list of the engine's connectors, which has no tier of its own."""
        return cls(EngineInfo({}, block_tokens, block_tokens, 0, caches_prefixes=False))

    def know_weights(self, weights: str) -> None:
        """A shared tier's workers know what names the engine's weights; empty: not yet."""
        if self.weights.know(weights):
            self._judge_all()

    def take_reports(self, reports: AdapterReports) -> None:
        """Take which adapters workers have loaded since their last report."""
        self.engine.marks.take_reports(reports)
        if reports:
            self._judge_all()

    def _judge_all(self) -> None:
        """Judge requests anew: more is known of the weights that they are computed with."""
        for request_state in self._states.values():
            self.weights.judge(request_state)

    def retune(self, max_wait: float, store: StoreScope) -> None:
        """Requests that come from now on may wait so long, and store that."""
        self._max_wait, self._store = max_wait, store

    def get(self, request: Request) -> RequestState | None:
        return self._states.get(request.request_id)

    def is_marked(self, request: Request, wait: bool) -> bool:
        """Whether `of` answers at once: a request's marks are known, or its media are waited for no
        more. `max_wait` is charged; without `wait` media are not waited for at all."""
        if self.ready(request):
            return True
        budget = self._unmarked.setdefault(request.request_id, self._wait_budget())
        budget.found()
        budget.looks()
        if wait and budget.left() > 0:
            return False
        self._media_late += self.engine.media.give_up(request, late=wait) and wait
        return self.ready(request)

    def take_measures(self) -> Mapping[str, Mapping[str, float]]:
        """Those of the chain itself and of its tenants, since the last call."""
        of_chain = {
            "hints_ignored": self._reader.ignored,
            "media_timeouts": self._media_late,
            "other_weights": self.weights.refused,
            "outdated_requests": self._outdated,
        }
        self._reader.ignored = self._media_late = self.weights.refused = self._outdated = 0
        measured = self.tenants.take_measures()
        return {CHAIN: of_chain, **measured} if any(of_chain.values()) else measured

    def _wait_budget(self) -> WaitBudget:
        return WaitBudget(self._now, self._max_wait)

    def of(self, request: Request) -> RequestState:
        """The state of a request, which is known from now on."""
        request_state = self._states.get(request.request_id)
        if request_state is None:
            limits, sure = self._reader.limits(request), 0
            if getattr(request, "resumable", False) and not self.engine.goes_on_right:
                limits, sure = NOTHING, request.num_prompt_tokens  # of its first turn
            budget = self._unmarked.pop(request.request_id, None) or self._wait_budget()
            budget.found()
            request_state = self._states[request.request_id] = RequestState(
                request,
                limits,
                self.engine.marks.of(request),
                self.engine.media.of(request),
                budget,
                may_store=limits.store is not False,
                scope=limits.scope(self._store),
                sure=sure,
                hints=self._reader.hints(request),
            )
            request_state.sent.update(self.weights.sent(request))
            self.weights.judge(request_state)
        return request_state

    def ready(self, request: Request) -> bool:
        """Whether `of` answers at once, with all that decides what may be loaded."""
        # Each begins its work when it is asked.
        is_ready = self.engine.marks.ready(request)
        return self.engine.media.ready(request) and is_ready

    def keys(self, request_state: RequestState) -> list[bytes]:
        """The keys of all blocks that are full by now."""
        new = range(len(request_state.keys) // len(self.groups), self._full(request_state))
        if new:
            media = self.engine.media.of(request_state.request)
            for blocks, mark in self._marked(request_state, media, new):
                whole = self.generation.key(mark)
                request_state.keys += self.groups.keys(
                    request_state.request.block_hashes, blocks, whole
                )
        return request_state.keys

    def marks(self, request_state: RequestState) -> list[tuple[range, bytes]]:
        """What its full blocks depend on beside their hashes and the generation: runs of blocks,
        each with one mark. Waits for nothing."""
        return list(
            self._marked(request_state, request_state.media, range(self._full(request_state)))
        )

    def _marked(
        self, request_state: RequestState, media: MediaMark, blocks: range
    ) -> Iterator[tuple[range, bytes]]:
        size = self.engine.block_tokens
        for some, of_request in request_state.mark.spans(blocks, size):
            for fewer, of_media in media.spans(some, size):
                yield fewer, joined(of_request, of_media)

    def _full(self, request_state: RequestState) -> int:
        if not request_state.mark.shared:
            return 0
        if not self.engine.media.ready(request_state.request):  # it has gone on with more
            return len(request_state.keys) // len(self.groups)
        tokens = len(request_state.request.block_hashes) * self.engine.hash_tokens
        return tokens // self.engine.block_tokens

    def loadable(self, request_state: RequestState) -> int:
        """The block behind the last that could be loaded."""
        is_known = request_state.mark.loadable and request_state.media.shared
        if request_state.is_outdated or not is_known:
            return 0
        known = self._full(request_state)
        if not self.groups.window and not self.engine.drops_last:
            return known
        # A prefix has its windowed parts at its end, which must be where the load ends. And the
        # last token is always computed; its window may reach one token further back. Nor does the
        # block of that token count as one that is found, of which the last is dropped.
        return min(known, (request_state.request.num_tokens - 1) // self.engine.block_tokens)

    def keeps_windows(self, request_state: RequestState, block: int) -> bool:
        """Whether what windows reach is stored of a block: of answers always, since a next turn
        begins anywhere; of prompts before their end, and where they part from others. Else layers
        with windows would cost as much as others, of which each prefix needs all.

        vLLM's own cache keeps the same of prompts (its `prefix_cache_retention_interval`).
        """
        interval, window = self._interval, self.groups.window
        tokens = self.engine.block_tokens
        last = (request_state.request.num_prompt_tokens - 1) // tokens - window
        return (
            interval is None
            or block >= last
            or 0 < request_state.junction - block <= window
            or bool(interval and -(block + 1) % (interval // tokens) < window)
        )

    # -- steps -------------------------------------------------------------------------------

    def allocated(self, request: Request, blocks: Blocks) -> RequestState:
        """Take in the blocks that the engine has given a request. Waits for nothing: where another
        connector loads it whole, ours were not asked about it before."""
        if self.get(request) is None and not self.engine.media.ready(request):
            self._media_late += self.engine.media.give_up(request)
        request_state = self.of(request)
        request_state.given(blocks.get_block_ids())
        request_state.prompt_tokens = request.num_tokens
        if request_state.is_undecided or not request_state.is_asked:  # else it goes on
            request_state.computed = 0
        request_state.is_beside = request_state.in_doubt = True
        # One tier may load into these blocks while another still reads what they held.
        self._allocated.update(*request_state.tables)
        return request_state

    def loads_arrived(self, finished: Iterable[str]) -> None:
        """The loads of these requests beside the steps have ended."""
        for request_id in finished:
            if (request_state := self._states.get(request_id)) is not None:
                request_state.is_beside = False

    @property
    def loads_beside(self) -> bool:
        """Whether anything, which may be another's, loads beside the steps for one of them."""
        return any(request_state.is_beside for request_state in self._states.values())

    def begin_step(self, output: SchedulerOutput) -> EngineStep:
        """Take in what a step runs; it is `step` until the next one."""
        overwritten, self._allocated = self._allocated, set()
        copies: Sequence[BlockCopy] = getattr(output, "kv_cache_block_copies", None) or ()
        for copy in copies:
            overwritten.add(copy.dst_block_id)
            if (since := self._computed_since) is not None:  # it is as old as what is copied
                (since.add if copy.src_block_id in since else since.discard)(copy.dst_block_id)
        number = self.step.number + 1
        self.step = EngineStep([], overwritten, set(), copies, self._is_empty, number)
        self._is_empty &= not (overwritten or output.num_scheduled_tokens)
        states = self._states_left(output)
        tokens, add_written = self.engine.block_tokens, self.groups.add_written
        for new in output.scheduled_new_reqs:
            request_state = self._states.get(new.req_id)
            if request_state is not None:
                request_state.given(new.block_ids)
                request_state.is_beside = False
                before, is_new = new.num_computed_tokens, not request_state.computed
                request_state.computed = after = before + output.num_scheduled_tokens[new.req_id]
                add_written(overwritten, request_state.tables, before)
                add_written(self.step.added, request_state.tables, -(-before // tokens) * tokens)
                left = states.get(new.req_id, ())
                self._runs(request_state, before, after, left, is_new)
        # Hundreds answer in each step, and most of those complete no block.
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, added, before in rows:
            request_state = self._states.get(request_id)
            if request_state is None:
                continue
            is_resumed = request_id in cached.resumed_req_ids
            request_state.is_beside = False
            if begins := is_resumed or not request_state.tables:
                request_state.given(() for _ in added or self.engine.kv_groups)
            elif added:
                self.step.added.update(*added)
            if added:
                for table, more in zip(request_state.tables, added, strict=True):
                    table += more
            if begins:
                add_written(self.step.added, request_state.tables, -(-before // tokens) * tokens)
            after = before + output.num_scheduled_tokens.get(request_id, 0)
            request_state.computed = after
            add_written(overwritten, request_state.tables, before)
            if (
                after // tokens != request_state.complete
                or before < request_state.prompt_tokens
                or request_state.to_offer_again
                or (added and (request_state.sure or self._computed_since is not None))
            ):
                left = states.get(request_id, ())
                self._runs(request_state, before, after, left, is_resumed=is_resumed)
        return self.step

    def _states_left(self, output: SchedulerOutput) -> dict[str, list[tuple[int, int]]]:
        """The states that a step leaves at the ends of blocks, as `Scheduled` has them."""
        block_state: BlockState | None = getattr(output, "kv_connector_block_state", None)
        left: dict[str, list[tuple[int, int]]] = {}
        if block_state is None:
            return left
        for request_id, states in block_state.boundary_state_offloads.items():
            for group, paged, tokens in states:
                number = self.groups.state(group, tokens)
                if number is not None:
                    left.setdefault(request_id, []).append((number, paged))
                    # It is there until the step's end, and the next step may overwrite it.
                    self._allocated.add(paged)
        return left

    def _runs(
        self,
        request_state: RequestState,
        before: int,
        after: int,
        states: Sequence[tuple[int, int]],
        is_new: bool = False,
        is_resumed: bool = False,
    ) -> None:
        if is_new and request_state.scope == "computed":
            request_state.omitted = self._not_computed(request_state, before)
        if self._computed_since is not None:
            self._note_older(request_state, before, begins=is_new or is_resumed)
        if is_new or is_resumed:
            request_state.load_range = NO_BLOCKS
        if self.engine.media.cut(request_state.request, after) < after:
            # Its tokens do not attend to the rest of their image, whatever name the KV has.
            self.engine.media.doubt(request_state.request)
            request_state.may_store = False
        complete = self._complete(request_state, after)
        run = Scheduled(request_state, before, after, complete, is_new, states)
        self.step.scheduled.append(run)

    def _not_computed(self, request_state: RequestState, before: int) -> tuple[range, ...]:
        """The leading blocks of a request that begins with `before` tokens, but those that tiers
        have loaded."""
        # Of a prompt that was loaded whole the engine computes the last token once more.
        stop = (before + 1) // self.engine.block_tokens
        loads = request_state.load_range
        return tuple(filter(None, (range(min(loads.start, stop)), range(loads.stop, stop))))

    def _note_older(self, request_state: RequestState, before: int, begins: bool) -> None:
        """Note what a step computes since a reset, and a request that begins with blocks of which
        some may be older: all that it computes is, too."""
        assert self._computed_since is not None, "the engine's own cache was reset"
        written, tokens = set[int](), self.engine.block_tokens
        if begins:
            if request_state.load_range is not NO_BLOCKS:  # what is behind these is loaded
                before = min(before, request_state.choice.computed)
            whole = -(-before // tokens) * tokens  # of a block it may have found a part
            self.groups.add_written(written, request_state.tables, whole)
            found = set().union(*request_state.tables) - written - {NULL_BLOCK}
            if not (request_state.is_outdated or found <= self._computed_since):
                request_state.is_outdated = True
                self._outdated += 1
        self.groups.add_written(written, request_state.tables, before)
        if request_state.is_outdated:
            self._computed_since -= written
        else:
            self._computed_since |= written

    def _complete(self, request_state: RequestState, after: int) -> int:
        if request_state.scope == "prompt":
            after = min(after, request_state.request.num_prompt_tokens)
        full = after // self.engine.block_tokens
        if full != request_state.complete:  # else nothing is new, as in most steps of an answer
            in_tables = self.groups.blocks_in(request_state.tables)
            full = request_state.complete = min(full, self._full(request_state), in_tables)
        return full

    # -- ends --------------------------------------------------------------------------------

    def ended(self, request_state: RequestState, tables: Sequence[list[int]]) -> Scheduled:
        """What is computed of a request that has ended, and had these block tables then.

        An engine that schedules ahead learns of a step's tokens when the next step is in flight.
        So nobody has offered a block that the last but one token completes. The last token is
        sampled and never computed; what ran ahead of it wrote behind that block. A conversation
        that goes on without that token has others in its place, so that the engine's own count
        of what is computed holds, too.
        """
        request = request_state.request
        request_state.given(tables)
        if not any(tables):
            return Scheduled(request_state, 0, 0, 0)  # it was preempted
        computed = min(request_state.computed, request.num_computed_tokens, request.num_tokens - 1)
        complete = self._complete(request_state, computed)
        request_state.junction = complete  # of a prompt that was aborted
        return Scheduled(request_state, computed, computed, complete)

    def forget(self, request: Request) -> None:
        """Drop a request that has finished, in all tiers."""
        self.engine.media.forget(request.request_id)
        self.engine.marks.forget(request.request_id)
        self._unmarked.pop(request.request_id, None)
        request_state = self._states.pop(request.request_id, None)
        if request_state is not None:
            request_state.wait_budget.loaded()  # nobody waits for a load that may never end
            request_state.tiers.clear()

    def reset(self) -> None:
        """Keep what is stored in a new generation free of what was computed in an older one.

        A request that has blocks has computed some of them with what is reset, so that none of
        its blocks may be stored or loaded. The others begin anew. Nor is what they find in the
        engine's own cache stored, unless that was emptied: it would outlive that cache.
        """
        self._states = {
            i: request_state
            for i, request_state in self._states.items()
            if any(request_state.tables)
        }
        for request_state in self._states.values():
            request_state.is_outdated = True
        if not self._is_empty and self.engine.caches_prefixes:
            self._computed_since = set()

    def cache_emptied(self) -> None:
        """The engine has reset its own cache, as it refuses to while a request has blocks."""
        self._computed_since, self._is_empty = None, True
