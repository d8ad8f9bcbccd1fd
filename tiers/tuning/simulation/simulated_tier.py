"""SimulatedTier: the blocks of one tier, its rules of admission, and its link, in time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from spec.offloading import BUDGET_BURST, QUEUE_SECONDS
from tiers.loading.load_cost import LoadCost
from tiers.tuning.machine import TierProfile
from tiers.tuning.report import TierCounts
from tiers.tuning.simulation.sim_chain import SimTier
from tiers.tuning.simulation.spaces import Job, LruSpace, Part, split
from tiers.tuning.simulation.workload import Offer, Prompt, Workload


class SimulatedTier:
    """One tier. Times never go back from call to call.

    Loads and stores wait in a queue each. Stores end on a clock that stands still for as long as
    loads take bandwidth from them: `delay` is how far it is behind.
    """

    def __init__(
        self,
        spec: SimTier,
        profile: TierProfile,
        block_bytes: int,
        most: float,
        workload: Workload,
        space: LruSpace,
    ) -> None:
        """`most`: blocks that may be in flight into it, if neither its own limit nor its link is
        lower."""
        rate = min(profile.store_bandwidth, spec.store_rate or math.inf)
        self.spec, self.profile = spec, profile
        self._load_seconds = block_bytes / min(profile.load_bandwidth, spec.load_rate or math.inf)
        """For each block, as `_store_seconds` is."""
        self._store_seconds = block_bytes / rate
        self.space = space
        self.held = space.held
        self.known = space.known
        self.counts = TierCounts()
        self.load_free = 0.0
        self._lengths = workload.lengths
        self._tokens = workload.block_tokens
        self._room = float(max(1, int(most)))
        """How many more blocks may be in flight into it."""
        if spec.max_inflight is not None:
            self._room = min(self._room, max(1, spec.max_inflight // block_bytes))
        elif not spec.is_host:
            self._room = min(self._room, max(1, int(QUEUE_SECONDS * rate / block_bytes)))
        self._budget = None if spec.write_budget is None else spec.write_budget / block_bytes
        """Blocks per second that the write budget admits."""
        self._uses: dict[int, int] = {}
        self.jobs: deque[tuple[float, float, Job]] = deque()
        self.idle_since: Callable[[], float] = lambda: 0.0
        """Since when a GPU is idle, so that blocks that find room are offered again at once; else
        infinite."""
        self.refused: dict[Prompt, list[Part]] = {}
        """Of prompts that still have their blocks: those that found no room."""
        self._now = 0.0
        self.cost = LoadCost(lambda: self._now, spec.loads_at_once)
        """As the chain would have measured its loads by now."""
        self._loads: deque[tuple[float, tuple[int, float, bool, int, bool]]] = deque()
        """The end of each load in flight, and what `cost` takes then."""
        self._jobs = 0
        self._loaders = [0.0] * spec.loads_at_once
        """When each of the worker's loaders is free."""
        self._store_free = 0.0
        self.delay = 0.0
        self._cut: set[int] = set()
        """Numbers of the prompts that the budget did not admit whole."""
        self._budget_left = 0.0
        """Blocks. An hour's worth, as engines begin with, would hide what the budget keeps out."""
        self._budget_since = 0.0

    def counted(self) -> TierCounts:
        held = self.space.used + self.space.claimed
        was_full = self.spec.ttl is not None or held >= self.space.capacity
        return replace(self.counts, held=None if was_full else held)

    # -- loads -------------------------------------------------------------------------------

    def load(self, blocks: int, now: float, late: float) -> tuple[float, int]:
        """Load blocks from now on; when that ends, at `late` at the latest, and how many come.

        A load that can't end in time is dropped at its turn, once the cost of loads is known.
        """
        profile, counts, cost = self.profile, self.counts, self.cost
        loader = self._loaders.index(min(self._loaders))
        turn = max(now, self._loaders[loader])
        begin = max(turn, self.load_free)
        each, latency = self._load_seconds, profile.load_latency
        came, busy = blocks, blocks * each
        dropped = False
        if begin + busy + latency > late:
            dropped = turn > now and cost.line is not None
            came = 0 if dropped else int(max(0.0, late - begin - latency) / each)
            busy = came * each
        if profile.shared_link:
            # Blocks take turns for as long as both have something to move, one of each load that
            # runs.
            backlog = max(0.0, self._store_free + self.delay - begin)
            loads = came if begin == now else came / self.spec.loads_at_once
            turns = min(loads, backlog / self._store_seconds)
            self.delay += turns * each
            busy += turns * self._store_seconds
        end = begin + busy
        if came:
            self.load_free = end
            end += latency
        counts.load_busy += busy
        counts.loaded += came
        if came < blocks:
            end = min(late, end) if dropped else late
        self._loaders[loader] = max(turn, end)
        self._jobs += 1
        self._now = now
        cost.began(self._jobs, blocks * self._tokens)
        for _ in range(2):  # an engine that waits steps on, and its second step sees the load begun
            cost.stepped()
        tokens, whole = came * self._tokens, came == blocks
        self._loads.append((end, (self._jobs, max(0.0, end - turn), whole, tokens, not whole)))
        return end, came

    def measure(self, now: float) -> None:
        """Count the loads that have ended by now."""
        loads, cost = self._loads, self.cost
        while loads and loads[0][0] <= now:
            self._now, ended = loads.popleft()
            cost.ended(*ended)
        self._now = now
        if loads:
            cost.stepped()

    # -- stores ------------------------------------------------------------------------------

    def offer(self, prompt: Prompt, offer: Offer, now: float) -> Job | None:
        """Take the missing ones of these blocks, predecessors first, as far as the tier's rules and
        its room admit; those that it has count as used."""
        known = self.known
        (wanted, missing, _), fresh = offer
        for run, new in wanted:
            if (have := known[run]) and (fresh or have & new):
                wanted = [(r, missing) for r, b in wanted if (missing := b & ~known[r])]
                missing = sum(blocks.bit_count() for _, blocks in wanted)
                if fresh:
                    # Blocks that this prompt has offered before are not used again.
                    self.space.touch(fresh)
                if not missing:
                    return None
                break
        if self.spec.store_threshold > 1:
            uses = self._uses
            # This prompt has asked for a run that is not `fresh` before.
            for run, _ in wanted:
                uses[run] = uses.get(run, 0) + (run in fresh)
            wanted = [part for part in wanted if uses[part[0]] >= self.spec.store_threshold]
            missing = sum(blocks.bit_count() for _, blocks in wanted)
        self.counts.dropped += missing
        if (rate := self._budget) is not None and wanted:
            most = 0.0
            if prompt.number not in self._cut:
                earned = (now - self._budget_since) * rate
                self._budget_left = min(rate * BUDGET_BURST, self._budget_left + earned)
                self._budget_since = now
                most = max(0.0, self._budget_left)
            if missing > most:
                self._cut.add(prompt.number)  # nothing behind that could be loaded
                wanted, _ = split(wanted, most)
                missing = math.floor(most)
        return self._begin(prompt, wanted, missing)

    def _begin(self, prompt: Prompt, parts: list[Part], blocks: int) -> Job | None:
        """Take slots for `blocks` blocks in parts; those without one wait while the prompt has its
        blocks."""
        if blocks > self._room:
            parts, left = split(parts, self._room)
            if prompt in self.refused:
                left = self.refused[prompt] + left
            self.refused[prompt] = left
            blocks = int(self._room)
        if not blocks:
            return None
        known = self.known
        for run, taken in parts:
            known[run] |= taken
        if self.spec.store_threshold > 1:
            for run, taken in parts:
                if taken.bit_length() == self._lengths[run]:
                    self._uses.pop(run, None)
        self.counts.dropped -= blocks
        self._room -= blocks
        self._budget_left -= blocks
        return parts, blocks, prompt.offered_path

    def submit(self, job: Job, now: float) -> None:
        """The blocks of a job are in their slots: they wait for the link."""
        profile, delay = self.profile, self.delay
        busy = job[1] * self._store_seconds
        begin = self._store_free + delay
        if begin < now:
            begin = now
        if profile.shared_link:
            turns = job[1] * self._load_seconds
            busy += min(turns, max(0.0, self.load_free - begin))
        if self.spec.is_host:
            self.space.claim(job[1])
        self._store_free = end = begin + busy + profile.store_latency - delay
        self.jobs.append((end, busy, job))

    def drain(self, now: float) -> None:
        """Count the stores that have ended by now."""
        jobs, counts = self.jobs, self.counts
        while jobs and jobs[0][0] + self.delay <= now:
            end, busy, job = jobs.popleft()
            blocks = job[1]
            if self.spec.is_host:
                self.space.claimed -= blocks
            self.space.store(job)
            self._room += blocks
            counts.stored += blocks
            counts.store_busy += busy
            if self.refused and end + self.delay >= self.idle_since():
                # A step for that alone offers again the blocks that answering prompts have.
                then = end + self.delay
                for again in self.offer_answers([p for p in self.refused if p.is_answering]):
                    self.submit(again, then)
        self.space.pass_time(now)

    def offer_again(self, prompt: Prompt) -> Job | None:
        """Take blocks that had no room before, predecessors first."""
        if self._room < 1 or prompt not in self.refused:
            return None
        refused = self.refused.pop(prompt)
        parts = [(run, missed) for run, blocks in refused if (missed := blocks & ~self.known[run])]
        return self._begin(prompt, parts, sum(blocks.bit_count() for _, blocks in parts))

    def offer_answers(self, answering: Iterable[Prompt]) -> list[Job]:
        """Take blocks that had no room before of prompts that answer, in their order."""
        return [job for prompt in answering if (job := self.offer_again(prompt)) is not None]

    def forget(self, prompt: Prompt, now: float) -> None:
        """The engine takes the blocks of a prompt back."""
        self.drain(now)
        self.refused.pop(prompt, None)
