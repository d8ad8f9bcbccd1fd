"""The bench of eviction policies: what it prints, and what the default must show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.eviction import POLICIES, TRACE, main, measure, optimum, prompts_of, replay


def blocks(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def test_the_optimum_of_a_small_trace() -> None:
    """Two slots: block 1 stays, since it is used again before 2 is; 3 is never worth a slot."""
    prompts = [blocks(1), blocks(2), blocks(3), blocks(1), blocks(2)]
    assert optimum(prompts, 2) == 2
    assert optimum(prompts, 1) == 1
    assert replay(prompts, "lru", 2) == 0
    assert replay(prompts, "lru", 3) == 2


def test_the_optimum_keeps_prefixes() -> None:
    prompts = [blocks(1, 2, 3), blocks(1, 2, 3)]
    assert [optimum(prompts, slots) for slots in (1, 2, 3)] == [1, 2, 3]


def test_a_block_behind_a_gap_is_no_hit() -> None:
    prompts = [blocks(2), blocks(1, 2)]
    assert optimum(prompts, 2) == 0
    assert {replay(prompts, policy, 2) for policy in POLICIES} == {0}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 3 * 512, "output_length": 1, "hash_ids": [1, 2, 3]}
    trace.write_text((json.dumps(line) + "\n") * 4)
    result = tmp_path / "out.json"
    assert main([str(trace), "--sizes", "100", "--json", str(result)]) == 0
    (row,) = json.loads(result.read_text())["rows"]
    assert {row[name] for name in (*POLICIES, "opt")} == {9}
    assert "100.0%" in capsys.readouterr().out
    assert main(["no-such-trace"]) == 2


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no trace at {TRACE.name}'s usual place")
def test_the_default_serves_more_than_lru_where_room_is_short() -> None:
    (row,) = measure(prompts_of(TRACE, 1000), [5.0])
    assert 1.1 * row["lru"] < row["arc"] < row["opt"]
