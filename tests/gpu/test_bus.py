"""Copies over the bus: one call of the driver for a wave, where it has one that can be trusted."""

from __future__ import annotations

import logging
import mmap
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu.copies import Copies
from tests.gpu.cuda_model import Model
from tests.gpu.streamed_engine import STREAMS
from tests.gpu.stub_driver import Driver, Operation
from tests.support.replay_chains import SLOT
from tiers.gpu.bus import Run, open_bus, runs
from tiers.host import slot_memory
from tiers.host.slot_memory import pinned_together

COUNT = 24
"""Blocks, in twelve waves of two."""
STREAM: Any = SimpleNamespace(cuda_stream=77, synchronize=lambda: None)


def there_and_back(ours: Copies, slots: list[int]) -> None:
    """Blocks to these slots and back, byte for byte."""
    ours.kv.copy_(torch.randint(0, 256, ours.kv.shape))
    before = ours.kv.clone()
    ours.rows.fill_(7)
    ours.copier.gather(range(len(slots)), ours.rows, slots).wait()
    others = [slot for slot in range(len(ours.rows)) if slot not in slots]
    assert (ours.rows[others] == 7).all()
    ours.kv.zero_()
    ours.load(slots, range(len(slots)))
    assert torch.equal(ours.kv[: len(slots)], before[: len(slots)])


def test_a_wave_of_scattered_slots_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Copies(Model(STREAMS), monkeypatch, 2 * COUNT)
    there_and_back(ours, [2 * slot for slot in range(COUNT)])
    driver = ours.model.driver
    assert (driver.batches, driver.copies, driver.refused) == (COUNT, 2 * COUNT, 0)


def test_neighbours_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the driver has always had."""
    ours = Copies(Model(STREAMS), monkeypatch, COUNT)
    there_and_back(ours, list(range(COUNT)))
    assert ours.model.driver.batches == 0


def test_none_goes_on_across_what_one_call_has_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 4096)  # a call pins whole pages, which may be larger
    monkeypatch.setattr(slot_memory, "REGISTER_BYTES", 3 * SLOT)
    found = runs([0, 1, 4, 5, 6, 7, 8, 9, 11], pinned_together(SLOT))
    assert found == [Run(0, 0, 2), Run(4, 2, 2), Run(6, 4, 3), Run(9, 7, 1), Run(11, 8, 1)]
    ours = Copies(Model(STREAMS), monkeypatch, 9)
    there_and_back(ours, list(range(9)))
    # Two slots a wave: from 2 to 3, and from 8 on, which is alone in its wave.
    assert ours.model.driver.copies == 2 * 2


def test_a_driver_that_refuses_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though it has queued half of what it refuses."""
    ours = Copies(Model(STREAMS), monkeypatch, COUNT)
    ours.model.driver.code = 801
    for seed in range(3):
        there_and_back(ours, random.Random(seed).sample(range(COUNT), COUNT // 2))
    assert (ours.model.driver.batches, ours.model.driver.copies) == (1, 0)
    (said,) = (one for one in caplog.records if one.levelno >= logging.WARNING)
    assert "error 801" in said.getMessage()
    assert ours.copier.warning() == said.getMessage()


@pytest.mark.parametrize("refuses", [False, True])
def test_both_ways_may_find_out_at_once(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that is queued with the driver's call while a load finds that it refuses."""
    ours = Copies(Model(STREAMS), monkeypatch, COUNT)
    slots = [2 * slot for slot in range(COUNT // 2)]
    ours.kv.fill_(5)
    gather = ours.copier.gather(slots, ours.rows, slots)
    ours.threads.run()
    ours.model.driver.code = 801 if refuses else 0
    ours.load([slot + 1 for slot in slots], [slot + 1 for slot in slots])
    gather.wait()
    size = ours.copier.payload_bytes
    assert (ours.rows[slots, :size] == 5).all()
    assert not ours.kv[1::2].any()


# -- before it is used -------------------------------------------------------------------------


def opened(driver: object, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether batches of this driver are used."""
    caplog.set_level(logging.INFO)
    return open_bus(torch.device("cpu"), STREAM, lambda name: driver).batch is not None


def test_one_that_copies_right_is_used(caplog: pytest.LogCaptureFixture) -> None:
    assert opened(driver := Driver(), caplog) and driver.batches == 2 and not caplog.text


@pytest.mark.parametrize("same", [0, -1])
def test_one_whose_device_has_other_addresses_for_slots_is_not_tried(
    same: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As on WSL2: such a copy fails for good, and the engine with it. Memory that the driver itself
    has made, as that of a trial, has the same addresses there."""
    caplog.set_level(logging.INFO)
    driver = Driver()
    driver.same_addresses = [1, same]
    bus = open_bus(torch.device("cuda", 1), STREAM, lambda name: driver)
    assert bus.batch is None and driver.batches == 0 and not bus.warning, "it is no fault"
    assert "would not find memory that was pinned where it lay" in caplog.text


def reversed_targets(targets: list[int]) -> None:
    targets.reverse()


def one_beside(targets: list[int]) -> None:
    targets[1] += 1


@pytest.mark.parametrize("goes_wrong", [reversed_targets, one_beside])
def test_one_that_copies_wrong_is_not(
    goes_wrong: Callable[[list[int]], None], caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    driver.goes_wrong = goes_wrong
    assert not opened(driver, caplog)
    assert "other bytes than it is sent" in caplog.text


def test_one_that_refuses_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """The memory that it was tried with goes, and half of the copies are queued."""
    queued: list[Operation] = []
    ended: list[int] = []
    driver = Driver(lambda stream, operation: queued.append(operation))
    driver.code = 1
    stream: Any = SimpleNamespace(cuda_stream=77, synchronize=lambda: ended.append(len(queued)))
    bus = open_bus(torch.device("cpu"), stream, lambda name: driver)
    assert bus.batch is None and "answers with error 1" in bus.warning
    assert "error 1" in caplog.text
    assert ended == [len(queued)] and queued


def test_one_that_can_not_be_tried_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(torch, "zeros_like", full)
    assert not opened(Driver(), caplog)
    assert "none is left" in caplog.text


def test_the_engine_s_random_numbers_stay_what_they_were(caplog: pytest.LogCaptureFixture) -> None:
    """Those that it samples tokens by."""
    before = torch.get_rng_state()
    assert opened(Driver(), caplog)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_without_the_function_whose_arguments_are_known_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver()
    driver.newest_only = True
    assert not opened(driver, caplog) and driver.batches == 0
    assert not opened(SimpleNamespace(), caplog)

    def missing(name: str) -> object:
        raise OSError(f"{name} is not here")

    bus = open_bus(torch.device("cpu"), STREAM, missing)
    assert bus.batch is None and not bus.warning, "an older driver is no fault"
    assert "libcuda.so.1 is not here" in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
