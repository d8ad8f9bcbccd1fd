"""Tier: what one tier holds, what it admits, and its link, in time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiers.tuning.simulation.prompt import Offer, Prompt
from tiers.tuning.simulation.spaces import LruSpace, Part, TimedSpace, first_of
from tiers.tuning.simulation.workload import Workload

BURST = 3600.0
"""Seconds whose part of a write budget may be spent at once, as in the chain's admission."""
ABREAST = 2
"""See `tiers/connector/policy/cheapest/load_cost.py`."""

StoreJob = tuple[list[Part], int, Sequence[int]]
"""Blocks of one prompt on their way: their parts of runs, how many, and the path of the prompt."""


class TierSettings(NamedTuple):
    """A tier in blocks and seconds. `room`: blocks that may be on their way into it."""

    name: str
    room: float
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


class Counts:
    """What a tier has done so far, in blocks and seconds. `hits`: loaded, and in time."""

    __slots__ = ("admitted", "claimed", "hits", "load_busy", "loaded", "store_busy", "stored")

    def __init__(self) -> None:
        self.hits = self.loaded = self.admitted = self.claimed = self.stored = 0
        self.load_busy = self.store_busy = 0.0

    def values(self) -> dict[str, float]:
        """All of them, by their names."""
        return {name: getattr(self, name) for name in self.__slots__}


class Tier:
    """One tier. Times never go back from call to call.

    Loads and stores wait in a queue each. Stores end on a clock that stands still for as long as
    loads take bandwidth from them: `delay` is how far it is behind.
    """

    def __init__(self, settings: TierSettings, workload: Workload, space: LruSpace) -> None:
        self.settings = settings
        self.space = space
        self.held = space.held
        self.counts = Counts()
        self.load_free = 0.0
        self._lengths = workload.lengths
        self._room = settings.room
        """How many more blocks may be on their way into it."""
        self._store_seconds = settings.store_seconds
        self._store_latency = settings.store_latency
        self._is_shared = settings.shared_link
        self._threshold = settings.store_threshold
        self.pending = [0] * len(workload.lengths)
        """Blocks of each run that are on their way into the tier, for reading."""
        self._uses: dict[int, int] = {}
        self.jobs: deque[tuple[float, float, StoreJob]] = deque()
        self._is_timed = isinstance(space, TimedSpace)
        self.due = -math.inf if self._is_timed else math.inf
        """When the tier is next to be drained: not before."""
        self.idle_since = math.inf
        """Since when a GPU has been idle, so that what finds room is offered again at once."""
        self.refused: dict[Prompt, list[Part]] = {}
        """Of prompts that still have their blocks: what found no room."""
        self._loads: deque[tuple[float, int]] = deque()
        self._store_free = 0.0
        self.delay = 0.0
        self._cut: set[int] = set()
        """Numbers of the prompts that the budget did not admit whole."""
        self._budget_left = (settings.budget or 0.0) * BURST
        self._budget_since = 0.0

    # -- loads -------------------------------------------------------------------------------

    def load(self, blocks: int, now: float) -> float:
        """Load blocks from now on; when the last of them has come."""
        settings, counts = self.settings, self.counts
        begin = max(now, self.load_free)
        busy = blocks * settings.load_seconds
        if settings.shared_link:
            # Each has half of the link for as long as both have something to move.
            behind = min(busy, max(0.0, self._store_free + self.delay - begin))
            self.delay += behind
            busy += behind
            self._next_due()
        self.load_free = end = begin + busy
        end += settings.load_latency
        if settings.concurrency == 1:
            self.load_free = end
        counts.load_busy += busy
        counts.loaded += blocks
        self._loads.append((end, blocks))
        return end

    def estimate(self, blocks: int, now: float) -> float:
        """How long the load policy `cheapest` takes a load of so many blocks to need: the loads
        under way are taken to run two at a time."""
        loads = self._loads
        while loads and loads[0][0] <= now:
            loads.popleft()
        queued = sum(one for _, one in loads) / ABREAST
        settings = self.settings
        return settings.load_latency + (queued + blocks) * settings.load_seconds

    # -- stores ------------------------------------------------------------------------------

    def offer(self, prompt: Prompt, offer: Offer, now: float) -> StoreJob | None:
        """Take what the tier lacks of these blocks, head first, as far as its rules and its room
        admit; those that it has count as used."""
        held, pending = self.held, self.pending
        parts, fresh = offer
        wanted: list[Part] = []
        lacking = 0
        is_held = False
        for part in parts:
            run, lacks = part
            if have := held[run] | pending[run]:
                is_held = True
                lacks &= ~have
                if not lacks:
                    continue
                part = run, lacks
            wanted.append(part)
            lacking += lacks.bit_count()
        if is_held and fresh:
            # What this prompt has offered before is not used again.
            self.space.touch(fresh)
        if wanted and self._threshold > 1:
            wanted, lacking = self._asked_enough(wanted, fresh)
        if not wanted:
            return None
        self.counts.admitted += lacking
        if self.settings.budget is not None:
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

    def _begin(self, prompt: Prompt, parts: list[Part], blocks: int) -> StoreJob | None:
        """Take slots for so many blocks in parts; those without one wait while the prompt has its
        blocks."""
        if blocks > self._room:
            parts, left = split(parts, self._room)
            self.refused[prompt] = self.refused.get(prompt, []) + left
            blocks = int(self._room)
        if not blocks:
            return None
        pending = self.pending
        for run, taken in parts:
            pending[run] |= taken
        if self._threshold > 1:
            for run, taken in parts:
                if taken.bit_length() == self._lengths[run]:
                    self._uses.pop(run, None)
        self.counts.claimed += blocks
        self._room -= blocks
        self._budget_left -= blocks
        return parts, blocks, prompt.path

    def _affordable(self, now: float) -> float:
        rate = self.settings.budget or 0.0
        earned = (now - self._budget_since) * rate
        self._budget_left = min(rate * BURST, self._budget_left + earned)
        self._budget_since = now
        return max(0.0, self._budget_left)

    def submit(self, job: StoreJob, now: float) -> None:
        """The blocks of a job are in their slots: they wait for the link."""
        busy = job[1] * self._store_seconds
        begin = self._store_free + self.delay
        if begin < now:
            begin = now
        if self._is_shared:
            busy += min(busy, max(0.0, self.load_free - begin))
        self._store_free = end = begin + busy + self._store_latency - self.delay
        self.jobs.append((end, busy, job))
        if len(self.jobs) == 1:
            self._next_due()

    def _next_due(self) -> None:
        if not self._is_timed:
            self.due = self.jobs[0][0] + self.delay if self.jobs else math.inf

    def drain(self, now: float) -> None:
        """Take in the stores that have ended by now. Needless before `due`."""
        jobs, pending, store, counts = self.jobs, self.pending, self.space.store, self.counts
        while jobs and jobs[0][0] + self.delay <= now:
            end, busy, (parts, blocks, path) = jobs.popleft()
            for run, taken in parts:
                pending[run] &= ~taken
            store(parts, path)
            self._room += blocks
            counts.stored += blocks
            counts.store_busy += busy
            if self.refused and end + self.delay >= self.idle_since:
                self._retry(end + self.delay)
        self._next_due()
        if self._is_timed:
            self.space.pass_time(now)

    def offer_again(self, prompt: Prompt) -> StoreJob | None:
        """Take what had no room before, head first."""
        if self._room < 1 or prompt not in self.refused:
            return None
        held, pending = self.held, self.pending
        parts: list[Part] = []
        lacking = 0
        for run, blocks in self.refused.pop(prompt):
            if lacks := blocks & ~(held[run] | pending[run]):
                parts.append((run, lacks))
                lacking += lacks.bit_count()
        return self._begin(prompt, parts, lacking)

    def offer_answers(self, answering: Iterable[Prompt]) -> list[StoreJob]:
        """Take what had no room before of prompts that answer, in their order."""
        jobs: list[StoreJob] = []
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


def split(parts: list[Part], most: float) -> tuple[list[Part], list[Part]]:
    """The first `most` blocks of these parts, and the others."""
    taken: list[Part] = []
    room = max(0, math.floor(most))
    for index, part in enumerate(parts):
        run, blocks = part
        count = blocks.bit_count()
        if count > room:
            first = first_of(blocks, room)
            head = [(run, first)] if room else []
            return taken + head, [(run, blocks & ~first), *parts[index + 1 :]]
        taken.append(part)
        room -= count
    return taken, []
