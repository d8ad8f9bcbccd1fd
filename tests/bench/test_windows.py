"""The bench of attention windows: what is found of prompts, and what is stored for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.windows import GROUPS, main


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three prompts with their first eight blocks in common, of which the last is asked again."""
    trace, result = tmp_path / "trace.jsonl", tmp_path / "out.json"
    numbers = [[*range(8), *range(8 * n, 8 * n + 4)] for n in (1, 2, 3, 3)]
    lines = [
        json.dumps({"timestamp": 0, "input_length": 12 * 512, "output_length": 1, "hash_ids": ids})
        for ids in numbers
    ]
    trace.write_text("\n".join(lines))
    assert main([str(trace), "--sizes", "100", "--json", str(result)]) == 0
    (row,) = json.loads(result.read_text())["rows"]
    blocks, windows = 8 + 3 * 4, len(GROUPS) - 1
    # Two blocks before each end, and once before where they part.
    assert row["everywhere"] == [8 + 8 + 12, blocks * len(GROUPS)]
    assert row["where prefixes end"] == [0 + 8 + 12, blocks + (3 * 2 + 2) * windows]
    assert "where prefixes end" in capsys.readouterr().out
    assert main(["no-such-trace"]) == 2
