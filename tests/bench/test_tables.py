"""The measurements in docs/benchmarks.md are those of the committed results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.report import machine, write_json
from bench.tables import (
    INDEX,
    PAGE,
    TURNS,
    index_section,
    newest,
    put_in,
    section,
    turns_section,
)
from tests.support.bench_rows import row


def test_the_page_shows_the_newest_results() -> None:
    text = PAGE.read_text()
    assert put_in(text, section(newest())) == text, "run python -m bench.tables"
    assert put_in(text, index_section(), *INDEX) == text, "run python -m bench.tables"
    assert put_in(text, turns_section(), *TURNS) == text, "run python -m bench.tables"


def test_a_table_of_the_newest_result_of_each_hardware(tmp_path: Path) -> None:
    old, new, other = (
        tmp_path / f"{name}.json"
        for name in ("2026-01-01-xeon", "2026-02-01-xeon", "2026-01-15-h100")
    )
    write_json(old, [row("an old case")])
    write_json(new, [row("store"), row("a point", target=None), row("gpu", ours=None, why="none")])
    write_json(other, [row("load", met=True)])
    new.with_suffix(".png").touch()
    text = section(newest(tmp_path))
    assert "| store | 2 GB/s | limit 4 | 0.50 | 0.9 | missed | 10% |" in text
    assert "it is slow" not in text, "no run has measured what holds a case back"
    assert "- disk: gpu: none." in text
    assert "| load | 2 GB/s | limit 4 | 0.50 | 0.9 | met | 10% |" in text
    assert text.count("#### disk") == 2, "a table for each suite of each machine"
    assert "![2026-02-01-xeon](../bench/results/2026-02-01-xeon.png)" in text
    assert "an old case" not in text
    assert "a point" not in text


def test_a_column_for_each_number_of_blocks(tmp_path: Path) -> None:
    for name, blocks, ours in (
        ("2026-01-01-xeon-1000", "1,000", 9.0),
        ("2026-02-01-xeon-20000", "20,000", 3.0),
        ("2026-02-01-xeon-1000", "1,000", 2.0),
    ):
        one = row(f"index: open {blocks} blocks", unit="s", ours=ours, peer=5.0, peer_name="dict")
        write_json(tmp_path / f"{name}.json", [one])
    lines = index_section(tmp_path).splitlines()
    assert lines[0].endswith(":")
    assert [line.count("[") for line in lines if line.startswith("| |")] == [2]
    assert lines[-1] == "| index: open blocks | 2 s (dict 5) (limit 4) | 3 s (dict 5) (limit 4) |"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="measured"):
        put_in("# kvtiers\n", "table")


def test_a_line_for_each_case_of_two_checkouts_that_has_a_target(tmp_path: Path) -> None:
    then = [row("store", target=None), row("a point", target=None), row("gone")]
    now = [row("store", ours=3.0, of_limit=0.75, spread=0.4), row("a point", target=None)]
    sides = {
        name: {"commit": name * 2, "rows": [asdict(one) for one in rows]}
        for name, rows in (("then", then), ("now", now))
    }
    result = {"machine": machine(), "turns": 4, "suites": ["disk"], **sides}
    (tmp_path / "2026-02-01-xeon.json").write_text(json.dumps(result))
    told, _, _, _, *lines = turns_section(tmp_path).splitlines()
    assert told.endswith("thenthen then and nownow now, 4 turns.")
    assert lines == ["| disk | store | 2 GB/s | 3 GB/s | 1.50 | 0.50 | 0.75 | 40% |"]
