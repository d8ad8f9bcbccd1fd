"""Inventory: keeps what a tier was announced to hold, and notices evictions.

A thread does all of it: the scheduler hands it announcements, and takes from it, in each step, a
few that have become due. Nothing here waits for the scheduler or makes it wait. Overflow is
counted; routers miss those blocks.

What may lie in no file, or finds none that can be written, is remembered in memory: what the tier
evicts of it is announced as well, and only the next engine does not announce it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import wait
from contextlib import suppress
from operator import not_, or_
from pathlib import Path
from typing import NamedTuple

from tiers.concurrency.executors import in_background
from tiers.concurrency.handoff import Handoff
from tiers.concurrency.rate_limit import RateLimit
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.connector.scheduler.inventory.journal import Journal, Run, pack, read, unpack
from tiers.contract.protocols import UNKNOWN

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 10
"""Bytes that are looked through in one go: 7,500 blocks of long runs."""
MAX_BYTES = 64 << 20
"""Bytes beyond which nothing is added: 1.9 million blocks of long runs."""


class Remembered:
    """What was announced and lies in no file: packed runs, oldest first; used by one thread.

    No other engine announces these, so their tokens are left out: 34 bytes a block, 50 a run.
    """

    def __init__(self) -> None:
        self._closed: deque[bytes] = deque()
        self._open = bytearray()
        self._bytes = 0

    def add(self, run: Run) -> bool:
        """Add a run; False: there is no room, or its keys have several lengths."""
        try:
            packed = pack(run._replace(parent=None, origin=UNKNOWN))
        except ValueError:
            return False
        if self._bytes + len(packed) > MAX_BYTES:
            return False
        if len(self._open) + len(packed) > SEGMENT_BYTES:
            self.rotate()
        self._open += packed
        self._bytes += len(packed)
        return True

    def rotate(self) -> int:
        """Close what is being added to; how many times `take` has something to give."""
        if self._open:
            self._closed.append(bytes(self._open))
            self._open.clear()
        return len(self._closed)

    def take(self) -> list[Run]:
        """Take the oldest runs out, to add again those that are still held."""
        taken = self._closed.popleft()
        self._bytes -= len(taken)
        return list(unpack(taken))


Holds = Callable[[Sequence[bytes]], list[bool] | None]
"""Which keys of one generation the tier holds; None: it can't answer now. Called by the
inventory's thread."""

PAUSE = 0.05
"""Seconds between two looks for what there is to do."""
PER_STEP = 512
"""Blocks that a step announces at most, after a restart: about a millisecond's work."""
BATCH = 512
"""Keys that a store is asked for at once."""
ANNOUNCE_RATE = 20_000.0
"""Blocks a second that are announced again at most, after a restart."""
AUDIT_RATE = 5_000.0
"""Keys a second that are looked up to notice what was evicted: a few percent of one core."""
AUDIT_EVERY = 10.0
"""Seconds between two rounds, at least."""
MAX_SPARED = 1 << 18
"""Blocks that are left announced only once for another tier's sake: 30 MB."""
CLOSE_SECONDS = 2.0
"""How long the end of an engine waits for its last announcements to be kept."""
RETRY_SECONDS = 10.0
"""After a file has failed."""
STUCK_SECONDS = 1.0
"""After so long without progress an engine with nothing else to do need not step for us."""


class Due(NamedTuple):
    """An announcement for a step: that these blocks are `held`, or that they are not, but for those
    that were stored again meanwhile (`but`)."""

    run: Run
    held: bool
    but: Set[bytes] = frozenset()


class Inventory:
    """What was announced of one tier. `note`, `take` and `is_announcing` are the scheduler's."""

    def __init__(self, tier: str, folder: Path | None, holds: Holds, elsewhere: Holds) -> None:
        """`folder`: of the journal; None: nothing may lie in files. `elsewhere`: what other tiers
        hold, or may hold, which events do not distinguish. It answers None if there are none, and
        without I/O if asked for no keys."""
        self._elsewhere = elsewhere
        self._refused = self._unkept = 0  # each counted by one thread
        self._tier, self._folder, self._holds = tier, folder, holds
        self._rate, self._audits = RateLimit(ANNOUNCE_RATE), RateLimit(AUDIT_RATE)
        self._noted: Handoff[tuple[Run, bool]] = Handoff(items=1 << 16, weight=1 << 20)
        self._due: Handoff[Due] = Handoff(items=1 << 16, weight=4 * PER_STEP)
        self._announced: set[bytes] = set()
        self._stop = threading.Event()
        self._adopting = folder is not None
        self._moved = self._audited = time.monotonic()
        self._journal: Journal | None = None
        self._remembered = Remembered()
        self._round: list[Path] = []
        self._before: Path | None = None
        self._unseen = 0
        self._spared: set[bytes] = set()
        """What this round leaves announced for another tier's sake."""
        self._retry_at = -math.inf
        self._missing: FileNotFoundError | None = None
        self._logged = ""
        what = "times what is announced could not be kept"
        self._failures = RepeatedLog(logger, f"tier {tier!r}", what)
        self._ended = in_background(self._run, "inventory")

    # -- the scheduler's thread ----------------------------------------------------------------

    def note(self, run: Run, lasts: bool = True) -> None:
        """Keep an announcement. `lasts`: whether the next engine finds it, too."""
        if not self._ended.done():
            self._announced.update(run.keys)  # first, or a loss that is found at once would hide it
            if self._noted.give((run, lasts), len(run.keys)):
                return
        self._refused += len(run.keys)

    @property
    def dropped(self) -> int:
        """Blocks so far that were not kept as they should: they are not announced again."""
        return self._refused + self._unkept

    def take(self) -> Iterator[Due]:
        """The announcements of this step."""
        blocks = 0
        while blocks < PER_STEP and (due := self._due.take()) is not None:
            blocks += len(due.run.keys)
            self._moved = time.monotonic()
            yield due

    @property
    def is_announcing(self) -> bool:
        """Whether blocks held before this start are, or soon will be, to be announced."""
        if self._ended.done():
            return False
        # What is due waits for a step, however long the engine took to come to its first.
        is_moving = time.monotonic() - self._moved < STUCK_SECONDS
        return bool(self._due) or (self._adopting and is_moving)

    @property
    def withdraws(self) -> bool:
        """Whether blocks that turn out to be gone are left to be noticed here, since another tier
        of the same medium may hold them."""
        return not self._ended.done() and self._elsewhere(()) is not None

    def close(self) -> None:
        """Leave what was announced to the next engine; waits a second or two at most."""
        self._stop.set()
        self._rate.stop()
        self._audits.stop()
        wait([self._ended], CLOSE_SECONDS)

    # -- the inventory's thread ----------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._try(self._open)
            if self._missing is None:
                self._adopting = False
            self._try(self._write)
            self._try(self._audit)
            if self._stop.wait(PAUSE):
                break
        self._try(self._write)
        self._close_journal()

    def _try(self, files: Callable[[], None]) -> None:
        try:
            files()
        except OSError as error:
            self._failed(error)

    def _open(self) -> None:
        """Make the journal, once the folder that it is to lie in is there: a disk may come late."""
        if self._journal or self._folder is None or time.monotonic() < self._retry_at:
            return
        try:
            self._journal = Journal(self._folder)
        except FileNotFoundError as error:
            self._missing = error
            return
        self._missing = None
        self._adopting = True
        # Only now: an engine that is being started again would else find that others took over
        # what it had announced.
        self._adopt(self._journal)
        with suppress(OSError):
            self._journal.forget_others()

    def _failed(self, error: OSError) -> None:
        """A file failed, as where a disk is full for a while: what comes is remembered, until
        another journal takes over what was kept."""
        self._missing = None
        self._log(error)
        self._close_journal()
        self._retry_at = time.monotonic() + RETRY_SECONDS

    def _log(self, error: OSError) -> None:
        if str(error) != self._logged:
            self._logged = str(error)
            self._failures.log(
                "tier %r: what is announced can't be kept in %s (%s): it is not announced again "
                "after a restart",
                self._tier,
                self._folder,
                error,
            )

    def _close_journal(self) -> None:
        journal, self._journal = self._journal, None
        self._round, self._before = [], None
        if journal is not None:
            try:
                journal.close()
            except OSError as error:
                self._log(error)

    def _write(self) -> None:
        while (noted := self._noted.take()) is not None:
            self._keep(*noted)

    def _keep(self, run: Run, lasts: bool) -> None:
        """Keep a run in a file, where the next engine finds it; else remember it."""
        should_last = lasts and self._folder is not None
        try:
            if should_last and self._journal is not None and self._journal.append(run):
                self._logged = ""
                return
        except OSError:
            self._remember(run, should_last)
            raise
        self._remember(run, should_last)
        if should_last and self._missing is not None:
            self._log(self._missing)

    def _remember(self, run: Run, should_last: bool) -> None:
        is_kept = self._remembered.add(run)
        if should_last or not is_kept:
            self._unkept += len(run.keys)

    def _adopt(self, journal: Journal) -> None:
        for file in journal.dead():
            for run in read(file):
                for held in self._held(run):
                    if not journal.append(held):
                        self._remember(held, should_last=True)
                    self._rate.take(len(held.keys))
                    self._give(Due(held, held=True))
                self._write()
                if self._stop.is_set():
                    return  # the rest is another engine's to take over, and some of it once more
            file.unlink()

    def _held(self, run: Run) -> Iterator[Run]:
        """The parts of a run that the tier holds, no longer than a step may announce."""
        for begin in range(0, len(run.keys), BATCH):
            part = run.part(begin, min(begin + BATCH, len(run.keys)))
            yield from part.held(self._ask(part.keys))

    def _ask(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys the tier holds; waits until it can answer."""
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

    def _audit(self) -> None:
        """Look through one file, or a part of what is remembered, for what the tier lacks now."""
        if self._due:
            return  # what was found before is announced before, while `but` is up to date
        if not self._round and not self._unseen:
            if time.monotonic() < self._audited + AUDIT_EVERY:
                return
            self._audited = time.monotonic()
            self._spared.clear()
            if self._journal is not None:
                self._journal.rotate()
                self._round, self._before = self._journal.closed()[::-1], None
            self._unseen = self._remembered.rotate()
        # What is stored from now on may be looked for before it is, and announced before its loss.
        but = self._announced = set[bytes]()
        for run in self._look_through():
            self._give(Due(run, held=False, but=but))

    def _look_through(self) -> list[Run]:
        """Losses in the next part of a round."""
        if self._journal is not None and self._round:
            return self._look_through_file(self._journal, self._round.pop())
        if not self._unseen:
            return []
        self._unseen -= 1
        kept, lost = self._checked(self._remembered.take())
        for run in kept:
            self._remember(run, should_last=False)  # that it should have lasted was counted
        return lost

    def _look_through_file(self, journal: Journal, file: Path) -> list[Run]:
        runs = read(file)
        kept, lost = self._checked(runs)
        gone = sum(len(run.keys) for run in runs) > sum(len(run.keys) for run in kept)
        if self._stop.is_set():
            return []
        if gone:
            journal.rewrite(file, kept)
        if file.exists():
            self._before = journal.merge(self._before, file)
        return lost

    def _checked(self, runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
        """The parts to look for again, and those that no tier of its medium holds. What another one
        has stays, once: that one may have announced nothing, and some routers count."""
        kept: list[Run] = []
        lost: list[Run] = []
        for run in runs:
            for begin in range(0, len(run.keys), BATCH):
                part = run.part(begin, min(begin + BATCH, len(run.keys)))
                self._audits.take(len(part.keys))
                held = self._ask(part.keys)
                other = None if all(held) else self._elsewhere(part.keys)
                spared = [
                    not has and there and self._is_first_spared(key)
                    for key, has, there in zip(part.keys, held, other or held, strict=True)
                ]
                kept += part.held([*map(or_, held, spared)])
                lost += part.held([*map(not_, map(or_, held, other or held))])
        return kept, lost

    def _is_first_spared(self, key: bytes) -> bool:
        """Whether to look again for what another tier holds: not once more in this round, since
        a tier that evicts and stores in turn would keep it each time."""
        is_first = key not in self._spared
        if len(self._spared) < MAX_SPARED:
            self._spared.add(key)
        return is_first
