"""The demo's results: sums, medians, and what counts as a failure."""

from __future__ import annotations

from bench.demo import demo_report as report
from bench.demo.demo_engine import Answered

SERVING = {"disk": frozenset({"nvme", "spare"})}


def asked(phase: str, ttft: float, answer: list[int], **by_tier: int) -> Answered:
    return Answered(
        phase=phase,
        prompt_tokens=100,
        local_tokens=0,
        by_tier=by_tier,
        ttft_s=ttft,
        tokens=answer,
    )


COLD = [asked("cold", 2.0, [1, 2]), asked("cold", 4.0, [3]), asked("cold", 3.0, [4])]


def test_a_phase_sums_tokens_and_compares_with_cold() -> None:
    disk = [
        asked("disk", 0.1, [1, 2], nvme=96),
        asked("disk", 9.0, [3], nvme=32, redis=64),
        asked("disk", 0.3, [4], nvme=96),
    ]
    results = report.summarise([*COLD, *disk])
    assert results[0] == report.PhaseResult("cold", 300, 0, {}, 3.0, 1.0, True)
    assert results[1] == report.PhaseResult(
        "disk", 300, 288, {"nvme": 224, "redis": 64}, 0.3, 10.0, True
    )
    assert report.faults(results, SERVING) == {}
    assert report.to_json(results)["phases"][1] == {
        "name": "disk",
        "prompt_tokens": 300,
        "loaded_tokens": 288,
        "by_tier": {"nvme": 224, "redis": 64},
        "ttft_s": 0.3,
        "speedup": 10.0,
        "identical": True,
    }


def test_one_changed_token_fails_its_phase() -> None:
    disk = [asked("disk", 0.1, tokens, nvme=96) for tokens in ([1, 2], [3], [5])]
    faults = report.faults(report.summarise([*COLD, *disk]), SERVING)
    assert faults == {"disk": "the generated tokens differ from cold's"}


def test_a_phase_served_by_another_tier_fails() -> None:
    disk = [asked("disk", 0.1, cold["tokens"], redis=96) for cold in COLD]
    faults = report.faults(report.summarise([*COLD, *disk]), SERVING)
    assert faults == {"disk": "nothing was loaded from nvme or spare"}


def test_the_table_shows_who_served_and_whether_tokens_changed() -> None:
    disk = [asked("disk", 0.5, [9], nvme=96) for _ in COLD]
    lines = report.table(report.summarise([*COLD, *disk])).splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("disk"))
    for shown in ("288 (96%)", " nvme ", "0.500 s", "6.0x", "changed"):
        assert shown in row
