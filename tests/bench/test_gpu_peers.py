"""Copies beside their peers, where there is no GPU: memory of the host, and a driver's stub."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bench import gpu_peers
from bench.gpu import Shape
from bench.gpu_peers import Pages, batched, cases
from bench.report import measure
from tests.gpu.stub_driver import Driver
from tiers.gpu.bus import Batch
from tiers.gpu.copier import CpuCopier

SHAPE = Shape("small", layers=3, page_bytes=512)
STREAM = 77


def stubbed(driver: Driver) -> Callable[[Pages], None]:
    return batched(Batch(driver), lambda: STREAM)


def test_each_way_moves_the_same_bytes() -> None:
    driver = Driver()
    peers: dict[str, Any] = {"batches": stubbed(driver), "nobody": "it is not here"}
    rows = [measure(case, 1) for case in cases("cpu", peers, [SHAPE], count=7)]
    assert [row.peer_name for row in rows] == ["batches", "batches", "", ""]
    assert [row.why for row in rows[2:]] == ["nobody: it is not here"] * 2
    assert all(row.ours and row.limit and row.peer and row.of_peer for row in rows[:2])
    # There and back to be looked at, for each of two cases; then each is measured twice.
    assert driver.copies == (2 * 2 + 2 * 2) * 7 * SHAPE.layers


def test_a_copy_that_goes_wrong_is_not_measured() -> None:
    driver = Driver()
    driver.goes_wrong = lambda targets: targets.reverse()
    peers: dict[str, Any] = {"batches": stubbed(driver)}
    with pytest.raises(ValueError, match="way there other bytes arrived"):
        next(cases("cpu", peers, [SHAPE], count=7))


def test_a_driver_that_refuses_is_told_of() -> None:
    driver = Driver()
    driver.code = 801
    with pytest.raises(RuntimeError, match="error 801"):
        next(cases("cpu", {"batches": stubbed(driver)}, [SHAPE], count=7))


class Strict(CpuCopier):
    """As a device's copier: a load whose fence nobody has waited for is an error."""

    waited = False

    def fence(self) -> Any:
        return SimpleNamespace(wait=lambda: setattr(self, "waited", True))

    def scatter(self, *args: Any) -> Any:
        assert self.waited, "wait for the fence before"
        self.waited = False
        return super().scatter(*args)


def test_a_load_is_behind_its_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers, "open_copier", Strict)
    next(cases("cpu", {}, [SHAPE], count=7), None)
