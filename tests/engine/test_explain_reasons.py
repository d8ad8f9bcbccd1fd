"""Why a tier did not serve: each reason is brought about, and told."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec, ExplainSpec
from tests.support.changing import change, running
from tests.support.explaining import explained, last_told, tier_of
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import MODEL, chain_of, cpu, damage_disk, disk
from tests.support.slow_store import SlowSpec, TroubledStore
from tiers.connector.policy.chooser import COUNTED
from tiers.connector.policy.request_params import RequestLimits
from tiers.errors import TierUnavailable
from tiers.explain.accounts import lines

MakeEngine = Callable[..., ReplayEngine]
PROMPT = [*range(50)]
"""Twelve full blocks, and two tokens more."""


@pytest.fixture
def made(engine: MakeEngine, tmp_path: Path) -> Callable[..., ReplayEngine]:
    """Make engines that explain over a chain, and cache nothing themselves."""

    def make(*tiers: dict[str, Any], options: Any = None, **chain: Any) -> ReplayEngine:
        settings = {"prefix_caching": False, **(options or {})}
        return engine(chain_of(*tiers, explain={}, **chain), **settings)

    return make


@pytest.fixture
def slow(engine: MakeEngine, store: TroubledStore, tmp_path: Path) -> Callable[..., ReplayEngine]:
    """Make engines that explain over the tier of `slow_store`."""

    def make(deadline: str = "200ms", **settings: Any) -> ReplayEngine:
        chain = ChainSpec(
            version=1,
            load_when="always",
            tiers=(SlowSpec.model_validate({"type": "slow", "deadline": deadline}),),
            staging=64 * 4096,
            explain=ExplainSpec(),
            **settings,
        )
        return engine(chain, prefix_caching=False)

    return make


def ask(engine: ReplayEngine, prompt: list[int] = PROMPT, **options: Any) -> None:
    request = engine.generate(prompt, 2, **options)
    assert request.output == answer(MODEL, prompt, 2, 1)
    engine.settle()


def why(engine: ReplayEngine, tier: str, attempt: int = -1) -> str:
    """Why a tier did or did not serve the last request, whose counts agree."""
    told = last_told(engine)
    assert told["holds"], told
    assert list(lines(told))
    return str(tier_of(told, tier, attempt)["why"])


def test_served_above_and_a_miss_at_a_block(made: MakeEngine, tmp_path: Path) -> None:
    one = made(cpu(), disk(tmp_path))
    ask(one)
    assert (why(one, "cpu"), why(one, "disk")) == ("miss", "miss")
    ask(one, [*range(20), *range(900, 930)])
    told = tier_of(last_told(one), "cpu")
    assert (told["why"], told["tokens"], told["miss"]) == ("served", 20, 5)
    assert (why(one, "disk"), tier_of(last_told(one), "disk")["miss"]) == ("above", 5)
    ask(one)
    assert (why(one, "cpu"), why(one, "disk")) == ("served", "not_asked")
    ask(one, [1, 2])
    assert why(one, "cpu") == "nothing"


def test_another_tier_has_more(made: MakeEngine, tmp_path: Path) -> None:
    one = made(cpu(3), disk(tmp_path), load_policy="longest")
    ask(one)
    ask(one)
    assert (why(one, "cpu"), why(one, "disk")) == ("above", "served")


def test_limits_of_the_request(made: MakeEngine, tmp_path: Path) -> None:
    one = made(cpu(), disk(tmp_path))
    ask(one)
    ask(one, kv_transfer_params={"kvtiers": {"tiers": ["disk"]}})
    assert (why(one, "cpu"), why(one, "disk")) == ("limit", "served")
    ask(one, kv_transfer_params={"kvtiers": {"tiers": ["disk", "no tier " * 1000]}})
    gc.collect()
    kept = [found for found in gc.get_objects() if isinstance(found, RequestLimits)]
    assert not any(limits.tiers for limits in kept), "a client would fill memory with names"
    ask(one, kv_transfer_params={"kvtiers": {"max_load_tokens": 0}})
    assert (why(one, "cpu"), why(one, "disk")) == ("limit", "limit")
    ask(one, skip_reading_prefix_cache=True)
    assert any("prompt logprobs" in line for line in lines(last_told(one))), "it set no limit"


def test_a_tier_that_nobody_loads_from(tmp_path: Path) -> None:
    paused, other = {**cpu(64), "paused": "reads"}, disk(tmp_path)
    with running(chain_of(paused, other, explain={}), ranks=1, prefix_caching=False) as one:
        ask(one)
        assert (why(one, "cpu"), why(one, "disk")) == ("out", "miss")
        ask(one)
        assert (why(one, "cpu"), why(one, "disk")) == ("out", "served")
        assert not change(one, chain_of(paused, explain={})).why
        ask(one)
        assert (why(one, "cpu"), why(one, "disk")) == ("out", "out"), "it has left the chain"


def test_a_rule_of_the_tenant(made: MakeEngine, tmp_path: Path) -> None:
    one = made(disk(tmp_path), tenants={"private": {"tiers": []}})
    ask(one, salt="private")
    ask(one, salt="private")
    assert why(one, "disk") == "tenant"


def test_a_tier_that_is_down(slow: MakeEngine, store: TroubledStore) -> None:
    one = slow()
    ask(one)
    ask(one)
    assert why(one, "slow") == "served"
    store.faults.fail("get", "has", "peek", error=TierUnavailable("down"))
    ask(one)
    ask(one)
    assert why(one, "slow") == "down"


def test_a_tier_that_never_opened(made: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    one = made(disk(tmp_path / "file"))
    ask(one)
    assert why(one, "disk") == "not_open"


def test_a_lookup_that_takes_too_long(
    slow: MakeEngine, store: TroubledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.slow.indexed = False
    one = slow(max_wait="200ms")
    ask(one)
    store.pace.hang("has")
    one.add(PROMPT, 2)
    one.step()
    assert (last_told(one)["state"], why(one, "slow")) == ("waiting", "looking")
    assert last_told(one)["attempts"][0]["milliseconds"]["until_begun"] > 0, "so far"
    one.run()
    store.pace.resume()
    assert why(one, "slow") == "late"


def test_a_load_that_fails_and_then_nothing_of_that_tier(made: MakeEngine, tmp_path: Path) -> None:
    one = made(disk(tmp_path))
    ask(one)
    damage_disk(tmp_path)
    ask(one)
    first = tier_of(last_told(one), "disk", 0)
    assert (why(one, "disk", 0), first["failed"], first["tokens"]) == ("lost", 0, 0)
    assert why(one, "disk", 1) == "failed_before"


def test_blocks_that_arrived_before_max_wait(slow: MakeEngine, store: TroubledStore) -> None:
    long = [token % 997 for token in range(401)]
    one = slow(max_wait="300ms")
    ask(one, long[:201])
    store.pace.hang("get")
    ask(one, long[:201])
    store.pace.resume()
    assert why(one, "slow", 0) == "load_failed"


def test_computing_is_faster(made: MakeEngine, tmp_path: Path) -> None:
    one = made(disk(tmp_path, load_rate="4KiB/s"), load_when="sooner")
    reasons = []
    for number in range(12):
        ask(one, [number % 2, *range(100)])
        reasons.append(why(one, "disk"))
    assert "computing" in reasons
    for why_passed, counter in COUNTED.items():
        assert one.stats.data["disk"].get(counter, 0) == reasons.count(why_passed)


def test_it_would_come_after_max_wait(made: MakeEngine, tmp_path: Path) -> None:
    """Computing is not compared, and the settings that would help are others. A long prompt shows
    it: a load of it takes several times as long as `max_wait`, and a lookup a fraction."""
    tier = disk(tmp_path, "4MiB", load_rate="100kB/s")
    one = made(tier, staging="4MiB", load_when="always", options={"num_blocks": 512})
    for number in range(6):
        ask(one, [number % 2, *range(100)])
    assert why(one, "disk") == "served" and one.connector is not None
    ask(one, long := [2, *range(2000)])
    one.connector._requests._max_wait = 0.5
    ask(one, long)
    assert why(one, "disk") == "max_wait"
    assert one.stats.data["disk"]["recompute_late"] == 1


def test_time_is_over(made: MakeEngine, tmp_path: Path) -> None:
    one = made(disk(tmp_path))
    ask(one)
    assert one.connector is not None
    one.connector._requests._max_wait = 0.0
    ask(one)
    assert why(one, "disk") == "budget"
    assert last_told(one)["attempts"][0]["computed"] == 50


def test_what_another_load_brought(made: MakeEngine, tmp_path: Path) -> None:
    one = made(disk(tmp_path, load_rate="100kB/s"), options={"prefix_caching": True})
    ask(one)
    one.scheduler.pool.forget_all()
    for _ in range(2):
        one.add(PROMPT, 2)
    one.step()
    assert (last_told(one)["state"], why(one, "disk")) == ("waiting", "waiting")
    one.run()
    first, second = explained(one)[-2:]
    assert first["attempts"][0]["loaded"] == {"disk": 48}
    (attempt,) = second["attempts"]
    assert attempt["own_cache"] == 48
    assert attempt["waited_for"] == first["request"]
    assert attempt["milliseconds"]["other_load"] > 0
    assert one.connector is not None and one.connector._sharing is not None
    assert not one.connector._sharing._loaders, "nobody waits for what has ended"


@pytest.mark.parametrize(("ranks", "processes"), [(2, False), (2, True)])
def test_times_are_those_of_the_slowest_rank(
    made: MakeEngine, tmp_path: Path, ranks: int, processes: bool
) -> None:
    one = made(disk(tmp_path), options={"world_size": ranks, "processes": processes})
    for _ in range(2):
        assert one.generate(PROMPT, 2).output == answer(MODEL, PROMPT, 2, ranks)
        one.settle()
    told = tier_of(last_told(one), "disk")
    assert told["tokens"] == 48
    parts = [told[f"{part}_ms"] for part in ("queue", "load", "check", "copy")]
    assert told["load_ms"] > 0 < told["copy_ms"]
    assert sum(parts) <= told["wait_ms"]


def test_an_aborted_request_tells_what_is_known(slow: MakeEngine, store: TroubledStore) -> None:
    one = slow(deadline="1m")
    ask(one)
    store.pace.hang("get")
    request = one.add(PROMPT, 2)
    one.step()
    while last_told(one)["state"] == "waiting":
        one.step()
    assert last_told(one)["state"] == "loading"
    one.scheduler.abort(request.request_id)
    told = last_told(one)
    (attempt,) = told["attempts"]
    assert (attempt["computed"], attempt["loaded"]) == (None, {"slow": None})
    assert why(one, "slow") == "loading"
    store.pace.resume()
    one.run()
    one.settle()
    assert last_told(one)["attempts"][0]["loaded"] == {"slow": 48}
