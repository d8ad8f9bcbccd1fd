"""Copies beside their peers, where there is no GPU: memory of the host, and a driver's stub."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import Shape
from bench.gpu_peers import Pages, batched, cases
from bench.report import measure

SHAPE = Shape("small", layers=3, page_bytes=512)
STREAM = 77


class Driver:
    """libcuda, as far as it copies batches; `goes_wrong` changes a batch's places."""

    def __init__(self, goes_wrong: Callable[[list[int]], None] = lambda places: None) -> None:
        self.copies = 0
        self.code = 0
        self._goes_wrong = goes_wrong
        pointer, count = ctypes.c_void_p, ctypes.c_size_t
        given = [pointer, pointer, pointer, count, pointer, pointer, count, pointer, pointer]
        self.cuMemcpyBatchAsync: Any = ctypes.CFUNCTYPE(ctypes.c_uint, *given)(self._copy)

    def _copy(self, targets: int, sources: int, sizes: int, count: int, *more: int) -> int:
        attributes, first, number, failed, stream = more
        (order,) = (ctypes.c_uint * 1).from_address(attributes)
        if (order, stream, number) != (1, STREAM, 1) or (ctypes.c_size_t).from_address(first).value:
            return 1
        places = [[*(ctypes.c_uint64 * count).from_address(at)] for at in (targets, sources, sizes)]
        self._goes_wrong(places[0])
        for target, source, size in zip(*places, strict=True):
            ctypes.memmove(target, source, size)
            self.copies += 1
        ctypes.c_size_t.from_address(failed).value = 5
        return self.code


def stubbed(driver: Driver) -> Callable[[Pages], None]:
    return batched(driver, lambda: STREAM)  # type: ignore[arg-type]


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
    peers: dict[str, Any] = {"batches": stubbed(Driver(lambda targets: targets.reverse()))}
    with pytest.raises(ValueError, match="way there other bytes arrived"):
        next(cases("cpu", peers, [SHAPE], count=7))


def test_a_driver_that_refuses_is_told_of() -> None:
    driver = Driver()
    driver.code = 801
    with pytest.raises(RuntimeError, match="error 801 at copy 5"):
        next(cases("cpu", {"batches": stubbed(driver)}, [SHAPE], count=7))
    with pytest.raises(AttributeError):
        batched(SimpleNamespace(), lambda: STREAM)  # type: ignore[arg-type]
