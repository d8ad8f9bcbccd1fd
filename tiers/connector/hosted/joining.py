"""LateStore: a store behind hosted memory, opened when all workers have said who they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tiers.concurrency.executors import io_executor
from tiers.connector.hosted.shared_slots import SlotRegion
from tiers.wrappers.guard import Guarded


class LateStore:
    """Asked by the scheduler's thread in each step; opens the store on a thread of its own.

    `open_store`: None for a store that can't be used, of which it has told.
    """

    def __init__(
        self, regions: Sequence[SlotRegion], open_store: Callable[[], Guarded | None]
    ) -> None:
        self._regions = regions
        self._open_store = open_store
        self._opener = io_executor(1, "open")
        self._opening: Future[Guarded | None] | None = None
        self._is_over = False

    def take(self) -> Guarded | None:
        """The store, once: in the step in which it is open. The caller owns it then."""
        if self._is_over:
            return None
        if self._opening is None:
            if all(region.namespace for region in self._regions):
                self._opening = self._opener.submit(self._open_store)
            return None
        if not self._opening.done():
            return None
        self._is_over = True
        return self._opening.result()

    def close(self) -> None:
        """Open nothing any more; a store that is open by now, and was not taken, is closed."""
        self._opener.shutdown(wait=False)
        if self._opening is not None and not self._is_over:
            self._is_over = True
            self._opening.add_done_callback(_close)


def _close(opening: Future[Guarded | None]) -> None:
    if opening.exception() is None and (store := opening.result()) is not None:
        store.close()
