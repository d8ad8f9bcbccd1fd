"""SimEngine: a serving engine in simulated time, whose steps ask a chain and load beside it."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import count
from typing import Any

from tiers.tuning.machine import Machine
from tiers.tuning.report import Mark, RoomWait, Served
from tiers.tuning.simulation.loads import Loads
from tiers.tuning.simulation.sim_chain import SimChain
from tiers.tuning.simulation.simulated_tier import SimulatedTier
from tiers.tuning.simulation.spaces import Job, Part
from tiers.tuning.simulation.workload import Prompt, Workload


class Beginning(Enum):
    """What becomes of a prompt that is to begin."""

    COMPUTES = auto()
    LOADS = auto()
    """Or it waits for another's load."""
    NO_ROOM = auto()


class OwnCache:
    """The blocks of running prompts, and, in the rest of its `capacity`, the prefixes used last.

    A prompt's blocks become known from the first on and are evicted from the last on, so that the
    known part of a run is a count. Runs of running prompts are pinned: only the others have an
    order.

    `capacity`: blocks; infinite for an engine without a prefix cache, which always has room.
    """

    def __init__(self, capacity: float, workload: Workload) -> None:
        self.capacity = capacity
        self._lengths = workload.lengths
        self._size = workload.block_tokens
        runs = len(workload.lengths)
        self._known = [0] * runs
        """Leading blocks of each run that are in place."""
        self._users = [0] * runs
        """How many running prompts have each run in their path."""
        self._copies: dict[int, int] = {}
        """Blocks of each run that running prompts hold beyond one of each, having computed or
        loaded them at the same time."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Runs with known blocks that no running prompt has, the first to be evicted first."""
        self._free = capacity
        """Blocks that are neither used nor taken; less than 0 where all others are pinned."""
        self._taken = 0
        """Blocks of running prompts: known, or yet to be computed or loaded."""

    def find(self, prompt: Prompt, ahead: Mapping[int, int]) -> tuple[int, int, int]:
        """Leading blocks of a prompt that are in place, or `ahead` will be; of its path the run and
        the block in it that come next. The last token is always computed."""
        path, lengths, in_place = prompt.path, self._lengths, self._known
        known = at = skip = 0
        for run in path:
            have = max(in_place[run], ahead.get(run, 0))
            known += have
            if have != lengths[run]:
                skip = have
                break
            at += 1
        limit = (prompt.tokens - 1) // self._size
        if known <= limit:
            return known, at, skip
        at, skip = 0, limit
        while skip >= lengths[path[at]]:
            skip -= lengths[path[at]]
            at += 1
        return limit, at, skip

    def reserve(self, prompt: Prompt, known: int) -> bool:
        """Take blocks for the part of a prompt that is not in place; False: too few are free."""
        needed = -(-prompt.tokens // self._size) - known
        more = needed + self._idle_of(prompt.path)
        if self._taken and self._taken + more > self.capacity:
            return False
        self._pin(prompt.path)
        prompt.reserved = needed
        self._taken += more
        self._free -= needed
        self._take_idle()
        return True

    def _idle_of(self, path: Sequence[int]) -> int:
        """Known blocks of these runs that no running prompt has."""
        return sum(self._known[run] for run in path if not self._users[run])

    def _pin(self, path: Sequence[int]) -> None:
        """A running prompt has these runs."""
        for run in path:
            if not self._users[run]:
                self._idle.pop(run, None)
            self._users[run] += 1

    def know(self, prompt: Prompt, parts: Iterable[Part], fresh: int) -> None:
        """These blocks of a prompt, of which it took `fresh`, are computed or loaded, as all before
        them: others find them in place."""
        if self.capacity == math.inf:
            return
        in_place = self._known
        before: list[tuple[int, int]] = []
        copied = fresh
        for run, blocks in parts:
            end = blocks.bit_length()
            have = in_place[run]
            if have:
                before.append((run, min(have, end)))
            if end > have:
                in_place[run] = end
                copied -= end - have
        prompt.reserved -= fresh
        if copied < 0:
            self._taken -= copied
            self._free += copied
            self._take_idle()
        while copied > 0 and before:
            # Those that it found in place come first.
            run, count = before.pop()
            count = min(count, copied)
            self._copies[run] = self._copies.get(run, 0) + count
            copied -= count

    def answer(self, prompt: Prompt, path: Sequence[int]) -> None:
        """The answer of a prompt has filled the runs that `path` adds to the prompt's own; their
        blocks are yet to be known."""
        self._taken += self._idle_of(path)
        self._pin(path)
        # The KV of the last token is not computed.
        needed = -(-(prompt.tokens + prompt.answer - 1) // self._size) - prompt.blocks
        more = max(0, needed - prompt.reserved)
        prompt.reserved += more
        self._taken += more
        self._free -= more
        self._take_idle()

    def give_back(self, prompt: Prompt) -> None:
        """The prompt's request has ended."""
        users, in_place, idle = self._users, self._known, self._idle
        # A block that never became known, such as a partial last one, is taken again first.
        ended = prompt.reserved
        prompt.reserved = 0
        if self._copies:
            ended += self._drop_copies(prompt)
        self._free += ended
        for run in prompt.path[::-1]:
            users[run] = left = users[run] - 1
            if not left and (have := in_place[run]):
                idle[run] = None
                ended += have
        self._taken -= ended
        self._take_idle()

    def _drop_copies(self, prompt: Prompt) -> int:
        """A prompt that ends gives back a copy of each block that it computed or loaded; how many
        there are."""
        depth, own, dropped = 0, prompt.own // self._size, 0
        for run in prompt.path:
            length = self._lengths[run]
            depth += length
            if copies := self._copies.get(run):
                mine = min(length, max(0, depth - own))
                left = max(0, copies - mine) if self._users[run] > 1 else 0
                dropped += copies - left
                self._copies[run] = left
                if not left:
                    del self._copies[run]
        return dropped

    def _take_idle(self) -> None:
        """Take blocks of idle runs, from the tail, for those that there is no room for."""
        free, idle, in_place = self._free, self._idle, self._known
        while free < 0 and idle:
            run = next(iter(idle))
            free += in_place[run]
            in_place[run] = max(0, int(free))
            if free <= 0:
                del idle[run]
            free = min(0, free)
        self._free = free


Batch = list[tuple[Prompt, int]]
"""Prompts of a step, each with its tokens done after it."""
Step = tuple[Batch, list[tuple[SimulatedTier, Job]], int, float]
"""With the stores that begin when it ends, its tokens and its seconds."""


class SimEngine:
    """Serves a workload: continuous batching of prompts, a prefix cache, loads beside the steps.
    All before request number `warm` only warms."""

    def __init__(
        self,
        workload: Workload,
        tiers: Sequence[SimulatedTier],
        chain: SimChain,
        machine: Machine,
        warm: int = 0,
    ) -> None:
        self.workload, self.tiers, self.machine, self.warm = workload, tiers, machine, warm
        self.now = self._gpu_busy = 0.0
        self.served: list[Served] = []
        """The counted requests, in the order in which their prompts ended."""
        self._room_wait = RoomWait()
        self._storing = [tier for tier in tiers if tier.spec.paused in (None, "reads")]
        self._size = size = workload.block_tokens
        self._token_seconds = 1 / machine.prefill_rate
        self._chain = chain
        capacity = machine.engine_cache // (machine.kv_bytes_per_token * size) or math.inf
        self._cache = OwnCache(capacity, workload)
        self._waiting: deque[Prompt] = deque()
        self._loads = Loads(tiers, chain, workload, lambda: self.now)
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._going_on: deque[Prompt] = deque()
        self._back: list[tuple[bool, int, Prompt]] = []
        """Those that have waited, for room or for a load. Those that have their blocks come first,
        as in vLLM, then they go by their place in line."""
        self._answering: dict[Prompt, None] = {}
        self._idle = machine.gpus
        self._idle_since = 0.0
        for tier in tiers:
            tier.idle_since = lambda: self._idle_since

    # -- the clock ---------------------------------------------------------------------------

    def run(self) -> tuple[Mark, Mark]:
        """Serve it; counts of when the first request came that counts, and of the end."""
        mark = self._mark()
        workload, events, waiting = self.workload, self._events, self._waiting
        lists = workload.times, workload.tokens, workload.answers, workload.prompts
        for number, (arrival, tokens, answer, prompt) in enumerate(zip(*lists, strict=True)):
            while events and events[0][0] <= arrival:
                self._next_event()
            self.now = arrival
            if number == self.warm:
                mark = self._mark()
            waiting.append(Prompt(number, arrival, tokens, answer, *prompt))
            self._loads.waiting += 1
            self._begin_steps()
        while events:
            self._next_event()
        assert not (waiting or self._back or self._going_on), "all requests are served"
        self._loads.drain(self.now)
        return mark, self._mark()

    def _mark(self) -> Mark:
        wait, counts = self._room_wait.until(self.now), [tier.counted() for tier in self.tiers]
        return Mark(self.now, self._gpu_busy, wait, counts)

    def _push(self, time: float, act: Callable[[Any], None], what: Any) -> None:
        heappush(self._events, (time, next(self._order), act, what))

    def _next_event(self) -> None:
        self.now, _, act, what = heappop(self._events)
        act(what)
        self._begin_steps()

    # -- steps -------------------------------------------------------------------------------

    def _begin_steps(self) -> None:
        """Begin a step on each idle GPU, as long as there is something to compute."""
        while self._idle:
            batch, tokens = self._batch()
            if not batch:
                return
            seconds = tokens * self._token_seconds
            self._gpu_busy += seconds
            self._idle -= 1
            if not self._idle:
                self._idle_since = math.inf
            step = batch, self._offer(batch), tokens, seconds
            self._push(self.now + seconds, self._end_step, step)

    def _batch(self) -> tuple[Batch, int]:
        """The prompts of a step, and its tokens: those that have begun first."""
        batch: Batch = []
        # As in vLLM, whoever begins in a step has what it computes; other steps do once it ends.
        ahead: dict[int, int] = {}
        going_on, budget, size = self._going_on, self.machine.step_tokens, self._size
        while budget > 0:
            if going_on:
                prompt = going_on.popleft()
            elif self._back:
                prompt = heappop(self._back)[2]
            elif self._waiting:
                prompt = self._waiting.popleft()
            else:
                break
            if not prompt.has_begun:
                begins = self._begin(prompt, ahead)
                if begins is Beginning.NO_ROOM:
                    heappush(self._back, (True, prompt.number, prompt))
                    break
                if begins is Beginning.LOADS:
                    continue
            done = min(prompt.tokens, prompt.done + budget)
            budget -= done - prompt.done
            batch.append((prompt, done))
            if self._cache.capacity < math.inf:
                parts = prompt.between(prompt.done // size, done // size, self.workload)
                ahead.update((run, blocks.bit_length()) for run, blocks in parts)
        return batch, self.machine.step_tokens - budget

    def _offer(self, batch: Batch) -> list[tuple[SimulatedTier, Job]]:
        """Offer the tiers the blocks of a step; the stores that begin when it ends."""
        now, size, tiers = self.now, self._size, self._storing
        jobs: list[tuple[SimulatedTier, Job]] = []
        self._loads.drain(now)
        # As engines report them: new prompts, then those that go on, then those that answer.
        for prompt, done in sorted(batch, key=lambda pair: pair[0].offered > 0):
            first, last = prompt.offered, min(prompt.blocks, done // size)
            offer = prompt.offer(last, self.workload) if last > first else None
            for tier in tiers:
                if tier.refused and first and (again := tier.offer_again(prompt)):
                    jobs.append((tier, again))
                if offer and (job := tier.offer(prompt, offer, now)):
                    jobs.append((tier, job))
        for tier in tiers:
            if tier.refused:
                jobs += [(tier, job) for job in tier.offer_answers(self._answering)]
        return jobs

    def _end_step(self, step: Step) -> None:
        batch, jobs, tokens, seconds = step
        self._loads.computed(tokens, seconds)
        now = self.now
        if not self._idle:
            self._idle_since = now
        self._idle += 1
        for tier, job in jobs:
            tier.submit(job, now)
        for prompt, done in batch:
            before, prompt.done = prompt.done, done
            if prompt.parts:
                fresh = min(done // self._size, prompt.blocks) - before // self._size
                self._cache.know(prompt, prompt.parts, fresh)
                prompt.parts = ()
            if done < prompt.tokens:
                self._going_on.append(prompt)
                continue
            if prompt.number >= self.warm:
                waited = now - prompt.arrival
                found = prompt.tokens, prompt.own, prompt.loaded, prompt.answer
                self.served.append(Served(waited, *found))
            answering = prompt.answer * self.machine.decode_seconds_per_token
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
        """The blocks of an answer are in place, and offered, all at its end."""
        self._cache.answer(prompt, path)
        prompt.path = (*prompt.path, *path)
        last = prompt.blocks + sum(self.workload.lengths[run] for run in path)
        offer = prompt.offer(last, self.workload)
        self._cache.know(prompt, prompt.parts, last - prompt.blocks)
        prompt.parts = ()
        if self._chain.store == "prompt":
            return
        for tier in self._storing:
            tier.drain(self.now)
            if job := tier.offer(prompt, offer, self.now):
                tier.submit(job, self.now)

    # -- beginning and loading ---------------------------------------------------------------

    def _begin(self, prompt: Prompt, ahead: Mapping[int, int]) -> Beginning:
        """Find a prompt's prefix here and in the chain, and begin it where there is room."""
        known, at, skip = self._cache.find(prompt, ahead)
        loads, now = self._loads, self.now
        prompt.own = known * self._size
        verdict = loads.nothing(prompt.blocks - known)
        if known < prompt.blocks and loads.any_has(prompt.path[at], skip, now):
            verdict = loads.choose(prompt, known, at, skip, now)
            if verdict.plan is not None and loads.joins(prompt, verdict.plan):
                return Beginning.LOADS
        if not self._cache.reserve(prompt, known):
            if known < prompt.blocks:
                loads.drain(now)
            self._room_wait.refused(now)
            return Beginning.NO_ROOM
        prompt.has_begun = True
        self._room_wait.began(now)
        known, ends = loads.begin(prompt, known, verdict, now)
        prompt.loaded = known * self._size - prompt.own
        if verdict.plan is not None:
            self._push(ends, self._end_load, prompt)
        prompt.done = known * self._size
        if not self._chain.promote:
            prompt.offered = known
        elif self._chain.store == "computed":
            prompt.offered, prompt.offers_from = prompt.own // self._size, at
        return Beginning.COMPUTES if verdict.plan is None else Beginning.LOADS

    def _end_load(self, prompt: Prompt) -> None:
        blocks = prompt.done // self._size
        fresh = blocks - prompt.own // self._size
        self._cache.know(prompt, prompt.between(0, blocks, self.workload), fresh)
        prompt.done = min(prompt.done, prompt.tokens - 1)
        for one in (prompt, *self._loads.end(prompt)):
            heappush(self._back, (not one.has_begun, one.number, one))
