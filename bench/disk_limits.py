"""What the disk tier is held against: the file system's own speed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tiers.concurrency.executors import BATCH_THREADS

Payloads = Sequence[memoryview]


class Lanes:
    """As many threads as the tier has, each taking every so many-th item of a batch."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(BATCH_THREADS)

    def each(self, job: Callable[[int], object], count: int) -> None:
        """Do the job for 0 to count - 1."""

        def run(lane: int) -> None:
            for item in range(lane, count, BATCH_THREADS):
                job(item)

        list(self._threads.map(run, range(BATCH_THREADS)))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


class RawLoop:
    """A preallocated file, batches written to it in turn and the last one read back: no index, no
    header, no checksum. What fio's psync engine does at `iodepth` 1, `numjobs` `BATCH_THREADS`."""

    def __init__(self, path: Path, payload_bytes: int, batches: int, count: int, direct: bool):
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self.path = path
        self._handle = os.open(path, flags, 0o600)
        self._size, self._batches, self._count = payload_bytes, batches, count
        os.posix_fallocate(self._handle, 0, payload_bytes * batches * count)
        self._lanes = Lanes()
        self._batch = 0

    def store(self, payloads: Payloads, sync: bool = False) -> None:
        """Write the next batch, over the oldest one."""
        self._batch = (self._batch + 1) % self._batches
        self._lanes.each(
            lambda i: os.pwrite(self._handle, payloads[i], self._offset(i)), len(payloads)
        )
        if sync:
            os.fdatasync(self._handle)

    def load(self, payloads: Payloads, places: Sequence[int] | None = None) -> None:
        """Read the batch written last, or what lies at these places of all."""
        offsets = [self._offset(i) for i in range(len(payloads))]
        if places is not None:
            offsets = [place * self._size for place in places]
        self._lanes.each(
            lambda i: os.preadv(self._handle, [payloads[i]], offsets[i]), len(payloads)
        )

    def _offset(self, item: int) -> int:
        return (self._batch * self._count + item) * self._size

    def close(self) -> None:
        """Close the file."""
        self._lanes.close()
        os.close(self._handle)
