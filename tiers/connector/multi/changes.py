"""A change of the chain while its engine runs, as the scheduler sees it: the same on all ranks, or
nowhere.

| state | what happens | what follows |
|---|---|---|
| asked | any thread has asked for it; the next step takes it | preparing, or in effect where no \
worker has a part in it |
| preparing | each rank makes what it needs beside its steps | opening; refused where one can't |
| opening | this process opens its side of new tiers on a thread | in effect, or refused |
| in effect | one step changes this half, and carries the order to all ranks | draining |
| draining | tiers that leave take and serve nothing; what is in flight ends | detached |
| detached | all ranks and this process have closed them | over, or the next stage |

A tier that takes its settings only when it is opened leaves in one stage and comes in the next. If
it can't be opened with them, a last stage brings back what was before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from spec.chain import ChainSpec
from spec.chain_diff import ChainDiff, diff
from spec.errors import reason_of
from spec.offloading import OffloadingSpec
from tiers.concurrency.executors import IoExecutor
from tiers.connector.multi.multi_connector import MultiConnector
from tiers.contract.changes import ChangeOrder, ChangeReport, Phase
from tiers.contract.connector import SchedulerConnector, do_nothing
from tiers.contract.messages import WorkerHandshake
from tiers.contract.stats import GAUGES, STATE, STATES, TierStats
from tiers.errors import TierUnusable

logger = logging.getLogger(__name__)

PREPARE_SECONDS = 60.0
"""How long ranks may prepare: a store that opens slowly takes 10 s, memory is given in steps."""
DRAIN_SECONDS = 60.0
"""How long is waited for what is in flight in tiers that leave."""


class PendingChange:
    """A change that was asked for; any thread may wait for its end.

    `version`: of the chain afterwards. `why`: it was refused for this, and nothing has changed, or,
    `in_part`, the chain goes on without some tiers; empty: it is in effect. `remains`: tiers that
    left, and still have blocks in flight. `is_begun`: whether a step has taken it. `before`: the
    chain that it is to replace.
    """

    def __init__(self) -> None:
        self.version, self.why, self.in_part = 0, "", False
        self.remains: tuple[str, ...] = ()
        self.before: ChainSpec | None = None
        self.is_begun = False
        self._over = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Wait for its end; whether it came in time."""
        return self._over.wait(seconds)

    def end(self, version: int, why: str = "", remains: Sequence[str] = ()) -> None:
        self.version, self.why, self.remains = version, why, tuple(remains)
        self._over.set()


@dataclass(frozen=True)
class Stage:
    """A part of a change that is in effect at once: what leads from one chain to the other."""

    chain: ChainSpec
    attach: Mapping[str, OffloadingSpec]
    leave: tuple[str, ...]
    retune: Mapping[str, OffloadingSpec]

    @classmethod
    def between(cls, old: ChainSpec, new: ChainSpec) -> Stage:
        before = {tier.tier_name: tier for tier in old.tiers}
        after = {tier.tier_name: tier for tier in new.tiers}
        return cls(
            new,
            {name: tier for name, tier in after.items() if name not in before},
            tuple(name for name in before if name not in after),
            {name: tier for name, tier in after.items() if before.get(name, tier) != tier},
        )


class LiveTier(Protocol):
    """A tier of ours that comes, leaves and takes settings while its engine runs."""

    @property
    def jobs_in_flight(self) -> int: ...

    def open_ahead(self, handshakes: Sequence[WorkerHandshake]) -> None:
        """Open it for these workers, by rank, on the calling thread; nobody uses it yet. Raises
        TierUnusable."""

    def drain(self) -> None:
        """Store nothing more. Nobody looks it up any more."""

    def shutdown(self) -> None:
        """Close it; any thread may, once nobody else uses it."""


class Rebuilder(Protocol):
    """Makes the parts of a chain's scheduler for a change, and hands them their settings.

    `chain`: that which is in effect.
    """

    chain: ChainSpec

    def refusals(self, new: ChainSpec, found: ChainDiff) -> list[str]:
        """Why this engine can't take a change that others could; any thread may ask."""

    def make(self, tier: OffloadingSpec, chain: ChainSpec) -> LiveTier:
        """A tier that is not open, in a chain that is to be."""

    def apply(self, chain: ChainSpec, tiers: Sequence[Any]) -> None:
        """Hand all settings of `chain` to its `tiers` and to what they share."""

    def close(self) -> None:
        """The engine ends: close what is opened from now on."""


@dataclass
class _Leaving:
    """A tier that leaves by a change. `closing`: this process closes it; None: something is in
    flight. `left`: the ranks that have closed it."""

    name: str
    change: PendingChange
    closing: Future[None] | None = None
    left: set[int] = field(default_factory=set)


class Changes:
    """The changes of one chain, one at a time; used by the scheduler's thread, but `request`.

    `version`: 1 at the start, and one more with each change that is in effect.
    """

    def __init__(
        self,
        half: MultiConnector[Any],
        take_up: Callable[[ChainSpec, Sequence[int]], None],
        rebuilder: Rebuilder,
        ranks: int,
        wake: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`take_up`: has the half load as a chain says, from the children of these places alone, in
        this order. `wake`: has an engine that idles make a step. `now`: seconds, never going back.
        """
        self.version = 1
        self._half, self._take_up = half, take_up
        self._rebuilder, self._ranks = rebuilder, ranks
        self._wake, self._now = wake, now
        # Without it two threads could both find that no change is pending.
        self._asking = threading.Lock()
        self._is_closed = False
        self._pending: PendingChange | None = None
        self._unbegun: list[PendingChange] = []
        """The pending change, until a step begins it or its asker withdraws it."""
        self._state: Literal["asked", "preparing", "opening", "draining"] = "asked"
        self._stages: deque[Stage] = deque()
        self._before = rebuilder.chain
        self._failed = ""
        self._number = 0
        self._until = 0.0
        self._attached: dict[int, tuple[str, LiveTier]] = {}
        """The tiers that come with the stage, each with its name, by their places."""
        self._reports = ChangeReport()
        # Begun now, as all that a change needs: in the midst of traffic no thread may be had.
        self._threads = IoExecutor(2, "change")
        self._opening: Future[None] | None = None
        self._leaving: dict[int, _Leaving] = {}

    # -- any thread --------------------------------------------------------------------------

    @property
    def chain(self) -> ChainSpec:
        return self._rebuilder.chain

    def request(self, new: ChainSpec, if_version: int | None = None) -> PendingChange:
        """Ask for another chain; any thread may, and the result's `wait` is for that thread.

        `if_version`: refuse unless this is the version in effect. Nothing is touched before all
        that can be known here is checked.
        """
        pending = PendingChange()
        with self._asking:
            why = self._refusal(new, if_version)
            if why or new == self.chain:
                pending.end(self.version, why)
                return pending
            old = pending.before = self.chain
            anew = diff(old, new).of_kind("reopened")
            kept = tuple(tier for tier in new.tiers if tier.tier_name not in anew)
            between = new.model_copy(update={"tiers": kept})
            stages = [Stage.between(old, between)] if anew else []
            self._stages = deque([*stages, Stage.between(between if anew else old, new)])
            self._before, self._failed, self._state = old, "", "asked"
            self._unbegun.append(pending)
            self._pending = pending
        self._wake()
        return pending

    def _refusal(self, new: ChainSpec, if_version: int | None) -> str:
        if self._is_closed:
            return "the engine is ending"
        if self._pending is not None:
            return "another change is in flight; ask again when it is over"
        if if_version not in (None, self.version):
            return f"the chain has version {self.version}, not {if_version}: another change came"
        return "\n".join(self.review(new).refused)

    def review(self, new: ChainSpec) -> ChainDiff:
        """What a change to this chain does here, and what of it this engine refuses; any thread may
        ask."""
        found = diff(self.chain, new)
        names = {leaving.name for leaving in list(self._leaving.values())}
        leaving = [
            f"tier {name} still has blocks in flight from before it left; ask again later"
            for name in found.of_kind("added", "reopened")
            if name in names
        ]
        reasons = (*found.refused, *self._rebuilder.refusals(new, found), *leaving)
        return replace(found, refused=reasons)

    def withdraw(self, pending: PendingChange) -> bool:
        """Take back a change that no step has begun; whether that was so."""
        try:
            self._unbegun.remove(pending)
        except ValueError:
            return False
        self._pending = None
        pending.end(self.version, "the engine made no step: it is idle, or hangs")
        return True

    # -- steps -------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether only a step brings a change on, of an engine that has nothing else to do."""
        closing = any(leaving.closing is not None for leaving in self._leaving.values())
        return self._pending is not None or closing

    def step(self) -> tuple[ChangeOrder, ...]:
        """Bring the change on; the orders of this step, which precede all others in it."""
        orders = self._detach()
        pending = self._pending
        if pending is not None:
            orders += self._go_on(pending)
        return tuple(orders)

    def heard(self, report: ChangeReport) -> None:
        """Take in what ranks have done; what they opened for an aborted change is closed."""
        if self._number in report.prepared:
            self._reports.fold(report)
        for place, ranks in report.detached.items():
            if place in self._leaving:
                self._leaving[place].left |= ranks

    def _go_on(self, pending: PendingChange) -> list[ChangeOrder]:
        if self._state == "asked":
            return self._begin(pending)
        if self._state == "draining":
            return self._drained(pending)
        stage = self._stages[0]
        prepared = self._reports.prepared.get(self._number, {})
        refused = [f"rank {rank}: {why}" for rank, why in sorted(prepared.items()) if why]
        if refused:
            return self._abort(pending, "; ".join(refused))
        if self._now() > self._until:
            waits = self._ranks - len(prepared)
            what = f"{waits} rank(s) have" if waits else "the scheduler has"
            return self._abort(pending, f"{what} not opened it after {PREPARE_SECONDS:g} s")
        if self._state == "preparing" and len(prepared) == self._ranks:
            self._open(stage)
        if self._state == "opening" and (self._opening is None or self._opening.done()):
            error = None if self._opening is None else self._opening.exception()
            if error is not None:
                return self._abort(pending, f"the scheduler: {reason_of(error)}")
            return self._commit(pending, stage)
        return []

    def _begin(self, pending: PendingChange) -> list[ChangeOrder]:
        if not pending.is_begun:
            try:
                self._unbegun.remove(pending)
            except ValueError:
                return []  # it is withdrawn
            pending.is_begun = True
        stage = self._stages[0]
        self._number += 1
        self._reports = ChangeReport()
        self._until = self._now() + PREPARE_SECONDS
        if not stage.attach and not stage.retune:
            return self._commit(pending, stage)
        names, free = self._half.names, len(self._half.names)
        attach: dict[int, OffloadingSpec] = {}
        for name, tier in stage.attach.items():
            place = names.index(name) if name in names else free
            free += place == free
            attach[place] = tier
            self._attached[place] = name, self._rebuilder.make(tier, stage.chain)
        self._state = "preparing"
        return [self._order("prepare", stage, attach)]

    def _order(
        self, phase: Phase, stage: Stage, attach: Mapping[int, OffloadingSpec]
    ) -> ChangeOrder:
        retune = {self._half.names.index(name): tier for name, tier in stage.retune.items()}
        return ChangeOrder(self._number, phase, attach, retune)

    def _open(self, stage: Stage) -> None:
        """Open this process's side, of which a thread makes the stores."""
        self._state = "opening"
        shakes, tiers = self._reports.handshakes, list(self._attached.items())

        def open_all() -> None:
            for place, (name, tier) in tiers:
                try:
                    tier.open_ahead(sorted(shakes.get(place, ()), key=lambda shake: shake.rank))
                except TierUnusable as error:
                    raise TierUnusable(f"tier {name}: {error}") from error

        self._opening = self._threads.submit(open_all) if tiers else None

    def _commit(self, pending: PendingChange, stage: Stage) -> list[ChangeOrder]:
        half, orders = self._half, [self._order("commit", stage, {})]
        for place, (name, tier) in self._attached.items():
            half.put_child(place, name, tier)
        self._attached = {}
        places = {name: place for place, name in enumerate(half.names)}
        order = [places[tier.tier_name] for tier in stage.chain.tiers]
        self._rebuilder.apply(stage.chain, [half.children[place] for place in order])
        for name in stage.leave:
            half.children[places[name]].drain()
            self._leaving[places[name]] = _Leaving(name, pending)
        self._take_up(stage.chain, order)
        self._stages.popleft()
        self._state, self._until = "draining", self._now() + DRAIN_SECONDS
        return orders + self._detach() + self._drained(pending)

    def _drained(self, pending: PendingChange) -> list[ChangeOrder]:
        """Go on with the next stage, or end, once what leaves has left."""
        remains = [tier.name for tier in self._leaving.values() if tier.change is pending]
        is_late = self._now() > self._until
        if remains and not is_late:
            return []
        if self._stages and remains:
            names = ", ".join(remains)
            self._end(pending, f"tier {names} has not closed: the chain goes on without it")
        elif self._stages:
            self._state = "asked"
        else:
            self._end(pending, self._failed, remains)
        return []

    def _end(self, pending: PendingChange, why: str = "", remains: Sequence[str] = ()) -> None:
        if self.chain != self._before:
            self.version += 1
            pending.in_part = bool(why)
        self._pending = None
        if why:
            what = "made in part" if pending.in_part else "refused"
            logger.warning("a change of the chain was %s: %s", what, why)
        else:
            line = "the chain was changed, and has version %d: %s"
            names = ", ".join(tier.tier_name for tier in self.chain.tiers)
            logger.info(line, self.version, f"load priority {names}")
        pending.end(self.version, why, remains)

    def _abort(self, pending: PendingChange, why: str) -> list[ChangeOrder]:
        """Close what was prepared; go back to the chain of before, if a stage is in effect."""
        for _, tier in self._attached.values():
            self._threads.submit(tier.shutdown)
        self._attached = {}
        order = ChangeOrder(self._number, "abort")
        if self._before == self.chain or self._failed:
            without = "" if self._before == self.chain else "; the chain goes on without it"
            self._end(pending, f"{self._failed or why}{without}")
        else:
            self._failed, self._state = why, "asked"
            self._stages = deque([Stage.between(self.chain, self._before)])
        return [order]

    # -- tiers that leave --------------------------------------------------------------------

    def _detach(self) -> list[ChangeOrder]:
        """Close tiers that left and have nothing in flight."""
        drained: list[int] = []
        for place, leaving in [*self._leaving.items()]:
            child = self._half.children[place]
            if leaving.closing is None and not child.jobs_in_flight:
                drained.append(place)
                # On a thread, since a store may wait. Nobody else uses it from now on.
                leaving.closing = self._threads.submit(child.shutdown)
                self._half.put_child(place, leaving.name, AbsentTier(leaving.name))
            closing, ranks = leaving.closing, len(leaving.left)
            if closing is not None and closing.done() and ranks == self._ranks:
                del self._leaving[place]
        return [ChangeOrder(self._number, "detach", closed=tuple(drained))] if drained else []

    def close(self) -> None:
        """The engine ends: nobody waits for a change any more."""
        with self._asking:
            self._is_closed = True
            pending, self._pending = self._pending, None
        self._rebuilder.close()
        for _, tier in self._attached.values():
            self._threads.submit(tier.shutdown)
        self._threads.shutdown(wait=False)
        if pending is not None:
            pending.end(self.version, "the engine ended before it")


class AbsentTier(SchedulerConnector):
    """Stands at the place of a tier that was detached: it has nothing, and wants nothing."""

    jobs_in_flight = 0
    update_state_after_alloc = build_connector_meta = update_connector_output = do_nothing
    shutdown = do_nothing

    def __init__(self, name: str) -> None:
        last = {**dict.fromkeys(GAUGES, 0.0), STATE: float(STATES.index("detached"))}
        self._stats: TierStats | None = TierStats({name: {**last}})

    def get_kv_connector_stats(self) -> TierStats | None:
        """Its state, once."""
        stats, self._stats = self._stats, None
        return stats
