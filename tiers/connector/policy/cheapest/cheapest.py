"""The load policy `cheapest`: the load that brings a request soonest to the end of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from spec.chain import CheapestSpec
from tiers.connector.contract.connector import SchedulerConnector
from tiers.connector.policy.cheapest.load_cost import LoadCost
from tiers.connector.policy.cheapest.lookup_latency import LookupLatency
from tiers.connector.policy.cheapest.prefill_rate import PrefillRate
from tiers.connector.policy.cheapest.probing import COMPUTING, Exploration
from tiers.connector.policy.choice import LATER, Choice, longest
from tiers.connector.policy.loaders import TimedLoader
from tiers.connector.policy.requests import RequestState

Answers = Sequence[tuple[int | None, bool]]
"""What each child has of a request: tokens, None while it looks, and whether beside the steps."""


def load_costs(children: Sequence[SchedulerConnector]) -> dict[int, LoadCost]:
    """The meters of those children that have one, by child."""
    return {i: c.load_cost for i, c in enumerate(children) if isinstance(c, TimedLoader)}


class LoadEstimate(NamedTuple):
    """Tokens that a child has of a request; seconds until they are loaded, and what computing them
    costs this request and those that wait."""

    child: int
    tokens: int
    load: float
    compute: float

    @property
    def saved(self) -> float:
        """Seconds that loading saves, over all of these."""
        return self.compute - self.load


CROWD = 4
"""Seconds of the engine that a second of computing counts for, at most, where others wait."""


class Cheapest:
    """Chooses among the children whose loads are measured; `meters` has them by child.

    A child's load must be faster, by the margin, than computing the same tokens; of those that
    are, the one serves that saves most. Computing counts once more for each request that waits to
    begin, since that one is computed later; four times at most. What has not been measured is not
    judged: without a prefill rate the longest prefix serves, and a tier without samples is taken
    to be free.

    A tier that requests skip is probed now and then (see `Exploration`): a request loads a few of
    its first blocks from it, and the rest as it would have. If all prompts are loaded, a request
    computes its last blocks now and then, so that the prefill rate stays known. Where prefixes
    can't be `cut`, a probe is the whole prefix. A tier that is still looking is waited for while
    it could, if it had everything, still save more than the others.
    """

    def __init__(
        self,
        settings: CheapestSpec,
        block_tokens: int,
        meters: Mapping[int, LoadCost],
        now: Callable[[], float],
        cut: bool = True,
    ) -> None:
        self.prefill = PrefillRate(now, settings.min_tokens)
        self.meters = meters
        self._waits = LookupLatency(now)
        self._probes = Exploration(least=-(-settings.min_tokens // block_tokens))
        self._settings = settings
        self._size = block_tokens
        self._cut = cut
        self._waiting = 0

    def arrived(self) -> None:
        """One more request waits to begin."""
        self._waiting += 1

    def gone(self, state: RequestState | None) -> None:
        """A request waits no more: it begins, or has ended; None: before anything was asked."""
        if state is None or not state.has_begun:
            self._waiting = max(0, self._waiting - 1)  # some engines announce no arrivals
        if state is not None:
            state.has_begun = True

    def choose(self, state: RequestState, answers: Answers, blocks: range) -> Choice:
        """Who loads what of these blocks of a request. Children without a meter do not serve."""
        answers = [a if i in self.meters else (0, False) for i, a in enumerate(answers)]
        looking = [child for child, (tokens, _) in enumerate(answers) if tokens is None]
        for child in self.meters.keys() - set(looking):
            self._waits.answered(child, state)
        each = self.prefill.seconds_per_token
        if each is None:
            return self._unmeasured(longest(answers, len(blocks) * self._size))
        others = max(0, self._waiting - (not state.has_begun))
        crowded = each * min(CROWD, 1 + others)
        offers = [
            self._offer(child, tokens, crowded)
            for child, (tokens, _) in enumerate(answers)
            if tokens is not None and tokens >= self._settings.min_tokens
        ]
        best = max(filter(self._pays, offers), key=lambda offer: offer.saved, default=None)
        whole = len(blocks) * self._size
        if self._should_wait(
            state, [self._offer(child, whole, crowded) for child in looking], best
        ):
            return LATER
        loaded = best.tokens * each - best.load if best is not None else 0.0
        seconds = max(0.0, whole * each - loaded)
        choice = self._probing(blocks, offers, best, whole * each)
        if choice is None and best is None:
            choice = Choice(None, 0, False, passed=tuple(offer.child for offer in offers))
        elif choice is None:
            assert best is not None
            choice = self._loading(best)
        return choice._replace(seconds=seconds)

    def decided(self, state: RequestState, choice: Choice) -> None:
        """The engine begins the request as it was chosen."""
        self._waits.decided(state)
        self.gone(state)
        for child in (*self.meters, COMPUTING):
            if child == choice.probed:
                self._probes.made(child)
            elif child == choice.child or (child == COMPUTING and choice.passed):
                self._probes.measured(child)
            else:
                self._probes.earn(child, choice.seconds)

    def step_ended(self, number: int | None) -> bool:
        """A step's results are here; whether they tell how fast the engine computes prompts."""
        return self._computed(self.prefill.step_ended(number))

    def computed(self, tokens: int, seconds: float) -> bool:
        """A step has computed so many tokens in this time; whether that says how fast it is."""
        return self._computed(self.prefill.measured(tokens, seconds))

    def _computed(self, tokens: int) -> bool:
        if tokens >= self._probes.length(COMPUTING) * self._size:
            self._probes.rest(COMPUTING)
        return tokens > 0

    def _offer(self, child: int, tokens: int, each: float) -> LoadEstimate:
        return LoadEstimate(child, tokens, self.meters[child].seconds(tokens), tokens * each)

    def _pays(self, offer: LoadEstimate) -> bool:
        if offer.tokens < self._settings.min_tokens:
            return False
        return offer.load * (1 + self._settings.margin) < offer.compute

    def _should_wait(
        self, state: RequestState, hopes: Sequence[LoadEstimate], best: LoadEstimate | None
    ) -> bool:
        """Whether any tier that is still looking may yet do better than the best."""
        left = {hope: self._waits.left(hope.child, state) for hope in hopes}
        saved = best.saved if best is not None else 0.0
        return any(self._pays(hope) and hope.saved - left[hope] > saved for hope in hopes)

    # -- choices -----------------------------------------------------------------------------

    def _unmeasured(self, choice: Choice) -> Choice:
        """As `longest` chose; but the half of it, once only the prefill rate is not known."""
        if choice.child is None or not choice.tokens or self.meters[choice.child].line is None:
            return choice
        return self._shortened(choice, choice.tokens // self._size // 2)

    def _loading(self, best: LoadEstimate) -> Choice:
        choice = Choice(best.child, best.tokens, True)
        length = min(self._probes.length(COMPUTING), best.tokens // self._size)
        if not self._probes.is_due(COMPUTING, best.compute * length * self._size / best.tokens):
            return choice
        if length * self._size == best.tokens:
            self._probes.shorten(COMPUTING)
        return self._shortened(choice, length)

    def _shortened(self, choice: Choice, blocks: int) -> Choice:
        """The choice without its last blocks, which are computed so that this is measured."""
        tokens = (choice.tokens or 0) - max(blocks, self._probes.least) * self._size
        if tokens <= 0 or not self._cut:
            return Choice(None, 0, False, probed=COMPUTING)
        return Choice(choice.child, tokens, True, probed=COMPUTING)

    def _probing(
        self, blocks: range, offers: Sequence[LoadEstimate], best: LoadEstimate | None, whole: float
    ) -> Choice | None:
        """The choice that probes a tier, if that is due; `whole`: seconds to compute all blocks."""
        for offer in offers:
            length = self._probe_length(offer, whole)
            cost = self._probe_cost(offer, length, best)
            idle = not self.meters[offer.child].is_loading
            if offer is not best and idle and self._probes.is_due(offer.child, cost):
                return self._shared(blocks, offer, length, best)
        return None

    def _probe_length(self, offer: LoadEstimate, whole: float) -> int:
        most = offer.tokens // self._size
        if not self._cut:
            return most
        length = min(self._probes.length(offer.child), most)
        if self.meters[offer.child].seconds(length * self._size) > whole:
            # Too much for one request.
            self._probes.shorten(offer.child)
            return min(self._probes.least, most)
        return length

    def _probe_cost(self, offer: LoadEstimate, blocks: int, best: LoadEstimate | None) -> float:
        """Seconds of loading and, where nothing else is loaded meanwhile, of being later by it."""
        load = self.meters[offer.child].seconds(blocks * self._size)
        other = best.load if best is not None else 0.0
        return max(load - other, load / 10)

    def _shared(
        self, blocks: range, offer: LoadEstimate, length: int, best: LoadEstimate | None
    ) -> Choice:
        if best is None or best.tokens <= length * self._size or not self._cut:
            return Choice(offer.child, length * self._size, True, probed=offer.child)
        cut = blocks.start + length
        stop = blocks.start + best.tokens // self._size
        shares = {offer.child: [range(blocks.start, cut)], best.child: [range(cut, stop)]}
        return Choice(None, best.tokens, True, shares, probed=offer.child)
