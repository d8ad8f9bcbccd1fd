"""The search finds what is known to be best, for each thing that it chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import pytest

from tests.tuning.known_traffic import BLOCK, BLOCK_TOKENS, KV_BYTES, loop, mixed, once, requests
from tiers.traces.trace import TraceRequest
from tiers.tuning.report import YEAR
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.processes import SimJob, Simulations
from tiers.tuning.search.space import Space
from tiers.tuning.search.tune import Tuned, TuneOptions, tune
from tiers.tuning.search.tune_report import left_out
from tiers.tuning.simulation.sim_chain import SimChain, SimTier

MB = 10**6
SETTINGS = {"disk": {"path": "/var/lib/kvtiers"}, "redis": {"url": "redis://cache.internal"}}


Media = dict[str, tuple[int, dict[str, Any]]]


def budget(media: Media, **more: Any) -> Budget:
    """A budget of media, by type the limit in blocks and what differs from a quick profile. The
    engine has no cache to speak of, and computes 1,600 tokens, a hundred blocks, in a second."""
    machine: dict[str, Any] = {
        "kv_bytes_per_token": KV_BYTES,
        "engine_cache": 25 * BLOCK,
        "prefill_rate": 1600.0,
        "tiers": {
            kind: {"load_bandwidth": 1000 * MB, "store_bandwidth": 1000 * MB} | profile
            for kind, (_, profile) in media.items()
        },
    }
    machine |= more.pop("machine", {})
    listed = [
        {"type": kind, "limit": blocks * BLOCK, "settings": SETTINGS.get(kind, {})}
        for kind, (blocks, _) in media.items()
    ]
    return Budget.model_validate({"media": listed, "machine": machine} | more)


def tuned(traffic: Sequence[TraceRequest], given: Budget, limit: int = 60) -> Tuned:
    return tune(traffic, BLOCK_TOKENS, given, options=TuneOptions(limit))


def order(found: Tuned) -> list[str]:
    return [tier.type for tier in found.chosen.chain.tiers]


def chosen(found: Tuned, kind: str) -> SimTier:
    """The chosen tier of this type."""
    return next(tier for tier in found.chosen.chain.tiers if tier.type == kind)


def hot_and_cold(count: int = 240) -> list[TraceRequest]:
    """8 documents that come often, 50 that come seldom, all of 10 blocks."""
    return requests(islice(mixed((loop(8, 10, count), 4), (loop(50, 10, count, 100), 1)), count))


@pytest.mark.parametrize("fast", ["disk", "redis"])
def test_order_the_faster_tier_first(fast: str) -> None:
    """The fast one has room for what comes often alone."""
    slow = {"load_bandwidth": 4 * MB}
    media: Media = {kind: (200, {}) if kind == fast else (1000, slow) for kind in ("disk", "redis")}
    found = tuned(hot_and_cold(600), budget(media), 30)
    assert order(found) == [fast, *({"disk", "redis"} - {fast})]
    judged = found.judged
    assert judged["none"].report.ttft_mean > 2 * judged["chosen"].report.ttft_mean


def test_what_is_found_does_not_hang_on_which_simulation_ends_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many chains come to the same here."""
    media: Media = {"cpu": (200, {}), "disk": (1000, {"load_bandwidth": 100 * MB})}
    in_order = tuned(hot_and_cold(), budget(media))
    run = Simulations.run

    def backwards(self: Simulations, jobs: Iterable[SimJob], *rest: Any) -> Any:
        return run(self, reversed(list(jobs)), *rest)

    monkeypatch.setattr(Simulations, "run", backwards)
    other = tuned(hot_and_cold(), budget(media))
    assert [one.chain for one in other.tried] == [one.chain for one in in_order.tried]
    assert other.chosen.chain == in_order.chosen.chain


def test_a_tier_that_brings_nothing_is_left_out() -> None:
    media: Media = {"cpu": (1000, {}), "disk": (1000, {"load_bandwidth": 100 * MB})}
    found = tuned(hot_and_cold(), budget(media))
    assert order(found) == ["cpu"]
    guess = found.space.fastest_first()
    assert [found.tried[0].score] == [one.score for one in found.tried if one.chain == guess]
    (said,) = left_out(found)
    assert said.startswith("disk is left out: the best chain with it, cpu ")
    assert "comes to the same; 0% of the prompts' tokens from it" in said


def test_a_tier_that_takes_longer_than_computing_is_left_out() -> None:
    """It would serve much, in three times the time that computing takes."""
    media: Media = {"cpu": (200, {}), "disk": (1000, {"load_bandwidth": 30 * BLOCK})}
    found = tuned(hot_and_cold(), budget(media))
    assert order(found) == ["cpu"]
    (said,) = left_out(found)
    assert said.startswith("disk is left out: the best chain with it, cpu ")


def test_no_tier_at_all() -> None:
    found = tuned(requests(once(10, 200)), budget({"cpu": (1000, {}), "disk": (1000, {})}))
    assert order(found) == []


def test_a_size_at_the_knee() -> None:
    """A loop over 100 blocks: all hits from there on, none below."""
    found = tuned(requests(loop(10, 10, 200)), budget({"cpu": (1600, {})}))
    (tier,) = found.chosen.chain.tiers
    assert tier.capacity is not None and 100 <= tier.capacity / BLOCK <= 200


def test_load_policy_equal_links_are_used_at_once() -> None:
    """Two slow links of like speed: whatever the order, using one alone takes twice as long."""
    like = {"load_bandwidth": 200 * BLOCK}
    media: Media = {"disk": (1000, like), "redis": (1000, like)}
    found = tuned(requests(loop(10, 50, 200, 100), 2.0), budget(media))
    chosen = found.chosen
    assert (len(chosen.chain.tiers), chosen.chain.load_policy) == (2, "stitched")


@pytest.mark.parametrize(
    ("objective", "when"), [("mean_ttft", "sooner"), ("saved_seconds", "always")]
)
def test_load_when_always_where_slow_loads_still_save_gpus(objective: str, when: str) -> None:
    """Loading takes half as long again as computing, and costs no GPU anything."""
    given = budget({"disk": (1000, {"load_bandwidth": 66 * BLOCK})}, objective=objective)
    found = tuned(requests(loop(10, 50, 200, 100), 2.0), given)
    chains = [one.chain for one in found.tried if one.chain.tiers]
    assert {chain.load_when for chain in chains} == {"sooner", "always"}
    chosen = found.chosen.chain
    assert chosen.load_when == (when if chosen.tiers else "sooner")
    assert bool(chosen.tiers) == (when == "always")


def test_load_when_is_not_tried_where_no_link_is_slower_than_computing() -> None:
    """Nor kept, once the slow tier is left out."""
    given = budget({"cpu": (400, {}), "disk": (1000, {"load_bandwidth": 66 * BLOCK})})
    space = Space(given, {"cpu": [400 * BLOCK], "disk": [1000 * BLOCK]})
    cpu, both = (
        SimChain(tuple(map(space.tier, given.media[:n])), load_when=when)
        for n, when in ((1, "sooner"), (2, "always"))
    )
    assert "load_when" not in {step.kind for step in space.steps(cpu)}
    assert {step.chain.load_when for step in space.steps(both) if step.kind == "load_when"} == {
        "sooner"
    }
    assert [
        step.chain for step in space.steps(both) if step.text == "left out" and step.tier == "disk"
    ] == [cpu]


def test_store_threshold_keeps_one_off_documents_out() -> None:
    """What comes again comes after more one-off blocks than there is room for."""
    again = mixed((loop(10, 10, 400), 1), (once(10, 400), 3))
    found = tuned(requests(islice(again, 400)), budget({"disk": (240, {})}))
    assert chosen(found, "disk").store_threshold > 1


def test_write_budget_lets_a_device_last() -> None:
    """What comes again seldom drives out what comes often, so that the disk is written all the
    time. A store threshold spares it, and not enough for the years that are asked for."""
    both = mixed((loop(8, 10, 240), 1), (loop(40, 10, 240, 100), 2))
    disk = {"endurance": int(BLOCK / 120 * 5 * YEAR)}
    given = budget({"disk": (200, disk)}, constraints={"life_years": 5.0})
    found = tuned(requests(islice(both, 240), 60.0), given)
    assert chosen(found, "disk").write_budget is not None
    assert not found.broken
    excesses: dict[bool, list[float]] = {True: [], False: []}
    for one in found.tried:
        for tier in one.chain.tiers:
            if tier.capacity == 200 * BLOCK:
                excesses[tier.write_budget is not None].append(one.score.excess)
    assert min(excesses[False]) > 1, "whatever the store threshold"
    assert max(excesses[True]) == 0


def test_eviction_that_a_scan_does_not_empty() -> None:
    """A document comes again soon, and twice more after a scan. LRU has forgotten it by then; a
    store threshold of 2 keeps the scan out and loses the first time that it comes again."""
    again = {10 * one + later: (one, 10) for one in range(24) for later in (0, 3, 21, 46)}
    scan = once(10, 1000)
    traffic = [again.get(at) or next(scan) for at in range(240)]
    found = tuned(requests(traffic), budget({"cpu": (100, {})}), limit=40)
    assert chosen(found, "cpu").eviction == "arc"


def test_promote_off_where_a_loop_below_drives_out_what_comes_often() -> None:
    """The disk tier holds what comes often, until the loop that redis serves is promoted."""
    media: Media = {"disk": (200, {}), "redis": (1000, {"load_bandwidth": 4 * MB})}
    often, round_and_round = loop(8, 10, 400), loop(30, 10, 400, 100)
    begin = islice(mixed((often, 5), (round_and_round, 2)), 105)
    then = islice(mixed((often, 1), (round_and_round, 3)), 145)
    found = tuned(requests(chain(begin, then)), budget(media))
    assert order(found) == ["disk", "redis"]
    assert not found.chosen.chain.promote
