"""MultiScheduler: a chain's children, of which the load policy chooses who loads."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from spec.chain import ChainSpec, LoadPolicy
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.connector.multi.changes import Changes, Rebuilder
from tiers.connector.multi.multi_connector import (
    MultiConnector,
    MultiConnectorMetadata,
    MultiHandshakeMetadata,
    MultiWorkerMetadata,
    merge_parameters,
)
from tiers.connector.policy.block_loader import BlockLoader, SharedLoad
from tiers.connector.policy.choice import (
    NO_LOAD,
    PENDING,
    Choice,
    clip,
    tokens_of_each,
)
from tiers.connector.policy.chooser import Chooser, LookupLatency
from tiers.connector.policy.doubts import Doubts
from tiers.connector.policy.load_room import LoadRoom
from tiers.connector.policy.load_sharing import LoadSharing
from tiers.connector.policy.request_params import CACHED, KEY
from tiers.connector.policy.request_state import RequestState
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.connector import SchedulerConnector
from tiers.contract.engine_info import EngineInfo
from tiers.contract.generation import Generation
from tiers.contract.messages import OffloadingConnectorMetadata
from tiers.contract.protocols import (
    Blocks,
    ConnectorOutput,
    Request,
    RequestObserver,
    SchedulerOutput,
)
from tiers.contract.stats import CHAIN, TierStats
from tiers.contract.weight_reports import Seen, WeightOrders, WeightReport
from tiers.explain.explanations import Explanations
from tiers.loading.comparison import Comparison

logger = logging.getLogger(__name__)

Finished = tuple[bool, dict[str, Any] | None]
"""What `request_finished` answers: whether blocks must stay, and parameters for the output."""


@dataclass(frozen=True)
class MultiSettings:
    """How a `MultiScheduler` chooses who loads.

    `requests`: those of the chain, which its tiers use, too, or of a list of connectors.
    `load_policy`: unless a chain says so. `now`: seconds, never going back. `observers`: hear of
    every request. `explainer`: notes why each request is served as it is. `rebuilder`: has the
    chain, and changes it while the engine runs; None: there is none. `wake`: has an engine that
    idles make a step. `following`: places of connectors that can load what is behind the prefix
    that others load. `as_computed`: blocks of which so many leading ones look computed, as these
    are shown them.
    """

    requests: RequestTable
    load_policy: LoadPolicy = "first"
    now: Callable[[], float] = time.monotonic
    observers: Sequence[RequestObserver] = ()
    explainer: Explanations = field(default_factory=Explanations)
    rebuilder: Rebuilder | None = None
    wake: Callable[[], None] = lambda: None
    following: Collection[int] = ()
    as_computed: Callable[[Blocks, int], Blocks] = lambda blocks, _: blocks


class MultiScheduler(MultiConnector[SchedulerConnector], SchedulerConnector):
    """Loads from the children that the load policy chooses; stores to all."""

    limits_requests = True
    """It applies the limits that a request sets itself, also as a child of another."""

    def __init__(
        self,
        children: Sequence[SchedulerConnector],
        settings: MultiSettings,
        names: Sequence[str] | None = None,
        chain: str = "",
    ) -> None:
        """`names` and `chain`: see `MultiConnector`."""
        MultiConnector.__init__(self, children, names, chain)
        self._requests = requests = settings.requests
        self._block_tokens = requests.engine.block_tokens
        self._now = now = settings.now
        self._reports_cached = False
        self._loaders = {i: c for i, c in enumerate(children) if isinstance(c, BlockLoader)}
        self._comparison = Comparison(self._block_tokens, now)
        self._prefill = self._comparison.prefill
        self._chooser = Chooser(
            self.children,
            self.names,
            settings.load_policy,
            requests,
            self._comparison,
            LookupLatency(now),
            settings.following,
        )
        self._as_computed = settings.as_computed
        self._in_pieces: list[RequestState] = []
        self._stood = 0
        """Steps in a row that ran nothing and beside which nothing was loading. An engine that can
        go on has no more of them than steps in flight, at most one more than ranks."""
        self._sharing = LoadSharing(requests.engine) if requests.engine.caches_prefixes else None
        self._room = LoadRoom(requests.engine)
        self._doubts = Doubts(requests)
        self._agreement = WeightAgreement(requests.engine.world_size, requests.generation)
        self._unannounced = RepeatedLog(logger, "the weights", "changes without a reset")
        self.changes: Changes | None = None
        """The changes of its chain; None: it lists connectors, or can't change."""
        if settings.rebuilder is not None:
            args = settings.rebuilder, requests.engine.world_size, settings.wake, now
            self.changes = Changes(self, self.take_up, *args)
            self.take_up(settings.rebuilder.chain, range(len(self.children)))
        self._observers = settings.observers
        self.explainer = settings.explainer
        self._prompt_tokens = 0
        self._more_saves: dict[str, int] = {}
        self._loading: dict[str, SharedLoad] = {}
        """By request, until the engine goes on with it."""
        self._received: set[str] = set()
        """Those of which the engine has counted all ends, and which may still load."""
        self._heard: dict[int, Set[int]] = {}
        self._missed: Counter[int] = Counter()
        self._has_strangers = False
        """Whether workers may have another chain, which they find out by their first orders."""

    def on_new_request(self, request: Request) -> None:
        """Observers and every child learn of a request before it is first asked for it."""
        for observer in self._observers:
            observer.arrived(request)
        self._chooser.arrived()
        self.for_each(lambda child: child.on_new_request(request))

    @property
    def engine(self) -> EngineInfo:
        return self._requests.engine

    @property
    def is_up(self) -> bool:
        """Whether any tier is; other connectors of the engine need no marks of ours."""
        return any(getattr(child, "is_up", False) for child in self.children)

    @property
    def is_lost(self) -> bool:
        return all(getattr(child, "is_lost", True) for child in self.children)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        notes = self.explainer.asked(request, num_computed_tokens)
        if self.is_lost:
            self._requests.engine.media.give_up(request, late=False)
        # Wait even if nothing may be loaded: beginning needs the marks.
        if not self._requests.is_marked(request, wait=self.is_up):
            return None, False
        request_state = self._requests.of(request)
        self._room.ends(request_state)
        stands = self._stood > self._requests.engine.world_size + 1
        is_held = stands and self._room.first and not request_state.wait_budget.is_looking
        if self._sharing is not None and self._sharing.waits(request_state):
            choice = PENDING
        elif request_state.is_undecided and (
            is_held
            or ((request_state.in_vain or stands) and request_state.choice.tokens is not None)
        ):
            # vLLM 0.32 has no room for another load, for which it reserves as much again as for one
            # in vain, this request's or another's behind it; to compute takes less. Where it has no
            # room for that either, it asks nobody behind this request, who up to 0.30 may be those
            # that have loaded and hold the room: it is passed by then. Else one that waits is
            # passed by once, and is asked about anew.
            choice = PENDING
            if request_state.choice.tokens and not is_held:
                choice = NO_LOAD._replace(passed=dict.fromkeys(self._loaders, "room"))
        elif request_state.wait_budget.left() <= 0:
            choice = NO_LOAD._replace(passed=dict.fromkeys(range(len(self.children)), "budget"))
        elif (
            request_state.lacks_room
            and self._room.is_short
            and request_state.choice.computed == num_computed_tokens
        ):
            choice = PENDING  # it is behind one that has no room, and would find none
        else:
            request_state.lacks_room = False
            choice = self._chooser.choose(request_state, num_computed_tokens, notes)
            if choice.tokens is None:
                request_state.wait_budget.looks()
            else:
                request_state.wait_budget.found()
                end = num_computed_tokens + choice.tokens
                if self._sharing and self._sharing.joins(
                    request_state, num_computed_tokens, choice.tokens
                ):
                    choice = PENDING
                    loader = request_state.awaits
                    notes.joins(loader.request.request_id if loader else "")
                elif choice.is_async and not self._room.fits(request_state, end):
                    choice = PENDING
                    request_state.lacks_room = True
                    notes.joins(self._room.first)
        request_state.choice = choice._replace(computed=num_computed_tokens)
        request_state.is_undecided = request_state.is_asked = True
        return choice.tokens, choice.is_async

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """Serving children load; the others learn of the blocks, so that they can store them."""
        request_state = self._requests.allocated(request, blocks)
        choice, count = request_state.choice, num_external_tokens // self._block_tokens
        if request_state.is_undecided:
            # Engines call again, with no tokens, when a load beside the steps has ended.
            request_state.is_undecided = False
            if self._loaders and not request_state.has_begun:
                self._prompt_tokens += request.num_prompt_tokens
            loads = not choice.tokens or num_external_tokens > 0
            self._chooser.decided(request_state, choice if loads else NO_LOAD)
            first = choice.computed // self._block_tokens
            request_state.load_range = range(first, first + count)
            in_step = num_external_tokens > 0 and not choice.is_async
            self._doubts.allocated(request_state, choice.computed, in_step)
        elif not request_state.is_asked:  # a list that this chain is in takes all from another
            self._doubts.judge(request_state, 0)
        shares = clip(choice.shares or {}, count)
        serving = tokens_of_each(choice, num_external_tokens, self._block_tokens)
        for index in serving if num_external_tokens else ():
            self._chooser.loads(request_state, index)
        self._room.ends(request_state)
        if num_external_tokens and not self._loaders.keys().isdisjoint(serving):
            self._room.begins(request_state, choice.computed + num_external_tokens)
        if num_external_tokens and choice.tokens:
            request_state.wait_budget.loads()
            if self._sharing is not None:
                self._sharing.begins(request_state, choice.computed, num_external_tokens)
        notes = self.explainer.begins(request, choice, shares, num_external_tokens, self._loaders)
        all_or_nothing = self._requests.engine.media.all_or_nothing(request)
        shared = SharedLoad(len(shares), notes, self._now(), all_or_nothing)
        if shares:
            self._loading[request.request_id] = shared
        firsts = self._begin_pieces(request_state, serving)
        for index, child in enumerate(self.children):
            if index in shares:
                self._loaders[index].load_blocks(request_state, shares[index], shared)
            else:
                first = firsts.get(index, 0)
                seen = self._as_computed(blocks, first) if first else blocks
                child.update_state_after_alloc(request, seen, serving.get(index, 0))
        if num_external_tokens and not choice.is_async:
            self.disable_store(request)

    def _begin_pieces(
        self, request_state: RequestState, serving: Mapping[int, int]
    ) -> dict[int, int]:
        """The block at which each of several connectors begins to load so many tokens; nothing,
        where one loads alone. Workers are told of the paged blocks of each."""
        firsts: dict[int, int] = {}
        if request_state.choice.pieces and len(serving) > 1:
            (table,) = request_state.tables
            size, token = self._block_tokens, request_state.choice.computed
            self._in_pieces.append(request_state)
            request_state.pieces = {}
            for child, tokens in serving.items():
                firsts[child] = token // size
                token += tokens
                request_state.pieces[child] = table[firsts[child] : -(-token // size)]
        return firsts

    def disable_store(self, request: Request) -> None:
        """None of our children stores it; others have no such member."""
        self._requests.of(request).may_store = False

        def disable_store(child: SchedulerConnector) -> None:
            if hasattr(child, "disable_store"):
                child.disable_store(request)

        self.for_each(disable_store)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[str, int]:
        sources: Counter[str] = Counter()
        choice = self._choice_of(request)
        serving = tokens_of_each(choice, num_external_tokens, self._block_tokens)
        for index, tokens in serving.items():
            child = self.children[index]
            sources.update(child.get_external_cache_hit_sources(request, tokens))
        return dict(sources)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        choice = self._choice_of(request)
        serving = tokens_of_each(choice, choice.tokens or 0, self._block_tokens)
        groups = [self.children[i].get_loaded_kv_cache_group_ids(request) for i in serving]
        return tuple(sorted(set().union(*groups)))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiConnectorMetadata:
        """All children's orders, and, once, the saves to wait for."""
        self._has_strangers = False
        step = self._requests.begin_step(scheduler_output)
        measures = self._loaders or self._doubts
        number = self._prefill.step_begins(step.prompt_tokens) if measures else None
        for request_state in self._doubts.step_begins(step, number):
            self.disable_store(request_state.request)
        self._room.step_begins()
        self.explainer.runs(scheduler_output)
        saves, self._more_saves = self._more_saves, {}
        pieces = {one.request.request_id: one.pieces for one in self._in_pieces}
        self._in_pieces.clear()
        changes = () if self.changes is None else self.changes.step()
        metadata = tuple(child.build_connector_meta(scheduler_output) for child in self.children)
        is_loading = any(loader.load_cost.is_loading for loader in self._loaders.values())
        runs = scheduler_output.num_scheduled_tokens or is_loading or self._requests.loads_beside
        self._stood = 0 if runs else self._stood + 1
        orders = self._agreement.orders(metadata, step.number, step.is_first)
        parts = metadata, saves, number, orders, changes, pieces
        return MultiConnectorMetadata(*parts, self.names, {**self._heard})

    def computed(self, tokens: int, seconds: float) -> None:
        """The engine has computed a prompt's tokens, and reports how long that took."""
        if self._prefill.measured(tokens, seconds):
            self._note_prefill_rate()

    def _note_prefill_rate(self) -> None:
        if each := self._prefill.seconds_per_token:
            self._requests.tenants.prefill_token_seconds = each
            for loader in self._loaders.values():
                loader.count(prefill_tokens_per_second=1 / each)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Show each child its metadata only, and restore the output."""
        whole = connector_output.kv_connector_worker_meta
        number = getattr(whole, "step", None)
        if self._prefill.step_ended(number):
            self._note_prefill_rate()
        if self._doubts and number is not None:
            self._doubts.heard(number, connector_output.invalid_block_ids)
        parts: Sequence[Any] = ()
        if isinstance(whole, MultiWorkerMetadata):
            # A step in flight when tiers came has no part for them.
            parts = (*whole.metadata, *(None,) * (len(self.children) - len(whole.metadata)))
            for rank, (number, unheard) in whole.reports.items():
                self._heard[rank] = {number} | (self._heard.get(rank, set()) & unheard)
            if whole.weights is not None:
                self._requests.take_reports(whole.weights.adapters)
                self._missed.update(missed := whole.weights.missed)
                # They raised before ranks had them, in an engine that goes on. What one rank had
                # would end twice there.
                steps = {step for step in missed if self._missed[step] == self.engine.world_size}
                for step in steps:
                    del self._missed[step]
                for loader in self._loaders.values() if steps else ():
                    loader.missed(steps)
            if whole.changes is not None and self.changes is not None:
                self.changes.heard(whole.changes)

        def update(child: SchedulerConnector, part: Any) -> None:
            connector_output.kv_connector_worker_meta = part
            child.update_connector_output(connector_output)

        try:
            self.for_each(update, parts or (None,) * len(self.children))
        finally:
            connector_output.kv_connector_worker_meta = whole
        self._received.update(connector_output.finished_recving or ())
        if self._received:
            connector_output.finished_recving = self._take_received()
        if self._agreement.heard(getattr(whole, "weights", None)):
            self.weights_changed()

    def _take_received(self) -> set[str]:
        """The requests that may run with what was loaded: of the others a rank of ours still loads.
        The engine counts the ranks that tell it of an end, and counts one twice that does so again
        since the step raised behind it."""
        loading = self._loading
        ended = {r for r in self._received if r not in loading or loading[r].has_ended}
        self._received -= ended
        for request_id in ended & loading.keys():
            del loading[request_id]
        self._requests.loads_arrived(ended)
        return ended

    def weights_changed(self) -> None:
        """Begin the next generation: workers saw that the weights are others, or the paged KV
        was gone, and the engine did not report it."""
        self._unannounced.log(
            "the weights changed, or workers slept, and the engine's prefix cache was not reset. "
            "This engine loads nothing again that it stored before, and no other finds what it "
            "stores from now on. Reset that cache after each: it may still serve KV of other "
            "weights or none, and what begins with such KV is not stored (outdated_requests_total)"
        )
        self._requests.reset()
        self.for_each(lambda child: child.weights_changed())

    def has_pending_push_work(self) -> bool:
        """Also while ranks wait for each other's report on the weights, or a change for them."""
        pending = any(child.has_pending_push_work() for child in self.children)
        pending |= self._has_strangers  # an engine that is to end does so before it has requests
        changes = self.changes is not None and self.changes.waits
        return self._agreement.waits or changes or pending

    # -- changes of the chain -----------------------------------------------------------------

    def put_child(self, place: int, name: str, child: SchedulerConnector) -> None:
        super().put_child(place, name, child)
        self._loaders.pop(place, None)
        if isinstance(child, BlockLoader):
            self._loaders[place] = child

    def take_up(self, chain: ChainSpec, places: Sequence[int]) -> None:
        """Load as the chain says, from the children of these places alone, in this order."""
        self._reports_cached = chain.report_cached_tokens
        order = [i for i, tier in zip(places, chain.tiers, strict=True) if tier.may_load]
        always = chain.load_when == "always"
        self._chooser.follow(self.children, self.names, order, chain.load_policy, always)

    def _choice_of(self, request: Request) -> Choice:
        request_state = self._requests.get(request)
        return NO_LOAD if request_state is None else request_state.choice

    def reset_cache(self) -> bool:
        """Reset every child, and begin anew with the requests; False: one refuses."""
        if not self._requests.generation.lasts:
            self._requests.reset()
        answers: list[bool | None] = []
        self.for_each(lambda child: answers.append(child.reset_cache()))
        return False not in answers

    def request_finished(self, request: Request, block_ids: list[int]) -> Finished:
        """The request's blocks stay while any child is saving it."""
        return self._finish(request, lambda child: child.request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> Finished:
        if not all(hasattr(child, "request_finished_all_groups") for child in self.children):
            # An engine's connector for one group only; the engine then has no more.
            (only,) = block_ids
            return self.request_finished(request, only)
        return self._finish(
            request, lambda child: child.request_finished_all_groups(request, block_ids)
        )

    def _finish(
        self, request: Request, finish: Callable[[SchedulerConnector], Finished]
    ) -> Finished:
        """Finish in every child, also when one raises, and forget the request in any case."""
        answers: list[Finished] = []
        request_state = self._requests.get(request)
        try:
            self.for_each(lambda child: answers.append(finish(child)))
            merged: dict[str, Any] | None = None
            for params in (params for _, params in answers if params is not None):
                merged = merge_parameters(merged or {}, params)
            cached = {} if merged or request_state is None else request_state.cached
            if entry := self.entry_of_response(request, cached):
                merged = merge_parameters(merged or {}, {KEY: entry})
        finally:
            if request_state is not None:
                self._room.ends(request_state)
                if self._sharing is not None:
                    self._sharing.ends(request_state)
            self._chooser.gone(request_state)
            try:
                for observer in self._observers:
                    observer.ended(request)
            finally:
                self._requests.forget(request)
        saving = sum(is_saving for is_saving, _ in answers)
        if saving > 1:
            self._more_saves[request.request_id] = saving - 1
        return saving > 0, merged

    def entry_of_response(self, request: Request, cached: Mapping[str, int]) -> dict[str, Any]:
        """Our entry of a response's parameters: what is `cached`, but not beside parameters of
        another connector, which a proxy takes for its own; to one whose KV another node takes, what
        names the weights."""
        params = getattr(request, "kv_transfer_params", None)
        if isinstance(params, Mapping) and params.get("do_remote_decode"):
            return self._requests.weights.entry(request)
        is_ours = not params or (isinstance(params, Mapping) and params.keys() <= {KEY})
        return {CACHED: dict(cached)} if cached and is_ours and self._reports_cached else {}

    def stats_by_child(self) -> dict[str, Any]:
        """As of any connector; the table of requests and the observers add theirs."""
        stats = super().stats_by_child()
        measured = [self._requests.take_measures()]
        if self._prompt_tokens:
            measured.append({CHAIN: {"prompt_tokens": self._prompt_tokens}})
            self._prompt_tokens = 0
        measured += [observer.take_measures() for observer in self._observers]
        for by_tier in measured:
            for name, measures in by_tier.items():
                stats.setdefault(name, TierStats()).add(name, measures)
        return stats

    # -- what any or all children answer ------------------------------------------------------

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        taken = [
            child.register_finished_partial_tail(request, block_ids, partial_tail_offloads)
            for child in self.children
        ]
        return any(taken)

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        for child, shakes in zip(self.children, self._handshakes_of_each(metadata), strict=True):
            child.set_xfer_handshake_metadata(shakes)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        for child, shakes in zip(self.children, self._handshakes_of_each(metadata), strict=True):
            child.set_xfer_handshake_metadata_pp_aware(shakes)

    def _handshakes_of_each(self, metadata: Mapping[Any, Any]) -> Iterator[dict[Any, Any]]:
        wholes = {
            worker: whole
            for worker, whole in metadata.items()
            if isinstance(whole, MultiHandshakeMetadata)
        }
        ours = {w: whole.metadata for w, whole in wholes.items() if whole.chain == self._chain}
        self._has_strangers = len(ours) < len(wholes)
        for index in range(len(self.children)):
            # A child without any handshake is called too, as an engine would.
            yield {worker: each[index] for worker, each in ours.items() if each[index] is not None}

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._room.free_blocks = kv_cache_manager.block_pool.get_num_free_blocks
        self.for_each(lambda child: child.bind_kv_cache_manager(kv_cache_manager))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._room.free_blocks = gpu_block_pool.get_num_free_blocks
        self.for_each(lambda child: child.bind_gpu_block_pool(gpu_block_pool))

    def take_events(self) -> Iterator[Any]:
        for child in self.children:
            yield from child.take_events()

    def get_finished_count(self) -> int | None:
        """The count that all children name; None if any leaves it to the engine.

        Raises ValueError, naming them, if they disagree.
        """
        counts = [child.get_finished_count() for child in self.children]
        if None in counts:
            return None
        if len(set(counts)) > 1:
            pairs = zip(self.names, counts, strict=True)
            named = ", ".join(f"{name}: {count}" for name, count in pairs)
            raise ValueError(f"connectors disagree on how often a request finishes ({named})")
        return next(iter(counts), None)

    def has_pending_block_frees(self) -> bool:
        return any(child.has_pending_block_frees() for child in self.children)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.requires_kv_delivery for child in self.children)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return bool(self.children) and all(
            child.supports_divergent_local_hybrid_hits for child in self.children
        )

    def shutdown(self) -> None:
        """Shut every child down, also when one raises, and then the observers."""
        if self.changes is not None:
            self.changes.close()
        try:
            super().shutdown()
        finally:
            for observer in self._observers:
                observer.close()


class WeightAgreement:
    """Numbers the looks of steps that store, and reports to each rank what all of them saw.

    What a rank stores may be found by others only when every rank saw its weights unchanged: a
    stage of a pipeline computes with what the stage before has made of new weights. One rank alone
    needs no other's report. Used by the scheduler's thread alone.
    """

    def __init__(self, ranks: int, generation: Generation) -> None:
        self._ranks = ranks
        self._generation = generation
        self._seen: dict[int, Seen] = {}
        self._verdicts: dict[int, bool] = {}

    def orders(self, metadata: Sequence[Any], step: int, is_first: bool) -> WeightOrders:
        """The orders for looks of a step with these orders of the tiers (see `EngineStep`)."""
        tiers = [tier for tier in metadata if isinstance(tier, OffloadingConnectorMetadata)]
        # What a step computes may be stored by a later one, when the weights have changed.
        tag = None if all(tier.idle for tier in tiers) else self._generation.in_use()
        if self._ranks == 1:
            return WeightOrders(tag=tag, step=step, is_first=is_first)
        number = step if any(tier.reqs_to_store for tier in tiers) else None
        if number is not None:
            self._seen[number] = Seen(0, unchanged=True)
        verdicts, self._verdicts = self._verdicts, {}
        return WeightOrders(number, verdicts, tag, step, is_first)

    def heard(self, report: WeightReport | None) -> bool:
        """Take in a report of ranks; whether the current generation's weights have changed."""
        if report is None:
            return False
        for number, seen in report.seen.items():
            if number not in self._seen:
                continue  # it is decided
            whole = self._seen[number] = seen.fold(self._seen[number])
            if not whole.unchanged or whole.ranks == self._ranks:
                del self._seen[number]
                self._verdicts[number] = whole.unchanged
        return report.over is not None and report.over == self._generation.tag

    @property
    def waits(self) -> bool:
        """Whether ranks wait for a report that only a step brings."""
        return bool(self._seen or self._verdicts)
