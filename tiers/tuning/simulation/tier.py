"""Tier: what one tier holds, what it admits, and its link, in time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiers.loading.load_cost import ABREAST, LoadCost
from tiers.tuning.simulation.spaces import Job, LruSpace, Part, TimedSpace, split
from tiers.tuning.simulation.workload import Offer, Prompt, Workload

BURST = 3600.0
"""Seconds whose part of a write budget may be spent at once, as in the chain's admission."""


@dataclass(slots=True)
class TierCounts:
    """Counts of a tier so far, in blocks and seconds."""

    hits: int = 0
    """Loaded, and in time."""
    loaded: int = 0
    dropped: int = 0
    """Admitted, and without a slot so far."""
    stored: int = 0
    load_busy: float = 0.0
    store_busy: float = 0.0


class TierSettings(NamedTuple):
    """A tier in blocks and seconds. `room`: blocks that may be on their way into it. `is_host`:
    they have their place in it from the first."""

    room: float
    is_host: bool
    store_threshold: int
    load_seconds: float
    """For each block, as `store_seconds` is."""
    store_seconds: float
    load_latency: float
    store_latency: float
    concurrency: int
    shared_link: bool
    budget: float | None
    """Blocks per second that the write budget admits."""


class _TimedLoad(NamedTuple):
    """A load until it ends: the job, its own seconds, and the tokens that come of it."""

    end: float
    job: int
    seconds: float
    tokens: int
    whole: bool


class IdleGpus:
    """What a tier has to know of the engine's GPUs."""

    idle_since = 0.0
    """Since when one is idle, so that what finds room is offered again at once; else infinite."""


class Tier:
    """One tier. Times never go back from call to call.

    Loads and stores wait in a queue each. Stores end on a clock that stands still for as long as
    loads take bandwidth from them: `delay` is how far it is behind.
    """

    def __init__(self, settings: TierSettings, workload: Workload, space: LruSpace) -> None:
        self.settings = settings
        self.space = space
        self.held = space.held
        self.known = space.known
        self.counts = TierCounts()
        self.load_free = 0.0
        self._lengths = workload.lengths
        self._tokens = workload.block_tokens
        self._room = settings.room
        """How many more blocks may be on their way into it."""
        self._store_seconds = settings.store_seconds
        self._store_latency = settings.store_latency
        self._is_shared = settings.shared_link
        self._is_host = settings.is_host
        self._threshold = settings.store_threshold
        self._has_rules = self._threshold > 1 or settings.budget is not None
        self._uses: dict[int, int] = {}
        self.jobs: deque[tuple[float, float, Job]] = deque()
        self._is_timed = isinstance(space, TimedSpace)
        self.due = -math.inf if self._is_timed else math.inf
        """When the tier is next to be drained: not before."""
        self.gpus = IdleGpus()
        self.refused: dict[Prompt, list[Part]] = {}
        """Of prompts that still have their blocks: what found no room."""
        self._now = 0.0
        self.cost = LoadCost(lambda: self._now)
        """What the chain would have measured of its loads by now."""
        self._loads: deque[_TimedLoad] = deque()
        self._jobs = 0
        self._loaders = [0.0] * ABREAST
        """When each of the worker's loaders is free."""
        self._store_free = 0.0
        self.delay = 0.0
        self._cut: set[int] = set()
        """Numbers of the prompts that the budget did not admit whole."""
        self._budget_left = (settings.budget or 0.0) * BURST
        self._budget_since = 0.0

    # -- loads -------------------------------------------------------------------------------

    def load(self, blocks: int, now: float, late: float) -> tuple[float, int]:
        """Load blocks from now on; when that ends, at `late` at the latest, and how many come.

        A load that can't end in time is dropped when its turn comes, once that is known.
        """
        settings, counts, cost = self.settings, self.counts, self.cost
        loader = self._loaders.index(min(self._loaders))
        turn = max(now, self._loaders[loader])
        begin = max(turn, self.load_free)
        each, latency = settings.load_seconds, settings.load_latency
        came, busy = blocks, blocks * each
        if begin + busy + latency > late:
            came = 0 if cost.line is not None else int(max(0.0, late - begin - latency) / each)
            busy = came * each
        if settings.shared_link:
            # Blocks take turns for as long as both have something to move, and loads two at a time.
            backlog = max(0.0, self._store_free + self.delay - begin)
            loads = came if begin == now else came / ABREAST
            turns = min(loads, backlog / settings.store_seconds)
            self.delay += turns * each
            busy += turns * settings.store_seconds
            if self.jobs and not self._is_timed:
                self.due = self.jobs[0][0] + self.delay
        end = begin + busy
        if came:
            self.load_free = end
            end += latency
            if settings.concurrency == 1:
                self.load_free = end
        counts.load_busy += busy
        counts.loaded += came
        if came < blocks:
            end = min(late, end) if cost.line is not None else late
        own = end - turn
        self._loaders[loader] = max(turn, end)
        self._jobs += 1
        cost.began(self._jobs, blocks * self._tokens)
        ended = _TimedLoad(end, self._jobs, max(0.0, own), came * self._tokens, came == blocks)
        self._loads.append(ended)
        return end, came

    def measure(self, now: float) -> None:
        """Take in what the chain has measured by now."""
        self._now = now
        loads, cost = self._loads, self.cost
        while loads and loads[0].end <= now:
            one = loads.popleft()
            cost.ended(one.job, one.seconds, one.whole, one.tokens, not one.whole)
        if loads:
            cost.stepped()

    # -- stores ------------------------------------------------------------------------------

    def offer(self, prompt: Prompt, offer: Offer, now: float) -> Job | None:
        """Take what the tier lacks of these blocks, head first, as far as its rules and its room
        admit; those that it has count as used."""
        known = self.known
        job, fresh = offer
        wanted, lacking, path = job
        for run, new in wanted:
            if (have := known[run]) and (fresh or have & new):
                wanted, lacking = self._lacks(wanted, lacking)
                if fresh:
                    # What this prompt has offered before is not used again.
                    self.space.touch(fresh)
                if not lacking:
                    return None
                job = wanted, lacking, path
                break
        if self._has_rules:
            return self._offer_by_rules(prompt, wanted, lacking, fresh, now)
        if lacking > self._room:
            self.counts.dropped += lacking
            return self._begin(prompt, wanted, lacking)
        self._room -= lacking
        for run, new in wanted:
            known[run] |= new
        return job

    def _lacks(self, parts: list[Part], lacking: int) -> tuple[list[Part], int]:
        """What the tier neither has nor is about to have of so many blocks, and how many."""
        known = self.known
        wanted: list[Part] = []
        for part in parts:
            run, blocks = part
            if old := known[run] & blocks:
                lacking -= old.bit_count()
                if old == blocks:
                    continue
                part = run, blocks ^ old
            wanted.append(part)
        return wanted, lacking

    def _offer_by_rules(
        self, prompt: Prompt, wanted: list[Part], lacking: int, fresh: Sequence[int], now: float
    ) -> Job | None:
        """Take of the blocks that the tier lacks those that enough prompts have asked for, as far
        as the write budget and the room admit."""
        if self._threshold > 1:
            wanted, lacking = self._asked_enough(wanted, fresh)
        self.counts.dropped += lacking
        if self.settings.budget is not None and wanted:
            most = 0.0 if prompt.number in self._cut else self._affordable(now)
            if lacking > most:
                self._cut.add(prompt.number)  # what is behind that could not be loaded
                wanted, _ = split(wanted, most)
                lacking = math.floor(most)
        return self._begin(prompt, wanted, lacking)

    def _asked_enough(self, wanted: list[Part], fresh: Sequence[int]) -> tuple[list[Part], int]:
        """Those of the parts that enough prompts have asked for, and their blocks. This prompt has
        asked for a run that is not `fresh` before."""
        uses = self._uses
        for run, _ in wanted:
            uses[run] = uses.get(run, 0) + (run in fresh)
        enough = [part for part in wanted if uses[part[0]] >= self._threshold]
        return enough, sum(blocks.bit_count() for _, blocks in enough)

    def _begin(self, prompt: Prompt, parts: list[Part], blocks: int) -> Job | None:
        """Take slots for so many blocks in parts; those without one wait while the prompt has its
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
        if self._threshold > 1:
            for run, taken in parts:
                if taken.bit_length() == self._lengths[run]:
                    self._uses.pop(run, None)
        self.counts.dropped -= blocks
        self._room -= blocks
        self._budget_left -= blocks
        return parts, blocks, prompt.path

    def _affordable(self, now: float) -> float:
        rate = self.settings.budget or 0.0
        earned = (now - self._budget_since) * rate
        self._budget_left = min(rate * BURST, self._budget_left + earned)
        self._budget_since = now
        return max(0.0, self._budget_left)

    def submit(self, job: Job, now: float) -> None:
        """The blocks of a job are in their slots: they wait for the link."""
        busy = job[1] * self._store_seconds
        delay = self.delay
        begin = self._store_free + delay
        if begin < now:
            begin = now
        if self._is_shared:
            turns = job[1] * self.settings.load_seconds
            busy += min(turns, max(0.0, self.load_free - begin))
        if self._is_host:
            self.space.claim(job[1])
        self._store_free = end = begin + busy + self._store_latency - delay
        self.jobs.append((end, busy, job))
        if self.due == math.inf:
            self.due = end + delay

    def drain(self, now: float) -> None:
        """Take in the stores that have ended by now. Needless before `due`."""
        jobs, store, counts = self.jobs, self.space.store, self.counts
        while jobs and jobs[0][0] + self.delay <= now:
            end, busy, job = jobs.popleft()
            blocks = job[1]
            if self._is_host:
                self.space.claimed -= blocks
            store(job)
            self._room += blocks
            counts.stored += blocks
            counts.store_busy += busy
            if self.refused and end + self.delay >= self.gpus.idle_since:
                self._retry(end + self.delay)
        if self._is_timed:
            self.space.pass_time(now)
        else:
            self.due = jobs[0][0] + self.delay if jobs else math.inf

    def offer_again(self, prompt: Prompt) -> Job | None:
        """Take what had no room before, head first."""
        if self._room < 1 or prompt not in self.refused:
            return None
        known = self.known
        parts: list[Part] = []
        lacking = 0
        for run, blocks in self.refused.pop(prompt):
            if lacks := blocks & ~known[run]:
                parts.append((run, lacks))
                lacking += lacks.bit_count()
        return self._begin(prompt, parts, lacking)

    def offer_answers(self, answering: Iterable[Prompt]) -> list[Job]:
        """Take what had no room before of prompts that answer, in their order."""
        jobs: list[Job] = []
        if self._room < 1:
            return jobs
        for prompt in [one for one in answering if one in self.refused]:
            job = self.offer_again(prompt)
            if job is not None:
                jobs.append(job)
            if self._room < 1:
                break
        return jobs

    def _retry(self, now: float) -> None:
        """Offer again what answering prompts have, in a step for that alone."""
        for job in self.offer_answers([one for one in self.refused if one.is_answering]):
            self.submit(job, now)

    def forget(self, prompt: Prompt, now: float) -> None:
        """The engine takes the blocks of a prompt back."""
        if self.due <= now:
            self.drain(now)
        self.refused.pop(prompt, None)
