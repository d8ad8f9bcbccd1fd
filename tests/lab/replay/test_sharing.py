"""Concurrent requests of one prefix: it is loaded once, and the engine's own cache has the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.chain import LOAD_POLICIES, ChainSpec
from tests.lab.replay.shared_prefix import PREFIX, add, ended, fill, hits
from tests.support.replay import ReplayEngine, ReplayModel, ReplayRequest
from tests.support.replay_chains import (
    HYBRID,
    SLOT,
    WINDOWS,
    chain_of,
    cpu,
    disk,
    drop_from_disk,
    measured,
    names,
)
from tests.support.slow_store import SlowSpec, TroubledStore
from tiers.lab.replay.requests import Status

MakeEngine = Callable[..., ReplayEngine]


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_sixteen_requests_of_one_prefix_load_it_once(
    engine: MakeEngine, tmp_path: Path, load: str
) -> None:
    made = engine(chain_of(cpu(40), disk(tmp_path), load_policy=load), num_blocks=400)
    fill(made)
    requests = [add(made, n) for n in range(16)]
    made.step()
    taken = made.num_blocks - made.scheduler.pool.num_free
    ended(made, requests)
    assert hits(made) == 16
    assert sum(request.loaded_tokens for request in requests) == len(PREFIX)
    assert taken <= 16 + 1, "who waits holds no blocks"


@pytest.mark.parametrize("model", [HYBRID, WINDOWS], ids=["hybrid", "windows"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_with_windows_and_ranks(
    engine: MakeEngine, tmp_path: Path, model: ReplayModel, world_size: int
) -> None:
    chain = chain_of(disk(tmp_path, "8MiB"), load_policy="stitched", staging=400 * SLOT)
    made = engine(chain, model=model, num_blocks=600, world_size=world_size)
    fill(made)
    requests = [add(made, n) for n in range(8)]
    ended(made, requests, world_size)
    assert hits(made) == 16


def test_two_tiers_that_serve_together(engine: MakeEngine, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    made = engine(chain_of(disk(one), disk(two), load_policy="stitched"), num_blocks=400)
    hashes = fill(made).block_hashes[:16]
    drop_from_disk(one, names(made, hashes[::2]))
    drop_from_disk(two, names(made, hashes[1::2]))
    ended(made, [add(made, n) for n in range(8)])
    assert hits(made) == 16
    assert measured(made, "hits", "disk") == measured(made, "hits", "disk-2") == 1


def test_other_salts_share_nothing(engine: MakeEngine, tmp_path: Path) -> None:
    made = engine(chain_of(disk(tmp_path)), num_blocks=400)
    for salt in ("a", "b"):
        fill(made, salt)
    ended(made, [add(made, n, "ab"[n % 2]) for n in range(8)])
    assert hits(made) == 2 * 16


def test_without_a_cache_of_its_own_an_engine_is_not_kept_waiting(
    engine: MakeEngine, tmp_path: Path
) -> None:
    made = engine(chain_of(disk(tmp_path)), num_blocks=400, prefix_caching=False)
    fill(made)
    ended(made, [add(made, n) for n in range(8)])
    assert hits(made) == 8 * 16


def slow(engine: MakeEngine, **more: Any) -> ReplayEngine:
    tier = SlowSpec(type="slow")
    made = engine(
        ChainSpec(version=1, load_when="always", tiers=(tier,), staging=256 * SLOT, **more),
        num_blocks=200,
    )
    fill(made)
    return made


@pytest.mark.fault
def test_a_load_that_fails_wakes_the_others(engine: MakeEngine, store: TroubledStore) -> None:
    made = slow(engine)
    store.faults.lost_batches = 1
    requests = [add(made, n) for n in range(8)]
    ended(made, requests)
    assert measured(made, "load_failures") == 16
    assert [r.loaded_tokens for r in requests[2:]] == [0] * 6
    assert hits(made) == 2 * 16


def step_until_one_loads(made: ReplayEngine, requests: list[ReplayRequest]) -> ReplayRequest:
    """The one request that loads, when all others have been looked up and wait."""
    while len(loading := [r for r in requests if r.status is Status.LOADING]) == 0:
        made.step()
    made.step()
    assert len(loading) == 1
    return loading[0]


@pytest.mark.fault
def test_an_aborted_loader_wakes_the_others(engine: MakeEngine, store: TroubledStore) -> None:
    made = slow(engine)
    store.pace.hang("get")
    requests = [add(made, n) for n in range(8)]
    loader = step_until_one_loads(made, requests)
    made.scheduler.abort(loader.request_id)
    requests.remove(loader)
    step_until_one_loads(made, requests)
    store.pace.resume()
    ended(made, requests)
    assert hits(made) == 2 * 16


@pytest.mark.fault
def test_a_load_that_hangs_keeps_nobody_longer_than_it_may_wait(
    engine: MakeEngine, store: TroubledStore
) -> None:
    made = slow(engine, max_wait="300ms")
    store.pace.hang("get")
    requests = [add(made, n) for n in range(8)]
    ended(made, requests)
    assert measured(made, "loaded_tokens") == 0
    store.pace.resume()


def test_nobody_waits_for_a_load_with_limits_of_its_own(
    engine: MakeEngine, store: TroubledStore
) -> None:
    """It may come from a tier that is slow, where another has all of it at once."""
    tiers = (SlowSpec(type="slow"), cpu(40))
    chain = chain_of(cpu(40)).model_copy(update={"tiers": (tiers[0], *chain_of(tiers[1]).tiers)})
    made = engine(chain, num_blocks=400)
    fill(made)
    store.pace.hang("get")
    for _ in range(3):  # and however often they come
        limited = made.add([*PREFIX, 999], 1, "", {"kvtiers": {"tiers": ["slow"]}})
        while limited.status is not Status.LOADING:
            made.step()
        one = made.add([*PREFIX, 998], 1, "", {"kvtiers": {"tiers": ["cpu"]}})
        for _ in range(200):
            made.step()
        assert len(one.output) == 1, "it waited for the other's tier"
        made.scheduler.abort(limited.request_id)
        made.scheduler.pool.forget_all()
    store.pace.resume()
    made.run()
