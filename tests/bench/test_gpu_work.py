"""What copies take of the host, on a stand-in for a device."""

from __future__ import annotations

import pytest

from bench.gpu_work import Nowhere, stand_in, stand_in_cases
from bench.report import measure
from tiers.gpu.bus import Bus

pytest.importorskip("tiers.gpu.page_kernel", exc_type=ImportError)
WAVES = 3
"""Of 64 blocks of 640 KiB, 25 in each."""


def test_a_wave_is_one_launch_and_one_call_of_the_driver() -> None:
    with stand_in() as counts:
        moves = Nowhere(layers=80, page_bytes=8 << 10, count=64)
        moves.gather()
        moves.scatter()
        assert (counts.batches, counts.launches) == (2 * WAVES, 2 * WAVES)
        # For a wave of the gather, and its end, for the engine before the load, and for the load.
        assert counts.waits == 4
        moves.copier._bus = Bus(None)
        moves.gather()
        assert (counts.batches, counts.launches) == (2 * WAVES, 3 * WAVES)
        moves.copier.close()


def test_both_ways_are_measured() -> None:
    rows = [measure(case, 0) for case in stand_in_cases([("small", 2, 4096)], 4)]
    assert [row.case.split(",")[0] for row in rows] == [
        "the host's work for a gather",
        "the host's work for a scatter",
    ]
    assert all(row.ours and row.peer for row in rows)
