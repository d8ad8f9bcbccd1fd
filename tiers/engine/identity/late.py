"""LateFacts: facts of a worker that take longer to find than an engine may wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from tiers.concurrency.executors import widen_affinity

logger = logging.getLogger(__name__)


class LateFacts:
    """Finds the facts of a worker: quickly those of its layers, in the background the others.

    `at_once` is called by the first `known`, then `slowly` on a daemon thread, for which no ending
    process waits. `otherwise`: the facts if either fails; they must be no other engine's.
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
        """Return all facts; None if they are unknown after `seconds`. Called by one thread."""
        if self._early is None:
            self._early = self._begin()
        if not self._done.wait(seconds):
            return None
        return {**self._early, **self._found}

    def _begin(self) -> Mapping[str, str]:
        try:
            early = dict(self._at_once())
            threading.Thread(target=self._find, name="kvtiers-facts", daemon=True).start()
        # Layers may come from any model, platform or plugin, so their errors can't be listed. This
        # thread is starting the engine: without this, a cache's fact would keep it from serving.
        except Exception:
            logger.exception(
                "the engine's layers can't be identified: no other process finds what it stores, "
                "nor does this one after a restart"
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
