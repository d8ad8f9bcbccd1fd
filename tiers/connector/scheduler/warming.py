"""What is in host memory after a start? What was used last of a store, loaded before it is asked.

    waiting ──both tiers open──> loading ──all loaded, a limit, no free slot, a reset──> over
       └──it can't be used, is paused, or answers too late──> the next store, if there is one

The store names its blocks on a thread. Each step orders some of them, while no request loads from
the store: a prefix's first block counts as used last, so that whole prefixes come. A worker reads
them into slots that nobody uses, by the rules of any load: of this namespace, verified, with the
weights that the generation stands for. Only then does a slot hold the block's key, and the host
tier admits it, to be evicted before what was used later.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from spec.chain import WarmSpec
from spec.fields import format_size
from tiers.concurrency.executors import IDLE_WAIT, in_background, wait_a_moment
from tiers.connector.scheduler.jobs import Jobs, PendingSlots
from tiers.connector.scheduler.tier import Tier
from tiers.contract.messages import JobResult, LoadItem, LoadJob
from tiers.store import batch_blocks

logger = logging.getLogger(__name__)

NAMED_AT_ONCE = 256
"""Blocks that the store names in one call."""
OPENING_SECONDS = 600.0
"""For which an engine without requests makes steps until the tiers open; weights are read first."""
JOB_BYTES = 8 << 20
"""Bytes over all ranks of what one step orders: a request's own load waits behind no more."""
CLAIM = b"warm "
"""Stands before the key in a slot that is being filled, so that nobody takes it for the block."""


class Warming:
    """Loads blocks of a tier that is a `source` into a host tier, once; used by the scheduler's
    thread alone. It holds a slot until every rank has ended with it, whatever comes between."""

    def __init__(
        self,
        spec: WarmSpec,
        source: Tier,
        target: Tier,
        jobs: Jobs,
        now: Callable[[], float],
        or_else: Callable[[], bool],
    ) -> None:
        """`jobs`: those of the source. `now`: seconds, never going back. `or_else` has the next
        store asked once this one turns out not to know what was used last; False: there is none."""
        self._or_else = or_else
        self._spec, self._source, self._target = spec, source, target
        self._jobs, self._now = jobs, now
        self._tag = source.requests.generation.tag
        self._named: deque[bytes] = deque()
        self._naming: Future[str | None] | None = None
        self._first = self._began = math.inf
        self._in_flight = self._loaded = 0
        self._before: bytes | None = None
        self._is_over = False

    @property
    def waits(self) -> bool:
        """Whether it needs steps, which an engine without requests makes for that. After its
        seconds none, for a store that hangs: its slots come back with any later step."""
        now = self._now()
        if self._naming is None:
            return not self._is_over and now <= self._first + OPENING_SECONDS
        is_late = now > self._began + self._spec.seconds
        return not self._is_over or (bool(self._in_flight) and not is_late)

    def orders(self, is_idle: bool, is_loading: bool) -> list[LoadJob]:
        """What the workers load with this step. `is_idle`: the step computes nothing;
        `is_loading`: a request loads from the source."""
        if self._is_over:
            return []
        job = None if self._ends() or is_loading or self._in_flight else self._next()
        if is_idle and not self._in_flight and not self._is_over:
            if self._naming is None:
                time.sleep(IDLE_WAIT)  # a tier opens, perhaps by what a step reports
            else:
                wait_a_moment([self._naming])
        return [] if job is None else [job]

    def _ends(self) -> bool:
        """Whether it is over by now, or has yet to begin."""
        generation, source, target = self._source.requests.generation, self._source, self._target
        now, is_asked = self._now(), self._naming is not None
        is_open = source.has_opened and target.has_opened
        self._first = min(self._first, now)
        if not is_asked:
            self._began = min(self._began, now) if is_open else math.inf
        is_late = now > self._began + self._spec.seconds
        is_passed = is_late and (is_asked or self._or_else())
        if is_late and not is_passed:
            self._first = -math.inf  # it may come yet, beside requests
        if generation.tag != self._tag or self._tag:
            self._end("the weights may have changed")
        elif is_passed:
            self._end("its seconds are over")
        elif any(tier.has_opened and not tier.usable for tier in (source, target)):
            self._end("a tier can't be used", or_else=not is_asked)
        elif not (source.admission.spec.may_load and target.admission.spec.may_store):
            self._end("a tier is paused", or_else=not is_asked)
        elif self._naming is None:
            if is_open and source.reads and source.open.manager.health().reads:
                self._began = now
                try:
                    self._naming = in_background(self._name, "warm")
                except RuntimeError as lacking:
                    self._end(str(lacking))
        elif self._naming.done() and not self._named and not self._in_flight:
            if (error := self._naming.exception()) is not None:
                self._end(f"its store failed: {error}")
            elif (why := self._naming.result()) is not None:
                self._end(why)
            else:
                self._end("it can't tell what was used last", or_else=True)
        return self._is_over or not self._named

    def _most(self) -> int:
        """How many blocks the target may be given."""
        most = self._target.open.max_blocks
        if self._spec.bytes is not None:
            most = min(most, self._spec.bytes // max(1, self._source.open.block_bytes))
        return most

    def _name(self) -> str | None:
        """Have the store name the blocks, on a thread; why there are no more. None: it can't."""
        left, before = self._most(), None
        manager = self._source.open.manager
        while left > 0 and not self._is_over:
            found = manager.recent(min(left, NAMED_AT_ONCE), before)
            if found is None:
                return None
            self._named.extend(found.keys)
            left, before = left - len(found.keys), found.before
            if before is None:
                return "all is loaded"
        return "as much as may be is loaded"

    def _next(self) -> LoadJob | None:
        """The next job, of what the target does not have yet; it takes no slot of others."""
        pool, block_bytes = self._source.open.pool, max(1, self._source.open.block_bytes)
        spare = self._target.open.max_blocks - pool.in_use
        count = min(batch_blocks(block_bytes), max(1, JOB_BYTES // block_bytes))
        items: list[LoadItem] = []
        while self._named and len(items) < count:
            if spare <= len(items):
                self._end("host memory is needed")
                break
            key = self._named.popleft()
            if pool.find(key) is None and (claim := pool.claim(CLAIM + key)) is not None:
                items.append(LoadItem(key, claim.slot, None))
        if not items:
            return None
        job = LoadJob(self._jobs.next_id(), "", items, self._spec.seconds, self._tag)
        self._jobs.begin(PendingSlots(job), self._source.requests.step.number)
        self._in_flight += 1
        return job

    def ended(self, job: LoadJob, result: JobResult) -> None:
        """Take in that a job has ended on all ranks: the target admits what all of them have."""
        self._in_flight -= 1
        # The target may have left the chain; the pool is that of all its tiers.
        pool, manager = self._source.open.pool, self._target.open.manager
        owns = self._source.requests.generation.owns
        for index, item in enumerate(job.items):
            key, slot = item.key, item.target
            is_whole = index not in result.failed and owns(key) and pool.rename(slot, key)
            if is_whole and manager.complete_store(key, slot, True, self._before):
                if self._before is None:  # what requests use stays longer; the others follow it
                    manager.demote([key])
                self._before, self._loaded = key, self._loaded + 1
                self._source.count(warmed_blocks=1)
            pool.release(slot)

    def stop(self, why: str) -> None:
        """Order nothing more."""
        if not self._is_over:
            self._end(why)

    def _end(self, why: str, or_else: bool = False) -> None:
        self._is_over = True
        self._named.clear()
        logger.info(
            "tier %r was given %s of tier %r in %.1f s, which were used last; %s",
            self._target.name,
            format_size(self._loaded * self._source.open.block_bytes),
            self._source.name,
            max(0.0, self._now() - self._began),
            why,
        )
        if or_else:
            self._or_else()
