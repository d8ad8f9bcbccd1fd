"""Tiers are made smaller and larger while the engine serves from them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from tests.engine.test_stress import LateCopies, assert_nothing_left, flaky_tier, prompts
from tests.host.test_slot_memory import resident
from tests.support.clock import wait_for
from tests.support.replay import ReplayEngine, ReplayModel, answer
from tests.support.replay_chains import HYBRID, MODEL, SLOT, chain_of, cpu, disk, measured
from tests.support.resizing import halves, resize
from tiers.connector.worker import host_slots
from tiers.cpu.spec import CpuSpec
from tiers.disk.spec import DiskSpec

MakeEngine = Callable[..., ReplayEngine]
PROMPTS = [list(range(start, start + 41)) for start in range(100, 900, 50)]


def ask(engine: ReplayEngine, prompts: list[list[int]], world_size: int = 1) -> None:
    """Ask all at once; the tokens are right."""
    requests = [engine.add(prompt, 4) for prompt in prompts]
    engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output == answer(MODEL, prompt, 4, world_size)
    engine.settle()


def test_a_disk_shrinks_to_what_was_used_last_and_grows_beyond_its_start(
    engine: MakeEngine, tmp_path: Path
) -> None:
    chain = chain_of(disk(tmp_path, f"{200 * 2 * SLOT}B"))
    made = engine(chain, num_blocks=400, prefix_caching=False)
    (spec,) = chain.tiers
    scheduler, _ = halves(made, "disk")

    def used() -> float:
        made.step()
        return measured(made, "used_bytes", "disk")

    def all_hit() -> bool:
        """What had no room in flight is stored when it is asked for again, and what its table still
        has, although it was evicted, a second later."""
        before = measured(made, "hit_tokens", "disk")
        ask(made, PROMPTS)
        return measured(made, "hit_tokens", "disk") == before + 16 * 40

    wait_for(all_hit)
    ask(made, PROMPTS[:8])
    ask(made, PROMPTS[8:])

    assert resize(made, spec, 100 * 2 * SLOT) == []
    wait_for(lambda: 0 < used() <= 100 * 2 * SLOT)
    wait_for(lambda: made.step() or measured(made, "capacity_bytes", "disk") == 100 * 2 * SLOT)
    before = measured(made, "stored_blocks", "disk")
    ask(made, PROMPTS[8:])
    assert measured(made, "stored_blocks", "disk") == before, "the half used last is there"
    assert resize(made, spec, 300 * 2 * SLOT) == []
    wait_for(all_hit)
    wait_for(lambda: used() > 100 * 2 * SLOT)
    (reason,) = resize(made, spec, SLOT)
    assert reason == "capacity 4KiB is less than a block of each rank"
    assert scheduler.get_kv_connector_stats() is None or used() > 100 * 2 * SLOT


def shrunk(engine: ReplayEngine) -> int:
    """Step until the host pool is what it is to be; its slots."""
    scheduler, workers = halves(engine, "cpu")
    wait_for(lambda: engine.step() or not scheduler.pool.is_vacating)
    slots = {len(worker._host.memory.rows) for worker in workers}
    wait_for(lambda: {len(worker._host.memory.rows) for worker in workers} == slots)
    return int(scheduler.pool.num_slots)


@pytest.mark.parametrize("world_size", [1, 2])
def test_host_memory_is_given_back_and_the_blocks_used_last_stay(
    engine: MakeEngine, world_size: int
) -> None:
    block = SLOT * world_size
    chain = chain_of(cpu(176 * world_size), staging=40 * block)
    made = engine(chain, num_blocks=400, prefix_caching=False, world_size=world_size)
    (spec,) = chain.tiers
    scheduler, workers = halves(made, "cpu")
    memory = workers[-1]._host.memory
    ask(made, PROMPTS, world_size)
    assert scheduler.manager.slots_kept() == 16 * 11
    ask(made, PROMPTS[8:], world_size)
    assert resize(made, spec, 88 * block) == []
    assert shrunk(made) == 88 + 40
    assert measured(made, "capacity_bytes", "cpu") == 88 * block
    assert scheduler.manager.slots_kept() == 88 and measured(made, "evictions", "cpu") == 88
    wait_for(lambda: len(memory.rows) == 128)
    # A huge page's end, which nobody uses, may stay beyond what there was.
    wait_for(lambda: resident(memory, (176 + 40) * SLOT) <= 128 * SLOT)
    before = measured(made, "hit_tokens", "cpu")
    ask(made, PROMPTS[8:], world_size)
    assert measured(made, "hit_tokens", "cpu") == before + 8 * 40, "no block of them was lost"
    assert resize(made, spec, 352 * block) == []
    ask(made, [*PROMPTS, *([token + 1000 for token in prompt] for prompt in PROMPTS)], world_size)
    assert scheduler.manager.slots_kept() == 352 and len(memory.rows) == 392
    before = measured(made, "hit_tokens", "cpu")
    ask(made, PROMPTS, world_size)
    assert measured(made, "hit_tokens", "cpu") == before + 16 * 40
    assert_nothing_pinned(scheduler)


def assert_nothing_pinned(scheduler: Any) -> None:
    pool = scheduler.pool
    assert {pool.references(slot) for slot in range(pool.num_slots)} <= {0, 1}
    assert pool.in_use == scheduler.manager.slots_kept()


def test_a_rank_that_refuses_keeps_all_as_they_were(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of(cpu(88), staging=40 * SLOT)
    made = engine(chain, num_blocks=400, prefix_caching=False, world_size=2)
    (spec,) = chain.tiers
    scheduler, workers = halves(made, "cpu")
    ask(made, PROMPTS[:4], 2)
    spare = iter([1 << 40, 0])
    monkeypatch.setattr(host_slots, "spare_memory", lambda root, ranks: next(spare))
    (reason,) = resize(made, spec, 1 << 30)
    assert "capacity 1GiB" in reason and "0B can be had" in reason
    wait_for(lambda: [len(worker._host.memory.rows) for worker in workers] == [64, 64])
    before = measured(made, "hit_tokens", "cpu")
    ask(made, PROMPTS[:4], 2)
    assert measured(made, "hit_tokens", "cpu") == before + 4 * 40
    assert scheduler.pool.end == 64 and measured(made, "capacity_bytes", "cpu") == 88 * SLOT


def test_a_block_that_can_not_be_moved_is_computed_again(engine: MakeEngine) -> None:
    chain = chain_of(cpu(160), staging=40 * SLOT)
    made = engine(chain, num_blocks=400, prefix_caching=False)
    scheduler, (worker,) = halves(made, "cpu")
    ask(made, PROMPTS)
    worker._host._holds.clear()
    assert resize(made, chain.tiers[0], 20 * SLOT) == []
    shrunk(made)
    assert measured(made, "evictions", "cpu") > 140
    ask(made, PROMPTS)
    assert_nothing_pinned(scheduler)


@pytest.mark.parametrize("setting", ["two ranks", pytest.param("groups", marks=pytest.mark.faults)])
def test_no_token_differs_while_tiers_are_resized(tmp_path: Path, setting: str) -> None:
    """Down by half and up beyond the start, again and again, with all that can be in flight."""
    model: ReplayModel = HYBRID if setting == "groups" else MODEL
    ranks = 1 if setting == "groups" else 2
    chain = ChainSpec(
        version=1,
        load_when="always",
        staging=24 * SLOT * ranks,
        tiers=(
            CpuSpec(capacity=32 * SLOT * ranks, verify="always"),
            flaky_tier("asked", indexed=False),
            DiskSpec(path=tmp_path, capacity=200 * 2 * SLOT),
        ),
    )
    made = ReplayEngine(
        chain,
        model,
        num_blocks=30 * len(model.windows),
        prefix_caching=False,
        world_size=ranks,
        open_copier=LateCopies,
    )
    _, workers = halves(made, "cpu")
    rng = random.Random(ranks)
    sizes = set()
    requests = []
    for number, prompt in enumerate(prompts(rng, 150)):
        requests.append((made.add(prompt, rng.randrange(1, 12)), prompt))
        for _ in range(rng.randrange(4)):
            made.step()
        if number % 5 == 0:
            slots = rng.choice((8, 16, 32, 64, 90)) * ranks
            assert resize(made, chain.tiers[0], slots * SLOT) == []
            sizes.add(len(workers[0]._host.memory.rows))
        if number % 30 == 0:
            assert resize(made, chain.tiers[2], rng.choice((60, 200, 300)) * 2 * SLOT) == []
        if rng.random() < 0.1:
            made.scheduler.abort(rng.choice(requests)[0].request_id)
    made.run()
    made.settle()
    for request, prompt in requests:
        expected = answer(model, prompt, request.max_tokens, ranks)
        assert request.output == expected[: len(request.output)]
    assert resize(made, chain.tiers[0], 16 * SLOT * ranks) == []
    assert shrunk(made) == 16 + 24
    made.settle()
    assert len(sizes) > 3, "memory came and went"
    assert measured(made, "loaded_tokens", "cpu") > 0
    assert measured(made, "damaged_blocks", "cpu") == 0
    assert_nothing_left(made)
    made.close()
