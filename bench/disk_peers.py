"""What the disk tier is held against: other ways to keep blocks on a disk.

All store a batch of payloads and load the last one stored, or any: `places` are positions among
all that is held, the oldest first.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.disk_limits import Lanes, Payloads
from tiers.concurrency.executors import BATCH_THREADS


class FilePerBlock:
    """Each block a file, written under another name and renamed; the oldest files go.
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


class VllmFiles:
    """vLLM's own file system tier, by the verbs its scheduler calls.

    A job of it is done by one thread, so a batch is given to it as `BATCH_THREADS` jobs. It has no
    capacity: we remove the files of the oldest batch, which is not timed. Its blocks are those of
    one memory, which is its own: payloads are not copied to it or from it.
    """

    def __init__(self, folder: Path, blocks: int, block_bytes: int, capacity_batches: int) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        # On whole pages, so that it can use direct I/O.
        pages = mmap.mmap(-1, blocks * block_bytes)
        memory: Any = np.frombuffer(pages, dtype=np.uint8).reshape(blocks, block_bytes)
        memory[:] = 1
        self._tier: Any = FileSystemTierManager(
            offloading_spec(), memoryview(memory), "fs", str(folder)
        )
        self._all, self._capacity = range(blocks), capacity_batches
        self._batches: deque[list[bytes]] = deque()
        self._numbers = count()

    @staticmethod
    def installed() -> bool:
        """Whether this environment has a vLLM with that tier."""
        try:
            import vllm.v1.kv_offload.tiering.fs.manager  # noqa: F401
        except ImportError:
            return False
        return True

    def make_room(self) -> None:
        """Remove the oldest batch, where the next would be one too many."""
        while len(self._batches) >= self._capacity:
            for key in self._batches.popleft():
                os.unlink(self._tier.file_mapper.get_file_name(key))

    def store(self) -> None:
        """Store a batch of new blocks."""
        # Hashes, as they spread over its folders, and the number of their group.
        keys = [hashlib.sha256(b"%d" % next(self._numbers)).digest() + bytes(4) for _ in self._all]
        self._batches.append(keys)
        self._submit(self._tier.submit_store, keys)

    def load(self) -> None:
        """Load the batch stored last."""
        self._submit(self._tier.submit_load, self._batches[-1])

    def _submit(self, submit: Callable[[Any], object], keys: list[bytes]) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        share = -(-len(keys) // BATCH_THREADS)
        starts = range(0, len(keys), share)
        for start in starts:
            part = keys[start : start + share]
            places = np.arange(start, start + len(part))
            submit(TransferJob(next(self._numbers), part, places, False, ReqContext("bench")))
        ended: list[Any] = []
        while len(ended) < len(starts):
            self._tier.drain_jobs()
            ended += self._tier.get_finished_jobs()
            time.sleep(0)
        if not all(job.success for job in ended):
            raise RuntimeError("vLLM's tier did not move every block")

    def close(self) -> None:
        """End its threads."""
        self._tier.shutdown()


def offloading_spec() -> Any:
    """As much of the engine's settings as a tier of vLLM's reads."""
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
    )
    config = SimpleNamespace(
        groups=[],
        canonical_layout=False,
        replicated_layout=False,
        model=SimpleNamespace(name="bench", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16),
        parallel=parallel,
    )
    events = SimpleNamespace(enable_kv_cache_events=False)
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)
