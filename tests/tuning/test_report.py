"""A report warns of what makes its figures, or the chain, not worth trusting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tiers.tuning.report import Report, TierUse

USE = TierUse("disk", 0, 0.3, 0.3, 0, 0, 0.0, 10, 6, life_years=3.0)
REPORT = Report(10, 10.0, 0.5, (USE,), 100, 0, 100, 1.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        ({"load_busy": 0.66}, "disk's loads are busy for 66% of the time"),
        ({"store_busy": 1.01}, "disk's stores are busy for 101% of the time"),
        ({"life_years": 0.21}, "disk is written to death in 77 days: give it a write_budget"),
        ({"life_years": 1.0}, ""),
        ({"life_years": None}, ""),
    ],
)
def test_a_tier_that_is_worn_or_busy_is_warned_of(change: dict[str, Any], told: str) -> None:
    """Stores at 101% of a link, and a device that lasts 77 days, had no line."""
    warnings = replace(REPORT, tiers=(replace(USE, **change),)).warnings
    assert len(warnings) == bool(told)
    assert all(warning.startswith(told) for warning in warnings)


@pytest.mark.parametrize(
    ("pause", "requests", "is_told"),
    [(0.99, 400, True), (0.11, 400, True), (0.09, 400, False), (0.3, 50, False), (0.5, 50, True)],
)
def test_a_pause_is_warned_of_unless_chance_made_it(
    pause: float, requests: int, is_told: bool
) -> None:
    warnings = replace(REPORT, pause=pause, requests=requests).warnings
    assert [text.startswith(f"no request came for {pause:.0%} of") for text in warnings] == (
        [True] * is_told
    )


def test_busy_gpus_are_warned_of() -> None:
    (warning,) = replace(REPORT, gpu_load=0.7).warnings
    assert warning.startswith("the GPUs are busy for 70% of the time")
