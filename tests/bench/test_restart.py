"""The bench of a restart runs, and loads what was stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def test_it_runs(tmp_path: Path) -> None:
    from bench.restart import main

    few = ["--documents", "3", "--tokens", "200", "--quiet", "0", "--rounds", "1"]
    assert main([*few, "--folder", str(tmp_path), "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["engine"] for row in rows] == [
        "has served",
        "warm, after 0 s",
        "without, after 0 s",
    ]
    assert all(row["p50_ttft_ms"] > 0 and row["not_computed"] > 0.5 for row in rows)
