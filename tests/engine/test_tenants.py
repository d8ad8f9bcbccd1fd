"""Tenants: requests of one cache salt share blocks, with others never; and the YAML's rules."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreContext
from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay_chains import (
    MODEL,
    chain_of,
    cpu,
    damage_disk,
    disk,
    measured,
    names,
    workload,
)
from tests.support.servers import RedisServer
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.contract.stats import OTHER_TENANTS, TENANT
from tiers.disk.disk_store import DiskStore
from tiers.store import Block
from tiers.testing import GivenSpec, MemoryStore

PROMPT = list(range(100, 141))
RIGHT = answer(MODEL, PROMPT, 4, 1)


def ask(engine: ReplayEngine, salt: str, prompt: list[int] = PROMPT) -> ReplayRequest:
    request = engine.generate(prompt, 4, salt)
    assert request.output == answer(MODEL, prompt, 4, 1)
    engine.settle()
    return request


def held(path: Path, engine: ReplayEngine, request: ReplayRequest) -> int:
    store = DiskStore(path, 1 << 20, StoreContext(MODEL.payload_bytes))
    try:
        return sum(store.has(names(engine, request.block_hashes)))
    finally:
        store.close()


def stored(engine: ReplayEngine, tier: str) -> float:
    value: Any = measured(engine, "stored_blocks", tier)
    return float(value)


def test_tenants_share_no_block_on_any_tier(
    engine: Callable[..., ReplayEngine], shared_server: RedisServer, tmp_path: Path
) -> None:
    redis = {"type": "redis", "url": shared_server.url, "key_prefix": tmp_path.name}
    made = engine(chain_of(cpu(), disk(tmp_path), redis), prefix_caching=False)
    ask(made, "one")
    for salt in ("two", ""):
        assert ask(made, salt).loaded_tokens == 0
    assert ask(made, "one").loaded_tokens == 40


def test_a_tenant_is_kept_out_of_tiers(engine: Callable[..., ReplayEngine], tmp_path: Path) -> None:
    rules = {"private": {"tiers": ["cpu"]}, "nowhere": {"tiers": []}}
    made = engine(chain_of(cpu(), disk(tmp_path), tenants=rules), prefix_caching=False)
    private, nowhere, public = (ask(made, salt) for salt in ("private", "nowhere", "public"))
    assert held(tmp_path, made, private) == held(tmp_path, made, nowhere) == 0
    assert held(tmp_path, made, public) == 11
    assert stored(made, "cpu") == 22
    assert ask(made, "private").loaded_tokens == 40
    assert ask(made, "nowhere").loaded_tokens == 0


def test_a_quota_holds_in_each_tier_and_the_oldest_go(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    rules = {"small": {"quota": 15 * MODEL.payload_bytes}}
    chain = chain_of(cpu(), disk(tmp_path), tenants=rules)
    made = engine(chain, prefix_caching=False, kv_events=True)
    first = ask(made, "small")
    other = ask(made, "other")
    second = ask(made, "small", PROMPT[::-1])
    assert held(tmp_path, made, second) == 11
    deadline = time.monotonic() + 20
    while held(tmp_path, made, first) > 4:  # dropped in the background
        assert time.monotonic() < deadline
    assert held(tmp_path, made, first) == 4
    assert held(tmp_path, made, other) == 11
    for tier in ("cpu", "disk"):  # and routers are told
        lost = [hash for e in made.events if e.tier == tier and not e.stored for hash in e.hashes]
        assert set(lost) == {*first.block_hashes[3:10]}, tier
    assert ask(made, "small", PROMPT[::-1]).loaded_tokens == 40
    assert ask(made, "other").loaded_tokens == 40


def test_a_rule_for_a_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tier is called 'dsik'; use one of cpu, disk"):
        chain_of(cpu(), disk(tmp_path), tenants={"acme": {"tiers": ["dsik"]}})


def reports(engine: ReplayEngine) -> list[Any]:
    """The transfer parameters that each request ends with from now on."""
    reported: list[Any] = []
    connector: Any = engine.connector
    finish = connector.request_finished_all_groups

    def finished(*args: Any) -> Any:
        answered = finish(*args)
        reported.append(answered[1])
        return answered

    connector.request_finished_all_groups = finished
    return reported


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_over_tenants_are_those_over_tiers_whatever_happens_to_requests(
    engine: Callable[..., ReplayEngine],
    tmp_path: Path,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests are aborted and preempted, and blocks are damaged and evicted."""
    monkeypatch.setattr(MultiScheduler, "_note_prefill_rate", lambda scheduler: None)
    salts = {"": "", "one": "gold", "two": "gold", "nameless": None, "no rule": None}
    rules = {salt: {"name": name} for salt, name in salts.items() if name}
    made = engine(
        chain_of(
            cpu(24 * ranks), disk(tmp_path, f"{480 * ranks}KiB"), tenants=rules | {"nameless": {}}
        ),
        num_blocks=30,
        world_size=ranks,
        prefix_caching=False,
    )
    assert made.connector is not None
    made.connector._requests.tenants.prefill_token_seconds = 0.5
    rng = random.Random(ranks)
    reported = reports(made)
    for number, (prompt, max_tokens) in enumerate(workload(ranks, 120)):
        added = made.add(prompt, max_tokens, rng.choice([*salts]))
        for _ in range(rng.randrange(3)):
            made.step()
        if rng.random() < 0.2:
            made.scheduler.abort(added.request_id)
        if number % 40 == 39:
            damage_disk(tmp_path)
    made.run()
    made.settle()
    assert made.scheduler.preemptions > 0
    tenants = [name for name in made.stats.data if name.startswith(TENANT)]
    assert sorted(tenants) == [TENANT + OTHER_TENANTS, TENANT + "gold"]

    def of_tiers(name: str) -> float:
        return measured(made, name, "cpu") + measured(made, name, "disk")

    def of_tenants(name: str) -> float:
        return sum(measured(made, f"tenant_{name}", tenant) for tenant in tenants)

    for name in ("hit_tokens", "loaded_tokens", "loaded_bytes", "stored_bytes"):
        assert of_tenants(name) == of_tiers(name) > 0, name
    saved = of_tiers("loaded_tokens") + of_tiers("reloaded_tokens")
    assert of_tenants("prefill_seconds") == 0.5 * saved > 0.5 * of_tiers("loaded_tokens")
    assert of_tiers("load_failures") > 0
    cached = sum(sum(one["kvtiers"]["cached_tokens"].values()) for one in reported if one)
    assert 0 < cached <= of_tiers("loaded_tokens")


def test_whose_blocks_a_store_took_counts_what_was_stored(
    engine: Callable[..., ReplayEngine],
) -> None:
    """Of several tenants' in one job: not what another's should have been."""

    class Refuses(MemoryStore):
        def put(self, blocks: Sequence[Block]) -> list[bool]:
            took = [number > 1 for number in range(len(blocks))]
            held = iter(super().put([*compress(blocks, took)]))
            return [taken and next(held) for taken in took]

    store = Refuses()
    far = GivenSpec(type="given", name="far").over(store)
    made = engine(
        chain_of(cpu(), tenants={"one": {"name": "one"}}).model_copy(update={"tiers": (far,)}),
        prefix_caching=False,
    )
    asked = {salt: [made.add(PROMPT[n:7], 1, salt) for n in range(3)] for salt in ("one", "two")}
    made.run()
    made.settle()
    of_each = {"one": TENANT + "one", "two": TENANT + OTHER_TENANTS}
    for salt, entry in of_each.items():
        hashes = [key for request in asked[salt] for key in request.block_hashes]
        there = sum(store.has(names(made, hashes)))
        assert measured(made, "tenant_stored_bytes", entry) == there * MODEL.payload_bytes
    assert measured(made, "store_failures", "far") > 0


@pytest.mark.parametrize(
    ("params", "is_reported"),
    [
        (None, True),
        ({"kvtiers": {"tiers": ["cpu"]}}, True),
        ({"kvtiers": {"cached_tokens": {"cpu": 40}}}, True),  # of a response that was sent on
        ({"do_remote_decode": True}, False),
        ({"do_remote_decode": True, "kvtiers": {}}, False),
        ("no mapping", False),
    ],
)
def test_what_was_cached_is_reported_beside_no_parameter_of_others(
    engine: Callable[..., ReplayEngine],
    params: Any,
    is_reported: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = engine(chain_of(cpu()), prefix_caching=False)
    ask(made, "")
    reported = reports(made)
    request = made.add(PROMPT, 4, kv_transfer_params=params)
    made.run()
    assert request.loaded_tokens == 40, "the parameters limit no load"
    expected = {"kvtiers": {"cached_tokens": {"cpu": 40}}} if is_reported else None
    assert reported == [expected]
    assert request.kv_transfer_params == params
    assert "ignored" not in caplog.text
