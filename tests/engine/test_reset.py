"""After a reset nothing of before is loaded, wherever it was, and whatever was under way."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spec.offloading import StoreContext
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import (
    MODEL,
    chain_of,
    close,
    cpu,
    disk,
    drive,
    measured,
    redis,
    scheduler_of,
    total,
    workload,
)
from tests.support.servers import RedisServer
from tiers.connector.worker.offloading_worker import _fence
from tiers.contract.block_copier import Copy
from tiers.disk.disk_store import DiskStore
from tiers.gpu.copier import CpuCopier

PROMPT, OTHER = list(range(50)), list(range(100, 150))
FULL = 48
"""Tokens of either prompt that lie in full blocks."""


class HeldCopy:
    """A gather that ends when it is let go."""

    def __init__(self, copy: Copy, go: threading.Event) -> None:
        self._copy = copy
        self._go = go

    def wait(self) -> None:
        assert self._go.wait(30)
        self._copy.wait()

    hold_engine = wait


def holding(go: threading.Event) -> Callable[..., CpuCopier]:
    """Copiers whose copies end only while `go` is set."""

    class Copier(CpuCopier):
        def gather(self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]) -> Any:
            return HeldCopy(super().gather(blocks, rows, slots), go)

        def scatter(self, *args: Any) -> Any:
            assert go.wait(30)
            return super().scatter(*args)

    return Copier


def finish(engine: ReplayEngine, prompt: list[int]) -> None:
    """Answer a prompt; its stores may go on."""
    engine.add(prompt, 3)
    while engine.scheduler.requests:
        engine.step()


@pytest.mark.parametrize("ranks", [1, 2])
def test_stored_and_being_stored(
    engine: Callable[..., ReplayEngine], tiers: list[dict[str, Any]], ranks: int
) -> None:
    go = threading.Event()
    go.set()
    made = engine(chain_of(*tiers), prefix_caching=False, world_size=ranks, open_copier=holding(go))
    made.generate(PROMPT, 3)
    made.settle()
    assert made.generate(PROMPT, 3).loaded_tokens == FULL
    made.settle()
    go.clear()
    finish(made, OTHER)
    assert made.connector is not None
    halves = [scheduler_of(made, n) for n in range(len(made.connector.children))]
    assert any(half._stores.slots_pinned for half in halves)
    assert made.reset_cache()
    go.set()
    made.settle()
    assert not any(half.manager.slots_kept() for half in halves), "nobody would find them"
    for prompt in (PROMPT, OTHER):
        request = made.generate(prompt, 3)
        assert request.loaded_tokens == 0
        assert request.output == answer(MODEL, prompt, 3, ranks)
        made.settle()
        assert made.generate(prompt, 3).loaded_tokens == FULL, "what is stored since is loaded"


def test_own_processes(
    engine: Callable[..., ReplayEngine], tmp_path: Path, shared_server: RedisServer
) -> None:
    chain = chain_of(cpu(), disk(tmp_path / "disk"), redis(shared_server, tmp_path))
    made = engine(chain, world_size=2, processes=True)
    drive(made, seed=1, world_size=2)
    assert made.reset_cache()
    loaded = total(made, "loaded_tokens")
    drive(made, seed=2, world_size=2)  # other prompts, while the stores of before end
    request = made.generate(PROMPT, 3)
    assert request.loaded_tokens == 0
    made.settle()
    assert total(made, "loaded_tokens") >= loaded


def blocks_on(folder: Path) -> int:
    """What a disk tier holds, of whomever."""
    store = DiskStore(folder, 1 << 20, StoreContext(MODEL.payload_bytes))
    try:
        return store.usage().blocks
    finally:
        store.close()


def becomes(count: int, blocks: Callable[[], int]) -> None:
    """Blocks are dropped in the background."""
    late = time.monotonic() + 30
    while blocks() != count:
        assert time.monotonic() < late, f"{blocks()} blocks, not {count}"
        time.sleep(0.01)


def test_a_start_finds_what_was_stored_before_the_reset_and_nothing_since(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    chain = chain_of(disk(tmp_path))
    made = engine(chain, prefix_caching=False)
    made.generate(PROMPT, 3)
    made.settle()
    stored = blocks_on(tmp_path)
    assert made.reset_cache()
    made.generate(OTHER, 3)
    close(made)
    assert blocks_on(tmp_path) == stored, "what nobody can find again is dropped"
    again = engine(chain, prefix_caching=False)
    assert [again.generate(prompt, 3).loaded_tokens for prompt in (PROMPT, OTHER)] == [FULL, 0]


def test_what_was_being_stored_at_a_reset_is_dropped_when_that_has_ended(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    """Of what was stored since the reset before; what is older others may use."""
    go = threading.Event()
    made = engine(chain_of(disk(tmp_path)), prefix_caching=False, open_copier=holding(go))
    for count in (FULL // MODEL.block_tokens,) * 2:
        go.clear()
        finish(made, OTHER)
        assert scheduler_of(made)._stores.slots_pinned == count
        assert made.reset_cache()
        go.set()
        made.settle()
        becomes(count, lambda: blocks_on(tmp_path))


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_reset_drops_what_this_engine_stored_since_the_one_before(
    engine: Callable[..., ReplayEngine], tmp_path: Path, shared_server: RedisServer, ranks: int
) -> None:
    """Of every tier, and nothing of others: an engine that sleeps a hundred times a day must
    neither empty a disk that engines share, nor fill it with what nobody can find again."""
    folder, client = tmp_path / "disk", shared_server.client()
    tiers = [disk(folder), redis(shared_server, tmp_path)]
    made, sibling = (
        engine(
            chain_of(cpu(), *tiers, load_policy="longest"), prefix_caching=False, world_size=ranks
        )
        for _ in range(2)
    )

    def in_redis() -> int:
        return sum(b"namespace:" not in key for key in client.keys(f"{tmp_path}*"))

    made.generate(PROMPT, 3)
    made.settle()
    stored = blocks_on(folder)
    assert stored >= ranks * FULL // MODEL.block_tokens
    for _ in range(3):
        assert made.reset_cache()
        becomes(stored, lambda: blocks_on(folder))
        becomes(stored, in_redis)
        made.generate(PROMPT, 3)
        made.generate(OTHER, 3)
        made.settle()
        assert made.generate(PROMPT, 3).loaded_tokens == FULL
        assert blocks_on(folder) == in_redis() == 3 * stored
    assert sibling.generate(PROMPT, 3).loaded_tokens == FULL
    assert sibling.generate(OTHER, 3).loaded_tokens == 0
    close(made)
    becomes(2 * stored, lambda: blocks_on(folder))


def test_a_reset_that_keeps(
    engine: Callable[..., ReplayEngine], tiers: list[dict[str, Any]]
) -> None:
    """An engine whose weights never change sleeps and wakes, and has lost nothing."""
    go = threading.Event()
    go.set()
    chain = chain_of(*tiers, on_reset="keep")
    made = engine(chain, prefix_caching=False, open_copier=holding(go))
    made.generate(PROMPT, 3)
    made.settle()
    go.clear()
    finish(made, OTHER)
    assert made.reset_cache()
    go.set()
    made.settle()
    for prompt in (PROMPT, OTHER):
        assert made.generate(prompt, 3).loaded_tokens == FULL
    go.clear()
    made.add(PROMPT, 3)
    assert made.connector is not None
    while not any(
        scheduler_of(made, n)._jobs.any_loading for n in range(len(made.connector.children))
    ):
        made.step()
    assert not made.connector.reset_cache(), "what a load writes to may be about to go"
    go.set()
    made.run()
    request = made.generate(PROMPT, 3)
    assert request.loaded_tokens == FULL
    assert request.output == answer(MODEL, PROMPT, 3)
    running = made.add(third := [7, *OTHER[1:]], 30)
    while not running.output:
        made.step()
    assert made.connector.reset_cache()
    made.run()
    made.settle()
    longer = [*third, *running.output]
    assert made.generate(longer, 3).loaded_tokens > FULL + 16, "also of one that ran meanwhile"


@pytest.mark.parametrize("on_reset", ["keep", "forget"])
def test_what_an_ended_request_left_is_not_stored_after_a_reset(
    engine: Callable[..., ReplayEngine], tiers: list[dict[str, Any]], on_reset: str
) -> None:
    """An engine that sleeps resets first and gives its memory up then: what a request's last block
    held is gone when the next step could store it, and neither the engine nor its next start, nor
    a sibling, may find anything else under its key."""
    made = engine(chain_of(*tiers, on_reset=on_reset), prefix_caching=False)
    made.add(prompt := list(range(42)), 7)  # the last token that is computed fills a block
    while made.scheduler.requests:
        made.step()
    assert made.reset_cache()
    worker: Any
    for worker in made.workers:
        for child in worker.connector.children:
            _fence(child._stores.values())  # vLLM waits for its device before the memory goes
        for cache in worker.kv.values():
            cache.zero_()
    made.generate(OTHER, 3)
    made.settle()
    answered = [*prompt, *answer(MODEL, prompt, 7), 5]
    for asked in (made, engine(chain_of(*tiers), prefix_caching=False)):
        assert asked.generate(answered, 3).output == answer(MODEL, answered, 3)


def test_an_engine_made_for_new_weights_begins_on_its_own(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    """Its facts name the weights that it starts with, not those that it is given next."""
    chain = chain_of(disk(tmp_path))
    before = engine(chain, prefix_caching=False)
    before.generate(PROMPT, 3)
    before.settle()
    model = dataclasses.replace(MODEL, weights=1)
    made = engine(chain, model=model, prefix_caching=False, weights_change=True)
    for loaded in (0, FULL):
        request = made.generate(PROMPT, 3)
        assert (request.loaded_tokens, request.output) == (loaded, answer(model, PROMPT, 3))
        made.settle()


def test_a_replica_goes_on_with_what_is_shared(
    engine: Callable[..., ReplayEngine], tmp_path: Path, shared_server: RedisServer
) -> None:
    chain = chain_of(redis(shared_server, tmp_path))
    one, two = engine(chain, prefix_caching=False), engine(chain, prefix_caching=False)
    one.generate(PROMPT, 3)
    one.settle()
    assert one.reset_cache()
    one.generate(OTHER, 3)
    one.settle()
    assert two.generate(PROMPT, 3).loaded_tokens == FULL
    assert two.generate(OTHER, 3).loaded_tokens == 0, "stored after a reset that `two` had not"


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_change_in_place_again_and_again(
    engine: Callable[..., ReplayEngine], tiers: list[dict[str, Any]], ranks: int
) -> None:
    """Stores of before are still under way each time; one old block would change an answer."""
    made = engine(chain_of(*tiers), num_blocks=48, world_size=ranks)
    prompts = [prompt for prompt, _ in workload(7, count=12)]
    for weights in range(4):
        model = dataclasses.replace(MODEL, weights=weights)
        worker: Any
        for worker in made.workers:
            worker._model = model
        assert made.reset_cache()
        for _ in range(2):
            requests = [made.add(prompt, 3) for prompt in prompts]
            while made.scheduler.requests:
                made.step()
            for request, prompt in zip(requests, prompts, strict=True):
                assert request.output == answer(model, prompt, 3, ranks)


def test_a_request_that_runs_meanwhile_is_not_stored(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    made = engine(chain_of(cpu(), disk(tmp_path)), prefix_caching=False)
    running = made.add(PROMPT, 20)
    for _ in range(5):
        made.step()
    assert not made.reset_cache(), "its blocks are still in use"
    made.run()
    made.settle()
    assert running.output == answer(MODEL, PROMPT, 20)
    assert made.generate(PROMPT, 4).loaded_tokens == 0
    made.settle()
    again = made.generate(PROMPT + running.output, 1)
    assert again.loaded_tokens == FULL + 4, "what the request before has stored, and no more"


def test_a_load_under_way_refuses(engine: Callable[..., ReplayEngine], tmp_path: Path) -> None:
    go = threading.Event()
    go.set()
    chain = chain_of(cpu(), disk(tmp_path))
    made = engine(chain, prefix_caching=False, open_copier=holding(go))
    made.generate(PROMPT, 3)
    made.settle()
    go.clear()
    made.add(PROMPT, 3)
    made.step()
    assert made.connector is not None
    assert made.connector.reset_cache() is False
    go.set()
    made.run()
    assert made.connector.reset_cache() is True
    assert made.generate(PROMPT, 3).loaded_tokens == 0


def test_tiers_still_share_one_gather_after_a_reset(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    one = engine(chain_of(cpu(), disk(tmp_path)))
    assert one.reset_cache()
    one.generate(PROMPT)
    one.settle()
    assert measured(one, "stored_blocks", "cpu") == measured(one, "stored_blocks", "disk") == 13
    assert one.connector is not None
    assert scheduler_of(one).pool.in_use == 13
    assert one.stats["disk"]["store_size_bytes"] == one.stats["cpu"]["store_size_bytes"]
