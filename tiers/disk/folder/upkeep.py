"""Upkeep: what a process does for a folder in the background, on a thread of its own.

It works in short steps of one write transaction at most. In the pauses between them other threads
and processes get their turn.
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
"""Seconds between two rounds: the delay until a use is written, or a dead reader is noticed."""

PAUSE_S = 0.001
"""Seconds between two steps. Without it this thread would mostly get LMDB's lock again."""

_CLOSE_WAIT_S = 5.0

logger = logging.getLogger(__name__)

Duty = Callable[[], bool | None]
"""Does a step of some work; returns True if more of it is to be done now."""


class Upkeep:
    """Runs duties in rounds. A step holds the open folder as a verb does, so that nobody closes it
    meanwhile."""

    def __init__(
        self, path: Path, hold: Callable[[], AbstractContextManager[object]], duties: Sequence[Duty]
    ) -> None:
        self._path = path
        self._hold = hold
        self._duties = duties
        self._stopped = threading.Event()
        # Held during a step. Without it a step could be under way when the tier is closed: then
        # the step would end last, and close the folder some time after `close` returned.
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
        """Keep steps from running during the body; a step that hangs is waited for 5 s at most."""
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
                # Said once; verbs that meet the same error are counted.
                if not self._failing and not self._stopped.is_set():
                    logger.warning(
                        "disk tier %s: upkeep failed and is tried again every second: %s",
                        self._path,
                        error,
                    )
                self._failing = True
            else:
                self._failing = False
            self._stopped.wait(EVERY_S)

    def _round(self) -> bool:
        """Do a step of every duty; return whether any has more to do."""
        more = [self._step(duty) for duty in self._duties]
        return any(more)

    def _step(self, duty: Duty) -> bool:
        with self._stepping:
            if self._stopped.is_set():
                return False
            with self._hold():
                return bool(duty())
