"""The bench of load policies: what it prints, and what it must show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.policies import TRACE, main


def run(tmp_path: Path, *arguments: str) -> dict[tuple[int, str], int]:
    """Loaded blocks by CPU size and policy."""
    result = tmp_path / "out.json"
    assert main([*arguments, "--json", str(result)]) == 0
    rows = json.loads(result.read_text())["rows"]
    return {(row["cpu_blocks"], row["load"]): row["loaded"] for row in rows}


def test_a_small_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six prompts of ten blocks, of which nine are shared; the CPU tier has room for five."""
    trace = tmp_path / "trace.jsonl"
    prompts = [[*range(9), 100 + n] for n in range(6)]
    lines = [
        {"timestamp": 0, "input_length": 10 * 512 + 1, "output_length": 1, "hash_ids": [*ids, 999]}
        for ids in prompts
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    loaded = run(tmp_path, str(trace), "--cpu", "5", "100", "--disk", "50")
    assert loaded[100, "first"] == loaded[100, "longest"] == loaded[100, "stitched"] == 5 * 9
    assert loaded[5, "stitched"] == loaded[5, "longest"] == 5 * 9, "the disk has all"
    assert 0 < loaded[5, "first"] < 5 * 9, "and is hidden by what the CPU tier has"
    assert "stitched" in capsys.readouterr().out


def test_a_trace_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-trace"]) == 2
    assert "no-such-trace" in capsys.readouterr().err


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no trace at {TRACE.name}'s usual place")
def test_real_prompts_load_more_when_stitched(tmp_path: Path) -> None:
    loaded = run(tmp_path, "--requests", "800", "--cpu", "100", "--disk", "5000")
    assert loaded[100, "stitched"] >= loaded[100, "longest"] >= loaded[100, "first"]
    assert loaded[100, "stitched"] > 2 * loaded[100, "first"] > 0
