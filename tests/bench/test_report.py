"""How a case is measured and told."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from bench.report import (
    COMPARED,
    HEAD,
    Case,
    Row,
    compared,
    measure,
    read_json,
    table,
    write_json,
)


def test_ratios_say_how_much_better_we_are() -> None:
    faster = Case("s", "c", "GB/s", lambda: 3.0, limit=lambda: 4.0, peer=lambda: 2.0, target=0.8)
    row = measure(faster, 1)
    assert (row.of_limit, row.of_peer, row.met) == (0.75, 1.5, False)
    sooner = Case("s", "c", "ms", lambda: 3.0, limit=lambda: 6.0, target=2.0)
    assert measure(sooner, 1).of_limit == 2.0
    assert measure(sooner, 1).met is True
    absolute = Case("s", "c", "ms", lambda: 3.0, target=2.0, of="ours")
    assert measure(absolute, 1).met is False


def test_medians_of_the_rounds_after_the_first() -> None:
    figures = count(1)
    row = measure(Case("s", "c", "GB/s", lambda: float(next(figures))), 3)
    assert row.ours == 3.0
    assert row.spread == 2 / 3
    figures = count(1)
    assert measure(Case("s", "c", "GB/s", lambda: float(next(figures)), rounds=1), 3).ours == 2.0


def test_what_is_not_here_is_neither_met_nor_missed() -> None:
    row = measure(
        Case("s", "c", "GB/s", None, limit=lambda: 1.0, target=0.9, why="no such device"), 3
    )
    assert (row.ours, row.limit, row.met) == (None, None, None)
    (line,) = table([row])
    assert len(line) == len(HEAD)
    assert "0.9 not measured" in line


def test_a_written_result_reads_back(tmp_path: Path) -> None:
    row = measure(Case("s", "c", "GB/s", lambda: 3.0), 1)
    write_json(tmp_path / "out.json", [row])
    machine, rows = read_json(tmp_path / "out.json")
    assert rows == [row]
    assert machine["cores"] > 0


def test_two_runs_are_shown_side_by_side() -> None:
    def run(ours: float, limit: float, *more: str) -> list[Row]:
        cases = [Case("s", name, "ms", lambda: ours, lambda: limit) for name in ("both", *more)]
        return [measure(case, 1) for case in cases]

    (line,) = compared(run(4.0, 2.0, "gone"), run(2.0, 3.0, "new"))
    assert len(line) == len(COMPARED)
    assert line == ("s", "both", "4 ms", "2 ms", "2.00", "0.50", "1.50", "0%")
