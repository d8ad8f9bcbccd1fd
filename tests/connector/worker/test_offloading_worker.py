"""A worker's step costs what the step brings, however many stores are in flight; and its puts."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench.lagging import worker_step
from tests.support.clock import wait_for
from tests.support.faulty_stores import FaultyStore, SlowStore
from tests.support.kept import kept
from tiers.concurrency.executors import IoExecutor
from tiers.concurrency.rate_limit import RateLimit
from tiers.connector.multi.multi_connector import MultiConnectorMetadata
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.worker import offloading_worker
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.offloading_worker import (
    MOST_ENDED,
    MOST_ENDS,
    OffloadingWorker,
    Puts,
)
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import (
    NO_PLACE,
    OffloadingConnectorMetadata,
    PromptPlace,
    StoreItem,
    StoreJob,
)
from tiers.contract.pool_size import PoolSize
from tiers.contract.weight_reports import WeightOrders
from tiers.disk.spec import DiskSpec
from tiers.gpu.copier import open_copier
from tiers.store import Block, PutCounts
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
        worker.resize(changed)
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


WAIT_S = 60.0
SPACE = b"namespace-16-byt"


class Host:
    """Slots of 1 MiB, of which a store takes 32 at once. A slot from 1,000 on was not gathered, and
    the gather of slot 2,000 failed."""

    payload_bytes = 1 << 20
    engine = SimpleNamespace(kv_events=True, rank=0)
    memory = SimpleNamespace(payload=lambda slot: memoryview(bytearray(1)))
    unchanged = SimpleNamespace(
        unchanged=lambda: True, unchanged_everywhere=lambda: True, waits_for_others=lambda: False
    )
    watch = SimpleNamespace(stores=lambda tag: Host.unchanged)
    checksums = SimpleNamespace(of=lambda slots: [None] * len(slots))

    def now(self) -> float:
        return 0.0

    def wait_and_verify(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        if 2000 in slots:
            raise RuntimeError("the device failed")
        return [slot < 1000 for slot in slots]


class Store:
    """Refuses keys that begin with `no`, and had those that begin with `had`. Its first put waits
    until it may go on."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()
        self.puts: list[list[bytes]] = []

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key[16:].startswith(b"had") for key in keys]

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self.begun.set()
        assert self.over.wait(WAIT_S)
        self.puts.append([block.key[16:] for block in blocks])
        return [not block.key[16:].startswith(b"no") for block in blocks]

    def counts(self) -> PutCounts:
        """Of those that it had."""
        return PutCounts(renewed=sum(k.startswith(b"had") for keys in self.puts for k in keys))


def job(number: int, *keys: bytes, slot: int = 0, generation: bytes = b"") -> StoreJob:
    return StoreJob(number, [StoreItem(key, slot, None) for key in keys], generation)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def puts(store: Store) -> Iterator[Puts]:
    writer = IoExecutor(1, "test")
    made = Puts(cast(Any, Host()), RateLimit(None), writer, in_host=False)
    made.serve(cast(Guarded, store), SPACE)
    yield made
    store.over.set()
    writer.shutdown()


def test_jobs_that_wait_are_put_together(puts: Puts, store: Store) -> None:
    before = kept(puts)
    futures = [puts.begin(job(0, b"first"), True)]
    assert store.begun.wait(WAIT_S)
    futures += [
        puts.begin(job(1, b"a", b"no b"), True),
        puts.begin(job(2, b"had c"), True),
        puts.begin(job(3, b"d", slot=1000), True),
        puts.begin(job(4, *[b"%d" % n for n in range(28)]), True),
        puts.begin(job(5, b"last"), True),
    ]
    store.over.set()
    results = [future.result(WAIT_S) for future in futures]
    assert [len(put) for put in store.puts] == [1, 3, 28, 1], "an eighth of what waits, at most"
    assert [result.failed for result in results] == [set(), {1}, set(), {0}, set(), set()]
    assert [result.already_stored for result in results] == [set(), set(), {0}, set(), set(), set()]
    assert kept(puts) == before


def test_what_differs_is_put_apart(puts: Puts, store: Store) -> None:
    futures = [puts.begin(job(0, b"first"), True)]
    assert store.begun.wait(WAIT_S)
    futures += [
        puts.begin(job(1, b"old"), True),
        puts.begin(job(2, b"new", generation=b"g" * 16), True),
        puts.begin(job(3, b"of another rank", generation=b"g" * 16), False),
        puts.begin(job(4, *[b"%d" % n for n in range(40)]), True),
        puts.begin(job(5, b"last"), True),
    ]
    store.over.set()
    assert [future.result(WAIT_S).failed for future in futures] == [set()] * 6
    assert [len(put) for put in store.puts] == [1, 1, 1, 8, 32, 1]


@pytest.mark.parametrize("packs", [False, True])
def test_the_first_batch_of_a_prompt_is_put_last_unless_packs_are_found_by_it(
    puts: Puts, store: Store, packs: bool
) -> None:
    store.over.set()
    keys = [b"%02d" % number for number in range(40)]
    keys[1] = b"no"
    place = PromptPlace(keys, range(40), 8) if packs else NO_PLACE
    result = puts.begin(replace(job(0, *keys), place=place), True).result(WAIT_S)
    assert store.puts == ([keys[:32], keys[32:]] if packs else [keys[32:], keys[:32]])
    assert result.failed == {1}


def test_a_gather_that_failed_fails_one_job(puts: Puts, store: Store) -> None:
    futures = [puts.begin(job(0, b"first"), True)]
    assert store.begun.wait(WAIT_S)
    futures += [
        puts.begin(job(1, b"a"), True),
        puts.begin(job(2, b"lost", slot=2000), True),
        puts.begin(job(3, b"b"), True),
        puts.begin(job(4, *[b"%d" % n for n in range(40)]), True),
    ]
    store.over.set()
    with pytest.raises(RuntimeError, match="the device failed"):
        futures.pop(2).result(WAIT_S)
    assert [future.result(WAIT_S).failed for future in futures] == [set()] * 4
    assert store.puts[:3] == [[b"first"], [b"a"], [b"b"]]


def test_nothing_is_held_up_in_host_memory() -> None:
    """A tier that has nothing to put waits for no other job's gather."""
    writer = IoExecutor(1, "test")
    gathered = threading.Event()
    host = Host()

    def wait_and_verify(slots: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        assert slots == [0] or gathered.wait(WAIT_S)
        return [True] * len(slots)

    host.wait_and_verify = wait_and_verify  # type: ignore[method-assign]
    blocked = threading.Event()
    writer.submit(blocked.wait, WAIT_S)
    puts = Puts(cast(HostSlots, host), RateLimit(None), writer, in_host=True)
    first, second = (puts.begin(job(n, b"k", slot=n), True) for n in range(2))
    blocked.set()
    assert first.result(WAIT_S).failed == set()
    assert not second.done()
    gathered.set()
    assert second.result(WAIT_S).failed == set()
    writer.shutdown()
