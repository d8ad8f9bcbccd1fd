"""Inventory: keeps what a tier was announced to hold, and notices what it holds no more.

A thread of its own does all of it: the scheduler hands it what it tells, and takes from it, in each
step, a few announcements that have become due. Nothing here waits for the scheduler or makes it
wait; what has no room is counted, and only what a router knows is the poorer for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import wait
from pathlib import Path
from typing import NamedTuple

from tiers.concurrency.executors import in_background
from tiers.concurrency.handoff import Handoff
from tiers.concurrency.rate_limit import RateLimit
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.connector.scheduler.inventory.journal import Journal, read
from tiers.connector.scheduler.inventory.runs import Run

logger = logging.getLogger(__name__)

Holds = Callable[[Sequence[bytes]], list[bool] | None]
"""Says which keys the tier holds; None: it can't say now. Called by the inventory's thread."""

PAUSE = 0.05
"""Seconds between two looks for what there is to do."""
PER_STEP = 512
"""Blocks that a step announces at most, after a restart: about a millisecond's work."""
BATCH = 512
"""Keys that a store is asked for at once."""
AUDIT_RATE = 5_000.0
"""Keys a second that are looked up to notice what was evicted: a few percent of one core."""
AUDIT_EVERY = 10.0
"""Seconds between two rounds, at least."""
CLOSE_SECONDS = 2.0
"""How long the end of an engine waits for what it told last to be kept."""
RETRY_SECONDS = 10.0
"""After a file has failed."""
STUCK_SECONDS = 1.0
"""After so long without progress an engine with nothing else to do need not step for us."""


class Due(NamedTuple):
    """What a step shall tell: that these blocks are `held`, or that they are not, but for those
    that were stored again meanwhile (`but`)."""

    run: Run
    held: bool
    but: Set[bytes] = frozenset()


class Inventory:
    """What was announced of one tier. `note`, `take` and `is_announcing` are the scheduler's."""

    def __init__(
        self, tier: str, folder: Path, holds: Holds, elsewhere: Holds, rate: float
    ) -> None:
        """`folder`: of the journal. `elsewhere`: what other tiers of the same medium hold: events
        do not tell them apart. `rate`: blocks a second that are announced again at most."""
        self._elsewhere = elsewhere
        self.dropped = 0
        """Blocks so far that were not kept: they are not announced again."""
        self._tier = tier
        self._folder = folder
        self._holds = holds
        self._rate = RateLimit(rate)
        self._audits = RateLimit(AUDIT_RATE)
        self._noted: Handoff[Run] = Handoff(items=1 << 16, weight=1 << 20)
        self._due: Handoff[Due] = Handoff(items=1 << 16, weight=4 * PER_STEP)
        self._told: set[bytes] = set()
        self._stop = threading.Event()
        self._adopting = True
        self._moved = time.monotonic()
        self._audited = time.monotonic()
        self._round: list[Path] = []
        self._before: Path | None = None
        what = "times what is announced could not be kept"
        self._failures = RepeatedLog(logger, f"tier {tier!r}", what)
        self._ended = in_background(self._run, "inventory")

    # -- the scheduler's thread ----------------------------------------------------------------

    def note(self, run: Run) -> None:
        """Keep what has just been told."""
        is_kept = not self._ended.done() and self._noted.give(run, len(run.keys))
        if is_kept:
            self._told.update(run.keys)
        else:
            self.dropped += len(run.keys)

    def take(self) -> Iterator[Due]:
        """What this step shall tell."""
        blocks = 0
        while blocks < PER_STEP and (due := self._due.take()) is not None:
            blocks += len(due.run.keys)
            self._moved = time.monotonic()
            yield due

    @property
    def is_announcing(self) -> bool:
        """Whether there is, or soon will be, something to tell that was held before this start."""
        if self._ended.done():
            return False
        # What is due waits for a step, however long the engine took to come to its first.
        is_moving = time.monotonic() - self._moved < STUCK_SECONDS
        return bool(self._due) or (self._adopting and is_moving)

    def close(self) -> None:
        """Leave what was announced to the next engine; waits a second or two at most."""
        self._stop.set()
        self._rate.stop()
        self._audits.stop()
        wait([self._ended], CLOSE_SECONDS)

    # -- the inventory's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            journal: Journal | None = self._open()
        except OSError as error:
            logger.warning(
                "tier %r: what is announced can't be kept in %s (%s): it is not announced again "
                "after a restart",
                self._tier,
                self._folder,
                error,
            )
            return
        while not self._ends_well(journal):
            journal = None

    def _ends_well(self, journal: Journal | None) -> bool:
        """Serve until the engine ends. False: a file failed, as where a disk is full for a while;
        another journal is to take over what was kept."""
        try:
            journal = journal or self._open()
            try:
                self._serve(journal)
                self._write(journal)
            finally:
                journal.close()
        except OSError as error:
            self._failures.log(
                "tier %r: what is announced can't be kept in %s for now (%s)",
                self._tier,
                self._folder,
                error,
            )
            self._round, self._before = [], None
            return self._stop.wait(RETRY_SECONDS)
        return True

    def _open(self) -> Journal:
        """Make the journal, once the folder that it is to lie in is there: a disk may come late."""
        while True:
            try:
                return Journal(self._folder)
            except FileNotFoundError:
                if self._stop.wait(PAUSE):
                    raise

    def _serve(self, journal: Journal) -> None:
        # Only now: an engine that is being started again would else find that others took over
        # what it had announced.
        self._adopt(journal)
        while not self._stop.is_set():
            self._adopting = bool(self._due)
            self._write(journal)
            self._audit(journal)
            self._stop.wait(PAUSE)

    def _write(self, journal: Journal) -> None:
        while (run := self._noted.take()) is not None:
            try:
                self.dropped += journal.append([run])
            except OSError:
                self.dropped += len(run.keys)
                raise

    def _adopt(self, journal: Journal) -> None:
        for file in journal.dead():
            for run in read(file):
                for held in self._held(run):
                    self.dropped += journal.append([held])
                    self._rate.take(len(held.keys))
                    self._give(Due(held, held=True))
                self._write(journal)
                if self._stop.is_set():
                    return  # the rest is another engine's to take over, and some of it once more
            file.unlink()

    def _held(self, run: Run) -> Iterator[Run]:
        """The parts of a run that the tier holds, no longer than a step may announce."""
        for begin in range(0, len(run.keys), BATCH):
            part = run.part(begin, min(begin + BATCH, len(run.keys)))
            yield from part.held(self._ask(part.keys))

    def _ask(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys the tier holds; waits until it can say."""
        while (held := self._holds(keys)) is None:
            if self._stop.wait(10 * PAUSE):
                return [True] * len(keys)  # nobody knows: the next engine asks again
        self._moved = time.monotonic()
        return held

    def _give(self, due: Due) -> None:
        while not self._due.give(due, len(due.run.keys)):
            if self._stop.wait(PAUSE / 10):
                return
        self._moved = time.monotonic()

    # -- what was evicted ----------------------------------------------------------------------

    def _audit(self, journal: Journal) -> None:
        """Look through one file for what the tier holds no more."""
        if self._due:
            return  # what was found before must be told before, while `but` is up to date
        if not self._round:
            if time.monotonic() < self._audited + AUDIT_EVERY:
                return
            self._audited = time.monotonic()
            journal.rotate()
            self._round, self._before = journal.closed()[::-1], None
            if not self._round:
                self._told = set()
                return
        file = self._round.pop()
        # What is stored from now on may be looked for before it is, and be told before its loss.
        but = self._told = set[bytes]()
        kept: list[Run] = []
        lost: list[Run] = []
        gone = False
        for run in read(file):
            for begin in range(0, len(run.keys), BATCH):
                part = run.part(begin, min(begin + BATCH, len(run.keys)))
                self._audits.take(len(part.keys))
                held = self._ask(part.keys)
                kept += part.held(held)
                gone = gone or not all(held)
                lost += self._nowhere(part, held)
        if gone and not self._stop.is_set():
            journal.rewrite(file, kept)
            for run in lost:
                self._give(Due(run, held=False, but=but))
        if file.exists():
            self._before = journal.merge(self._before, file)

    def _nowhere(self, run: Run, held: Sequence[bool]) -> Iterator[Run]:
        """Those that are neither held here nor in another tier of the same medium."""
        if all(held):
            return iter(())
        other = self._elsewhere(run.keys) or [False] * len(held)
        return run.held([not here and not there for here, there in zip(held, other, strict=True)])
