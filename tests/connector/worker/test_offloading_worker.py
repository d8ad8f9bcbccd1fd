"""A worker's step costs what the step brings, however many stores are in flight."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.lagging import worker_step
from tests.support.clock import wait_for
from tests.support.faulty_stores import FaultyStore, SlowStore
from tiers.connector.multi.multi_connector import MultiConnectorMetadata
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.worker import offloading_worker
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.offloading_worker import (
    MOST_ENDED,
    MOST_ENDS,
    OffloadingWorker,
)
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import (
    OffloadingConnectorMetadata,
    StoreItem,
    StoreJob,
)
from tiers.contract.pool_size import PoolSize
from tiers.contract.weight_reports import WeightOrders
from tiers.disk.spec import DiskSpec
from tiers.gpu.copier import open_copier
from tiers.testing import GivenSpec, MemoryStore
from tiers.wrappers.guard import Guarded
from tiers.wrappers.opening import open_guarded

JOBS = 3 * MOST_ENDS + 10


def host_slots(slots: int, ranks: int = 1) -> HostSlots:
    """Host memory of so many slots, of 4 KiB at most."""
    engine = EngineInfo({}, block_tokens=4, hash_tokens=4, num_blocks=4, world_size=ranks)
    return HostSlots(engine, PoolSize(0, slots << 12, 0, ranks), open_copier)


class Counted(OrderedDict[int, Any]):
    """Stores in flight; counts those that anybody looks at one after the other."""

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
        spec = GivenSpec(type="given").over(FaultyStore(slow))
        self.worker = OffloadingWorker(spec, host_slots(JOBS), drain=10.0)
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


def numbered_job(number: int) -> StoreJob:
    return StoreJob(number, [StoreItem(b"%40d" % number, number, number % 4)])


def test_a_step_looks_at_few_stores_and_reports_the_end_of_each_once(lagging: Lagging) -> None:
    lagging.step(*map(numbered_job, range(JOBS - 1)))
    before = Counted.looked
    assert lagging.step(flush=(3, JOBS - 5, 10**6)) == set(), "they are gathered, not stored"
    assert lagging.step(numbered_job(JOBS - 1)) == set()
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


def test_a_step_reports_the_end_of_so_many_blocks_and_of_those_of_one_store_more(
    lagging: Lagging,
) -> None:
    jobs = [StoreJob(n, [StoreItem(b"%40d" % n, 0, 0)] * (MOST_ENDED // 2 - 1)) for n in range(7)]
    lagging.worker._refuse([*jobs, StoreJob(7, [StoreItem(b"7", 0, 0)] * 2 * MOST_ENDED)])
    assert [lagging.step() for _ in range(4)] == [{0, 1, 2}, {3, 4, 5}, {6, 7}, set()]


@pytest.mark.parametrize("seen", [True, False])
def test_nothing_is_stored_of_a_step_that_raises(lagging: Lagging, seen: bool) -> None:
    """Nor of those behind it, which may be queued by then and compute with what it never made.
    Model Runner V1 saves what such a step has half computed, or it fails before it is known here.
    What the engine's caller handles meanwhile is no step's."""
    lagging.pace.resume()
    stores, raises = lagging.worker._stores, 1 if seen else -1
    worker = MultiWorker([lagging.worker], watch=lagging.worker._host.watch)

    def save(number: int) -> None:
        orders = OffloadingConnectorMetadata([], [numbered_job(number)])
        step = WeightOrders(tag=b"", step=number)
        worker.bind_connector_metadata(MultiConnectorMetadata((orders,), {}, weights=step))
        try:
            if number == raises:
                raise ValueError("out of memory, in the second layer")
        finally:
            worker.wait_for_save()

    try:
        raise KeyError("of a program that then asks an engine")
    except KeyError:
        save(0)
    behind = range(1 if seen else 2, 4)
    for number in behind:
        with suppress(ValueError):
            save(number)
    failed = {number: store.future.result().failed for number, store in stores.items()}
    assert failed == {0: set()} | {number: {0} for number in behind}


def test_what_a_step_that_never_came_was_to_flush_is_flushed_by_those_behind_it(
    lagging: Lagging,
) -> None:
    """Its loads, which are ordered again, overwrite what is perhaps read still."""
    waited: list[int] = []
    lagging.step(numbered_job(0))
    gather: Any = SimpleNamespace(wait=lambda: waited.append(0))
    lagging.worker._stores[0].gather = gather
    lagging.worker.handle_preemptions(OffloadingConnectorMetadata())
    assert not waited
    lagging.worker._host.watch.stopped = "a step failed"
    lagging.worker.handle_preemptions(OffloadingConnectorMetadata())
    assert waited == [0]
    lagging.pace.resume()


def test_a_tier_has_threads_for_as_many_loads_as_its_spec_says() -> None:
    spec = GivenSpec.model_validate({"type": "given", "name": "many", "loads_at_once": 5})
    worker = OffloadingWorker(spec, host_slots(1), drain=10.0)
    names = [thread.name for thread in threading.enumerate()]
    worker.shutdown()
    for part in ("load", "read"):
        assert sum(name.startswith(f"kvtiers-{part}-many_") for name in names) == 5


def test_a_store_that_opens_while_its_settings_change_has_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"path": tmp_path, "capacity": "64MiB"}
    spec = DiskSpec.model_validate(before)
    changed = DiskSpec.model_validate({**before, "capacity": "32MiB", "deadline": "7s"})
    worker = OffloadingWorker(spec, host_slots(1), drain=10.0)

    def open_late(*args: Any, **more: Any) -> Guarded:
        store = open_guarded(*args, **more)
        worker.retune(changed)
        return store

    monkeypatch.setattr(offloading_worker, "open_guarded", open_late)
    worker.register_kv_caches({"layer": torch.zeros(4, 64, dtype=torch.uint8)})
    store = worker._store
    assert store is not None and store.usage().capacity == 32 << 20
    assert {lane.deadline for lane in store._lanes} == {7.0}
    worker.shutdown()


def test_an_engine_that_ends_waits_for_what_is_being_stored() -> None:
    lagging = Lagging()
    lagging.step(numbered_job(0))
    future = lagging.worker._stores[0].future
    threading.Timer(0.1, lagging.pace.resume).start()
    lagging.worker.shutdown()
    assert future.done() and future.result().failed == set()


@pytest.mark.parametrize(("ranks", "rate"), [(2, None), (1, "4KiB/day")], ids=["verdict", "rate"])
def test_an_engine_that_ends_waits_for_no_verdict_and_no_rate(ranks: int, rate: str | None) -> None:
    host = host_slots(4, ranks)
    spec = GivenSpec.model_validate({"type": "given", "store_rate": rate}).over(MemoryStore())
    worker = OffloadingWorker(spec, host, drain=20.0)
    worker.register_kv_caches({"layer": torch.zeros(4, 64, dtype=torch.uint8)})
    host.watch.bind(WeightOrders(0))
    jobs = [numbered_job(number) for number in range(2)]
    worker_step(worker, OffloadingConnectorMetadata(reqs_to_store=jobs))
    began = time.monotonic()
    worker.shutdown()
    assert time.monotonic() - began < 10.0
