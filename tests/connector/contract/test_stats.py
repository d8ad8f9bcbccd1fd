"""What tiers measure: how ranks and intervals add up, and what a log line shows of it."""

from __future__ import annotations

from tiers.connector.contract.stats import COUNTERS, GAUGES, HISTOGRAMS, MEASURES, TierStats


def test_each_measure_is_of_one_kind() -> None:
    assert len(MEASURES) == len(COUNTERS) + len(GAUGES) + len(HISTOGRAMS)


def test_counters_add_up_gauges_are_replaced_and_samples_gather() -> None:
    stats = TierStats()
    stats.add("disk", hits=1, storing_jobs=3, load_seconds=[0.5])
    later = TierStats()
    later.add("disk", hits=2, storing_jobs=1, load_seconds=[1.5])
    later.add("cpu", hits=1)
    stats.aggregate(later)
    assert stats["disk"] == {"hits": 3, "storing_jobs": 1, "load_seconds": [0.5, 1.5]}
    assert later["disk"]["load_seconds"] == [1.5], "what was added is as it was"
    assert stats.reduce() == {
        "disk.hits": 3,
        "disk.storing_jobs": 1,
        "disk.load_seconds_mean": 1.0,
        "disk.load_seconds_max": 1.5,
        "cpu.hits": 1,
    }


def test_a_queue_that_has_emptied_is_news_and_zero_hits_are_not() -> None:
    stats = TierStats()
    stats.add("disk", hits=0, load_seconds=[])
    assert stats.is_empty()
    stats.add("disk", storing_jobs=0)
    assert not stats.is_empty()
