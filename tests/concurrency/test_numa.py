"""Threads and memory stay at the NUMA node of a device, of machines that are not ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bench.lagging import worker_step
from spec.offloading import StoreContext
from tests.gpu.stub_driver import Driver
from tests.support.clock import wait_for
from tiers.concurrency.executors import IoExecutor
from tiers.concurrency.numa import bound, near
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.offloading_worker import OffloadingWorker
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import (
    LoadItem,
    LoadJob,
    OffloadingConnectorMetadata,
    StoreItem,
    StoreJob,
)
from tiers.contract.pool_size import PoolSize
from tiers.gpu.bus import near_device
from tiers.gpu.copier import CpuCopier
from tiers.host import slot_memory
from tiers.store import Block, TierStore
from tiers.testing import GivenSpec, MemoryStore

ALLOWED = frozenset(os.sched_getaffinity(0))
BUS = "0000:3b:00.0"
Tree = Callable[..., Path]
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two processors")
FIRST, SECOND = sorted(ALLOWED)[:2]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Make what the kernel tells: the processors of each node, and the node of a device."""

    def make(*nodes: str, node: str = "1") -> Path:
        for number, cpus in enumerate(nodes):
            folder = tmp_path / f"sys/devices/system/node/node{number}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{cpus}\n")
        device = tmp_path / "sys/bus/pci/devices" / BUS
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        return tmp_path

    return make


@pytest.mark.parametrize("written", [BUS, "0000:3B:00.0", "00000000:3B:00.0"])
def test_the_processors_near_a_device_are_those_of_its_node(written: str, tree: Tree) -> None:
    assert near(written, tree(f"{FIRST}", f"{SECOND},900-903")) == {SECOND}


@pytest.mark.parametrize(
    ("nodes", "node"),
    [
        pytest.param(["0-999"], "0", id="one node"),
        pytest.param([], "0", id="none is told"),
        pytest.param([f"{FIRST}", f"{SECOND}"], "-1", id="the device's is not known"),
        pytest.param([f"{FIRST}", f"{SECOND}"], "7", id="a node that is not there"),
        pytest.param([f"{FIRST}", f"{SECOND}"], "what", id="nonsense"),
        pytest.param(["0-999", "1000-1007"], "1", id="this process may use none of it"),
    ],
)
def test_else_nothing_is_bound(nodes: list[str], node: str, tree: Tree) -> None:
    assert near(BUS, tree(*nodes, node=node)) == frozenset()


def test_a_device_that_the_kernel_does_not_know_is_near_nothing(tree: Tree) -> None:
    assert near("0000:ff:00.0", tree(f"{FIRST}", f"{SECOND}")) == frozenset()


def test_the_driver_tells_where_a_device_is(tree: Tree) -> None:
    root, driver = tree(f"{FIRST}", f"{SECOND}"), Driver()

    def of(index: int, driver: object = driver) -> frozenset[int]:
        return near_device(torch.device("cuda", index), root, lambda name: driver)

    assert of(1) == {SECOND}
    assert of(0) == of(7) == of(1, object()) == frozenset()


@pytest.mark.parametrize("cpus", [frozenset({SECOND}), frozenset[int]()])
def test_threads_that_begin_meanwhile_stay(cpus: frozenset[int]) -> None:
    with bound(cpus):
        assert os.sched_getaffinity(0) == (cpus or ALLOWED)
        pool = IoExecutor(1, "test")
    assert os.sched_getaffinity(0) == ALLOWED
    assert pool.submit(os.sched_getaffinity, 0).result() == (cpus or ALLOWED)
    pool.shutdown()


# -- who touches the host pool ---------------------------------------------------------------


class NearOne(CpuCopier):
    """A device at the node of the second processor, for which memory is pinned."""

    pin = True
    device = torch.device("cuda", 1)
    cpus = frozenset({SECOND})


class Watching(MemoryStore):
    """Notes where its verbs run, and what begins with it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, frozenset[int]] = {}

    def note(self, what: str) -> None:
        """Note the processors that the calling thread may use."""
        self.seen[what] = frozenset(os.sched_getaffinity(0))

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Note it."""
        self.note("get")
        return super().get(blocks)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Note it."""
        self.note("put")
        return super().put(blocks)


class BeginsThreads(GivenSpec):
    """A tier whose store begins a thread when it is opened, as disk does."""

    def open(self, site: StoreContext) -> TierStore:
        """Note where such a thread runs."""
        store = super().open(site)
        assert isinstance(store, Watching)
        thread = threading.Thread(target=store.note, args=("its own threads",))
        thread.start()
        thread.join()
        return store


@pytest.fixture
def provided(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[frozenset[int]]]:
    """Where pinned memory was touched first; there is no device that pins it. A thread that has
    none set would make a context on the first one, which is another rank's."""
    found: list[frozenset[int]] = []
    entered: list[torch.device | None] = []

    @contextmanager
    def on(device: torch.device | None) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    def pins(*address: int) -> None:
        assert entered == [NearOne.device]

    def populate(address: int, size: int) -> None:
        found.append(frozenset(os.sched_getaffinity(0)))

    def prefer(memory: object, touch: bool) -> None:
        assert not touch, "the engine's thread would be the first to touch it"

    monkeypatch.setattr(slot_memory, "_populate", populate)
    monkeypatch.setattr(slot_memory, "_prefer_huge_pages", prefer)
    monkeypatch.setattr(slot_memory, "register", pins)
    monkeypatch.setattr(slot_memory, "unregister", pins)
    monkeypatch.setattr(torch.cuda, "device", on)
    yield found


def test_the_host_pool_and_who_touches_it_are_at_the_device(provided: list[frozenset[int]]) -> None:
    store = Watching()
    engine = EngineInfo({}, block_tokens=4, hash_tokens=4, num_blocks=4)
    host = HostSlots(engine, PoolSize(0, 1 << 20, 0, 1), NearOne)
    worker = OffloadingWorker(BeginsThreads(type="given").over(store), host, drain=10.0)
    worker.register_kv_caches({"layer": torch.zeros(4, 64, dtype=torch.uint8)})
    assert os.sched_getaffinity(0) == ALLOWED
    key = b"%40d" % 0

    stored = [StoreJob(0, [StoreItem(key, 0, 0)])]
    worker_step(worker, OffloadingConnectorMetadata(reqs_to_store=stored))
    wait_for(lambda: "put" in store.seen)
    loaded = [LoadJob(1, "request", [LoadItem(key, 1, None)], 9.0)]
    worker_step(worker, OffloadingConnectorMetadata(reqs_to_load=loaded))
    wait_for(lambda: "get" in store.seen)
    here = {SECOND}
    assert store.seen == {"its own threads": here, "put": here, "get": here}
    assert provided and set(provided) == {frozenset(here)}
    loading = worker._loading
    for pool in (host._mover, host.checksums._thread, loading._threads, loading._readers):
        assert pool.submit(os.sched_getaffinity, 0).result() == here
    worker.shutdown()


@pytest.mark.usefixtures("provided")
def test_checksums_for_a_tier_that_is_added_are_computed_at_the_device() -> None:
    engine = EngineInfo({}, block_tokens=4, hash_tokens=4, num_blocks=4)
    host = HostSlots(engine, PoolSize(1 << 20, 0, 0, 1), NearOne)
    host.open({"layer": torch.zeros(4, 64, dtype=torch.uint8)})
    host.checksums.are_kept = True
    assert host.checksums._thread.submit(os.sched_getaffinity, 0).result() == {SECOND}
    host.close()
