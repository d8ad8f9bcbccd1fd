"""Checksums: of each block that leaves the engine one, for all tiers and all records of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from tiers.block import digest
from tiers.concurrency.executors import io_executor
from tiers.contract.copier import Copy

_AT_ONCE = 64


class Checksums:
    """The checksums of slots, computed on a thread behind each gather. Whatever changes a block
    after that shows, in any tier.

    The engine's thread begins, and the tiers' threads ask. A slot is begun anew only when no tier
    uses it; what is under way for its last block then ends first, since one thread computes all.
    """

    def __init__(self, payload: Callable[[int], memoryview]) -> None:
        """`payload`: the bytes of a slot."""
        self._payload = payload
        self._known: dict[int, bytes] = {}
        self._under_way: dict[int, Future[None]] = {}
        self._begun: deque[tuple[Future[None], Sequence[int]]] = deque()
        self._thread = io_executor(1, "checksum")

    def begin(self, slots: Sequence[int], gather: Copy) -> None:
        """Compute the checksums of these slots, once they are gathered. Does not wait."""
        self._let_go()
        for start in range(0, len(slots), _AT_ONCE):
            part = slots[start : start + _AT_ONCE]
            future = self._thread.submit(self._compute, part, gather)
            self._under_way.update(dict.fromkeys(part, future))
            self._begun.append((future, part))

    def _let_go(self) -> None:
        """Forget what has ended. A future has ten objects that Python's collector visits: with one
        for each of a million slots, a full collection would stop the engine for a second."""
        while self._begun and self._begun[0][0].done():
            future, slots = self._begun.popleft()
            for slot in slots:
                if self._under_way[slot] is future:
                    del self._under_way[slot]

    def _compute(self, slots: Sequence[int], gather: Copy) -> None:
        for slot in slots:
            self._known.pop(slot, None)
        gather.wait()
        for slot in slots:
            self._known[slot] = digest(self._payload(slot))

    def of(self, slots: Sequence[int]) -> list[bytes | None]:
        """Wait for the checksums of these slots; None for one whose gather failed."""
        under_way = map(self._under_way.get, slots)
        wait({future for future in under_way if future is not None})
        return [self._known.get(slot) for slot in slots]

    def close(self) -> None:
        """End the thread; nobody asks any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)
