"""Loads: who loads what of a prompt, and who waits for another's load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from functools import partial

from tiers.loading.comparison import Comparison, Verdict, Wish
from tiers.loading.shares import LinkCost
from tiers.tuning.simulation.chain import SimChain
from tiers.tuning.simulation.policies import Pieces, Plan, Question, policy, shared
from tiers.tuning.simulation.prompt import Prompt
from tiers.tuning.simulation.tier import Tier
from tiers.tuning.simulation.workload import Workload

NOTHING: Verdict[Plan] = Verdict(None)


class Loads:
    """The loads of a chain, as its load policy and the comparison with computing decide them."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        chain: SimChain,
        workload: Workload,
        clock: Callable[[], float],
        waiting: Sized,
    ) -> None:
        """`waiting`: the prompts that wait to begin."""
        self._size = workload.block_tokens
        always = chain.load_when == "always"
        costs = {place: tier.cost for place, tier in enumerate(tiers)}
        self._comparison = Comparison(self._size, costs, clock, always)
        self._policy = policy(chain.load_policy)
        self._shares = chain.load_policy == "stitched" and len(tiers) > 1
        self._masks = workload.masks
        self._tiers = tiers
        self._placed = list(enumerate(tiers))
        self._waiting = waiting
        self._max_wait = chain.max_wait
        self.in_flight: dict[tuple[int, int], Prompt] = {}
        """Prompts that load, by the run, and the block in it, where they began to."""

    def computed(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts in this time."""
        self._comparison.prefill.measured(tokens, seconds)

    def joins(self, prompt: Prompt, at: int, skip: int) -> bool:
        """Whether another prompt loads from this block of this run on, so that this one waits for
        it: then it finds those blocks in the engine's own cache."""
        loader = self.in_flight.get((prompt.path[at], skip))
        if loader is None:
            return False
        loader.woken.append(prompt)
        return True

    def any_has(self, run: int, skip: int, now: float) -> bool:
        """Whether a tier has this block of this run by now, so that there is a choice."""
        for tier in self._tiers:
            # What is refused may find room as stores end, sooner than the step's own offer.
            if tier.known[run] >> skip & 1 or tier.refused:
                break
        else:
            return False
        self.drain(now)
        return any(tier.held[run] >> skip & 1 for tier in self._tiers)

    def drain(self, now: float) -> None:
        """Take in what all tiers have stored by now."""
        for tier in self._tiers:
            if tier.due <= now:
                tier.drain(now)

    def choose(self, prompt: Prompt, known: int, at: int, skip: int, now: float) -> Verdict[Plan]:
        """Which tier loads which blocks behind the first `known` ones; the next block is number
        `skip` of the run `at` of the prompt's path."""
        prompt.place = (prompt.path[at], skip)
        for tier in self._tiers:
            tier.measure(now)
        blocks = prompt.blocks - known
        question = Question(prompt.path, at, skip, blocks)
        wish = Wish(blocks, self._max_wait, len(self._waiting))
        return self._comparison.choose(partial(self._propose, question), wish)

    def nothing(self, blocks: int) -> Verdict[Plan]:
        """No tier has any of so many blocks."""
        each = self._comparison.prefill.seconds_per_token or 0.0
        return NOTHING._replace(seconds=blocks * self._size * each)

    def _propose(self, question: Question, but: Collection[int], blocks: int | None) -> Plan | None:
        """The policy's plan without some tiers, of so many blocks at most."""
        if blocks is not None and blocks < question.most:
            question = question._replace(most=blocks)
        placed = [one for one in self._placed if one[0] not in but] if but else self._placed
        plan = Plan(self._policy(placed, question, self._masks), self._size)
        if not plan.pieces:
            return None

        def share(paces: Mapping[int, LinkCost], last: Callable[[int], int]) -> Plan:
            known = [one for one in placed if one[0] in paces]
            return Plan(shared(known, question, self._masks, paces, last), self._size)

        places = [place for place, _ in placed]
        return self._comparison.shared(places, plan, share) if self._shares else plan

    def begin(
        self, prompt: Prompt, known: int, verdict: Verdict[Plan], now: float
    ) -> tuple[int, float]:
        """Begin the loads, if any; the prompt's blocks when they have ended, and when that is.

        It uses what precedes the first block that has not come in time.
        """
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
        for place, count in self._in_time(plan.pieces, arrived):
            tiers[place].counts.hits += count
            known += count
        return known, end

    def _in_time(self, pieces: Pieces, left: dict[int, int]) -> Pieces:
        """The blocks that have come, up to the first that has not."""
        arrived: Pieces = []
        for place, count in pieces:
            arrived.append((place, min(count, left[place])))
            left[place] -= count
            if left[place] < 0:
                break
        return arrived

    def end(self, prompt: Prompt) -> list[Prompt]:
        """A prompt's loads have ended; the prompts that waited for it."""
        if self.in_flight.get(prompt.place) is prompt:
            del self.in_flight[prompt.place]
        return prompt.woken
