"""What a load waits for, and what waits for it, counted on the model of streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spec.chain import ChainSpec
from tests.gpu.copies import Copies, Loads, expected
from tests.gpu.cuda_model import Mark, Model, Stream
from tests.gpu.streamed_engine import RUNNERS, STREAMS, StreamedCopier, StreamedEngine
from tests.support.replay_chains import SLOT
from tiers.contract.weight_reports import Look, Weights
from tiers.cpu.spec import CpuSpec
from tiers.host import slot_memory
from tiers.testing import GivenSpec, MemoryStore


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    copies = Copies(Model(STREAMS), monkeypatch)
    yield Loads(copies, monkeypatch)
    copies.model.drain()


def test_a_load_that_waits_for_the_engine_holds_up_no_other_and_no_end(loads: Loads) -> None:
    """All loads share the streams: one queued behind a prompt of a second would hold the rest."""
    model, kv, computed = loads.copies.model, loads.copies.kv, list[str]()
    (early := loads.copies.copier.fence()).wait()
    model.compute.put(lambda: computed.append("a prompt"))
    load = loads.begin(2)
    ended: list[tuple[set[int], set[int]]] = []
    arrived: list[bool] = []

    def meanwhile(mark: Mark) -> None:
        """While the load waits for the prompt, another one copies, and the load is ended."""
        if mark.stream is model.compute and not ended:
            ended.append(load.end())
            loads.copies.copier.scatter(loads.copies.rows, [2, 3], [2, 3], early).wait()
            with torch._C.DisableTorchFunction():
                arrived.append(torch.equal(kv[2:4], expected(kv)[2:4]) and not computed)

    model.before_wait = meanwhile
    loads.run()
    assert ended == [({0, 1}, set())] and arrived == [True]
    assert computed and not kv[0:2].any()


class Queued(Weights):
    """Weights that are looked at behind all that the engine has queued, as a device's are."""

    def __init__(self, compute: Stream) -> None:
        self._compute = compute

    def look(self, part: int) -> Look:
        mark = Mark(self._compute)

        class Reading(Look):
            def ready(self) -> bool:
                return mark.reached

            def seen(self) -> bytes:
                mark.reach()
                return b""

        return Reading()


@pytest.mark.parametrize("runner", ["V1 and V2", "loads first"])
def test_a_load_does_not_wait_for_a_forward_that_does_not_touch_its_blocks(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is begun in a step whose forward is that of other requests, and is done before."""
    memory = CpuSpec(type="cpu", capacity=64 * SLOT)
    chain = ChainSpec(version=1, load_when="always", staging=24 * SLOT, tiers=(memory,))
    model = Model(STREAMS)
    engine = StreamedEngine(chain, model, RUNNERS[runner], monkeypatch, num_blocks=40)
    engine.host.watch._weights = Queued(model.compute)
    engine.add(range(40), 1)
    engine.run()
    engine.check()
    engine.scheduler.pool.forget_all()
    engine.add(range(40), 1)
    engine.add(range(500, 540), 1)
    computed = engine.rank.computed
    engine.step()
    assert engine.threads.named("load-cpu").run_next()
    connector: Any = engine.rank.connector
    ((load, future),) = connector.children[0]._loading._loads
    assert future.done() and load.arrived == len(load.job.items) > 0
    assert engine.rank.computed == computed, "it has waited for the forward of its step"
    engine.run()
    engine.check()
    assert engine.rank.computed > computed


@pytest.mark.parametrize("rows", [0, 2], ids=["host memory", "a store"])
def test_the_device_has_the_next_wave_when_one_has_ended(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of 32 waves, which are a GiB of host memory. The device had nothing to do 32 times
    when each wave was waited for before the next was queued."""
    copies = Copies(Model(STREAMS), monkeypatch, 64)
    loads, waits, drains = Loads(copies, monkeypatch, rows), list[Mark](), list[Mark]()

    def count(mark: Mark) -> None:
        if not mark.reached:
            waits.append(mark)
            drains.extend([] if mark.is_followed else [mark])

    copies.model.before_wait = count
    loads.begin(64, from_store=bool(rows))
    loads.end()
    assert (len(waits), len(drains)) == (32, 1)
    loads.close()


def test_graphs_may_be_captured_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread does on the device meanwhile, pinning memory too, would end that."""
    used: list[str] = []
    monkeypatch.setattr(StreamedCopier, "pin", True)
    monkeypatch.setattr(slot_memory, "register", lambda address, size: used.append("pinning"))
    monkeypatch.setattr(slot_memory, "unregister", lambda address: None)
    store = GivenSpec(type="given", name="store").over(MemoryStore())
    tiers = CpuSpec(type="cpu", capacity=64 * SLOT), store
    chain = ChainSpec(version=1, load_when="always", staging=24 * SLOT, tiers=tiers)
    model = Model(STREAMS)
    engine = StreamedEngine(chain, model, RUNNERS["V1 and V2"], monkeypatch, num_blocks=40)
    assert set(used) == {"pinning"}
    used.clear()
    model.fails = lambda: used.append("an operation")
    model.before_wait = lambda mark: used.append("a wait")
    while engine.threads.run():
        pass
    assert used == []
    engine.add(range(40), 1)
    engine.run()
    assert set(used) == {"an operation", "a wait"}
    engine.check()
