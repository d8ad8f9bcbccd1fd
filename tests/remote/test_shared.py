"""Engines over a shared directory: what one stores, others load; none stores beyond capacity."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreContext
from tests.support.clock import wait_for
from tests.support.replay_chains import (
    MODEL,
    SLOT,
    chain_of,
    close,
    cpu,
    drive,
    measured,
    scheduler_of,
)
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.generation import Generation
from tiers.errors import TierUnusable
from tiers.lab.replay import ReplayEngine, ReplayModel, answer
from tiers.remote.directory_bucket import DirectoryBucket
from tiers.remote.shared_spec import SharedSpec
from tiers.testing import make_key


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_of_full_attention_lie_in_packs_beside_windows(tmp_path: Path, ranks: int) -> None:
    tmp_path.chmod(0o700)
    model, blocks = ReplayModel(windows=(None, 14)), 128
    prompt = list(range(blocks * model.block_tokens + 1))
    tier = {"type": "shared", "path": tmp_path}
    chain = chain_of(tier, staging=4 * blocks * SLOT * ranks, max_wait="30s")
    for loaded in (0, blocks * model.block_tokens):
        engine = ReplayEngine(chain, model, num_blocks=400, prefix_caching=False, world_size=ranks)
        request = engine.generate(prompt, 1)
        assert request.output == answer(model, prompt, 1, ranks)
        assert request.loaded_tokens == loaded
        close(engine)
    several = [pack for pack in tmp_path.glob("?" * 32 + "/*/*") if pack.stat().st_size > 4 * SLOT]
    assert len(several) == 2 * ranks, "128 blocks are two groups"


def test_a_prompt_that_is_not_there_costs_few_reads_beside_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    names: list[str] = []
    read = DirectoryBucket.read

    def noted(bucket: DirectoryBucket, name: str, start: int, into: Any) -> int | None:
        names.append(name)
        return read(bucket, name, start, into)

    monkeypatch.setattr(DirectoryBucket, "read", noted)
    store = SharedSpec(path=tmp_path).open(StoreContext(4096))
    parts = (True, False)
    with closing(StoreManager(store, [bytes(16)], Generation(), in_order=parts)) as manager:
        keys, lookup = [make_key() for _ in range(1024)], Lookup()
        wait_for(lambda: manager.coverage(lookup, keys, range(1024)) is not None)
        assert manager.coverage(lookup, keys, range(1024)) == [False] * 1024
        assert len(names) < 32


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
    wait_for(lambda: "capacity 1MiB evicts for all there" in caplog.text)
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
