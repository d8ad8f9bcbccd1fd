"""The replay engine over paged KV on a device: every answer is that of an engine without tiers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec.chain import ChainSpec
from tests.gpu.test_copier import DEVICES
from tests.support.replay import ReplayEngine, ReplayModel, answer
from tests.support.replay_chains import MODEL, RECURRENT, SLOT, measured, workload
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.contract.stats import STATE, STATES
from tiers.cpu.spec import CpuSpec
from tiers.disk.spec import DiskSpec
from tiers.gpu.copier import CpuCopier


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [MODEL, RECURRENT], ids=["attention", "states"])
def test_answers_are_those_without_tiers(device: str, model: ReplayModel, tmp_path: Path) -> None:
    memory = CpuSpec(type="cpu", capacity=24 * SLOT)
    disk = DiskSpec(type="disk", path=tmp_path, capacity=200 * SLOT)
    chain = ChainSpec(version=1, load_when="always", staging=32 * SLOT, tiers=(memory, disk))
    engine = ReplayEngine(chain, replace(model, device=device), num_blocks=64, batch_tokens=64)
    assert all(layer.device == torch.device(device, layer.device.index) for layer in layers(engine))
    rng = random.Random(0)
    requests = []
    for prompt, max_tokens in workload(seed=0):
        requests.append((engine.add(prompt, max_tokens), prompt))
        for _ in range(rng.randrange(3)):
            engine.step()
    engine.run()
    for request, prompt in requests:
        assert request.output == answer(model, prompt, request.max_tokens)
    assert measured(engine, "loaded_tokens", "cpu") + measured(engine, "loaded_tokens", "disk") > 0
    engine.settle()
    engine.close()


def layers(engine: ReplayEngine) -> list[torch.Tensor]:
    """The paged KV of the one rank."""
    return list(engine.workers[0].kv.values())  # type: ignore[attr-defined]


class Counting(CpuCopier):
    """Counts the gathers that are begun."""

    gathers = 0

    def gather(self, *args: Any) -> Any:
        type(self).gathers += 1
        return super().gather(*args)


class Warned(CpuCopier):
    """A copier whose driver refuses."""

    def warning(self) -> str:
        return "the driver refuses"


def test_a_copier_that_warns_shows_in_the_state_of_its_tiers() -> None:
    chain = ChainSpec(version=1, tiers=(CpuSpec(type="cpu", capacity=64 * SLOT),))
    engine = ReplayEngine(chain, MODEL, num_blocks=64, open_copier=Warned)
    engine.generate([1] * 40, 2)
    engine.settle()
    assert STATES[int(measured(engine, STATE, "cpu"))] == "degraded"
    assert engine.connector is not None
    first = engine.connector.children[0]
    assert isinstance(first, OffloadingScheduler)
    assert first.condition() == ("degraded", "the driver refuses")
    engine.close()


def test_a_step_gathers_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "gathers", 0)
    chain = ChainSpec(
        version=1,
        load_when="always",
        staging=32 * SLOT,
        tiers=(CpuSpec(type="cpu", capacity=64 * SLOT),),
    )
    engine = ReplayEngine(chain, MODEL, num_blocks=64, open_copier=Counting)
    for first in range(4):
        engine.add([first] * (3 * MODEL.block_tokens), 1)
    engine.step()
    engine.settle()
    assert measured(engine, "stored_blocks", "cpu") == 12
    assert Counting.gathers == 1
    engine.run()
    engine.close()
