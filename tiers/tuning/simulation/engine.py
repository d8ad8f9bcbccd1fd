"""Engine: a serving engine in simulated time, whose steps ask a chain and load beside it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from tiers.tuning.machine import Machine
from tiers.tuning.report import Served
from tiers.tuning.simulation.chain import SimChain
from tiers.tuning.simulation.loads import Loads
from tiers.tuning.simulation.own_cache import OwnCache
from tiers.tuning.simulation.prompt import Prompt
from tiers.tuning.simulation.spaces import Job
from tiers.tuning.simulation.tier import Gpus, Tier
from tiers.tuning.simulation.workload import Workload

Batch = list[tuple[Prompt, int]]
"""Prompts of a step, each with its tokens done after it."""
Step = tuple[Batch, list[tuple[Tier, Job]], int, float]
"""With the stores that begin when it ends, its tokens and its seconds."""


class Engine:
    """Serves a workload: continuous batching of prompts, a prefix cache, loads beside the steps.

    What precedes request number `warm` only warms: `marks` are the counts when that one comes.
    """

    def __init__(
        self,
        workload: Workload,
        tiers: Sequence[Tier],
        chain: SimChain,
        machine: Machine,
        warm: int = 0,
    ) -> None:
        self.workload = workload
        self.tiers = tiers
        self.warm = warm
        self.now = self.since = self.gpu_busy = 0.0
        self.own_hits = 0
        """Tokens that the counted requests found in the engine's own cache."""
        self.served: list[Served] = []
        """The counted requests, in the order in which their prompts ended."""
        self.marks: list[dict[str, float]] = []
        self._size = size = workload.block_tokens
        self._token_seconds = 1 / machine.prefill_rate
        self._answer_seconds = machine.decode_seconds_per_token
        self._step_tokens = machine.step_tokens
        self._step_overhead = machine.step_overhead
        capacity = machine.engine_cache // (machine.kv_bytes_per_token * size)
        self._cache = OwnCache(capacity, workload)
        self._waiting: deque[Prompt] = deque()
        self._loads = Loads(tiers, chain, workload, lambda: self.now, self._waiting)
        self._promote = chain.promote
        self._stores_answers = chain.stores_answers
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._going_on: deque[Prompt] = deque()
        self._back: list[tuple[int, Prompt]] = []
        """Those that have waited for a load, their own or another's, by their place in line."""
        self._answering: dict[Prompt, None] = {}
        self._idle = machine.gpus
        self._gpus = Gpus()
        for tier in tiers:
            tier.gpus = self._gpus

    # -- the clock ---------------------------------------------------------------------------

    def run(self) -> None:
        """Serve all requests."""
        workload, events, waiting = self.workload, self._events, self._waiting
        lists = workload.times, workload.tokens, workload.answers, workload.prompts
        for number, (arrival, tokens, answer, job) in enumerate(zip(*lists, strict=True)):
            while events and events[0][0] <= arrival:
                self._next_event()
            if number == self.warm:
                self._mark(arrival)
            self.now = arrival
            waiting.append(Prompt(number, arrival, tokens, answer, job))
            if self._idle:
                self._begin_steps()
        while events:
            self._next_event()
        assert not (waiting or self._back or self._going_on), "all requests are served"

    def _mark(self, now: float) -> None:
        self.since = now
        self.marks = [{"gpu_busy": self.gpu_busy}, *(tier.counts.values() for tier in self.tiers)]

    def _push(self, time: float, act: Callable[[Any], None], what: Any) -> None:
        heappush(self._events, (time, next(self._order), act, what))

    def _next_event(self) -> None:
        self.now, _, act, what = heappop(self._events)
        act(what)
        if self._idle and (self._waiting or self._back or self._going_on):
            self._begin_steps()

    # -- steps -------------------------------------------------------------------------------

    def _begin_steps(self) -> None:
        """Begin a step on each idle GPU, as long as there is something to compute."""
        while True:
            batch, tokens = self._batch()
            if not batch:
                return
            seconds = tokens * self._token_seconds + self._step_overhead
            self.gpu_busy += seconds
            self._idle -= 1
            if not self._idle:
                self._gpus.idle_since = math.inf
            step = batch, self._offer(batch), tokens, seconds
            heappush(self._events, (self.now + seconds, next(self._order), self._end_step, step))
            if not (self._idle and (self._waiting or self._back or self._going_on)):
                return

    def _batch(self) -> tuple[Batch, int]:
        """The prompts of a step, and its tokens: first those under way, then the next in line."""
        batch: Batch = []
        going_on, budget = self._going_on, self._step_tokens
        while budget > 0:
            if going_on:
                prompt = going_on.popleft()
            elif self._back:
                prompt = heappop(self._back)[1]
            elif self._waiting:
                prompt = self._waiting.popleft()
            else:
                break
            if not prompt.has_begun:
                begins = self._begin(prompt)
                if begins is None:
                    heappush(self._back, (prompt.number, prompt))
                    if batch or self._events:
                        break
                    prompt = self._take_begun()
                elif not begins:
                    continue
            done = prompt.done + budget
            if done > prompt.tokens:
                done = prompt.tokens
            budget -= done - prompt.done
            batch.append((prompt, done))
        return batch, self._step_tokens - budget

    def _take_begun(self) -> Prompt:
        """The first in line of those that have their blocks. Where nothing is under way, only they
        can make room for one before them."""
        place = min(place for place in self._back if place[1].has_begun)
        self._back.remove(place)
        heapify(self._back)
        return place[1]

    def _offer(self, batch: Batch) -> list[tuple[Tier, Job]]:
        """Offer the tiers what the step completes; the stores that begin when it ends."""
        now, size, tiers = self.now, self._size, self.tiers
        jobs: list[tuple[Tier, Job]] = []
        for tier in tiers:
            if tier.due <= now:
                tier.drain(now)
        if len(batch) > 1:
            # As engines tell it: first those that are new, then those that go on, then who answers.
            batch = sorted(batch, key=_has_run)
        for prompt, done in batch:
            first, last = prompt.offered, done // size
            if last > prompt.blocks:
                last = prompt.blocks
            offer = prompt.offer(last, self.workload) if last > first else None
            for tier in tiers:
                if tier.refused and first and (again := tier.offer_again(prompt)):
                    jobs.append((tier, again))
                if offer and (job := tier.offer(prompt, offer, now)):
                    jobs.append((tier, job))
        if self._answering:
            for tier in tiers:
                if tier.refused:
                    jobs += [(tier, job) for job in tier.offer_answers(self._answering)]
        return jobs

    def _end_step(self, step: Step) -> None:
        batch, jobs, tokens, seconds = step
        self._loads.computed(tokens, seconds)
        now = self.now
        if not self._idle:
            self._gpus.idle_since = now
        self._idle += 1
        for tier, job in jobs:
            tier.submit(job, now)
        for prompt, done in batch:
            prompt.done = done
            if prompt.parts:
                self._cache.know(prompt, prompt.parts)
                prompt.parts = ()
            if done < prompt.tokens:
                self._going_on.append(prompt)
                continue
            if prompt.number >= self.warm:
                computed = prompt.tokens - prompt.own - prompt.loaded
                self.served.append(Served(now - prompt.arrival, computed, prompt.loaded))
            answering = prompt.answer * self._answer_seconds
            if answering:
                prompt.is_answering = True
                self._answering[prompt] = None
                self._push(now + answering, self._give_back, prompt)
            else:
                self._give_back(prompt)

    def _give_back(self, prompt: Prompt) -> None:
        self._answering.pop(prompt, None)
        if path := self.workload.answer_paths[prompt.number]:
            self._answer(prompt, path)
        self._cache.give_back(prompt)
        for tier in self.tiers:
            if tier.refused:
                tier.forget(prompt, self.now)

    def _answer(self, prompt: Prompt, path: Sequence[int]) -> None:
        """What the answer filled is in place, and offered, all at its end."""
        self._cache.answer(prompt, path)
        prompt.path = (*prompt.path, *path)
        last = prompt.blocks + sum(self.workload.lengths[run] for run in path)
        offer = prompt.offer(last, self.workload)
        self._cache.know(prompt, prompt.parts)
        prompt.parts = ()
        if not self._stores_answers:
            return
        for tier in self.tiers:
            if tier.due <= self.now:
                tier.drain(self.now)
            if job := tier.offer(prompt, offer, self.now):
                tier.submit(job, self.now)

    # -- beginning and loading ---------------------------------------------------------------

    def _begin(self, prompt: Prompt) -> bool | None:
        """Find a prompt's prefix here and in the chain. True: it can be computed now. False: it
        loads, or waits for another's load. None: there is no room for it."""
        known, at, skip = self._cache.find(prompt)
        loads, now = self._loads, self.now
        is_held = False
        if known < prompt.blocks:
            if loads.in_flight and loads.joins(prompt, at, skip):
                return False
            is_held = loads.any_has(prompt.path[at], skip, now)
        if not self._cache.reserve(prompt, known):
            if known < prompt.blocks:
                loads.drain(now)
            return None
        blocks = prompt.blocks - known
        verdict = loads.choose(prompt, known, at, skip, now) if is_held else loads.nothing(blocks)
        prompt.own = known * self._size
        if prompt.number >= self.warm:
            self.own_hits += prompt.own
        prompt.has_begun = True
        known, ends = loads.begin(prompt, known, verdict, now)
        prompt.loaded = known * self._size - prompt.own
        if verdict.plan is not None:
            self._push(ends, self._end_load, prompt)
        prompt.done = known * self._size
        if not self._promote:
            prompt.offered = known
        return verdict.plan is None

    def _end_load(self, prompt: Prompt) -> None:
        self._cache.know(prompt, prompt.first(prompt.done // self._size, self.workload))
        prompt.done = min(prompt.done, prompt.tokens - 1)
        for one in (prompt, *self._loads.end(prompt)):
            heappush(self._back, (one.number, one))


def _has_run(pair: tuple[Prompt, int]) -> bool:
    return pair[0].offered > 0
