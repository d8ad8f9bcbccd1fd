"""LMCache's local disk and its Redis client, where it is installed: peers of our tiers.

    pip install --no-deps lmcache aiofile caio

is enough beside vLLM, without CUDA. Measured with 0.5.6, with the settings it has by default.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME = "LMCache"
ABSENT = "LMCache is not installed; docs/benchmarks.md says how"
_CLIENT_THREADS = 8
"""Of the Redis client: LMCache's default."""


def installed() -> bool:
    """Whether both can be imported here."""
    if find_spec("lmcache") is None or find_spec("aiofile") is None:
        return False
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    try:
        import lmcache.lmcache_redis
        import lmcache.v1.storage_backend.local_disk_backend  # noqa: F401
    except ImportError as error:
        logging.getLogger(__name__).warning("LMCache can't be imported: %s", error)
        return False
    return True


class LMCacheDisk:
    """Its `LocalDiskBackend`: a file per block, four threads, through the page cache.

    Blocks come from memory objects of its own and go to fresh ones, as in an engine.
    """

    def __init__(self, folder: Path, blocks: int, block_bytes: int, batches: int) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            local_disk=str(folder),
            max_local_disk_size=batches * blocks * block_bytes / 2**30,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        memory = HostMemoryAllocator(3 * blocks * block_bytes)
        host = LocalCPUBackend(config, memory_allocator=memory, dst_device="cpu")
        self._disk: Any = LocalDiskBackend(config, self._loop, host, dst_device="cpu")
        shape = torch.Size([2, 1, block_bytes // 4])
        self._blocks: list[Any] = [
            host.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in range(blocks)
        ]
        for block in self._blocks:
            block.tensor.fill_(1.0)
        self._stored = 0

    def _keys(self) -> list[Any]:
        import torch
        from lmcache.utils import CacheEngineKey

        first = self._stored * len(self._blocks)
        numbers = range(first, first + len(self._blocks))
        return [CacheEngineKey("bench", 1, 0, number, torch.bfloat16) for number in numbers]

    def store(self) -> None:
        """Store a batch of new blocks; return when the last is in its file."""
        self._stored += 1
        done = threading.Semaphore(0)
        self._disk.batched_submit_put_task(
            self._keys(), self._blocks, on_complete_callback=lambda _: done.release()
        )
        for _ in self._blocks:
            done.acquire()

    def load(self) -> None:
        """Load the batch stored last."""
        for block in self._disk.batched_get_blocking(self._keys()):
            if block is None:
                raise RuntimeError("LMCache lost a block")
            block.ref_count_down()

    def close(self) -> None:
        """End its threads."""
        self._disk.close()
        for block in self._blocks:
            block.ref_count_down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LMCacheRedis:
    """Its C++ client: a pool of threads with a connection each; a batch is one job for all."""

    def __init__(self, port: int, payloads: Sequence[memoryview]) -> None:
        from lmcache.lmcache_redis import LMCacheRedisClient

        self._client: Any = LMCacheRedisClient("127.0.0.1", port, _CLIENT_THREADS, "", "")
        self._ended = select.poll()
        self._ended.register(self._client.event_fd(), select.POLLIN)
        self._keys = [f"bench@{number:032x}" for number in range(len(payloads))]
        self._payloads = list(payloads)

    def store(self) -> None:
        """Store every payload."""
        self._run(self._client.submit_batch_set)

    def load(self) -> None:
        """Load every payload into its place."""
        self._run(self._client.submit_batch_get)

    def _run(self, submit: Callable[[list[str], list[memoryview]], object]) -> None:
        submit(self._keys, self._payloads)
        answers: deque[Any] = deque()
        while not answers:
            self._ended.poll()
            answers.extend(self._client.drain_completions())
        _, ok, error, _ = answers[0]
        if not ok:
            raise RuntimeError(f"LMCache's client: {error}")

    def close(self) -> None:
        """Close its connections."""
        self._client.close()
