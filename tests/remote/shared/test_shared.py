"""Engines over a shared directory: what one stores, others load; none stores beyond capacity."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreContext
from tests.support.clock import wait_for
from tests.support.replay import ReplayEngine, ReplayModel, ReplayRequest, answer
from tests.support.replay_chains import (
    MODEL,
    SLOT,
    chain_of,
    close,
    cpu,
    disk,
    drive,
    measured,
    scheduler_of,
)
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.block_groups import GROUP_BYTES, BlockGroups
from tiers.contract.generation import Generation
from tiers.remote.packs.bucket import is_mark
from tiers.remote.packs.pack_store import PackStore
from tiers.remote.shared.directory_bucket import DirectoryBucket
from tiers.remote.shared_spec import SharedSpec
from tiers.testing import make_key
from tiers.wrappers.guard import Guarded


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


@pytest.mark.fault
@pytest.mark.parametrize("stores", [True, False])
def test_packs_that_others_removed_are_missed_once(tmp_path: Path, stores: bool) -> None:
    """Whether or not the request stores them anew: the scheduler's process, which has met them,
    learns of it by the load that failed."""
    tmp_path.chmod(0o700)
    engine = ReplayEngine(chain_of({"type": "shared", "path": tmp_path}), prefix_caching=False)
    prompt, params = list(range(60)), {"kvtiers": {"store": stores}}
    engine.generate(prompt, 1)
    engine.settle()
    assert engine.generate(prompt, 1).loaded_tokens == 60
    for pack in _packs(tmp_path):
        pack.unlink()
    for loaded in (0, 60 * stores, 60 * stores):
        assert engine.generate(prompt, 1, kv_transfer_params=params).loaded_tokens == loaded
        engine.settle()
    assert measured(engine, "load_failures", "shared") == 15
    close(engine)


class Counted:
    """What a directory of packs is asked for, by all stores of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.puts = self.looks = self.rounds = 0
        put, read, indexes = DirectoryBucket.put, DirectoryBucket.read, PackStore._indexes

        def counted_put(bucket: DirectoryBucket, name: str, parts: Any) -> bool:
            self.puts += not is_mark(name)
            return put(bucket, name, parts)

        def counted_read(bucket: DirectoryBucket, name: str, start: int, into: Any) -> int | None:
            self.looks += start == 0 and not is_mark(name)
            return read(bucket, name, start, into)

        def counted_round(store: PackStore, *keys: Any, **more: Any) -> Any:
            before = self.looks
            found = indexes(store, *keys, **more)
            self.rounds += self.looks > before
            return found

        monkeypatch.setattr(DirectoryBucket, "put", counted_put)
        monkeypatch.setattr(DirectoryBucket, "read", counted_read)
        monkeypatch.setattr(PackStore, "_indexes", counted_round)

    def take(self) -> tuple[int, int, int]:
        """Puts, indexes read, and round trips for those, since the last call."""
        taken = self.puts, self.looks, self.rounds
        self.puts = self.looks = self.rounds = 0
        return taken


GEMMA = ReplayModel(windows=(None, 30))
"""Full attention, and a window of eight blocks."""
BLOCKS = 512


def _served(
    tiers: Sequence[dict[str, Any]],
    prompt: Sequence[int],
    answered: int = 1,
    batch_tokens: int = 4096,
    ranks: int = 1,
    model: ReplayModel = GEMMA,
) -> ReplayRequest:
    """Answer a prompt in a new engine."""
    chain = chain_of(*tiers, staging=4 * BLOCKS * SLOT * ranks, max_wait="30s")
    engine = ReplayEngine(
        chain,
        model,
        num_blocks=1600,
        batch_tokens=batch_tokens,
        prefix_caching=False,
        world_size=ranks,
    )
    request = engine.generate(prompt, answered)
    assert request.output == answer(model, prompt, answered, ranks)
    close(engine)
    return request


def _loaded(*of_served: Any, **more: Any) -> int:
    """As `_served`; how many blocks were loaded."""
    return _served(*of_served, **more).loaded_tokens // GEMMA.block_tokens


def _prompt(blocks: int, *behind: int) -> list[int]:
    """So many blocks, the same in each prompt, and what is behind them."""
    return [*range(blocks * GEMMA.block_tokens), *(behind or (1,))]


def _packs(place: Path) -> list[Path]:
    return [path for path in place.glob("?" * 32 + "/*/*") if not is_mark(str(path))]


def _pack(place: Path, request: ReplayRequest, block: int, group: int) -> Path:
    """The pack that begins with this block of a request, in a KV cache group."""
    end = request.block_hashes[block] + group.to_bytes(GROUP_BYTES, "little")
    (path,) = (path for path in _packs(place) if path.name == end.hex())
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_windows_lie_in_packs_as_full_attention_does(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 blocks are 8 packs of each. One by one those of the window were 512 puts, and as many
    indexes to read where the prompt comes again."""
    tmp_path.chmod(0o700)
    tiers, counted = [{"type": "shared", "path": tmp_path}], Counted(monkeypatch)
    assert _loaded(tiers, _prompt(BLOCKS), ranks=ranks) == 0
    assert counted.take()[0] == len(_packs(tmp_path)) == 16 * ranks
    assert _loaded(tiers, _prompt(BLOCKS), ranks=ranks) == BLOCKS
    puts, looks, rounds = counted.take()
    assert not puts and looks <= 40 * ranks and rounds == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_windows_before_an_end_are_not_asked_for_elsewhere(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last group alone each block may begin a pack: whoever looks up, loads or stores asks
    for it. Else every block of the prompt was asked for."""
    tmp_path.chmod(0o700)
    tiers, counted = [{"type": "shared", "path": tmp_path}], Counted(monkeypatch)
    sparse = replace(GEMMA, window_interval=0)
    assert _loaded(tiers, _prompt(BLOCKS), ranks=ranks, model=sparse) == 0
    assert counted.take()[0] == len(_packs(tmp_path)) == (8 + 1) * ranks
    assert _loaded(tiers, _prompt(BLOCKS), ranks=ranks, model=sparse) == BLOCKS
    puts, looks, _ = counted.take()
    assert not puts and looks <= 4 * 64 * ranks
    fork = [_prompt(300, *range(behind, behind + 50)) for behind in range(5000, 5200, 50)]
    assert [_loaded(tiers, one, ranks=ranks, model=sparse) for one in fork] == [0, 300, 300, 300]


def test_a_prompt_that_is_not_there_costs_few_reads_beside_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    counted = Counted(monkeypatch)
    store = SharedSpec(path=tmp_path).open(StoreContext(4096))
    spaces, kinds, rows = [bytes(16)], (True, False), (True, True)
    with closing(
        StoreManager(Guarded(store, "tier"), spaces, Generation(), in_order=kinds, in_rows=rows)
    ) as manager:
        keys, lookup = [make_key() for _ in range(1024)], Lookup()
        wait_for(lambda: manager.coverage(lookup, keys, range(1024)) is not None)
        assert manager.coverage(lookup, keys, range(1024)) == [False] * 1024
        _, looks, rounds = counted.take()
        assert looks < 16 and rounds == 1


def test_a_conversation_goes_on_from_a_window_in_the_midst_of_a_pack(tmp_path: Path) -> None:
    """Its blocks were stored in steps, and those of the answer one by one."""
    tmp_path.chmod(0o700)
    tiers, first = [{"type": "shared", "path": tmp_path}], _prompt(100)
    output = _served(tiers, first, 161, batch_tokens=120).output
    assert _loaded(tiers, _prompt(90, *range(9000, 9100))) == 90, "it parts within a pack"
    second = [*first, *output, *range(7000, 7050)]
    assert _loaded(tiers, second, 41) == 140, "100 of the prompt and 40 of the answer"
    assert _loaded(tiers, second) == (len(second) - 1) // GEMMA.block_tokens


def test_a_window_whose_first_blocks_were_never_stored(tmp_path: Path) -> None:
    """An engine has loaded a prefix from its disk, and stores it in the directory: of the window it
    has the end alone, so that what it stores begins in the midst of a group."""
    tmp_path.chmod(0o700)
    place = tmp_path / "shared"
    place.mkdir(0o700)
    shared, own = {"type": "shared", "path": place}, disk(tmp_path / "disk", "64MiB")
    assert _loaded([own], _prompt(100)) == 0
    request = _served([own, shared], _prompt(120))
    assert request.loaded_tokens == 100 * GEMMA.block_tokens
    assert len(_packs(place)) == 3 and _pack(place, request, 92, 1), "one of the window"
    assert _loaded([shared], _prompt(200)) == 120
    assert _loaded([shared], _prompt(110, *range(5000, 5050))) == 110, "from its midst"
    assert _loaded([shared], _prompt(99, *range(5000, 5050))) == 0, "the window before is nowhere"


def test_a_window_of_one_object_a_block_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As directories have it from before windows went in packs."""
    tmp_path.chmod(0o700)
    tiers = [{"type": "shared", "path": tmp_path}]
    with monkeypatch.context() as before:
        before.setattr(BlockGroups, "in_rows", BlockGroups.in_order)
        request = _served(tiers, _prompt(100))
        assert len(_packs(tmp_path)) == 2 + 100
        assert _loaded(tiers, _prompt(100)) == 100
    assert _loaded(tiers, _prompt(100)) == 100
    _pack(tmp_path, request, 95, 1).unlink()
    assert _loaded(tiers, _prompt(100)) == 95
    assert len(_packs(tmp_path)) == 2 + 100, "what was there is not stored again"


def test_a_prefix_ends_before_a_pack_of_a_window_that_is_gone(tmp_path: Path) -> None:
    """The packs of one group go without those of the other; and who computes a block again stores
    it anew."""
    tmp_path.chmod(0o700)
    tiers = [{"type": "shared", "path": tmp_path}]
    request = _served(tiers, _prompt(192))
    _pack(tmp_path, request, 64, 1).unlink()
    assert _loaded(tiers, _prompt(192)) == 192, "no window before it reaches so far"
    assert _loaded(tiers, _prompt(130, *range(5000, 5050))) == 64, "this one does"
    assert _loaded(tiers, _prompt(130, *range(6000, 6050))) == 130
    _pack(tmp_path, request, 128, 1).unlink()
    assert _loaded(tiers, _prompt(192)) == 128
    _pack(tmp_path, request, 64, 0).unlink()
    assert _loaded(tiers, _prompt(192)) == 64
    assert _loaded(tiers, _prompt(192)) == 192


def test_a_tier_that_does_not_count_what_it_holds_shows_no_fill(tmp_path: Path) -> None:
    """It would be empty for ever, to whoever looks at how full tiers are."""
    tmp_path.chmod(0o700)
    engine = _engine(tmp_path, 1, "1GiB")
    drive(engine, 1)
    wait_for(lambda: scheduler_of(engine, 1).room() == (0, 0))
    assert scheduler_of(engine).room()[1] > 0
    close(engine)


@pytest.mark.fault
def test_a_note_that_hangs_holds_up_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark is a file as a pack is, and a read of it may hang alone."""
    tmp_path.chmod(0o700)
    before = _engine(tmp_path, 1, "1GiB")
    wait_for(lambda: any(tmp_path.glob(f"*/*/{b'mark'.hex()}")))
    close(before)
    hung, ends, real = threading.Event(), threading.Event(), DirectoryBucket.read

    def read(bucket: DirectoryBucket, name: str, *where: Any) -> int | None:
        if name.endswith(b"mark".hex()):
            hung.set()
            ends.wait()
        return real(bucket, name, *where)

    monkeypatch.setattr(DirectoryBucket, "read", read)
    engine = _engine(tmp_path, 1, "1GiB")
    try:
        drive(engine, 3)
        engine.settle()
        assert measured(engine, "stored_blocks", "shared") > 0
        assert hung.is_set()
    finally:
        ends.set()
        close(engine)
