"""A copier, and a tier's loads through it, on the model of streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import pytest
import torch

from tests.gpu.cuda_model import LateThreads, Model
from tests.gpu.streamed_engine import StreamedCopier
from tests.support.replay_chains import SLOT
from tiers.concurrency.rate_limit import RateLimit
from tiers.connector.worker import loading
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.weight_watch import WeightWatch
from tiers.contract.block_copier import Copy
from tiers.contract.messages import LoadItem, LoadJob
from tiers.contract.weight_reports import Weights
from tiers.gpu import cuda
from tiers.gpu.pages import PageCopies
from tiers.store import Block
from tiers.wrappers.guard import HEALTHY, Guarded

BLOCKS = 7


def prepare(model: Model, patch: pytest.MonkeyPatch) -> LateThreads:
    """Let copiers run on the model, in small waves, by threads that are returned."""
    threads = LateThreads(model)
    model.install(patch)
    patch.setattr(cuda, "WAVE_BYTES", 2 * SLOT)
    patch.setattr(cuda, "open_copies", PageCopies)
    patch.setattr(cuda, "IoExecutor", threads.executor)
    return threads


class Copies:
    """A copier over a paged KV, of so many pages a block, and as many rows as that has blocks."""

    def __init__(
        self, model: Model, patch: pytest.MonkeyPatch, blocks: int = BLOCKS, pages: int = 1
    ) -> None:
        self.model, self.threads = model, prepare(model, patch)
        self.kv = torch.zeros(pages, blocks, 48 // pages, dtype=torch.uint8).transpose(0, 1)
        self.rows = torch.zeros(blocks, SLOT, dtype=torch.uint8)
        self.copier = StreamedCopier({"layer": self.kv}, blocks)

    def load(self, slots: Iterable[int], blocks: Iterable[int]) -> None:
        """Load rows behind what the engine has queued."""
        self.begin_load(slots, blocks).wait()

    def begin_load(self, slots: Iterable[int], blocks: Iterable[int]) -> Copy:
        """The same, without waiting for its end."""
        fence = self.copier.fence()
        fence.wait()
        return self.copier.scatter(self.rows, list(slots), list(blocks), fence)

    def fail_after(self, operations: int) -> None:
        """Let the device take so many more operations."""
        left = iter(range(operations))

        def take() -> None:
            if next(left, None) is None:
                raise RuntimeError("the device failed")

        self.model.fails = take


class Host:
    """The host pool of a copier's rows, all of whose slots hold their blocks."""

    def __init__(self, copies: Copies) -> None:
        self.copier = copies.copier
        self.memory = copies
        self.payload_bytes = copies.copier.payload_bytes
        self.watch = WeightWatch(Weights(), 1)

    def now(self) -> float:
        """Time stands still."""
        return 0.0

    def wait_and_verify(self, slots: list[int], keys: list[bytes]) -> list[bool]:
        """They hold them."""
        return [True] * len(slots)


class Store:
    """Each block is its key's number."""

    health = HEALTHY

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Read blocks."""
        for block in blocks:
            block.payload[:] = bytes([block.key[-1]]) * len(block.payload)
        return [True] * len(blocks)


class Loads:
    """The loads of a tier over a copier on the model: those of host memory by waves of two blocks,
    those of a store of so many `rows`. Block n is full of n."""

    def __init__(self, copies: Copies, patch: pytest.MonkeyPatch, rows: int = 0) -> None:
        self.copies = copies
        copies.rows.copy_(torch.arange(len(copies.rows)).view(-1, 1))
        patch.setattr(loading, "IoExecutor", copies.threads.executor)
        patch.setattr(loading, "wait", copies.threads.wait)
        patch.setattr(loading, "WAVE_BYTES", 2 * SLOT)
        patch.setattr(loading, "READ_BYTES", rows * SLOT)
        host = cast(HostSlots, Host(copies))
        self.loading = loading.Loading("tier", host, RateLimit(None), verify=False)
        if rows:
            self.loading.open()
            self.loading.serve(cast(Guarded, Store()), b"namespace-16-byt")

    def begin(self, count: int = BLOCKS, from_store: bool = False) -> loading.Load:
        """Begin to load the first blocks, from the slots of their numbers or the store."""
        slots = [None if from_store else block for block in range(count)]
        items = [LoadItem(bytes([block]), block, slot) for block, slot in enumerate(slots)]
        job = LoadJob(len(self.loading._loads), "request", items, 9.0)
        self.loading.begin([job], self.copies.copier.fence())
        return self.loading._loads[-1][0]

    def run(self) -> None:
        """Run the one load on this thread."""
        assert self.copies.threads.named("load-tier").run_next()
        assert self.loading._loads[0][1].exception() is None

    def end(self) -> None:
        """Run the one load to its end: all has arrived, as it was."""
        self.run()
        (ended,) = self.loading.ended(idle=False)
        assert not ended.result.failed
        with torch._C.DisableTorchFunction():
            assert torch.equal(self.copies.kv, expected(self.copies.kv))

    def close(self) -> None:
        """Give the memory back."""
        self.loading.close(0.0)


def expected(kv: torch.Tensor) -> torch.Tensor:
    """A paged KV whose blocks are full of their numbers."""
    return torch.arange(len(kv)).view(-1, 1, 1).expand_as(kv).to(kv.dtype)
