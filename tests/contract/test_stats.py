"""What tiers measure: how ranks and intervals add up, and what a log line shows of it."""

from __future__ import annotations

from tiers.contract.stats import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    MEASURES,
    STATES,
    TierStats,
)


def test_each_measure_is_of_one_kind() -> None:
    assert len(MEASURES) == len(COUNTERS) + len(GAUGES) + len(HISTOGRAMS) + 1


def test_counters_add_up_gauges_are_replaced_and_samples_gather() -> None:
    stats = TierStats()
    stats.add("disk", {"hits": 1, "storing_jobs": 3, "load_seconds": [0.5]})
    later = TierStats()
    later.add("disk", {"hits": 2, "storing_jobs": 1, "load_seconds": [1.5]})
    later.add("cpu", {"hits": 1})
    stats.aggregate(later)
    assert stats["disk"] == {"hits": 3, "storing_jobs": 1, "load_seconds": [0.5, 1.5]}
    TierStats().aggregate(later).aggregate(stats)
    assert later["disk"]["load_seconds"] == [1.5], "what was added is as it was"


def test_a_queue_that_has_emptied_is_news_and_zero_hits_are_not() -> None:
    stats = TierStats()
    stats.add("disk", {"hits": 0, "load_seconds": []})
    assert stats.is_empty()
    stats.add("disk", {"storing_jobs": 0})
    assert not stats.is_empty()


def test_a_log_line_has_one_short_text_of_all_tiers() -> None:
    stats = TierStats()
    stats.add("cpu", {"loaded_tokens": 1000, "reloaded_tokens": 152})
    stats.add("cpu", {"stored_blocks": 36, "stored_bytes": 36 << 17, "tier_state": 1})
    stats.add("cpu", {"load_seconds": [0.1], "hits": 2, "storing_bytes": 5, "evictions": 4})
    stats.add("disk", {"tier_state": STATES.index("down"), "store_dropped_down": 3})
    stats.add("redis", {"hits": 0, "storing_jobs": 1, "tier_state": STATES.index("open")})
    said = "cpu: 1,152 tokens loaded, 36 blocks stored (4.5MiB), 4 blocks evicted; "
    assert stats.reduce() == {"kvtiers": said + "disk: down, 3 blocks dropped"}


def test_a_log_line_of_nothing_says_so() -> None:
    stats = TierStats()
    stats.add("cpu", {"storing_jobs": 0, "tier_state": STATES.index("open")})
    assert stats.reduce() == {"kvtiers": "quiet"}
    assert TierStats().reduce() == {}
