"""What the disk tier is held against: the file system's own speed, and one file per block."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tiers.disk.vault import THREADS

Payloads = Sequence[memoryview]


class Lanes:
    """As many threads as the tier has, each taking every so many-th item of a batch."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS)

    def each(self, job: Callable[[int], object], count: int) -> None:
        """Do the job for 0 to count - 1."""

        def run(lane: int) -> None:
            for item in range(lane, count, THREADS):
                job(item)

        list(self._threads.map(run, range(THREADS)))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


class RawLoop:
    """A preallocated file, batches written to it in turn and the last one read back: no index, no
    header, no checksum. What fio's psync engine does at `iodepth` 1 and `numjobs` `THREADS`."""

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


class FilePerBlock:
    """The peer: each block a file, written under another name and renamed; the oldest files go.
    What vLLM's file system tier and LMCache's local disk do, without what they do around it."""

    def __init__(self, folder: Path, capacity_blocks: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._capacity = capacity_blocks
        self._held: deque[Path] = deque()
        self._last: list[Path] = []
        self._stored = 0
        self._lanes = Lanes()

    def store(self, payloads: Payloads) -> None:
        """Write a batch of new files; remove as many of the oldest as are too many."""
        names = [f"{self._stored + i:08x}.bin" for i in range(len(payloads))]
        self._stored += len(payloads)
        self._last = [self._folder / name for name in names]
        while len(self._held) + len(payloads) > self._capacity:
            self._held.popleft().unlink()
        self._lanes.each(lambda i: _write_file(self._last[i], payloads[i]), len(payloads))
        self._held.extend(self._last)

    def load(self, payloads: Payloads, places: Sequence[int] | None = None) -> None:
        """Read the batch written last, or what lies at these places of all, the oldest first."""
        files = self._last if places is None else [self._held[place] for place in places]
        self._lanes.each(lambda i: _read_file(files[i], payloads[i]), len(payloads))

    def close(self) -> None:
        """End the threads."""
        self._lanes.close()


def _write_file(path: Path, payload: memoryview) -> None:
    part = path.with_suffix(".part")
    with open(part, "wb", buffering=0) as file:
        file.write(payload)
    part.rename(path)


def _read_file(path: Path, payload: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        file.readinto(payload)
