"""Which chains are equal, which is the simplest, and what is said of a choice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.load import load_chain
from tests.tuning.known_traffic import BLOCK, loop, mixed, requests
from tests.tuning.search.test_search import Media, budget, tuned
from tiers.tuning.report import Report, Stretch, TierUse
from tiers.tuning.search.advice import Advice
from tiers.tuning.search.budget import Budget, Constraints, Objective
from tiers.tuning.search.chain_text import change, name
from tiers.tuning.search.processes import SimJob, Simulations
from tiers.tuning.search.search import (
    Gap,
    Score,
    Split,
    Trials,
    excesses,
    gap,
    score,
    search,
)
from tiers.tuning.search.space import LOAD_WHEN, POLICIES, Space, simplicity, worth_trying
from tiers.tuning.search.tune import Tuned, choose, settled
from tiers.tuning.search.tune_report import as_json, as_text, as_yaml
from tiers.tuning.simulation.sim_chain import SimChain, SimTier

GIVEN = budget({"cpu": (1000, {}), "disk": (1000, {})})
CPU = SimTier("cpu", "cpu", True, 100)


def report(ttft: float = 1.0, life: float | None = None) -> Report:
    use = TierUse("disk", 0, 0.0, 0.0, 0, 0, 0.0, 0, 0, life_years=life, price_per_month=50.0)
    return Report(10, 10.0, 0.5, (use,), 100, 0, 100, ttft, ttft, 2 * ttft, 3.0)


def varied(*means: float) -> Report:
    """A report whose stretches have these means, p99s twice as long, and as many tokens."""
    parts = tuple(Stretch(mean, 2 * mean, round(1000 * mean), 500) for mean in means)
    return replace(report(fmean(means)), ttft_p99=2 * fmean(means), stretches=parts)


def test_a_difference_tells_if_it_is_more_than_it_varies_by() -> None:
    best = [1.0, 0.5, 2.0, 1.0, 3.0, 1.0, 0.2, 1.3]
    everywhere = gap(varied(*(1.04 * one for one in best)), varied(*best), GIVEN)
    assert everywhere.share == pytest.approx(0.04) and everywhere.is_certain
    once = gap(varied(*best[:-1], 1.3 + 0.4), varied(*best), GIVEN)
    assert once.share == pytest.approx(0.04)
    assert once.margin == pytest.approx(2.36 * 0.05 / 1.25 / 1, rel=0.02) and not once.is_certain
    little = gap(varied(*(1.004 * one for one in best)), varied(*best), GIVEN)
    assert little.margin == 0.005 and not little.is_certain
    assert math.isinf(gap(varied(1.04), varied(1.0), GIVEN).margin), "one stretch tells nothing"
    late = GIVEN.model_copy(update={"objective": "p99_ttft"})
    assert gap(varied(*best[:-1], 1.7), varied(*best), late) == pytest.approx(once)
    paid = GIVEN.model_copy(update={"objective": "cost", "gpu_price_per_month": 1000.0})
    assert gap(varied(*best), varied(*best), paid) == (0, 0.005)
    assert 0 < gap(varied(*best[:-1], 1.7), varied(*best), paid).margin < 1


@pytest.mark.parametrize(
    ("found", "objective", "said"),
    [
        (Gap(-0.04, 0.081), "mean_ttft", "-4.0% ± 8.1%"),
        (Gap(0.6, 0.16), "p99_ttft", "+60% ± 16%"),
        (Gap(-0.04, 0.01), "saved_seconds", "+4.0% ± 1.0%"),
        (Gap(0.0, 0.005), "mean_ttft", "the same"),
        (Gap(0.034, math.inf), "cost", "+3.4% ±?"),
        (Gap(math.inf, 0.005), "cost", "+inf% ±?"),
        (Gap(-math.inf, math.inf), "saved_seconds", "+inf% ±?"),
    ],
)
def test_a_change_is_told_with_its_margin(found: Gap, objective: Objective, said: str) -> None:
    assert change(found, objective) == said


def test_json_has_no_infinity() -> None:
    endless = Advice("stay", "", Gap(-math.inf, math.inf), worst=math.inf, least=-math.inf)
    told = endless.as_json()
    assert (told["change"], told["margin"]) == (None, None)
    assert told["change_if_rates_are_off"] == [None, None]


def test_a_default_that_equals_the_best_is_not_chosen_where_another_beats_it() -> None:
    """The best was lucky once; another chain is certainly better than the default, which was chosen
    again and again, for ever."""
    often = [1.0, 0.5, 2.0, 1.0, 3.0, 1.0, 0.2, 1.3]
    bad = varied(*(2 * one for one in often))
    reports: dict[tuple[str, int] | None, Report] = {
        ("lru", 1): varied(*often),
        ("arc", 1): varied(*often[:4], 3.0 - 0.37, *often[5:]),
        ("lru", 2): varied(*(0.965 * one for one in often)),
    }
    runs = count()

    def run(jobs: Sequence[SimJob], *_: object) -> Iterator[tuple[SimJob, Report]]:
        assert next(runs) < 1000, "it ends"
        yield from ((job, reports.get(settings(job[0]), bad)) for job in jobs)

    space = Space(budget({"cpu": (100, {})}), {"cpu": [100]})
    trials = Trials(space, cast(Simulations, SimpleNamespace(run=run)), Split())
    search(trials, 60)
    assert settings(trials.tried[0].chain) == ("arc", 1)
    assert settings(choose(trials).chain) == ("lru", 1)
    for grows in (False, True):
        assert settings(settled(trials, grows).chain) == ("arc", 1)
        trials.beaten.clear()


def settings(chain: SimChain) -> tuple[str, int] | None:
    """Those of the tier, if there is one."""
    return next(((tier.eviction, tier.store_threshold) for tier in chain.tiers), None)


SIZES = st.none() | st.sampled_from([10**9, 2 * 10**9, 2 * 10**9 + 1])
RATES = st.none() | st.sampled_from([1e6, 2e6, 88657407.4])
TIERS = st.builds(
    SimTier,
    name=st.sampled_from(["cpu", "disk"]),
    type=st.just("disk"),
    is_host=st.just(False),
    capacity=SIZES,
    eviction=st.sampled_from(["lru", "arc"]),
    store_threshold=st.integers(1, 3),
    max_inflight=SIZES,
    store_rate=RATES,
    load_rate=RATES,
    write_budget=RATES,
    ttl=st.none() | st.just(5.0),
)
CHAINS = st.builds(
    SimChain,
    tiers=st.lists(TIERS, max_size=2).map(tuple),
    load_policy=st.sampled_from(POLICIES),
    load_when=st.sampled_from(LOAD_WHEN),
    promote=st.booleans(),
    max_wait=st.sampled_from([10.0, 3.0]),
    staging=SIZES,
    store=st.sampled_from(("all", "prompt", "computed")),
)


@given(CHAINS, CHAINS)
def test_no_two_chains_have_one_name(one: SimChain, other: SimChain) -> None:
    assert one == other or not one.tiers or not other.tiers or name(one) != name(other)


def test_what_differs_most_is_in_a_name() -> None:
    disk = SimTier("disk", "disk", False, 10**12, store_threshold=2, write_budget=1e6)
    arc = SimTier("cpu", "cpu", True, 64 * 10**9, "arc")
    assert name(SimChain((arc, disk), promote=False)) == (
        "cpu 64GB arc, disk 1TB from use 2 write_budget 1MB/s; stitched; no promotion"
    )


def test_times_are_named_as_they_are_written() -> None:
    redis = SimTier("redis", "redis", False, 10**9, ttl=86_400.0)
    assert name(SimChain((redis,), max_wait=2.0)) == "redis 1GB ttl 1d; stitched; max_wait 2s"


def test_fewer_tiers_then_fewer_settings_then_a_lower_price_are_simpler() -> None:
    cpu = {"price_per_gb_month": 3.0, "load_bandwidth": 1e12}
    machine = budget({"cpu": (9, cpu), "disk": (9, {})}).machine
    disk = SimTier("disk", "disk", False, 100)
    chains = [
        SimChain(()),
        SimChain((replace(disk, capacity=50),)),
        SimChain((disk,)),
        SimChain((CPU,)),
        SimChain((CPU,), "longest"),
        SimChain((replace(CPU, store_threshold=2, eviction="arc"),)),
        SimChain((CPU, disk)),
        SimChain((disk, CPU)),
    ]
    assert sorted(chains, key=lambda one: simplicity(one, machine)) == chains


def test_scores() -> None:
    limits = {"p99_ttft": 1.0, "price_per_month": 40, "life_years": 5.0}
    limited = GIVEN.model_copy(update={"constraints": Constraints.model_validate(
        limits | {"p99_ttft": "1s"})})  # fmt: skip
    told = [text for text, _ in excesses(report(life=2.0), limited)]
    assert told == [
        "p99_ttft is 2, not 1 or less",
        "price_per_month is 50, not 40 or less",
        "disk lasts 2 years, not 5 or more",
    ]
    assert score(report(life=2.0), limited).excess == pytest.approx(1 + 0.25 + 1.5)
    assert score(report(9.0), GIVEN) < score(report(), limited)
    saved = GIVEN.model_copy(update={"objective": "saved_seconds"})
    more, less = Score(0, -10.0), Score(0, -8.0)
    assert score(report(), saved) == Score(0, -3.0) and more < less
    assert less.worse_than(more) == pytest.approx(0.2)
    assert more.worse_than(less) == pytest.approx(-0.25)
    assert Score(0, 0.0).worse_than(more) == 1
    nothing = Score(0, -0.0)
    assert more.worse_than(nothing) == -math.inf and Score(0, 5.0).worse_than(nothing) == math.inf
    assert Score(0, 0.0).worse_than(nothing) == 0
    paid = GIVEN.model_copy(update={"objective": "cost", "gpu_price_per_month": 1000.0})
    assert score(report(), paid).value == 50 + 0.5 * 1000


def test_no_size_beyond_what_serves_all() -> None:
    given = budget({"cpu": (100, {}), "disk": (10_000, {})})
    sizes = worth_trying(given, lambda size: min(size / BLOCK, 500) / 500)
    assert [size / BLOCK for size in sizes["cpu"]] == pytest.approx([100, 50, 25, 12.5, 6.25])
    assert sizes["disk"][0] / BLOCK == pytest.approx(500 * 1.1, rel=0.06)


def test_what_is_computed_says_which_hits_are_few() -> None:
    """Where the engine has nearly all itself, the last thousandth is a twentieth of its work."""
    given = budget({"disk": (10_000, {})})
    (sizes,) = worth_trying(given, lambda size: 0.97 if size < 500 * BLOCK else 0.9715).values()
    assert sizes[0] / BLOCK == pytest.approx(550, rel=0.06)
    (sizes,) = worth_trying(given, lambda size: 0.2 if size < 500 * BLOCK else 0.2015).values()
    assert sizes == (1,)


@pytest.mark.parametrize("limit", [1_000, 10_000, 10**7, 2**62 // BLOCK])
def test_a_limit_far_beyond_what_serves_all_changes_no_size(limit: int) -> None:
    """It was found to a part of the limit, so that all sizes were too large and broke a price."""
    given = budget({"disk": (limit, {})})
    (sizes,) = worth_trying(given, lambda size: min(size / BLOCK, 500) / 500).values()
    assert [size / BLOCK for size in sizes] == pytest.approx([550, 275, 137, 69, 34], rel=0.06)
    (nothing,) = worth_trying(given, lambda size: 0.0).values()
    assert nothing == (1,)


@pytest.fixture(scope="module")
def small() -> Tuned:
    media: Media = {"disk": (200, {}), "redis": (1000, {"load_bandwidth": 4e6})}
    given = budget(media, constraints={"price_per_month": 10})
    both = mixed((loop(8, 10, 120), 4), (loop(30, 10, 120, 100), 1))
    return tuned(requests(islice(both, 120)), given, 30)


def test_the_chain_file_loads_and_gives_a_reason_for_each_choice(
    small: Tuned, tmp_path: Path
) -> None:
    text = as_yaml(small, "some.jsonl")
    assert text is not None
    (tmp_path / "chain.yaml").write_text(text)
    loaded = load_chain(tmp_path / "chain.yaml")
    chosen = small.chosen.chain
    assert [tier.type for tier in loaded.tiers] == [tier.type for tier in chosen.tiers]
    assert (loaded.load_policy, loaded.promote) == (chosen.load_policy, chosen.promote)
    assert [t.store_threshold for t in loaded.tiers] == [t.store_threshold for t in chosen.tiers]
    for key in ("load_policy", "load_when", "capacity", "store_threshold"):
        at = text.index(f"{key}: ")
        assert "% ± " in text[at - 300 : at + 100] or "the same" in text[at - 300 : at + 100], key


def test_what_is_told_can_be_read_by_machines_too(small: Tuned) -> None:
    told = as_json(small, "some.jsonl")
    assert told["tried"] == len(small.tried) == len(told["search"])
    assert told["within"]["1"] <= told["within"]["5"] <= told["within"]["10"] <= told["tried"]
    prices = [point["cost"] for point in told["frontier"]]
    waits = [point["ttft_mean"] for point in told["frontier"]]
    assert prices == sorted(prices) and waits == sorted(waits, reverse=True)
    text = as_text(small)
    assert "chosen" in text and "fastest first" in text and "Not beaten in both" in text


def test_settings_are_written_as_yaml(tmp_path: Path, small: Tuned) -> None:
    """A path with a colon and a quote, a number that is text."""
    odd = {"path": "/var/it's: here", "name": "12"}
    media = [
        medium.model_copy(update={"settings": odd}) if medium.type == "disk" else medium
        for medium in small.budget.media
    ]
    given: Budget = small.budget.model_copy(update={"media": tuple(media)})
    text = as_yaml(replace(small, budget=given), "some.jsonl")
    assert text is not None
    (tmp_path / "chain.yaml").write_text(text)
    (disk,) = [tier for tier in load_chain(tmp_path / "chain.yaml").tiers if tier.type == "disk"]
    assert (str(getattr(disk, "path", "")), disk.name) == (odd["path"], odd["name"])
