"""`kvtiers status` of an engine in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from spec.text import bytes_text, span
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import cpu, disk
from tiers.cli.status import ghost_lines, lines
from tiers.control.control_server import ControlServer
from tiers.control.engine_status import EngineStatus, GhostStatus, Percentiles, TierStatus

Run = Callable[..., tuple[int, str, str]]
Engine = Callable[..., ReplayEngine]

TIER = TierStatus(
    name="disk",
    type="disk",
    state="degraded",
    why="writes are down: OSError: No space left on device",
    paused="",
    capacity_bytes=200 << 30,
    used_bytes=50 << 30,
    token_share=0.5,
    token_share_late=0.25,
    loaded_bytes_per_second=1.5 * (1 << 30),
    stored_bytes_per_second=0,
    measured_load_bytes_per_second=3 * (1 << 30),
    load_latency_seconds=0.001,
    loading_jobs=2,
    storing_jobs=1,
    lookup_seconds=Percentiles(p50=0.0001, p99=0.0025, samples=500),
    load_seconds=None,
    dropped_blocks={"budget": 1200},
    sums={"evictions": 7, "store_failures": 0},
)
STATUS = EngineStatus(
    version="1",
    load_policy="stitched",
    chain_version=3,
    up_seconds=7200,
    measured_seconds_ago=90,
    window_seconds=60,
    prompt_tokens=12345,
    prompt_tokens_late=100,
    prefill_tokens_per_second=4000,
    tiers=[TIER],
    ghosts=[GhostStatus(tier="disk (capacity: 2x)", hit_ratio=0.6, error=0.02)],
)


def test_the_text_has_what_an_operator_looks_for() -> None:
    assert [*lines("chat-7", STATUS)] == [
        "engine chat-7: up 2h, load policy stitched, chain version 3, 12,345 prompt tokens, 100 of "
        "late, computes 4,000 tokens/s, its last step was 90s ago",
        "tier state    fill        share load/s  store/s lookup ms load ms queue",
        "disk degraded 25% of 200G 25.0% 1.5G/3G 0       0.1/2.5   -       2+1",
        "  disk: writes are down: OSError: No space left on device",
        "  disk: blocks: 1,200 dropped (budget), 7 evicted",
        "  ghost disk (capacity: 2x): 60.0% of blocks +- 2.0%",
    ]


def test_a_tier_that_is_paused_is_not_shown_as_open() -> None:
    paused = TIER.model_copy(update={"state": "open", "why": "", "paused": "both"})
    status = STATUS.model_copy(update={"tiers": [paused]})
    row, note = [*lines("chat-7", status)][2:4]
    assert row.split()[:2] == ["disk", "paused"] and note == "  disk: paused: both"
    status = STATUS.model_copy(
        update={"tiers": [paused.model_copy(update={"state": "down", "why": "", "paused": ""})]}
    )
    row, note = [*lines("chat-7", status)][2:4]
    assert row.split()[:2] == ["disk", "down"] and note == "  disk: it is down"
    status = STATUS.model_copy(update={"tiers": [paused.model_copy(update={"state": "down"})]})
    assert [*lines("chat-7", status)][2].split()[:2] == ["disk", "down"]


def test_a_tier_whose_blocks_are_not_counted_is_not_shown_as_empty() -> None:
    """As a server, whose 0 looked like one that has lost all."""
    server = TIER.model_copy(update={"state": "open", "capacity_bytes": 0, "used_bytes": 0})
    row = [*lines("chat-7", STATUS.model_copy(update={"tiers": [server]}))][2]
    assert row.split()[:3] == ["disk", "open", "-"]
    server = server.model_copy(update={"used_bytes": 3 << 30})
    row = [*lines("chat-7", STATUS.model_copy(update={"tiers": [server]}))][2]
    assert row.split()[:3] == ["disk", "open", "3G"]


def test_a_ghost_is_compared_with_the_tier_as_it_is() -> None:
    found = [
        ("cpu", 0.4, 0.01),
        ("cpu (capacity: 2x)", 0.45, 0.02),
        ("cpu (eviction: arc)", 0.425, 0.02),
    ]
    ghosts = [GhostStatus(tier=tier, hit_ratio=hits, error=error) for tier, hits, error in found]
    ghosts.append(GhostStatus(tier="disk (1TB)", hit_ratio=0.6, error=0.01, prompt_seconds=0.0525))
    ghosts.append(GhostStatus(tier="disk (2TB)", hit_ratio=0.6, error=0.01, prompt_seconds=2.5))
    assert [*ghost_lines(ghosts)] == [
        "ghost cpu: 40.0% of blocks +- 1.0%",
        "ghost cpu (capacity: 2x): 45.0% of blocks +- 2.0%, +5.0 points",
        "ghost cpu (eviction: arc): 42.5% of blocks +- 2.0%, as good as now",
        "ghost disk (1TB): 60.0% of blocks +- 1.0%, 52.5 ms for 1,000 tokens",
        "ghost disk (2TB): 60.0% of blocks +- 1.0%, 2500 ms for 1,000 tokens",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.7, "0.976K"),
        (1536, "1.5K"),
        (1023 << 20, "0.999G"),
        (2 << 40, "2T"),
    ],
)
def test_bytes_have_three_digits(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_times_are_those_of_an_operator() -> None:
    assert [span(s) for s in (3, 119, 120, 7199, 7200, 400000)] == [
        *("3s", "119s", "2m", "120m", "2h", "5d")
    ]


def test_engines_are_shown_and_a_tier_that_is_not_open_is_status_1(
    kvtiers: Run, engine: Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "control"
    engine(cpu(), disk(tmp_path / "disk"))
    status, out, err = kvtiers("status", "--folder", folder)
    assert (status, err) == (0, "")
    tiers = [line.split()[:2] for line in out.splitlines()[2:]]
    assert tiers == [["cpu", "open"], ["disk", "open"]]
    (tmp_path / "file").write_text("no folder")
    engine(cpu(), disk(tmp_path / "file"))
    status, out, _ = kvtiers("status", "--json", "--folder", folder)
    found = [json.loads(line) for line in out.splitlines()]
    assert status == 1 and len(found) == 2
    assert {tier["state"] for one in found for tier in one["tiers"]} == {"open", "refused"}
    status, out, err = kvtiers("status", "--folder", tmp_path)
    assert (status, out) == (1, "") and "no engine listens" in err


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ([{"state": "open"}, {"state": "open", "temperature": 21}], 0),
        ([], 0),
        ([{"state": "open"}, {"state": "degraded"}], 1),
        ([{"condition": "open"}], 1),
        (["open"], 1),
        ({"disk": {"state": "open"}}, 1),
        (None, 1),
    ],
)
def test_json_of_another_version_is_judged_by_the_states_that_it_has(
    kvtiers: Run, tmp_path: Path, tiers: object, expected: int
) -> None:
    content = {**STATUS.model_dump(), "tiers": tiers}
    folder = tmp_path / "control"
    with closing(ControlServer(folder, "new", {"status": lambda _: content})):
        status, out, err = kvtiers("status", "--json", "--folder", folder)
        assert (status, err) == (expected, "")
        assert json.loads(out)["tiers"] == tiers
    with closing(ControlServer(folder, "odd", {"status": lambda _: [content]})):
        for more in ((), ("--json",)):
            status, out, err = kvtiers("status", *more, "--folder", folder)
            assert (status, out) == (1, "") and "its answer is another version's" in err
        with closing(ControlServer(folder, "zoo", {"status": lambda _: STATUS.model_dump()})):
            for more in ((), ("--json",)):
                status, out, err = kvtiers("status", *more, "--folder", folder)
                assert status == 1 and "zoo" in out, "the engines after it are shown"
                assert "engine odd-" in err and "its answer is another version's" in err
