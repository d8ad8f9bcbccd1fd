"""An engine's status: counts of its start and of late, and the tiers' states with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, chain_of, close, cpu, disk
from tiers.contract.stats import TierStats
from tiers.control.status_board import SAMPLES, WINDOW, StatusBoard

PROMPT = [*range(40)]
"""Ten blocks."""


class Observed:
    """An engine over a chain, its board, and the board's clock."""

    def __init__(self, *tiers: dict[str, Any], **more: Any) -> None:
        chain = chain_of(*tiers, **more)
        self.engine = ReplayEngine(chain, MODEL, prefix_caching=False)
        assert self.engine.connector is not None
        self.connector = self.engine.connector
        self.clock = Clock()
        self.board = StatusBoard(self.connector, self.clock)

    def serve(self, prompt: list[int]) -> None:
        self.engine.generate(prompt, 1)
        self.engine.settle()
        stats, self.engine.stats = self.engine.stats, TierStats()
        self.board.measured({"all": stats})


@pytest.fixture
def observed(request: pytest.FixtureRequest) -> Callable[..., Observed]:
    def make(*tiers: dict[str, Any], **more: Any) -> Observed:
        made = Observed(*tiers, **more)
        request.addfinalizer(lambda: close(made.engine))
        return made

    return make


def test_counts_are_those_of_the_start_and_shares_those_of_late(
    observed: Callable[..., Observed], tmp_path: Path
) -> None:
    made = observed(cpu(), disk(tmp_path))
    made.serve(PROMPT)
    made.serve(PROMPT)
    made.clock.now += 10
    status = made.board.status("1")
    assert [(tier.name, tier.type, tier.state, tier.why) for tier in status.tiers] == [
        ("cpu", "cpu", "open", ""),
        ("disk", "disk", "open", ""),
    ]
    first, second = status.tiers
    assert status.prompt_tokens == status.prompt_tokens_late == 2 * len(PROMPT)
    loaded = first.sums["loaded_tokens"] + second.sums.get("loaded_tokens", 0)
    assert loaded == 40
    assert (first.token_share, first.token_share_late) == (0.5, 0.5)
    assert first.sums["stored_blocks"] == second.sums["stored_blocks"] > 0
    assert second.stored_bytes_per_second == second.sums["stored_bytes"] / 10
    assert first.load_seconds is not None and first.load_seconds.samples == 1
    assert first.used_bytes > 0
    # Long afterwards nothing of this is of late.
    for _ in range(20):
        made.clock.now += WINDOW / 6
        made.board.measured({})
    made.serve([*range(100, 140)])
    status = made.board.status("1")
    assert status.prompt_tokens == 3 * len(PROMPT)
    assert status.prompt_tokens_late == len(PROMPT)
    assert status.window_seconds <= WINDOW
    assert status.tiers[0].token_share_late == 0.0
    assert status.tiers[0].token_share == 40 / 120
    made.serve([*range(100, 140)])
    assert made.board.status("1").tiers[0].token_share_late == 0.5


def test_an_engine_that_stands_still_is_no_busy_one(
    observed: Callable[..., Observed],
) -> None:
    """No step brings counts while it idles, so the last of them lie further back with time."""
    made = observed(cpu())
    made.serve(PROMPT)
    made.clock.now += 20
    made.board.measured({})
    made.clock.now += 1000
    status = made.board.status("1")
    assert status.measured_seconds_ago == status.window_seconds == 1000
    assert status.tiers[0].stored_bytes_per_second < status.tiers[0].sums["stored_bytes"] / 900


def test_late_is_a_minute_however_many_steps_there_are(observed: Callable[..., Observed]) -> None:
    made = observed(cpu())
    for _ in range(1200):
        made.clock.now += 0.1
        made.board.measured({})
    assert WINDOW - WINDOW / 6 <= made.board.status("1").window_seconds <= WINDOW + 0.1


def test_a_tier_that_fails_says_why_without_a_step(
    observed: Callable[..., Observed], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    made = observed(cpu(), disk(tmp_path / "file"))
    (tier,) = [tier for tier in made.board.status("1").tiers if tier.name == "disk"]
    assert tier.state == "refused"
    assert "file" in tier.why


def test_a_ghost_says_how_long_a_prompt_takes(observed: Callable[..., Observed]) -> None:
    """Of a tier that the chain has by what that loads; of another one by what its ghost says."""
    absent = {"tier": "disk", "capacity": "1MiB", "load_rate": "1MB/s"}
    made = observed(cpu(), ghosts=[{"tier": "cpu", "capacity": "2x"}, absent])
    hits: dict[str, Any] = {"ghost_hit_ratio": 0.25, "ghost_hit_error": 0.0}
    names = ["cpu", "cpu (capacity: 2x)", "disk (capacity: 1MiB)"]
    made.board.measured({"cpu": TierStats(dict.fromkeys([*names, "gone"], hits))})
    computes: dict[str, Any] = {"prefill_tokens_per_second": 1e3}
    for known in ({}, computes):
        made.board.measured({"cpu": TierStats({"cpu": known})})
        ghosts = made.board.status("1").ghosts
        assert [ghost.tier for ghost in ghosts] == names
        assert [ghost.prompt_seconds for ghost in ghosts] == [None] * 3
    rates = {**computes, "load_tokens_per_second": 1e5}
    loaded = {"loaded_tokens": 4.0, "reloaded_tokens": 6.0, "loaded_bytes": 1000.0}
    for _ in range(2):
        made.board.measured({"cpu": TierStats({"cpu": {**rates, **loaded}})})
    seconds = [ghost.prompt_seconds for ghost in made.board.status("1").ghosts]
    assert seconds == pytest.approx([752.5e-3, 752.5e-3, 775e-3])
    (tier,) = made.board.status("1").tiers
    assert tier.measured_load_bytes_per_second == 1e7


def test_samples_are_bounded(observed: Callable[..., Observed]) -> None:
    made = observed(cpu())
    samples = [float(n) for n in reversed(range(10 * SAMPLES))]
    of_cpu: dict[str, Any] = {
        "load_seconds": samples,
        "store_size_bytes": [6.0] * 4,
        "store_seconds": [2.0] * 4,
    }
    made.board.measured({"cpu": TierStats({"cpu": of_cpu})})
    assert made.board.store_rates(ranks=2) == {"cpu": 6.0}
    found = made.board.status("1").tiers[0].load_seconds
    assert found is not None
    assert (found.samples, round(found.p99 - found.p50)) == (SAMPLES, round(0.49 * SAMPLES))
