"""What a process does for a folder beside its verbs, on a thread of its own.

It goes in short steps, each one write transaction at most, with pauses in which other threads and
processes get theirs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tiers.concurrency.executors import widen_affinity
from tiers.errors import TierError

EVERY_S = 1.0
"""Seconds between two rounds: how late a use reaches the index, or a dead reader is noticed."""

PAUSE_S = 0.001
"""Seconds between two steps. LMDB's lock goes to whoever asks first, which would be us again."""

_CLOSE_WAIT_S = 5.0

logger = logging.getLogger(__name__)

Duty = Callable[[], bool]
"""Does a step of some work; True if more of it is to be done now."""


class Upkeep:
    """The thread. A step holds the vault as a verb does, so nothing is closed under it."""

    def __init__(
        self, path: Path, hold: Callable[[], AbstractContextManager[object]], duties: Sequence[Duty]
    ) -> None:
        self._path = path
        self._hold = hold
        self._duties = duties
        self._stopped = threading.Event()
        # Held by a step, so that whoever closes the tier does not find one under way: it would
        # be the step that ends last, and closes the folder some time later.
        self._stepping = threading.Lock()
        self._failing = False

    def start(self) -> None:
        """Begin the first round."""
        thread = threading.Thread(target=self._run, name="kvtiers-disk-upkeep", daemon=True)
        thread.start()

    def stop(self) -> None:
        """Let no further step begin. Does not wait."""
        self._stopped.set()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let no step be under way meanwhile, unless one hangs."""
        held = self._stepping.acquire(timeout=_CLOSE_WAIT_S)
        try:
            yield
        finally:
            if held:
                self._stepping.release()

    def _run(self) -> None:
        widen_affinity()
        while not self._stopped.is_set():
            try:
                while self._round():
                    self._stopped.wait(PAUSE_S)
            except TierError as error:
                # Once: verbs that meet the same tell it, too, and are counted.
                if not self._failing and not self._stopped.is_set():
                    logger.warning("disk tier %s: upkeep waits: %s", self._path, error)
                self._failing = True
            else:
                self._failing = False
            self._stopped.wait(EVERY_S)

    def _round(self) -> bool:
        """A step of every duty; whether one has more to do."""
        more = [self._step(duty) for duty in self._duties]
        return any(more)

    def _step(self, duty: Duty) -> bool:
        with self._stepping:
            if self._stopped.is_set():
                return False
            with self._hold():
                return duty()
