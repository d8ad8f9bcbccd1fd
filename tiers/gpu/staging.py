"""Staging: memory on a device through which blocks cross the bus in waves, and its streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from tiers.concurrency.executors import io_executor

WAVE_BYTES = 16 << 20
"""Staging of one wave, or a block's bytes if those are more."""
WAVES = 2
"""Waves of a ring: one is filled while the other is emptied."""
MOST_QUEUED = 256
"""Operations of a ring from one mark to the next, or those of a wave if they are more; the device
is never two marks behind. A stream takes a thousand: queuing more holds up all threads that launch
anything, the engine's too, until the step has been computed that a gather waits for."""

Move = Callable[[int, int, torch.Tensor], None]
"""Queues the copies of items first to last (exclusive) into, or out of, as many staged rows."""


class _Wave:
    """Staging memory, and the last events at which it was filled and emptied. An event that was
    never recorded holds nobody back."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.filled = torch.cuda.Event()
        self.emptied = torch.cuda.Event()


class Ring:
    """The waves of one direction. Called by one thread at a time."""

    def __init__(self, device: torch.device, stride: int) -> None:
        made = _memory(min(MOST_QUEUED, max(1, WAVE_BYTES // stride)), stride, device)
        self._device = device
        self._waves = [_Wave(made[i]) for i in range(WAVES)]
        self._turn = self._queued = 0
        self._last_mark = torch.cuda.Event(blocking=True)
        self.filling = torch.cuda.Stream(device)
        self.emptying = torch.cuda.Stream(device)

    def pass_through(self, count: int, launches: int, fill: Move, empty: Move) -> None:
        """Queue `fill` on the one stream and `empty` on the other, for waves of `count` items.
        `launches`: what gathers or scatters a wave on the device."""
        step = len(self._waves[0].rows)
        for first in range(0, count, step):
            last = min(first + step, count)
            self._keep_behind(max(last - first, launches) + 2)
            wave = self._waves[self._turn]
            self._turn = (self._turn + 1) % WAVES
            rows = wave.rows[: last - first]
            with torch.cuda.stream(self.filling):
                self.filling.wait_event(wave.emptied)
                fill(first, last, rows)
                wave.filled.record(self.filling)
            with torch.cuda.stream(self.emptying):
                self.emptying.wait_event(wave.filled)
                try:
                    empty(first, last, rows)
                finally:
                    # What failed midway may read the wave still.
                    wave.emptied.record(self.emptying)

    def _keep_behind(self, operations: int) -> None:
        """Count what the next wave queues on a stream at most; of much, wait for what precedes."""
        self._queued += operations
        if self._queued > MOST_QUEUED:
            before, self._last_mark, self._queued = self._last_mark, mark(self.emptying), operations
            wait_for([before], self._device)

    def marks(self) -> list[torch.cuda.Event]:
        """Events after all that is queued on both streams."""
        return [mark(self.filling), mark(self.emptying)]


class Staging:
    """A device's rings, `out` and `into`, and what keeps each to one thread at a time: gathers are
    queued by `thread`, loads under `loading`. Copiers of one device may share it: streams are few,
    and beyond those the engine's own is handed out once more."""

    def __init__(self, device: torch.device, stride: int) -> None:
        """`stride`: bytes of a staged row, those of the largest block at least."""
        with torch.cuda.device(device):
            self.out, self.into = (Ring(device, stride) for _ in range(2))
            # The engine's stream may still zero that memory, and use what it was before.
            torch.cuda.synchronize(device)
        # Two loaders between each other's waves would fill memory that the other has not emptied.
        self.loading = threading.Lock()
        self.thread = io_executor(1, "gather")


def _memory(rows: int, stride: int, device: torch.device) -> torch.Tensor:
    """Memory for the waves of a ring, of `rows` each, or fewer where the engine has left less."""
    with torch.inference_mode(False):  # else other threads may not write it
        while True:
            try:
                return torch.zeros(WAVES, rows, stride, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
                rows //= 2


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event after all that is queued on a stream. Whoever waits for it sleeps, rather than take
    a core from the engine."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def wait_for(marks: Sequence[torch.cuda.Event], device: torch.device) -> None:
    # A thread that no device was set for would make a context on the first one, of half a gigabyte,
    # which is another rank's: seven ranks would take what that one has left.
    with torch.cuda.device(device):
        for mark in marks:
            mark.synchronize()
