"""Benchmarks of two checkouts in turn."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from bench.report import Row
from bench.turns import CHECKOUT, lines, medians, run
from tests.bench.rows import row


def turn(ours: float, *cases: str, **more: object) -> list[Row]:
    return [row(case, **{"ours": ours, "of_limit": ours / 4, **more}) for case in cases]


def ratios(then: list[Row], now: list[Row]) -> list[tuple[str, ...]]:
    """Of each line its case, how many times as good it is, and the ratios then and now."""
    sides = {"then": then, "now": now}
    result = {side: {"rows": [asdict(one) for one in rows]} for side, rows in sides.items()}
    return [(line[1], *line[4:7]) for line in lines(result)]


def test_medians_of_the_turns_that_all_have_the_case() -> None:
    turns = [turn(4.0, "a", "b"), turn(1.0, "a"), turn(3.0, "a", "b"), turn(2.0, "b", "a")]
    (found,) = medians(turns)
    assert (found.case, found.ours, found.of_limit, found.spread) == ("a", 2.5, 0.625, 1.2)


def test_a_case_beside_another_peer_is_compared_without_it() -> None:
    raw: dict[str, object] = {"peer_name": "raw", "of_peer": 0.4, "of_limit": None}
    other = {**raw, "peer_name": "other"}
    then = turn(2.0, "a", "b", **raw) + turn(2.0, "c", "gone")
    now = turn(3.0, "a", **raw) + turn(4.0, "b", **other) + turn(4.0, "c", peer_name="other")
    found = [("a", "1.50", "0.40", "0.40"), ("b", "2.00", "", ""), ("c", "2.00", "0.50", "1.00")]
    assert ratios(then, now) == found
    assert not ratios(turn(1.0, "c", of="ours"), now), "of which each has another target"


def test_a_checkout_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    rows = run(CHECKOUT, ["codec"], 1, tmp_path / "turn.json")
    assert {one.suite for one in rows} == {"codec"}
