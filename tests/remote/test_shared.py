"""Engines over a shared directory: what one stores, others load; none stores beyond capacity."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spec.offloading import StoreContext
from tests.support.clock import wait_for
from tests.support.replay_chains import (
    MODEL,
    chain_of,
    close,
    cpu,
    drive,
    measured,
    scheduler_of,
)
from tiers.errors import TierUnusable
from tiers.lab.replay import ReplayEngine
from tiers.remote.shared_spec import SharedSpec


def _engine(place: Path, ranks: int, capacity: str) -> ReplayEngine:
    tier = {"type": "shared", "path": place, "capacity": capacity}
    return ReplayEngine(
        chain_of(cpu(12), tier), MODEL, num_blocks=24, prefix_caching=False, world_size=ranks
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_engine_loads_what_another_stored(tmp_path: Path, ranks: int) -> None:
    tmp_path.chmod(0o700)
    one = _engine(tmp_path, ranks, "1GiB")
    drive(one, 3, world_size=ranks)
    one.settle()
    stored = measured(one, "stored_blocks", "shared")
    close(one)
    other = _engine(tmp_path, ranks, "1GiB")
    drive(other, 3, world_size=ranks)
    other.settle()
    assert stored and measured(other, "loaded_tokens", "shared") > 0
    close(other)


def test_answers_stay_right_where_the_directory_is_full(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    engine = _engine(tmp_path, 1, "64KiB")
    drive(engine, 3)
    engine.settle()
    close(engine)
    packs = [pack for pack in tmp_path.glob("?" * 32 + "/*/*") if pack.is_file()]
    assert 0 < sum(pack.stat().st_size for pack in packs) <= 64 << 10


def test_a_capacity_in_which_no_block_has_room_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    block, ranks = 2048 + 512 + 4096, 2
    site = StoreContext(4096, ranks)
    with pytest.raises(TierUnusable, match=rf"less than one block .* at least {ranks * block}B"):
        SharedSpec(path=tmp_path, capacity=ranks * block - 1).open(site)
    SharedSpec(path=tmp_path, capacity=ranks * block).open(site).close()


def test_a_tier_that_does_not_count_what_it_holds_shows_no_fill(tmp_path: Path) -> None:
    """It would be empty for ever, to whoever looks at how full tiers are."""
    tmp_path.chmod(0o700)
    engine = _engine(tmp_path, 1, "1GiB")
    drive(engine, 1)
    wait_for(lambda: scheduler_of(engine, 1).room() == (0, 0))
    assert scheduler_of(engine).room()[1] > 0
    close(engine)


def test_an_engine_whose_capacity_is_not_that_of_the_evictor_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    one, other = (_engine(tmp_path, 1, capacity) for capacity in ("1MiB", "1GiB"))
    wait_for(lambda: "capacity 1MiB evicts for all on its directory" in caplog.text)
    drive(other, 1)
    assert scheduler_of(other, 1).condition()[0] == "degraded"
    close(one)
    close(other)


@pytest.mark.fault
def test_a_note_that_hangs_holds_up_no_store(tmp_path: Path) -> None:
    """A mark is a file as a pack is, and a read of it may hang alone: nobody writes to this one."""
    tmp_path.chmod(0o700)
    before = _engine(tmp_path, 1, "1GiB")
    wait_for(lambda: any(tmp_path.glob(f"*/*/{b'mark'.hex()}")))
    close(before)
    (mark,) = tmp_path.glob(f"*/*/{b'mark'.hex()}")
    mark.unlink()
    os.mkfifo(mark)
    engine = _engine(tmp_path, 1, "1GiB")
    try:
        drive(engine, 3)
        engine.settle()
        assert measured(engine, "stored_blocks", "shared") > 0
    finally:
        os.close(os.open(mark, os.O_WRONLY | os.O_NONBLOCK))  # fails where nobody hangs
        close(engine)
