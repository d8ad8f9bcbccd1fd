"""The bench of `load_when`: what it prints, and that what it serves is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.load_when import main


def test_a_tiny_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "out.json"
    arguments = ["--rounds", "2", "--tokens", "256", "--bandwidths", "1e7", "1e9"]
    assert main([*arguments, "--json", str(result)]) == 0
    rows = json.loads(result.read_text())["rows"]
    assert [row["tiers"] for row in rows] == [
        *("10 MB/s", "1 GB/s", "10 MB/s remote", "1 GB/s remote"),
        *("10 MB/s over 1 GB/s", "1 GB/s over 1 GB/s"),
    ]
    assert all(len(row["times"]["sooner"]) == 3 for row in rows)
    assert "10 MB/s over 1 GB/s" in capsys.readouterr().out
