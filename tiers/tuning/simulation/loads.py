"""Loads: who loads what of a prompt, and who waits for another's load."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized

from tiers.tuning.simulation.chain import SimChain
from tiers.tuning.simulation.policies import Costs, Pieces, Question, policy
from tiers.tuning.simulation.prompt import Prompt
from tiers.tuning.simulation.tier import Tier
from tiers.tuning.simulation.workload import Workload


class Loads:
    """The loads of a chain, as its load policy decides them."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        chain: SimChain,
        workload: Workload,
        prefill_rate: float,
        waiting: Sized,
    ) -> None:
        """`waiting`: the prompts that wait to begin."""
        size = workload.block_tokens
        costs = Costs(size / prefill_rate, chain.min_tokens / size, chain.margin)
        self._policy = policy(chain.load_policy, costs)
        self._masks = workload.masks
        self._tiers = tiers
        self._waiting = waiting
        self._max_wait = chain.max_wait
        self.under_way: dict[tuple[int, int], Prompt] = {}
        """Prompts that load, by the run, and the block in it, where they began to."""

    def joins(self, prompt: Prompt, at: int, skip: int) -> bool:
        """Whether another prompt loads from this block of this run on, so that this one waits for
        it: then it finds those blocks in the engine's own cache."""
        loader = self.under_way.get((prompt.path[at], skip))
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

    def choose(self, prompt: Prompt, known: int, at: int, skip: int, now: float) -> Pieces:
        """Which tier loads which blocks behind the first `known` ones; the next block is number
        `skip` of the run `at` of the prompt's path."""
        prompt.place = (prompt.path[at], skip)
        question = Question(prompt.path, at, skip, prompt.blocks - known, now, len(self._waiting))
        return self._policy(self._tiers, question, self._masks)

    def begin(self, prompt: Prompt, known: int, pieces: Pieces, now: float) -> tuple[int, float]:
        """Begin the loads; the prompt's blocks when they have ended, and when that is.

        A prompt waits for `max_wait` at most. It uses what precedes the first block that is late.
        """
        tiers, late = self._tiers, now + self._max_wait
        run = prompt.place[0]
        path = prompt.path if run == prompt.path[0] else prompt.path[prompt.path.index(run) :]
        blocks: dict[int, int] = {}
        for index, count in pieces:
            blocks[index] = blocks.get(index, 0) + count
        end = 0.0
        ends = {}
        for index, count in blocks.items():
            tiers[index].space.touch(path)
            ends[index] = last = tiers[index].load(count, now)
            if last > end:
                end = last
        self.under_way[prompt.place] = prompt
        if end > late:
            pieces, end = self._in_time(pieces, blocks, ends, late), late
        for index, count in pieces:
            tiers[index].counts.hits += count
            known += count
        return known, end

    def _in_time(
        self, pieces: Pieces, blocks: dict[int, int], ends: dict[int, float], late: float
    ) -> Pieces:
        """The blocks that have come when it is too `late`, up to the first that has not."""
        left = {}
        for index, count in blocks.items():
            behind = (ends[index] - late) / self._tiers[index].settings.load_seconds
            left[index] = count - min(count, max(0, math.ceil(behind)))
        arrived: Pieces = []
        for index, count in pieces:
            arrived.append((index, min(count, left[index])))
            left[index] -= count
            if left[index] < 0:
                break
        return arrived

    def end(self, prompt: Prompt) -> list[Prompt]:
        """A prompt's loads have ended; the prompts that waited for it."""
        if self.under_way.get(prompt.place) is prompt:
            del self.under_way[prompt.place]
        return prompt.woken
