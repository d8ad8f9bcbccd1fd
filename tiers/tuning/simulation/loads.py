"""Loads: the loads of a prompt by the chain's load policy, and the waits for another's load.

`stitched` and its sharing are the rules of `connector/policy/choice.py`, written again by runs of
blocks for speed; tests/tuning/simulation/test_policies.py holds both together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import islice, takewhile
from operator import or_
from typing import NamedTuple

from tiers.loading.comparison import Comparison, Verdict, Wish
from tiers.loading.shares import HeldRun, LinkCost, share
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


def first(tiers: Placed, question: Question, masks: Sequence[int]) -> Pieces:
    """The first tier that has any of it."""
    for place, tier in tiers:
        if blocks := _prefix(tier, question, masks):
            return [(place, blocks)]
    return []


def longest(tiers: Placed, question: Question, masks: Sequence[int]) -> Pieces:
    """The tier that has the most of it, the first of several."""
    most, best = 0, -1
    for place, tier in tiers:
        blocks = _prefix(tier, question, masks)
        if blocks > most:
            most, best = blocks, place
            if most == question.most:
                break
    return [(best, most)] if most else []


def _prefix(tier: SimulatedTier, question: Question, masks: Sequence[int]) -> int:
    """How many blocks in a row the tier holds."""
    path, at, skip, most = question
    held = tier.held
    count = 0
    for run in path[at:]:
        blocks = held[run] >> skip
        if blocks != masks[run] >> skip:
            count += leading(blocks)
            break
        count += blocks.bit_length()
        skip = 0
    return count if count < most else most


def stitched(tiers: Placed, question: Question, masks: Sequence[int]) -> Pieces:
    """Each block from the first tier that has it."""
    path, at, skip, left = question
    pieces: Pieces = []
    for run in islice(path, at, None):
        whole = masks[run] >> skip
        found = 0
        shares: list[tuple[int, int]] = []
        for place, tier in tiers:
            more = tier.held[run] >> skip & ~found
            if more:
                found |= more
                shares.append((place, more))
                if found == whole:
                    break
        count = whole.bit_length() if found == whole else leading(found)
        if count > left:
            count = left
        if len(shares) == 1 and count:
            pieces.append((shares[0][0], count))
        else:
            prefix = (1 << count) - 1
            pieces += [(place, n) for place, more in shares if (n := (more & prefix).bit_count())]
        left -= count
        if found != whole or not left:
            break
        skip = 0
    return pieces


def shared(
    tiers: Placed,
    question: Question,
    masks: Sequence[int],
    paces: Mapping[int, LinkCost],
    last: Callable[[int], int],
) -> Pieces:
    """As `stitched`, shared among the tiers so that the last block comes soonest."""
    path, at, skip, left = question
    stretches: list[HeldRun] = []
    places = [place for place, _ in tiers]
    for run in islice(path, at, None):
        held = [tier.held[run] >> skip for _, tier in tiers]
        found = reduce(or_, held)
        count = min(leading(found), left)
        stretches += _stretches(places, held, count)
        left -= count
        if found != masks[run] >> skip or not left:
            break
        skip = 0
    return share(stretches, paces, last)[0]


def _stretches(places: Sequence[int], held: Sequence[int], count: int) -> Iterator[HeldRun]:
    """The holders of the first `count` blocks of a run; each has some."""
    first = 0
    while first < count:
        have = [bool(blocks >> first & 1) for blocks in held]
        # Each holder has blocks up to its next gap, and each other none up to its next block.
        same = count - first
        for blocks, has in zip(held, have, strict=True):
            rest = blocks >> first
            missing = (rest & -rest).bit_length() - 1 if rest else same
            same = min(same, leading(rest) if has else missing)
        yield tuple(place for place, has in zip(places, have, strict=True) if has), same
        first += same


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
        always = chain.load_when == "always"
        costs = {place: tier.cost for place, tier in enumerate(tiers)}
        self._comparison = Comparison(self._size, costs, clock, always)
        self._policy = {"first": first, "longest": longest, "stitched": stitched}[chain.load_policy]
        self._comparison.shares = chain.load_policy == "stitched" and len(tiers) > 1
        self._masks, self._lengths = workload.masks, workload.lengths
        self._tiers = tiers
        self._placed = list(enumerate(tiers))
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
        for tier in self._tiers:
            # Refused blocks may find room as stores end, sooner than the step's own offer.
            if tier.known[run] >> skip & 1 or tier.refused:
                break
        else:
            return False
        self.drain(now)
        return any(tier.held[run] >> skip & 1 for tier in self._tiers)

    def drain(self, now: float) -> None:
        for tier in self._tiers:
            if tier.due <= now:
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
        """No tier has any of `blocks` blocks."""
        each = self._comparison.prefill.seconds_per_token or 0.0
        return Verdict(None, seconds=blocks * self._size * each)

    def _propose(
        self, question: Question, but: Collection[int], blocks: int | None
    ) -> SimPlan | None:
        """The policy's plan without some tiers, of at most `blocks` blocks."""
        if blocks is not None and blocks < question.most:
            question = question._replace(most=blocks)
        placed = [one for one in self._placed if one[0] not in but] if but else self._placed
        plan = SimPlan(self._policy(placed, question, self._masks), self._size)
        if not plan.pieces:
            return None

        def share(paces: Mapping[int, LinkCost], last: Callable[[int], int]) -> SimPlan:
            known = [one for one in placed if one[0] in paces]
            return SimPlan(shared(known, question, self._masks, paces, last), self._size)

        places = [place for place, _ in placed]
        return self._comparison.shared(places, plan, share) if self._comparison.shares else plan

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
        run = prompt.place[0]
        path = prompt.path if run == prompt.path[0] else prompt.path[prompt.path.index(run) :]
        end, arrived = now, {}
        for place, tokens in parts.items():
            tiers[place].space.touch(path)
            count = tokens // self._size
            ends, arrived[place] = tiers[place].load(count, now, late)
            end = max(end, ends)
        self.in_flight[prompt.place] = prompt
        prompt.loads = plan.tokens // self._size
        for place, count in plan.pieces:
            came = min(count, arrived[place])
            tiers[place].counts.hits += came
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
