"""The measurements in docs/benchmarks.md are those of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.report import read_json, write_json
from bench.tables import PAGE, SHOWN, newest, put_in, row_of, section
from tests.bench.rows import row


def test_the_page_shows_the_newest_results() -> None:
    text = PAGE.read_text()
    assert put_in(text, section(newest())) == text, "run python -m bench.tables"


def test_the_table_has_few_rows_and_each_was_measured() -> None:
    assert len(SHOWN) <= 25
    rows = [one for path in newest() for one in read_json(path)[1]]
    assert [name for name in SHOWN if row_of(name, rows) is None] == []


def test_a_column_of_the_newest_result_of_each_hardware(tmp_path: Path) -> None:
    old, new, other = (
        tmp_path / f"{name}.json"
        for name in ("2026-01-01-xeon", "2026-02-01-xeon", "2026-01-15-h100")
    )
    write_json(old, [row("store, direct, 64 blocks", ours=1.0)])
    absent = row("load, direct, 64 blocks", ours=None, why="none")
    write_json(new, [row("store, direct, 64 blocks"), absent, row("another case")])
    write_json(other, [row("load, direct, 64 blocks", met=True)])
    head, _, *lines = section(newest(tmp_path)).splitlines()
    assert head.count("[2026-02-01-xeon]") == head.count("[2026-01-15-h100]") == 1
    assert "2026-01-01-xeon" not in head, "there is a newer one"
    assert lines == [
        "| disk: direct store beside a raw loop | 0.9 | 0.50, missed (2 GB/s) |  |",
        "| disk: direct load beside a raw loop | 0.9 |  | 0.50 (2 GB/s) |",
    ]


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="measured"):
        put_in("# kvtiers\n", "table")
