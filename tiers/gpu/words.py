"""Words of memory by their addresses, on the CPU or a CUDA device, beside the engine's work."""

from __future__ import annotations

from typing import Protocol

import torch

WORD = torch.int16
"""As long as most weights are, so that each lies at a whole one."""


class Reading(Protocol):
    """Words on their way."""

    def ready(self) -> bool:
        """Whether `words` waits for nothing any more."""

    def words(self) -> bytes:
        """The words, in the order asked for; waits for the device. Raises RuntimeError, of a device
        that failed."""


class Words:
    """Reads words between two addresses of one device, whoever owns them.

    It owns none of that memory and keeps nobody's alive: who asks knows that the words it asks for
    are there until the device has done what it has been given by then.
    """

    def __init__(self, device: torch.device, start: int, stop: int) -> None:
        """The addresses, in bytes, of the first word and behind the last. Raises RuntimeError or
        AttributeError where this PyTorch can't look there."""
        self._device = device
        length = (stop - start) // WORD.itemsize
        storage = torch._C._construct_storage_from_data_pointer(
            start, device, length * WORD.itemsize
        )
        with torch.inference_mode(False):
            self._memory = torch.empty(0, dtype=WORD, device=device)
            self._memory.set_(storage, 0, (length,), (1,))
        if self._memory.data_ptr() != start:
            raise RuntimeError("this PyTorch copies memory that it is told to look at")
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, numbers: torch.Tensor) -> Reading:
        """Begin to read the words of these numbers, behind all that the calling thread has queued
        on its device. `numbers`: int64, in host memory, pinned for a CUDA device."""
        if self._beside is None:
            return _Read(torch.index_select(self._memory, 0, numbers))
        after = torch.cuda.Event()
        after.record(torch.cuda.current_stream(self._device))
        count = len(numbers)
        with torch.cuda.device(self._device), torch.cuda.stream(self._beside):
            self._beside.wait_event(after)
            there = numbers.to(self._device, non_blocking=True)
            found = torch.empty(count, dtype=WORD, device=self._device)
            torch.index_select(self._memory, 0, there, out=found)
            arrived = torch.empty(count, dtype=WORD, pin_memory=True)
            arrived.copy_(found, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(self._beside)
        return _Crossing(arrived, done, self._device)


class _Read:
    def __init__(self, words: torch.Tensor) -> None:
        self._words = words

    def ready(self) -> bool:
        return True

    def words(self) -> bytes:
        return self._words.numpy().tobytes()


class _Crossing(_Read):
    """Words that cross the bus to `words`, which are there after `done`."""

    def __init__(self, words: torch.Tensor, done: torch.cuda.Event, device: torch.device) -> None:
        super().__init__(words)
        self._done = done
        self._device = device

    def ready(self) -> bool:
        return bool(self._done.query())

    def words(self) -> bytes:
        with torch.cuda.device(self._device):  # else a thread makes a context on the first one
            self._done.synchronize()
        return super().words()
