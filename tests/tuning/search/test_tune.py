"""What tune says of its choice is true of it: where it was tried, how long, and on which part."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle

import pytest

from spec.chain import ChainSpec
from tests.tuning.known_traffic import BLOCK, BLOCK_TOKENS, loop, once, requests
from tests.tuning.search.test_search import MB, Media, budget, chosen, hot_and_cold, order, tuned
from tiers.traces.trace import TraceRequest
from tiers.tuning.curve import measure
from tiers.tuning.report import YEAR
from tiers.tuning.search.search import Split, Trials
from tiers.tuning.search.space import Space, growth
from tiers.tuning.search.tune import TuneOptions, tune
from tiers.tuning.search.tune_report import as_text, as_yaml, left_out, notes, unconfirmed


def for_a_while(count: int) -> list[TraceRequest]:
    """A request a minute. Half are for one of six documents of 10 blocks, of which one goes for a
    new one every twenty minutes, and half for documents that never come again."""
    rng = random.Random(0)
    used = ((at // 10 + rng.randrange(6), 10) for at in range(count))
    return requests(
        [next(one) for at, one in zip(range(count), cycle((used, once(10, count))))], 60
    )


def test_a_device_that_must_last_has_a_write_budget_from_the_start() -> None:
    """A disk that may be written little serves most if it stores what comes again. Chains with a
    disk all broke the constraint, and it was thrown away."""
    media: Media = {
        "cpu": (20, {}),
        "disk": (400, {"endurance": int(0.4 * BLOCK / 60 * 5 * YEAR)}),
        "redis": (50, {"load_bandwidth": 4 * MB}),
    }
    given = budget(media, constraints={"life_years": 5.0})
    found = tuned(for_a_while(400), given, 50)
    disk = chosen(found, "disk")
    assert disk.write_budget is not None and not found.broken
    judged = found.judged
    assert judged["chosen"].report.ttft_mean < 0.8 * judged["none"].report.ttft_mean


def test_what_breaks_a_constraint_was_tried_and_is_told_by_how_much() -> None:
    """Nothing may be written at all."""
    media: Media = {"cpu": (200, {}), "disk": (400, {"price_per_month": 70.0})}
    given = budget(media, constraints={"price_per_month": 10})
    found = tuned(hot_and_cold(), given)
    (said,) = left_out(found)
    assert "chains that were tried with it none keeps the constraints. The best of them, " in said
    assert "price_per_month is 70, not 10 or less" in said
    (said,) = left_out(replace(found, tried=(found.chosen,)))
    assert said == "disk is left out: no chain with it was tried."


def test_a_gain_that_later_requests_do_not_show_is_not_to_be_trusted() -> None:
    """What comes after the searched part is never asked for again."""
    given = budget({"cpu": (400, {}), "disk": (400, {})})
    found = tuned(requests([*loop(20, 10, 180), *once(10, 120)]), given, 30)
    (said,) = unconfirmed(found)
    assert "against no tiers it came to -" in said and "so the traffic has changed" in said
    assert said in notes(found)
    assert not [*unconfirmed(tuned(requests(loop(20, 10, 300)), given, 30))]


def growing(count: int) -> list[TraceRequest]:
    """Each request is for a document that came 20% of all requests before, or for a new one."""
    return requests((at if at % 2 else at - at // 10 * 2 - 1, 10) for at in range(count))


def growth_of(traffic: list[TraceRequest]) -> str | None:
    return growth(measure(traffic, BLOCK_TOKENS, second_use=False))


def test_traffic_that_grows_is_told_from_traffic_that_does_not() -> None:
    grown = growth_of(growing(400))
    assert grown is not None and "times the room of its first half" in grown
    for same in (hot_and_cold(600), requests(loop(10, 10, 200)), requests(once(10, 100))):
        assert growth_of(same) is None
    later = [*once(10, 100), *loop(5, 10, 100)]
    late = growth_of(requests(later))
    assert late is not None


def test_a_tier_is_as_large_as_it_may_be_where_traffic_grows() -> None:
    """It was as large as what the recording filled, and said of no larger size."""
    media: Media = {"disk": (20_000, {"price_per_gb_month": 1.0})}
    found = tuned(growing(400), budget(media))
    filled = found.space.sizes["disk"][0]
    assert filled < 1500 * BLOCK and chosen(found, "disk").capacity == 20_000 * BLOCK
    said = "\n".join(notes(found))
    assert "The trace is still growing" in said and "Record longer." in said
    text = as_yaml(found, "some.jsonl") or ""
    assert "all that the searched requests fill" in text
    price = 2000 * BLOCK / 1e9
    within = tuned(growing(400), budget(media, constraints={"price_per_month": price}))
    assert filled < (chosen(within, "disk").capacity or 0) <= 2000 * BLOCK
    settled = tuned(requests(loop(10, 10, 200)), budget({"cpu": (1600, {})}))
    assert "growing" not in "\n".join(notes(settled))


def test_too_few_requests_are_told() -> None:
    found = tuned(hot_and_cold(60), budget({"cpu": (1000, {})}))
    assert any("counted 24 requests, too few to tell" in one for one in notes(found))
    found = tuned(hot_and_cold(600), budget({"cpu": (1000, {})}))
    assert not any("too few" in one for one in notes(found))


def test_sizes_are_those_of_the_searched_part() -> None:
    """What comes later was in the curve that sizes were taken from."""
    traffic = requests([*loop(10, 10, 120), *loop(50, 10, 80, 100)])
    found = tuned(traffic, budget({"cpu": (1000, {})}))
    assert found.space.sizes["cpu"][0] < 150 * BLOCK


def test_nothing_is_chosen_by_what_judges_it() -> None:
    """Later requests that would choose otherwise change the judgement, and not the choice."""
    media: Media = {"disk": (200, {})}
    searched = hot_and_cold(400)[:240]
    ends = [requests(loop(8, 10, 400))[240:], requests(once(10, 400))[240:]]
    found = [tuned([*searched, *end], budget(media)) for end in ends]
    assert found[0].chosen == found[1].chosen
    assert found[0].tried == found[1].tried
    first, second = (one.judged["chosen"].report for one in found)
    assert first.tier_hit_tokens > second.tier_hit_tokens == 0


def test_another_trace_judges() -> None:
    asked = TuneOptions(40, judge=requests(once(10, 100)))
    found = tune(hot_and_cold(300), BLOCK_TOKENS, budget({"disk": (200, {})}), options=asked)
    assert found.split == Split(0.2, 1.0) and found.counted == 240
    judged = found.judged["chosen"].report
    assert (judged.requests, judged.tier_hit_tokens) == (80, 0)
    assert found.chosen.report.tier_hit_tokens > 0
    assert as_text(found, "other.jsonl").startswith("Judged on other.jsonl, ")


def test_a_search_ends_when_its_time_is_over() -> None:
    given = budget({"cpu": (100, {}), "disk": (400, {}), "redis": (1000, {})})
    traffic = hot_and_cold(200)
    whole = tune(traffic, BLOCK_TOKENS, given, options=TuneOptions(60))
    short = tune(traffic, BLOCK_TOKENS, given, options=TuneOptions(60, seconds=0.0))
    assert len(short.tried) < len(whole.tried) / 2
    assert not short.is_cut_off


@pytest.mark.parametrize("after", [1, 30])
def test_an_interrupt_keeps_the_best_so_far(after: int) -> None:
    def interrupt(trials: Trials) -> None:
        if len(trials) >= after:
            raise KeyboardInterrupt

    given = budget({"cpu": (100, {}), "disk": (400, {}), "redis": (1000, {})})
    found = tune(hot_and_cold(200), BLOCK_TOKENS, given, advance=interrupt)
    assert found.is_cut_off
    assert len(found.tried) == after
    assert found.chosen.score <= found.tried[0].score or after > 1
    text = as_text(found)
    assert text.startswith("The search was interrupted. The best so far, on requests 41 to 120:")
    assert bool(as_yaml(found, "some.jsonl")) == bool(found.chosen.chain.tiers)


def test_an_interrupt_before_anything_is_found_is_one() -> None:
    def interrupt(trials: Trials) -> None:
        raise AssertionError

    with pytest.raises(AssertionError):
        tune(hot_and_cold(100), BLOCK_TOKENS, budget({"cpu": (100, {})}), advance=interrupt)


@pytest.mark.parametrize(("path", "is_same"), [("/var/lib/kvtiers", True), ("/mnt/old", False)])
def test_a_device_that_the_present_chain_has_by_a_name_is_as_fast_for_its_rivals(
    path: str, is_same: bool
) -> None:
    """By its name it was measured, and is slow; what is known of its type is of another one."""
    slow = {"load_bandwidth": 20 * MB, "store_bandwidth": 20 * MB}
    given = budget({"disk": (400, {}), "redis": (400, slow)})
    link = given.machine.tiers["redis"]
    machine = given.machine.model_copy(update={"tiers": {**given.machine.tiers, "nvme": link}})
    tier = {"type": "disk", "name": "nvme", "path": path, "capacity": 400 * BLOCK}
    present = ChainSpec.model_validate({"version": 1, "tiers": [tier]})
    given = given.model_copy(update={"machine": machine, "media": given.media[:1]})
    found = tune(hot_and_cold(200), BLOCK_TOKENS, given, present, TuneOptions(20))
    assert (found.budget.machine.tiers["disk"] == link) == is_same
    ours, theirs = (found.judged[one].report.ttft_mean for one in ("fastest first", "present"))
    assert (ours == pytest.approx(theirs, rel=1e-3)) == is_same and ours <= theirs


def test_settings_of_a_medium_are_simulated() -> None:
    """A time to live was written into the chain, and no simulation knew of it."""
    settings = {"url": "redis://cache.internal", "ttl": "1s", "store_rate": "1MB/s"}
    given = budget({"redis": (100, {})})
    medium = given.media[0].model_copy(update={"settings": settings})
    limited = given.model_copy(update={"media": (medium,)})
    tier = Space(limited, {"redis": [100]}).tier(medium)
    assert (tier.ttl, tier.store_rate, tier.capacity) == (1.0, 1e6, 100)
    traffic = requests(loop(5, 10, 100), 5.0)
    assert order(tuned(traffic, given)) == ["redis"]
    assert order(tuned(traffic, limited)) == []
