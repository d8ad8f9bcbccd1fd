"""Checksums of slots, computed behind each gather. Whatever changes a block after that shows, in
any tier."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress

from spec.errors import reason_of
from tiers.block import digest
from tiers.concurrency.executors import IoExecutor
from tiers.contract.block_copier import Copy
from tiers.host.digests import DigestProcess
from tiers.host.slot_memory import SlotMemory

logger = logging.getLogger(__name__)

_AT_ONCE = 64
AGAIN_SECONDS = 60.0
"""Where one has served, another process follows so long after the last is gone."""


class Checksums:
    """The checksums of slots, on a thread of its own, which may have a process compute them.

    The engine's thread begins, and the tiers' threads ask. A slot is begun anew only when no tier
    uses it; what is in flight for its last block then ends first, since one thread computes all.
    """

    def __init__(self, memory: Callable[[], SlotMemory]) -> None:
        """`memory`: the slots, once the first gather begins."""
        self.are_kept = False
        """Whether any are computed; set before the first gather, if a tier asks for them."""
        self._memory = memory
        self._known: dict[int, bytes] = {}
        self._in_flight: dict[int, Future[None]] = {}
        self._begun: deque[tuple[Future[None], Sequence[int]]] = deque()
        self._thread = IoExecutor(1, "checksum")
        self._asking = 0
        """Tiers that ask for a process."""
        self._process: DigestProcess | None = None
        self._pause = self._again = math.inf
        """How long after a lost one, and when, another begins; never, until one has served."""
        self.computed_here = ""
        """Why no process computes them that was to; empty: all is well."""

    def bind(self, cpus: frozenset[int]) -> None:
        """Compute on these processors alone; see `numa.bind`."""
        self._thread.bind(cpus)

    def compute_apart(self, more: int = 1) -> None:
        """Have a process compute them, as soon as it can (see `host.digests`), for one more tier;
        -1: for one less. Does not wait."""
        with suppress(RuntimeError):  # closed, while a tier opened
            self._thread.submit(self._ask, more)

    def _ask(self, more: int) -> None:
        self._asking += more
        if not self._asking:
            self._end_process()
        elif self._asking == more:
            self._begin_process()

    def _begin_process(self) -> None:
        self._again = math.inf
        try:
            self._process = DigestProcess(self._memory().payload_bytes)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on
            self._lose(error)

    def _end_process(self) -> None:
        self._again, self.computed_here = math.inf, ""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _lose(self, error: Exception) -> None:
        process, self._process = self._process, None
        why = reason_of(error)
        if process is not None:
            why = process.kill() or why
        self._again = time.monotonic() + self._pause
        line = "checksums are computed by the engine's process (store_process), since another can't"
        self.computed_here = f"{line} ({why})"
        logger.warning("%s", self.computed_here)

    def begin(self, slots: Sequence[int], gather: Copy) -> None:
        """Compute the checksums of these slots, once they are gathered. Does not wait."""
        if not self.are_kept:
            return
        self._let_go()
        for start in range(0, len(slots), _AT_ONCE):
            part = slots[start : start + _AT_ONCE]
            future = self._thread.submit(self._compute, part, gather)
            self._in_flight.update(dict.fromkeys(part, future))
            self._begun.append((future, part))

    def keep(self, slot: int, checksum: bytes | None) -> None:
        """The slot holds a block of this checksum; what was begun for its last one has ended."""
        self._known.pop(slot, None)
        if checksum is not None:
            self._known[slot] = checksum

    def _let_go(self) -> None:
        """Forget what has ended. A future has ten objects that Python's collector visits: with one
        for each of a million slots, a full collection would stop the engine for a second."""
        while self._begun and self._begun[0][0].done():
            future, slots = self._begun.popleft()
            for slot in slots:
                if self._in_flight[slot] is future:
                    del self._in_flight[slot]

    def _compute(self, slots: Sequence[int], gather: Copy) -> None:
        for slot in slots:
            self._known.pop(slot, None)
        gather.wait()
        self._known.update(zip(slots, self._digests(slots), strict=True))

    def _digests(self, slots: Sequence[int]) -> list[bytes]:
        memory = self._memory()
        if time.monotonic() > self._again:
            self._begin_process()
        if (process := self._process) is not None and process.is_ready():
            try:
                found = process.digests(map(memory.address, slots))
                self._pause, self.computed_here = AGAIN_SECONDS, ""
                return found
            except Exception as error:  # noqa: BLE001 - its next answer may be to another question
                self._lose(error)
        return [digest(memory.payload(slot)) for slot in slots]

    def of(self, slots: Sequence[int]) -> list[bytes | None]:
        """Wait for the checksums that the blocks of these slots had when they were gathered; None
        where that failed, or none are kept."""
        in_flight = map(self._in_flight.get, slots)
        wait({future for future in in_flight if future is not None})
        return [self._known.get(slot) for slot in slots]

    def close(self) -> None:
        """End the thread and the process; nobody asks any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._end_process()
