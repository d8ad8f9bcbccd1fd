"""Facts that take longer to find out than an engine may wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from tiers.concurrency.executors import widen_affinity

logger = logging.getLogger(__name__)


class LateFacts:
    """Facts of a worker: some that are there once its layers are, some that take their time.

    `at_once` is called by the first who asks, on his thread; `slowly` on a thread of its own,
    begun then, which no process waits for when it ends. `otherwise`: what holds if any fails.
    """

    def __init__(
        self,
        at_once: Callable[[], Mapping[str, str]],
        slowly: Callable[[], Mapping[str, str]],
        otherwise: Mapping[str, str],
    ) -> None:
        self._at_once = at_once
        self._slowly = slowly
        self._found = otherwise
        self._early: Mapping[str, str] | None = None
        self._done = threading.Event()

    def known(self, seconds: float = 0.0) -> Mapping[str, str] | None:
        """All facts; None: not known yet, also after waiting for so long. Asked by one thread."""
        if self._early is None:
            self._early = self._begin()
        if not self._done.wait(seconds):
            return None
        return {**self._early, **self._found}

    def _begin(self) -> Mapping[str, str]:
        try:
            early = dict(self._at_once())
            threading.Thread(target=self._find, name="kvtiers-facts", daemon=True).start()
        # It asks layers of any engine and model, on the thread of one that starts.
        except Exception:
            logger.exception(
                "the engine's layers can't be identified: what it stores is found by no other "
                "process, nor after a restart"
            )
            self._done.set()
            return {}
        return early

    def _find(self) -> None:
        widen_affinity()
        try:
            self._found = dict(self._slowly())
        finally:
            self._done.set()
