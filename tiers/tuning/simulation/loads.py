"""Loads: the loads of a prompt by the chain's load policy, and the waits for another's load.

The policies are those of `connector/policy/choice.py`, written again by runs of blocks for speed;
tests/tuning/simulation/test_policies.py holds both together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import islice, takewhile
from operator import or_
from typing import NamedTuple

from tiers.loading.comparison import Comparison, Verdict, Wish
from tiers.loading.shares import HeldRun, LoadPace, share
from tiers.tuning.simulation.sim_chain import SimChain
from tiers.tuning.simulation.simulated_tier import SimulatedTier
from tiers.tuning.simulation.spaces import leading
from tiers.tuning.simulation.workload import Prompt, Workload

Pieces = list[tuple[int, int]]
"""A prefix in order: which tier loads how many blocks."""
Placed = Sequence[tuple[int, SimulatedTier]]
"""Tiers with their places in the chain."""


class Question(NamedTuple):
    """Blocks of a prompt that could be loaded: at most `most`, from block `skip` of the run
    `path[at]` on."""

    path: Sequence[int]
    at: int
    skip: int
    most: int


class SimPlan(NamedTuple):
    """The loads of a policy; see `tiers.loading.comparison.Plan`. `size`: tokens of a block."""

    pieces: Pieces
    size: int

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.pieces) * self.size

    @property
    def parts(self) -> Mapping[int, int]:
        parts: dict[int, int] = {}
        for tier, count in self.pieces:
            parts[tier] = parts.get(tier, 0) + count * self.size
        return parts

    def behind(self, head: SimPlan) -> SimPlan:
        """The plan of which `head` loads the first blocks."""
        skip = sum(count for _, count in head.pieces)
        pieces = list(head.pieces)
        for tier, count in self.pieces:
            if count > skip:
                pieces.append((tier, count - skip))
            skip = max(0, skip - count)
        return SimPlan(pieces, self.size)


def held_runs(tiers: Placed, question: Question, masks: Sequence[int]) -> Iterator[HeldRun]:
    """Neighbouring blocks that the same tiers hold, in order, up to the first that none holds."""
    path, at, skip, left = question
    for run in islice(path, at, None):
        held = [(place, tier.held[run] >> skip) for place, tier in tiers]
        found = reduce(or_, (blocks for _, blocks in held), 0)
        count = min(leading(found), left)
        left -= count
        while count:
            # Each holder has blocks up to its next gap, and each other none up to its next block.
            ends = (leading(mine) or (leading(~mine) if mine else count) for _, mine in held)
            same = min(count, *ends)
            yield tuple(place for place, mine in held if mine & 1), same
            held = [(place, mine >> same) for place, mine in held]
            count -= same
        if found != masks[run] >> skip or not left:
            break
        skip = 0


def first(runs: Sequence[HeldRun]) -> Pieces:
    return _longest_of(runs[0][0][:1], runs)


def longest(runs: Sequence[HeldRun]) -> Pieces:
    """The tier that has the most of it, the first of several."""
    return _longest_of(runs[0][0], runs)


def _longest_of(places: Sequence[int], runs: Sequence[HeldRun]) -> Pieces:
    def row(place: int) -> int:
        return sum(count for _, count in takewhile(lambda run: place in run[0], runs))

    best = max(places, key=row)
    return [(best, row(best))]


def stitched(runs: Sequence[HeldRun]) -> Pieces:
    """Each block from the first tier that has it."""
    return [(holders[0], count) for holders, count in runs]


class Loads:
    """The loads of a chain, as its load policy and the comparison with computing decide them."""

    def __init__(
        self,
        tiers: Sequence[SimulatedTier],
        chain: SimChain,
        workload: Workload,
        clock: Callable[[], float],
    ) -> None:
        self._size = workload.block_tokens
        costs = {place: tier.cost for place, tier in enumerate(tiers)}
        shares = chain.load_policy == "stitched" and len(tiers) > 1
        self._comparison = Comparison(self._size, clock)
        self._comparison.follow(costs, chain.load_when == "always", shares)
        self._policy = {"first": first, "longest": longest, "stitched": stitched}[chain.load_policy]
        self._masks, self._lengths = workload.masks, workload.lengths
        self._tiers = tiers
        self._placed = [p for p in enumerate(tiers) if p[1].spec.paused in (None, "writes")]
        self.waiting = 0
        """Prompts that have come and not begun."""
        self._max_wait = chain.max_wait
        self.in_flight: dict[tuple[int, int], Prompt] = {}
        """Prompts that load, by the run, and the block in it, where they began to."""

    def computed(self, tokens: int, seconds: float) -> None:
        """A step has computed `tokens` of prompts in this time."""
        self._comparison.prefill.measured(tokens, seconds)

    def joins(self, prompt: Prompt, plan: SimPlan) -> bool:
        """Whether a prompt that could load by this plan waits for another's load instead, and then
        finds those blocks in the engine's own cache: see `connector/policy/load_sharing.py`."""
        loader = self.in_flight.get(prompt.place)
        if loader is None:
            return False
        blocks = plan.tokens // self._size
        # The engine computes the last token, whatever it has.
        known, limit = prompt.own // self._size, (prompt.tokens - 1) // self._size
        shared = min(blocks, limit - known, loader.loads, self._shared(prompt, loader))
        if 2 * shared < max(blocks, loader.loads):
            return False
        loader.woken.append(prompt)
        return True

    def _shared(self, one: Prompt, other: Prompt) -> int:
        """How many blocks two prompts have in common behind their place, which is the same."""
        run, skip = one.place
        mine, others = (prompt.path[prompt.path.index(run) :] for prompt in (one, other))
        same = takewhile(lambda runs: runs[0] == runs[1], zip(mine, others, strict=False))
        return sum(self._lengths[run] for run, _ in same) - skip

    def any_has(self, run: int, skip: int, now: float) -> bool:
        """Whether a tier has this block of this run by now."""
        # Refused blocks may find room as stores end, sooner than the step's own offer.
        if not any(tier.known[run] >> skip & 1 or tier.refused for _, tier in self._placed):
            return False
        self.drain(now)
        return any(tier.held[run] >> skip & 1 for _, tier in self._placed)

    def drain(self, now: float) -> None:
        for tier in self._tiers:
            tier.drain(now)

    def choose(
        self, prompt: Prompt, known: int, at: int, skip: int, now: float
    ) -> Verdict[SimPlan]:
        """Which tier loads which blocks behind the first `known` ones; the next block is number
        `skip` of the run `at` of the prompt's path."""
        prompt.place = (prompt.path[at], skip)
        for tier in self._tiers:
            tier.measure(now)
        blocks = prompt.blocks - known
        question = Question(prompt.path, at, skip, blocks)
        wish = Wish(blocks, self._max_wait, self.waiting - 1)
        return self._comparison.choose(partial(self._propose, question), wish)

    def nothing(self, blocks: int) -> Verdict[SimPlan]:
        each = self._comparison.prefill.seconds_per_token or 0.0
        return Verdict(None, seconds=blocks * self._size * each)

    def _propose(
        self, question: Question, but: Collection[int], blocks: int | None
    ) -> SimPlan | None:
        """The policy's plan without some tiers, of at most `blocks` blocks."""
        if blocks is not None and blocks < question.most:
            question = question._replace(most=blocks)
        placed = [one for one in self._placed if one[0] not in but] if but else self._placed
        runs = list(held_runs(placed, question, self._masks))
        if not runs:
            return None
        plan = SimPlan(self._policy(runs), self._size)

        def sharing(paces: Mapping[int, LoadPace], last: Callable[[int], int]) -> SimPlan:
            known = [one for one in placed if one[0] in paces]
            found = share([*held_runs(known, question, self._masks)], paces, last)
            return SimPlan(found[0], self._size)

        places = [place for place, _ in placed]
        return self._comparison.shared(places, plan, sharing) if self._comparison.shares else plan

    def begin(
        self, prompt: Prompt, known: int, verdict: Verdict[SimPlan], now: float
    ) -> tuple[int, float]:
        """Begin the loads, if any; the prompt's blocks when they have ended, and when that is.

        It uses what precedes the first block that has not come in time.
        """
        self.waiting -= 1
        plan = verdict.plan
        parts = plan.parts if plan is not None else {}
        self._comparison.decided(parts, verdict.probed, verdict.seconds)
        if plan is None:
            return known, now
        tiers, late = self._tiers, now + min(self._max_wait, verdict.within)
        path = prompt.path[prompt.path.index(prompt.place[0]) :]
        end, arrived = now, {}
        for place, tokens in parts.items():
            tiers[place].space.load(path)
            count = tokens // self._size
            ends, arrived[place] = tiers[place].load(count, now, late)
            end = max(end, ends)
        self.in_flight[prompt.place] = prompt
        prompt.loads = plan.tokens // self._size
        for place, count in plan.pieces:
            came = min(count, arrived[place])
            tiers[place].counts.hit_tokens += came * self._size
            known += came
            arrived[place] -= count
            if arrived[place] < 0:
                break
        return known, end

    def end(self, prompt: Prompt) -> list[Prompt]:
        """A prompt's loads have ended; the prompts that waited for it."""
        if self.in_flight.get(prompt.place) is prompt:
            del self.in_flight[prompt.place]
        return prompt.woken
