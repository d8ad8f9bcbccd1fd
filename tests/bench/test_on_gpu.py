"""`make gpu` where there is no GPU: parts that pass, fail and hang, and the JSON of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest

from bench import on_gpu
from bench.gpu import choose
from bench.report import read_json


def part(name: str, code: str, seconds: float = 60.0) -> on_gpu.Part:
    return on_gpu.Part(name, [sys.executable, "-S", "-c", code], seconds)


def test_a_part_that_fails_or_hangs_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = "print('begun', flush=True); import time; time.sleep(600)"
    ours = [
        part("hangs", hang, 1.0),
        part("fails", "print('no'); raise SystemExit(3)"),
        part("runs", "1"),
    ]
    monkeypatch.setattr(on_gpu, "parts", lambda rows: ours)
    file = tmp_path / "new" / "gpu.json"
    assert on_gpu.main(file) == 1
    said = json.loads(file.read_text())["parts"]
    exits = {name: one["exit"] for name, one in said.items()}
    assert exits == {"hangs": None, "fails": 3, "runs": 0}
    assert said["fails"]["output"] == "no\n"
    assert [one["passed"] for one in said.values()] == [False, False, True]


def test_its_parts_run_and_its_rows_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, bench = on_gpu.parts(tmp_path / "gpu.rows.json")
    assert sum(one.seconds for one in (tests, bench)) < 600
    some = tests._replace(command=[*tests.command[:-1], "tests/gpu/test_copier.py"])
    monkeypatch.setattr(on_gpu, "parts", lambda rows: [some, bench])
    file = tmp_path / "gpu.json"
    on_gpu.main(file)
    said = json.loads(file.read_text())["parts"]
    assert all(one["passed"] for one in said.values()), said
    machine, rows = read_json(file)
    assert {row.suite for row in rows} == {"gpu"}
    assert all(row.why for row in rows) or machine["gpu"]


def test_fragmented_slots_are_within_the_pool() -> None:
    assert choose(Random(0), 5, fragmented=False) == [0, 1, 2, 3, 4]
    slots = choose(Random(0), 5, fragmented=True)
    assert len(set(slots)) == 5
    assert all(0 <= slot < 10 for slot in slots)
    assert sorted(slots) != list(range(min(slots), min(slots) + 5))
