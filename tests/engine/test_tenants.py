"""Tenants: requests of one cache salt share blocks, with others never; and the YAML's rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreContext
from tests.support.replay_chains import MODEL, chain_of, cpu, disk, measured, names
from tests.support.servers import RedisServer
from tiers.disk.disk_store import DiskStore
from tiers.lab.replay import ReplayEngine, answer
from tiers.lab.replay.requests import ReplayRequest

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
    made = engine(chain_of(cpu(), disk(tmp_path), tenants=rules), prefix_caching=False)
    first = ask(made, "small")
    other = ask(made, "other")
    second = ask(made, "small", PROMPT[::-1])
    assert held(tmp_path, made, second) == 11
    deadline = time.monotonic() + 20
    while held(tmp_path, made, first) > 4:  # dropped in the background
        assert time.monotonic() < deadline
    assert held(tmp_path, made, first) == 4
    assert held(tmp_path, made, other) == 11
    assert ask(made, "small", PROMPT[::-1]).loaded_tokens == 40
    assert ask(made, "other").loaded_tokens == 40


def test_a_rule_for_a_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tier is called 'dsik'; use one of cpu, disk"):
        chain_of(cpu(), disk(tmp_path), tenants={"acme": {"tiers": ["dsik"]}})
