"""What is known of a request? A chain keeps one record of it for all its tiers."""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spec.chain import StoreScope
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.connector.policy.choice import NO_LOAD, Choice, Stitch
from tiers.connector.policy.request_params import (
    KEY,
    MAX_NAME,
    NO_HINTS,
    NOTHING,
    WEIGHTS,
    Hints,
    RequestLimits,
    RequestReader,
    entry_of,
)
from tiers.connector.policy.tenant_counts import TenantCounts
from tiers.contract.block_groups import BlockGroups
from tiers.contract.engine_info import EngineInfo
from tiers.contract.generation import Generation
from tiers.contract.marks import AdapterReports, MediaMark, RequestMark, joined
from tiers.contract.protocols import (
    NULL_BLOCK,
    BlockCopy,
    Blocks,
    BlockState,
    Request,
    SchedulerOutput,
)
from tiers.contract.stats import CHAIN
from tiers.recent import RecentDict

logger = logging.getLogger(__name__)

NO_BLOCKS = range(0)
MOST_NODES = 4096
"""Of other nodes and their adapters, so many are known by what names their weights."""


@dataclass(eq=False, slots=True)
class RequestState:
    """What a chain knows of one request until that has finished.

    `mark`, `media`: see `EngineInfo`. `may_store`: whether its blocks may be stored, and `scope`:
    which of them. `sent`: what names the weights of a part of its KV that another node sent for it
    or for others; it `awaits_weights` while it is not known yet whether they are its own, and none
    may be stored. `sure`: before so many tokens its blocks are what their hashes say; 0: all are.
    `load_range`: blocks that tiers load for it behind what the engine found, until it runs;
    `NO_BLOCKS`: it was not asked. `omitted`: blocks not to be stored, since neither this engine
    computes them for it nor tiers load them. `hints`: on its prompt's blocks. `junction`: the block
    before which it had all but windows in common with what tiers held. `pieces`: where several
    connectors load it, the paged blocks of each, by its place. `keys`: of all parts of its full
    blocks, as far as they are made, block by block. `tables`: its blocks in the paged KV, per KV
    cache group. `computed`: tokens computed once every scheduled step has run; 0 while it may be
    loading. `complete`: as of `Scheduled`. `is_outdated`: a reset came after some of its blocks
    were computed.

    `choice`: the last decision who loads what; `is_undecided` until the engine begins it, and
    `has_begun` once it did. `held`: coverage of tiers, and `stitches` of it, each with what tiers
    look for yet, valid while `versions` are unchanged. `foreign_loaders`: the engine's own
    connectors that load it; `failed`: those that left it nothing. `loading`, `awaits`: see
    `LoadSharing`. `next_step`: blocks that it needs behind what it loads, until that step runs (see
    `LoadRoom`). `lacks_room`: whether it found a load when the tiers were asked last, and no room.
    `prompt_tokens`: known before it ran or went on. `looking`: see `LookupLatency`. `tiers`: what
    each keeps of it, by the tier itself. `cached`: tokens of its prompt that each tier loaded.
    `to_offer_again`: the tiers that could not take some of its blocks, which they are offered
    again. `in_vain`: tiers loaded it, and that brought nothing.
    """

    request: Request
    limits: RequestLimits
    mark: RequestMark
    media: MediaMark
    wait_budget: WaitBudget
    may_store: bool
    scope: StoreScope
    sent: set[str] = field(default_factory=set)
    awaits_weights: bool = False
    sure: int = 0
    is_asked: bool = False
    in_doubt: bool = False
    is_beside: bool = False
    load_range: range = NO_BLOCKS
    pieces: dict[int, list[int]] = field(default_factory=dict)
    omitted: tuple[range, ...] = ()
    junction: int = 0
    hints: Hints = NO_HINTS
    keys: list[bytes] = field(default_factory=list)
    tables: tuple[list[int], ...] = ()
    computed: int = 0
    complete: int = 0
    is_outdated: bool = False
    choice: Choice = NO_LOAD
    versions: Hashable = None
    held: dict[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    stitches: dict[Hashable, tuple[Stitch, Mapping[int, range]]] = field(default_factory=dict)
    is_undecided: bool = False
    has_begun: bool = False
    foreign_loaders: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    loading: Sequence[bytes] = ()
    awaits: RequestState | None = None
    next_step: int = 0
    lacks_room: bool = False
    prompt_tokens: int = 0
    looking: dict[int, float] = field(default_factory=dict)
    tiers: dict[object, Any] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    to_offer_again: set[object] = field(default_factory=set)
    in_vain: bool = False

    def given(self, tables: Iterable[Iterable[int]]) -> None:
        """The engine has given it these blocks, and no others."""
        self.tables, self.complete = tuple(list(table) for table in tables), 0

    @property
    def shared(self) -> bool:
        """Whether it is known what its blocks are computed from."""
        return self.mark.shared and self.media.shared

    @property
    def stores(self) -> bool:
        """Whether its blocks may be stored."""
        may_store = self.may_store and not self.awaits_weights
        return may_store and not self.is_outdated and self.shared


class Scheduled(NamedTuple):
    """A request in a step, with its tokens computed `before` and `after` it.

    `complete`: leading blocks of which every token is known and then computed. `is_new`: whether
    this is the first step that runs it. `states`: the numbers, among its keys, of the states of
    recurrent layers that the step leaves, and their paged blocks.
    """

    request_state: RequestState
    before: int
    after: int
    complete: int
    is_new: bool = False
    states: Sequence[tuple[int, int]] = ()


class EngineStep(NamedTuple):
    """One step of the engine. `scheduled`: its requests, but for those that answer, complete no
    block and have none that a tier is to be offered again. `overwritten`: paged blocks that it
    writes, that were allocated for loads since the step before, or in which that left a state.
    `added`: paged blocks that requests are given for it, and write. `copies`: of paged blocks, made
    before it."""

    scheduled: list[Scheduled]
    overwritten: set[int]
    added: set[int]
    copies: Sequence[BlockCopy]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that it computes."""
        return sum(
            min(left, run.after - run.before)
            for run in self.scheduled
            if (left := run.request_state.prompt_tokens - run.before) > 0
        )


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
        self.groups = BlockGroups(engine)
        keeps_all = self.groups.parts_kept == len(self.groups)
        self._interval = None if keeps_all else engine.window_interval
        self.step = EngineStep([], set(), set(), ())
        """The step whose orders are being made."""
        self._reader = RequestReader()
        self._media_late = self._of_others = self._outdated = 0
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
        self._emptied: EngineStep | None = None
        """The last step before the engine's own cache was emptied."""
        self._weights: str | None = None
        self._here = secrets.token_bytes(16)
        self._named = RecentDict[str, str](MOST_NODES, math.inf, now)
        """By what stands for another node, with an adapter: the first name of those weights."""
        self._others = RepeatedLog(logger, "chain", "requests came with KV of other weights")

    @classmethod
    def of_connectors(cls, block_tokens: int) -> RequestTable:
        """The requests of a list of the engine's connectors, which has no tier of its own."""
        return cls(EngineInfo({}, block_tokens, block_tokens, 0, caches_prefixes=False))

    def know_weights(self, weights: str) -> None:
        """A shared tier's workers know what names the engine's weights; empty: not yet."""
        before, self._weights = self._weights, weights or self._weights or ""
        if self._weights != before:
            self._judge_all()

    def take_reports(self, reports: AdapterReports) -> None:
        """Take which adapters workers have loaded since their last report."""
        self.engine.marks.take_reports(reports)
        if reports:
            self._judge_all()

    def _judge_all(self) -> None:
        """Judge requests anew: more is known of the weights that they are computed with."""
        for request_state in self._states.values():
            self.judge(request_state)

    def weights_of(self, request: Request) -> str | None:
        """What names the weights of this generation and of the request's adapter to other nodes;
        empty: not known yet; None: no tier is shared."""
        weights, mark = self._weights, self.engine.marks.of(request)
        if weights and mark.shared:
            return weights + self.generation.tag.hex() + mark.content.hex()
        return weights and ""

    def entry_of_weights(self, request: Request) -> dict[str, Any]:
        """What to tell another node, which takes KV of a request, of the weights that computed it.
        It stores what it computes behind that. An empty name, of weights that are not known yet,
        is none of its own; this node, with an adapter from one place, names them later."""
        weights, adapter = self.weights_of(request), getattr(request, "lora_request", None)
        if weights is None:
            return {}
        place = "" if adapter is None else f"{adapter.lora_name}\0{adapter.lora_path}"
        node = hashlib.blake2b(place.encode(), key=self._here, digest_size=16).hexdigest()
        return {WEIGHTS: f"{weights}@{node}"}

    def _sent(self, request: Request) -> Iterator[str]:
        """What names the weights of KV that another node sends for a request; for weights that it
        did not know yet, what stands for them until it does."""
        entry, params = entry_of(request), getattr(request, "kv_transfer_params", {})
        if self.engine.is_alone or not isinstance(entry, Mapping) or WEIGHTS not in entry:
            return
        if params.keys() == {KEY}:  # so a client asks nobody to send anything
            return
        name = entry[WEIGHTS]
        is_ours = isinstance(name, str) and len(name) <= MAX_NAME
        weights, _, node = name.partition("@") if is_ours else ("", "", "")
        named = self._named.get(node)
        if weights and node and named is None:
            self._named.update({node: weights})
        # What has no name any more, as an adapter loaded anew in its place, is not what had one.
        yield weights or (node if named is None else "")

    def judge(self, request_state: RequestState) -> set[str]:
        """Store nothing of a request unless what is computed for it is of its own weights alone, as
        far as the nodes say that sent a part of its KV. Return what names others, or those of which
        nobody knows yet."""
        if not request_state.sent:
            return set()
        ours = self.weights_of(request_state.request)
        named = {one: self._named.get(one) or one for one in request_state.sent}
        others = {one for one, name in named.items() if not name or name != ours}
        request_state.awaits_weights = ours == ""
        if ours and others and request_state.may_store:
            line = (
                "request %s: nothing of it is stored, since another node sent KV of other weights, "
                "or of another version of vLLM or kvtiers"
            )
            self._others.log(line, request_state.request.request_id)
            self._of_others += 1
            request_state.may_store = False
        return others

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
            "other_weights": self._of_others,
            "outdated_requests": self._outdated,
        }
        self._reader.ignored = self._media_late = self._of_others = self._outdated = 0
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
            request_state.sent.update(self._sent(request))
            self.judge(request_state)
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
        self.step = EngineStep([], overwritten, set(), copies)
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
                or (added and request_state.sure)
                or self._computed_since is not None
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
        if self.step is not self._emptied:
            self._computed_since = set()

    def cache_emptied(self) -> None:
        """The engine has reset its own cache, as it refuses to while a request has blocks."""
        self._computed_since, self._emptied = None, self.step


LOOKUP_SECONDS = 1.0
"""How long a request waits for one lookup, unless `max_wait` is short or very long."""


def lookup_seconds(max_wait: float) -> float:
    """How long one lookup may take: half of `max_wait` at most, so that a tier that never answers
    leaves time to load from one that does; and a tenth of a `max_wait` that is longer than usual,
    as it is where tiers are far away or machines are busy."""
    return min(max_wait / 2, max(LOOKUP_SECONDS, max_wait / 10))


class WaitBudget:
    """What one request has left of `max_wait` seconds; used by the scheduler's thread alone.

    A lookup costs at most `lookup_seconds`, even if the engine's step took longer, or asked others
    first. `now` gives seconds, never going back.
    """

    def __init__(self, now: Callable[[], float], max_wait: float = math.inf) -> None:
        self._now = now
        self.lookup_seconds = lookup_seconds(max_wait)
        self._left = max_wait
        self._looking: float | None = None
        self._loading: float | None = None
        self.ended = -math.inf
        """When the last load that the request waited for had ended."""

    def left(self) -> float:
        """Seconds that the request may still wait."""
        return self._left - (0.0 if self._loading is None else self._now() - self._loading)

    def looks(self) -> None:
        """A tier is asked and has no answer yet."""
        if self._looking is None:
            self._looking = self._now()

    @property
    def is_looking(self) -> bool:
        return self._looking is not None

    def found(self) -> None:
        if self._looking is not None:
            self._left -= min(self._now() - self._looking, self.lookup_seconds)
            self._looking = None

    def loads(self) -> None:
        """The request begins to wait for a load, its own or another request's."""
        if self._loading is None:
            self._loading = self._now()

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    def loaded(self, ended: float = math.inf) -> None:
        """The request no longer waits: the load has ended in all tiers, or was given up. `ended`:
        when it had, if that is known; who is asked later has waited for the engine since."""
        self.ended = min(ended, self._now())
        if self._loading is not None:
            self._left -= max(0.0, self.ended - self._loading)
            self._loading = None
