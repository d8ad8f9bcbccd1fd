"""A worker's step costs what the step brings, however many stores are under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.lagging import worker_step
from tests.support.clock import wait_for
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.offloading_worker import MOST_ENDS, OffloadingWorker
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import OffloadingConnectorMetadata, StoreItem, StoreJob
from tiers.contract.pool_size import PoolSize
from tiers.gpu.copier import open_copier
from tiers.testing import FaultyStore, GivenSpec, MemoryStore, SlowStore

JOBS = 3 * MOST_ENDS + 10


class Counted(OrderedDict[int, Any]):
    """Stores under way; counts those that anybody looks at one after the other."""

    looked = 0

    def values(self) -> Any:
        for one in super().values():
            Counted.looked += 1
            yield one


class Lagging:
    """A worker with a tier whose writes wait until they are let go."""

    def __init__(self) -> None:
        slow = SlowStore(MemoryStore())
        self.pace = slow.pace
        engine = EngineInfo({}, block_tokens=4, hash_tokens=4, num_blocks=4)
        host = HostSlots(engine, PoolSize(0, JOBS << 12, 0, 1), open_copier)
        spec = GivenSpec(type="given").over(FaultyStore(slow))
        self.worker = OffloadingWorker(spec, host, drain=10.0)
        self.worker.register_kv_caches({"layer": torch.zeros(4, 64, dtype=torch.uint8)})
        self.worker._stores = Counted()
        Counted.looked = 0
        self.pace.hang("put")

    def step(self, *jobs: StoreJob, flush: tuple[int, ...] = ()) -> set[int]:
        """One step; which stores it says have ended."""
        orders = OffloadingConnectorMetadata(reqs_to_store=[*jobs], jobs_to_flush=[*flush])
        worker = self.worker
        said = worker_step(worker, orders)
        return set() if said is None else {*said.jobs}


@pytest.fixture
def lagging() -> Iterator[Lagging]:
    made = Lagging()
    yield made
    made.pace.resume()
    made.worker.shutdown()


def job(number: int) -> StoreJob:
    return StoreJob(number, [StoreItem(b"%40d" % number, number, number % 4)])


def test_a_step_looks_at_few_stores_and_reports_the_end_of_each_once(lagging: Lagging) -> None:
    lagging.step(*map(job, range(JOBS - 1)))
    before = Counted.looked
    assert lagging.step(flush=(3, JOBS - 5, 10**6)) == set(), "they are gathered, not stored"
    assert lagging.step(job(JOBS - 1)) == set()
    assert Counted.looked - before <= 2
    stores = lagging.worker._stores
    last = stores[JOBS - 1].future
    lagging.pace.resume()
    wait_for(last.done)
    ended: list[int] = []
    while stores:
        before = Counted.looked
        some = sorted(lagging.step())
        assert 0 < len(some) <= MOST_ENDS
        assert Counted.looked - before <= MOST_ENDS
        ended += some
    assert ended == [*range(JOBS)]
