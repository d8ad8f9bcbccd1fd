"""Chooser: asks the children of a chain what they have of a request, and chooses who loads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from spec.chain import LoadPolicy
from tiers.connector.policy.block_loader import BlockLoader
from tiers.connector.policy.choice import (
    NO_LOAD,
    PENDING,
    Choice,
    Coverage,
    Stitch,
    behind,
    clip,
    stitched,
    tokens_of_each,
)
from tiers.connector.policy.request_state import RequestState
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.connector import SchedulerConnector
from tiers.explain.notes import UNNOTED, Attempt, Explained
from tiers.loading.comparison import BESIDE, LATE, SLOWER, Comparison, Wish
from tiers.loading.shares import LoadPace, share

COUNTED = {
    SLOWER: "recompute_preferred",
    BESIDE: "recompute_preferred_engine",
    LATE: "recompute_late",
}
"""What counts requests that load nothing, by why a tier was passed."""


class _Question(NamedTuple):
    """What is asked for a request: at most `loadable` tokens, in whole blocks, from `computed`.

    `asked`: connectors of the engine that were. `notes`: hear of all answers. `looking`: our tiers
    that have no answer yet, and for which blocks. `waits`: whether the policy waits for those that
    look, or takes them to have nothing. `but`: children that may not load.
    """

    request_state: RequestState
    computed: int
    loadable: int
    asked: set[int]
    notes: Attempt
    looking: dict[int, range]
    waits: bool
    but: Collection[int] = ()

    def after(self, tokens: int) -> _Question:
        """The same, where so many tokens more are there."""
        return self._replace(computed=self.computed + tokens, loadable=self.loadable - tokens)


class _Plan(NamedTuple):
    """What the policy would load; see `tiers.loading.comparison.Plan`."""

    choice: Choice
    parts: Mapping[int, int]
    size: int

    @property
    def tokens(self) -> int:
        return self.choice.tokens or 0

    def behind(self, first: _Plan) -> _Plan:
        shares = behind(self.choice.shares or {}, first.choice.shares or {})
        tokens = max(self.tokens, first.tokens)
        choice = Choice(tokens, True, shares)
        return _Plan(choice, tokens_of_each(choice, tokens, self.size), self.size)


class Chooser:
    """The load policy of a chain, within the limits that a request sets itself.

    The policy orders the tiers; what it plans is compared with computing (see `Comparison`), and
    planned again without tiers that would be later.

    Its children are tiers of ours or, where no `BlockLoader` is among them, other connectors of the
    engine. Each of those loads the whole prefix it reports or nothing, so that one with more than
    `max_load_tokens` does not serve. Nor is it known how long its loads take: they are not compared
    with computing. Some can load what is behind the prefix that others load (`following`, by their
    places): `stitched` asks these as if that prefix were computed.
    """

    def __init__(
        self,
        children: Sequence[SchedulerConnector],
        names: Sequence[str],
        load: LoadPolicy,
        requests: RequestTable,
        comparison: Comparison,
        waits: LookupLatency,
        following: Collection[int] = (),
    ) -> None:
        """`comparison`: of those of our children that may load. `waits`: of their lookups."""
        self._following = following
        self._comparison = comparison
        self._waits = waits
        self.follow(children, names, range(len(children)), load, always=False)
        self._requests = requests
        self._block_tokens = requests.engine.block_tokens
        self._window = requests.groups.window
        self._dropped = int(requests.engine.drops_last)
        self._waiting = 0
        # Connectors of the engine; ours, and chains of ours, know what they failed to load.
        self._foreign = {
            index: child
            for index, child in enumerate(children)
            if index not in self._loaders and not getattr(child, "limits_requests", False)
        }

    # -- changes of the chain ----------------------------------------------------------------

    def follow(
        self,
        children: Sequence[SchedulerConnector],
        names: Sequence[str],
        order: Sequence[int],
        load: LoadPolicy,
        always: bool,
    ) -> None:
        """Choose among the children of these places alone, in this order, as this policy does, and
        compare with computing unless `always`. What was planned so far stays as it is."""
        self._children = tuple(zip(names, children, strict=True))
        self._order = tuple(order)
        """The places of the children that may load, in load priority."""
        self._loaders = {i: c for i in order if isinstance(c := children[i], BlockLoader)}
        costs = {i: loader.load_cost for i, loader in self._loaders.items()}
        self._comparison.follow(costs, always, load == "stitched")
        stitches = self._stitch if self._loaders else self._piecewise
        self._apply_policy = stitches if load == "stitched" else self._one_child
        self._takes_first = load == "first"

    # -- requests ----------------------------------------------------------------------------

    def arrived(self) -> None:
        self._waiting += 1

    def gone(self, request_state: RequestState | None) -> None:
        """A request waits no more: it begins, or has ended; None: before anything was asked."""
        if request_state is None or not request_state.has_begun:
            self._waiting = max(0, self._waiting - 1)  # some engines announce no arrivals
        if request_state is not None:
            request_state.has_begun = True

    def choose(
        self, request_state: RequestState, num_computed_tokens: int, notes: Attempt = UNNOTED
    ) -> Choice:
        """Who loads what of the tokens beyond the computed ones; `notes` hear why.

        Each connector of the engine is asked before a request begins, whoever serves. Some
        reset their state of the request in this call; without it they would store from blocks that
        the engine has freed.
        """
        if not request_state.computed:
            request_state.failed |= request_state.foreign_loaders
        request_state.foreign_loaders.clear()
        question = self._question(request_state, num_computed_tokens, notes)
        choice = NO_LOAD
        if request_state.limits.max_load_tokens is None or question.loadable > 0:
            planned = self._apply_policy(question)
            choice = self._compared(question, planned) if planned.tokens is not None else PENDING
        if choice.tokens is not None:
            for index in self._foreign.keys() - question.asked:
                self._foreign[index].get_num_new_matched_tokens(
                    request_state.request, num_computed_tokens
                )
        return choice

    def _question(
        self, request_state: RequestState, num_computed_tokens: int, notes: Attempt
    ) -> _Question:
        limits = request_state.limits
        versions = self._versions(request_state, num_computed_tokens)
        if versions is None or versions != request_state.versions:
            self._forget(request_state, versions)
            limited = [name for name, _ in self._children if not limits.may_load(name)]
            notes.asks_tiers(limited, self._order)
        limit = limits.max_load_tokens
        loadable = request_state.request.num_tokens - num_computed_tokens
        loadable = loadable if limit is None else min(loadable, limit)
        loadable -= loadable % self._block_tokens
        waits = self._comparison.token_seconds is None
        return _Question(request_state, num_computed_tokens, loadable, set(), notes, {}, waits)

    @staticmethod
    def _forget(request_state: RequestState, versions: Hashable) -> None:
        """Tiers are to be asked anew, unless these versions come again."""
        request_state.versions = versions
        request_state.held, request_state.stitches = {}, {}

    def _versions(self, request_state: RequestState, computed: int) -> Hashable:
        """Our tiers' coverage of a request is the same while this is; None: it may not be."""
        versions = [loader.version(request_state) for loader in self._loaders.values()]
        known = None not in versions
        loadable = self._requests.loadable(request_state)
        tokens = request_state.request.num_tokens
        return (computed, tokens, loadable, self._order, *versions) if known else None

    def decided(self, request_state: RequestState, choice: Choice) -> None:
        """The engine begins the request as it was chosen."""
        self._forget(request_state, None)
        self._waits.decided(request_state)
        self.gone(request_state)
        self._comparison.decided(choice.shares or {}, choice.probed, choice.seconds)
        if choice.tokens:
            return
        for index in self._loaders.keys() & choice.passed.keys():
            if counter := COUNTED.get(choice.passed[index]):
                self._loaders[index].count(**{counter: 1})

    def loads(self, request_state: RequestState, child: int) -> None:
        """A child begins to load a request beside the steps.

        If that leaves the request nothing, it is chosen for again without having run. A connector
        of the engine, which learns of no failure, would report the same tokens for ever.
        """
        if child in self._foreign:
            request_state.foreign_loaders.add(child)

    # -- comparing ---------------------------------------------------------------------------

    def _compared(self, question: _Question, planned: Choice) -> Choice:
        """What is `planned`, as far as it comes in time and sooner than computing."""
        comparison, request_state = self._comparison, question.request_state
        if not comparison.meters:
            return planned
        question = question._replace(waits=False)
        wish = Wish(
            len(self._blocks(question)),
            request_state.wait_budget.left(),
            max(0, self._waiting - (not request_state.has_begun)),
        )
        verdict = comparison.choose(partial(self._propose, question, planned), wish)
        for child in self._loaders.keys() - question.looking.keys():
            self._waits.answered(child, request_state, self._loaders[child])
        hopes = {i: self._waits.left(i, request_state) for i in question.looking}
        if comparison.hopes(hopes, verdict, wish):
            return PENDING
        choice = NO_LOAD if verdict.plan is None else verdict.plan.choice
        return choice._replace(
            passed=verdict.passed,
            probed=verdict.probed,
            seconds=verdict.seconds,
            within=verdict.within,
        )

    def _propose(
        self, question: _Question, choice: Choice, but: Collection[int], blocks: int | None
    ) -> _Plan | None:
        """The policy's plan without some children, for at most `blocks`; `choice`: with all
        of them, for all."""
        if blocks is not None:
            loadable = min(question.loadable, blocks * self._block_tokens)
            question = question._replace(loadable=loadable)
        if but or blocks is not None:
            choice = self._apply_policy(question._replace(but=but))
        return self._plan(choice) if choice.tokens else None

    def _plan(self, choice: Choice) -> _Plan:
        parts = tokens_of_each(choice, choice.tokens or 0, self._block_tokens)
        return _Plan(choice, parts, self._block_tokens)

    # -- policies ----------------------------------------------------------------------------

    def _one_child(self, question: _Question) -> Choice:
        """The one child that loads, of those that may: of `first` the first that has tokens, else
        the one that has most, of several the first.

        Of `first` a child that is still looking holds back those below it, which are asked all the
        same, so that look-ups of several children run at once. Else it is waited for, unless
        another has all loadable tokens already. Nobody below a child that suffices is asked.
        """
        best, looking = NO_LOAD, False
        for index in self._order:
            if not self._may_load(index, question):
                continue
            tokens, is_async = self._ask(index, question)
            if tokens is None:
                looking = True
            elif tokens > (best.tokens or 0):
                best = self._alone(index, question, tokens, is_async)
                suffices = not looking if self._takes_first else tokens >= question.loadable
                if suffices:
                    return best
        return PENDING if looking else best

    def _alone(self, index: int, question: _Question, tokens: int, is_async: bool) -> Choice:
        if index not in self._loaders:
            return Choice(tokens, is_async, pieces=((index, tokens),))
        start = self._blocks(question).start
        return Choice(
            tokens, is_async, {index: [range(start, start + tokens // self._block_tokens)]}
        )

    def _stitch(self, question: _Question) -> Choice:
        loaders = [i for i in self._loaders if self._may_load(i, question)]
        blocks = self._blocks(question)
        found = self._stitch_of(loaders, question, blocks)
        tokens = self._tokens(found, blocks)
        if found.looking and question.waits and tokens < question.loadable:
            return PENDING
        if not tokens:
            return NO_LOAD
        plan = self._stitched(found, tokens)
        blocks = range(blocks.start, found.stop)  # shared out it ends no later

        def shared(paces: Mapping[int, LoadPace], last: Callable[[int], int]) -> _Plan:
            held = self._coverage_of(paces, question)
            found = stitched(held, blocks, self._window, lambda runs: share(runs, paces, last)[0])
            return self._stitched(found, min(tokens, self._tokens(found, blocks)))

        if len(loaders) > 1:
            plan = self._comparison.shared(loaders, plan, shared)
        return plan.choice

    def _piecewise(self, question: _Question) -> Choice:
        """Each child in turn has what is behind the prefix so far, if it can; or one that can't
        has all, where that is more. Nobody follows one that ends within a block."""
        pieces: list[tuple[int, int]] = []
        tokens, alone = 0, NO_LOAD
        for index in self._order:
            if tokens >= question.loadable:
                break
            if not self._may_load(index, question):
                continue
            follows = index in self._following and not tokens % self._block_tokens
            before = tokens if follows else 0
            found, is_async = self._ask(index, question.after(before))
            if found is None:
                return PENDING
            if found and is_async and before == tokens:
                pieces.append((index, found))
                tokens += found
            elif not before and found > (alone.tokens or 0):
                alone = self._alone(index, question, found, is_async)
        if (alone.tokens or 0) > tokens:
            return alone
        return Choice(tokens, True, pieces=tuple(pieces)) if pieces else NO_LOAD

    def _stitched(self, found: Stitch, tokens: int) -> _Plan:
        shares = clip(found.shares, tokens // self._block_tokens)
        return self._plan(Choice(tokens, True, shares))

    # -- asking ------------------------------------------------------------------------------

    def _may_load(self, index: int, question: _Question) -> bool:
        name, child = self._children[index]
        # A chain within this one limits its tiers itself.
        limits_itself = getattr(child, "limits_requests", False)
        request_state = question.request_state
        if index in question.but or index in request_state.failed:
            return False
        return limits_itself or request_state.limits.may_load(name)

    def _ask(self, index: int, question: _Question) -> tuple[int | None, bool]:
        """How many tokens a child has, and whether it loads them beside the steps."""
        if index in self._loaders:
            blocks = self._blocks(question)
            found = self._stitch_of((index,), question, blocks)
            tokens = self._tokens(found, blocks)
            looking = found.looking and question.waits
            return (None, False) if looking else (tokens, tokens > 0)
        question.asked.add(index)
        request_state = question.request_state
        _, child = self._children[index]
        answer = child.get_num_new_matched_tokens(request_state.request, question.computed)
        limit = request_state.limits.max_load_tokens
        return (0, False) if limit is not None and (answer[0] or 0) > question.loadable else answer

    def _stitch_of(self, loaders: Sequence[int], question: _Question, blocks: range) -> Stitch:
        """What these have together, put together once for a request that waits while nothing
        changes: of long prompts it costs a step a millisecond. Those that look are asked again."""
        known, asked = question.request_state.stitches, (tuple(loaders), blocks)
        found, looking = known.get(asked, (None, {}))
        if found is None or any(self._held(i, question, looking[i]) is not None for i in looking):
            coverage = self._coverage_of(loaders, question)
            found = stitched(coverage, blocks, self._window)
            found = self._cut_before_media(found, coverage, question, blocks.start)
            # The longest: others' prompts may still be stored while it waits.
            question.request_state.junction = max(question.request_state.junction, found.body)
            looking = {i: some for i, some in question.looking.items() if i in loaders}
            known[asked] = found, looking
        return found

    def _cut_before_media(
        self, found: Stitch, coverage: Mapping[int, Coverage], question: _Question, start: int
    ) -> Stitch:
        """The prefix, or one that does not end within a medium (see `MediaMarks.cut`)."""
        longest = found
        while found.stop > start:
            tokens = (found.stop - self._dropped) * self._block_tokens
            cut = self._requests.engine.media.cut(question.request_state.request, tokens)
            if cut == tokens:
                break
            stop = max(start, cut // self._block_tokens + self._dropped)
            found = stitched(coverage, range(start, stop), self._window)
        return found._replace(looking=longest.looking, body=longest.body)

    def _coverage_of(self, loaders: Iterable[int], question: _Question) -> dict[int, Coverage]:
        return {i: partial(self._held, i, question) for i in loaders}

    def _held(self, index: int, question: _Question, blocks: range) -> Sequence[int] | None:
        """A tier is asked once, however often the policy plans."""
        held = question.request_state.held.get((index, blocks.start), ())
        if len(held) >= len(blocks):
            return held if len(held) == len(blocks) else held[: len(blocks)]
        if index in question.looking:
            return None
        coverage = question.notes.watch(
            index, partial(self._loaders[index].coverage, question.request_state)
        )
        found = coverage(blocks)
        if found is None:
            question.looking[index] = blocks
        else:
            question.request_state.held[index, blocks.start] = found
        return found

    def _tokens(self, found: Stitch, blocks: range) -> int:
        """How many tokens a stitched prefix brings."""
        return max(0, found.stop - blocks.start - self._dropped) * self._block_tokens

    def _blocks(self, question: _Question) -> range:
        start, rest = divmod(question.computed, self._block_tokens)
        return range(start, start + (0 if rest else question.loadable // self._block_tokens))


KEEP = 0.7
"""Weight of all earlier lookups when one is answered."""
FADE = 0.98
"""Factor by which the expected wait shrinks whenever a request skips waiting. After a few dozen, a
request waits again and measures anew."""


class LookupLatency:
    """Expected latency of each tier's lookups, over those that are not answered at once.

    `RequestState.looking` has, by child, when a request began to wait for an answer. An engine
    asks again when it has room for more, perhaps many steps later: an answer that lay until then
    took what the tier did, and one that is missing `lookup_seconds` at most.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._usual: dict[int, float] = {}

    def _waited(self, request_state: RequestState, since: float, now: float) -> float:
        return min(now - since, request_state.wait_budget.lookup_seconds)

    def left(self, child: int, request_state: RequestState) -> float:
        """Estimated seconds until the answer; at least as many as were waited already."""
        now = self._now()
        waited = self._waited(request_state, request_state.looking.setdefault(child, now), now)
        return max(self._usual.get(child, 0.0) - waited, waited)

    def answered(self, child: int, request_state: RequestState, tier: Explained) -> None:
        """Take in that `child` has answered; an answer that nobody waited for is no sample."""
        since = request_state.looking.pop(child, None)
        if since is not None:
            times = tier.lookup_times(request_state.request)
            longest = self._waited(request_state, since, self._now())
            waited = min(times.waited - times.notice, longest)
            usual = self._usual.get(child, waited)
            self._usual[child] = KEEP * usual + (1 - KEEP) * waited

    def decided(self, request_state: RequestState) -> None:
        """The request begins, without waiting for the answers that are missing."""
        for child, since in request_state.looking.items():
            # A wait in vain is expected to take as long again.
            in_vain = 2 * self._waited(request_state, since, self._now())
            self._usual[child] = max(FADE * self._usual.get(child, 0.0), in_vain)
        request_state.looking.clear()
