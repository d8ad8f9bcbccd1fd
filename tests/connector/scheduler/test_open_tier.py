"""Tiers that open on several threads share the slots of their chain."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from spec.offloading import OffloadingSpec
from tests.support.replay_chains import MODEL, chain_of, cpu
from tiers.connector.scheduler import open_tier
from tiers.connector.scheduler.open_tier import TierOpener
from tiers.contract.generation import Generation
from tiers.contract.messages import WorkerHandshake
from tiers.host.slots import SlotPool


def test_two_tiers_that_open_first_at_once_have_the_same_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else both would hand out the same memory, and one would store the other's blocks."""
    chain = chain_of({**cpu(8), "name": "a"}, {**cpu(8), "name": "b"})
    opener = TierOpener(chain, MODEL.engine_info(64), Generation(), lambda: 0.0)
    together = threading.Barrier(2)

    def slots(count: int) -> SlotPool:
        with suppress(threading.BrokenBarrierError):
            together.wait(0.5)
        return SlotPool(count)

    def opened(tier: OffloadingSpec) -> SlotPool:
        shakes = [WorkerHandshake(0, b"", 4096)]
        return opener.open(chain, tier, shakes, False, lambda key: None).pool

    monkeypatch.setattr(open_tier, "SlotPool", slots)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(opened, chain.tiers)
    assert first is second
