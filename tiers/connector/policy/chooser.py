"""Chooser: asks the children of a chain what they have of a request, and chooses who loads it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from spec.chain import LoadPolicy
from tiers.connector.contract.connector import SchedulerConnector
from tiers.connector.policy.cheapest.cheapest import Cheapest
from tiers.connector.policy.choice import (
    LATER,
    NOBODY,
    Choice,
    Coverage,
    Stitch,
    clip,
    first,
    longest,
    stitched,
)
from tiers.connector.policy.loaders import BlockLoader, TimedLoader
from tiers.connector.policy.requests import RequestState, RequestTable
from tiers.connector.policy.soonest import Soonest
from tiers.explain.attempt import UNNOTED, Attempt


class _Question(NamedTuple):
    """What is asked for a request: at most `loadable` tokens, in whole blocks, from `computed`.

    `asked`: children that have been, so far. `notes`: told what they answer.
    """

    state: RequestState
    computed: int
    loadable: int
    asked: set[int]
    notes: Attempt


class Chooser:
    """The load policy of a chain, within the limits that a request sets itself.

    A child that is no `BlockLoader` (another connector of the engine) loads the whole prefix it
    reports or nothing. So it never shares a request: `stitched` gives it one alone where it has
    more than our tiers together, and one with more than `max_load_tokens` does not serve. Nor is
    it known how long its loads take: `cheapest` lets it serve where it has more than our tiers
    are to load.
    """

    def __init__(
        self,
        children: Sequence[SchedulerConnector],
        names: Sequence[str],
        load: LoadPolicy,
        requests: RequestTable,
        cheapest: Cheapest | None = None,
        soonest: Soonest | None = None,
    ) -> None:
        """`cheapest`, `soonest`: what decides under the load policy of that name."""
        self._children = tuple(zip(names, children, strict=True))
        self._cheapest = cheapest
        self._soonest = soonest
        self._apply_policy: Callable[[_Question], Choice] = {
            "first": self._first,
            "longest": self._longest,
            "stitched": self._stitch,
            "soonest": self._stitch,
            "cheapest": self._stitch if cheapest is None else partial(self._cheapest_of, cheapest),
        }[load]
        self._requests = requests
        self._block_tokens = requests.engine.block_tokens
        self._window = requests.groups.window
        self._dropped = int(requests.engine.drops_last)
        self._loaders = {i: one for i, one in enumerate(children) if isinstance(one, BlockLoader)}
        self._keeps_choices = len(self._loaders) == len(children) and not (cheapest or soonest)
        # The engine's own connectors; ours, and chains of ours, know what they failed to load.
        self._foreign = {
            index: child
            for index, child in enumerate(children)
            if index not in self._loaders and not getattr(child, "limits_requests", False)
        }

    def choose(
        self, state: RequestState, num_computed_tokens: int, notes: Attempt = UNNOTED
    ) -> Choice:
        """Who loads what of the tokens beyond the computed ones; `notes` is told why.

        Each of the engine's own connectors is asked before a request begins, whoever serves. Some
        reset their state of the request in this call; without it they would store from blocks that
        the engine has freed.
        """
        if state.alone is not None and not state.computed:
            state.failed.add(state.alone)
        state.alone = None
        versions = self._versions(state, num_computed_tokens)
        if versions is not None and versions == state.versions and state.choice.tokens is not None:
            return state.choice  # nothing has changed since
        state.versions = versions
        question = self._question(state, num_computed_tokens, notes)
        may_load = state.limits.max_load_tokens is None or question.loadable > 0
        choice = self._apply_policy(question) if may_load else NOBODY
        if choice.tokens is not None:
            for index in self._foreign.keys() - question.asked:
                self._foreign[index].get_num_new_matched_tokens(state.request, num_computed_tokens)
        if choice.child in self._loaders and choice.tokens:
            start = num_computed_tokens // self._block_tokens
            alone = range(start, start + choice.tokens // self._block_tokens)
            return choice._replace(shares={choice.child: [alone]})
        return choice

    def _versions(self, state: RequestState, computed: int) -> Hashable:
        """A choice is the same while this is; None: it may not be.

        Of other connectors of the engine nobody knows, and `cheapest` and `soonest` go by time.
        """
        if not self._keeps_choices:
            return None
        versions = [loader.version(state) for loader in self._loaders.values()]
        known = None not in versions
        loadable = self._requests.loadable(state)
        return (computed, state.request.num_tokens, loadable, *versions) if known else None

    def _question(self, state: RequestState, num_computed_tokens: int, notes: Attempt) -> _Question:
        notes.asks_tiers(state.limits)
        loadable = state.request.num_tokens - num_computed_tokens
        if state.limits.max_load_tokens is not None:
            loadable = min(loadable, state.limits.max_load_tokens)
        loadable -= loadable % self._block_tokens
        return _Question(state, num_computed_tokens, loadable, set(), notes)

    def _first(self, question: _Question) -> Choice:
        return first(self._answers(question))

    def _longest(self, question: _Question) -> Choice:
        return longest(self._answers(question), question.loadable)

    def decided(self, state: RequestState, choice: Choice) -> None:
        """The engine begins the request as it was chosen."""
        state.versions = None
        if self._soonest is not None:
            self._soonest.decided(choice)
        if self._cheapest is None:
            return
        self._cheapest.decided(state, choice)
        for index in choice.passed:
            _, child = self._children[index]
            assert isinstance(child, TimedLoader)
            child.note(recompute_preferred=1)

    def step_ended(self, number: int | None) -> None:
        """The results of a step are here; `number` as `Cheapest` gave it."""
        if self._cheapest is not None and self._cheapest.step_ended(number):
            self._note_rate(self._cheapest)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts in this time."""
        if self._cheapest is not None and self._cheapest.computed(tokens, seconds):
            self._note_rate(self._cheapest)

    def _note_rate(self, cheapest: Cheapest) -> None:
        each = cheapest.prefill.seconds_per_token
        for _, child in self._children:
            if isinstance(child, TimedLoader) and each:
                child.note(prefill_tokens_per_second=1 / each)

    def loads(self, state: RequestState, child: int) -> None:
        """A child begins to load a request beside the steps.

        If that leaves the request nothing, it is chosen for again without having run. One of the
        engine's own connectors that is told of no failure would say the same again, for ever.
        """
        if child in self._foreign:
            state.alone = child

    def _answers(
        self, question: _Question, but: Iterable[int] = ()
    ) -> Iterator[tuple[int | None, bool]]:
        """What each child has, asked one by one; those that may not load, or in `but`: nothing."""
        but = {*but, *question.state.failed}
        for index, (name, child) in enumerate(self._children):
            # A chain within this one knows its own tiers.
            limits_itself = getattr(child, "limits_requests", False)
            if (limits_itself or question.state.limits.may_load(name)) and index not in but:
                yield self._ask(index, child, question)
            else:
                yield 0, False

    def _ask(
        self, index: int, child: SchedulerConnector, question: _Question
    ) -> tuple[int | None, bool]:
        if index in self._loaders:
            blocks = self._blocks(question)
            found = stitched(self._coverage_of((index,), question), blocks, self._window)
            tokens = self._tokens(found, blocks)
            return (None, False) if found.looking else (tokens, tokens > 0)
        question.asked.add(index)
        state = question.state
        tokens_of, is_async = child.get_num_new_matched_tokens(state.request, question.computed)
        question.notes.told(index, tokens_of)
        limited = state.limits.max_load_tokens is not None
        if limited and tokens_of is not None and tokens_of > question.loadable:
            return 0, False
        return tokens_of, is_async

    def _coverage_of(self, loaders: Iterable[int], question: _Question) -> dict[int, Coverage]:
        watch, state = question.notes.watch, question.state
        return {i: watch(i, partial(self._loaders[i].coverage, state)) for i in loaders}

    def _tokens(self, found: Stitch, blocks: range) -> int:
        """How many tokens a stitched prefix brings."""
        return max(0, found.stop - blocks.start - self._dropped) * self._block_tokens

    def _cheapest_of(self, cheapest: Cheapest, question: _Question) -> Choice:
        cheapest.prefill.expect(question.state)
        answers = list(self._answers(question))
        choice = cheapest.choose(question.state, answers, self._blocks(question))
        others = [(0, False) if i in cheapest.meters else a for i, a in enumerate(answers)]
        alone = longest(others, question.loadable)
        if choice.tokens is None or alone.tokens is None:
            return LATER
        return alone if alone.tokens > choice.tokens else choice

    def _blocks(self, question: _Question) -> range:
        start, rest = divmod(question.computed, self._block_tokens)
        return range(start, start + (0 if rest else question.loadable // self._block_tokens))

    def _stitch(self, question: _Question) -> Choice:
        loaders = [i for i in self._loaders if question.state.limits.may_load(self._children[i][0])]
        blocks = self._blocks(question)
        coverage = self._coverage_of(loaders, question)
        seconds, probed = 0.0, None
        if self._soonest is None:
            found = stitched(coverage, blocks, self._window)
        else:
            found, seconds, probed = self._soonest.plan(coverage, blocks, self._window)
        tokens = self._tokens(found, blocks)
        if tokens < question.loadable:
            alone = longest(self._answers(question, but=self._loaders), question.loadable)
            if alone.tokens is None or (found.looking and alone.tokens < question.loadable):
                return LATER
            if alone.tokens > tokens:
                return alone
        shares = clip(found.shares, tokens // self._block_tokens)
        choice = Choice(None, tokens, True, shares, probed=probed, seconds=seconds)
        return choice if tokens else NOBODY
