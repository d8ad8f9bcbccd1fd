"""`kvtiers curve`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ran
from tiers.traces.recorded import FileHeader, encode_header, encode_request
from tiers.traces.trace import TraceRequest

Kvtiers = Callable[..., Ran]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """100 requests by turns of two prompts of 4 blocks each, which share the first one."""
    path = tmp_path / "a.jsonl"
    prompts = [[0, 1, 2, 3], [0, 11, 12, 13]]
    requests = [TraceRequest(t * 10.0, 70, 1, prompts[t % 2]) for t in range(100)]
    path.write_bytes(
        encode_header(FileHeader(16, 0.0, kv_bytes_per_token=65536))
        + b"".join(map(encode_request, requests))
    )
    return path


def test_a_table_and_the_numbers(kvtiers: Kvtiers, trace: Path, tmp_path: Path) -> None:
    ran = kvtiers("curve", trace, "--json", tmp_path / "out.json")
    assert (ran.status, ran.err) == (0, "")
    assert "100 requests, 7,000 prompt tokens, 400 full blocks, 7 different ones" in ran.out
    rows = [line.split() for line in ran.out.splitlines() if line.strip().endswith("%")]
    assert [row[:2] for row in rows] == [
        ["1MiB", "1"],
        ["2MiB", "2"],
        ["4MiB", "4"],
        ["7MiB", "7"],
    ]
    assert [row[3] for row in rows] == ["24.75%", "24.75%", "24.75%", "98.25%"]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["sizes"][-1] | {"first_half": None, "second_half": None} == {
        "tier": None,
        "blocks": 7,
        "tokens": 112,
        "bytes": 7 * 2**20,
        "hits": 393,
        "hit_ratio": 0.9825,
        "token_ratio": round(393 * 16 / 7000, 6),
        "from_second_use": 0.965,
        "first_half": None,
        "second_half": None,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.json"]


CHAIN = """\
version: 1
tiers:
  - {type: cpu, capacity: 2MiB}
  - {type: disk, capacity: 1GiB, path: /tmp/kv, store_threshold: 2}
  - {type: redis, url: "redis://cache"}
"""


def test_a_chains_tiers_are_marked(kvtiers: Kvtiers, trace: Path, tmp_path: Path) -> None:
    chain = tmp_path / "chain.yaml"
    chain.write_text(CHAIN)
    ran = kvtiers("curve", trace, "--chain", chain)
    marked = [line for line in ran.out.splitlines() if "<-" in line]
    assert [line.split("<- ")[1] for line in marked] == ["cpu", "disk (2nd use)"]
    assert marked[0].split()[:2] == ["2MiB", "2"]
    assert "only hits beyond the size of the engine's own cache come from tiers" in ran.out
    assert "come from tiers" not in kvtiers("curve", trace).out, "no tier is marked"
    assert ran.err == "redis is not marked: its YAML has no maxmemory\n"


def test_without_kv_bytes_sizes_are_blocks(kvtiers: Kvtiers, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line: dict[str, Any] = {"timestamp": 0, "input_length": 1030, "output_length": 5}
    path.write_text(f"{json.dumps(line | {'hash_ids': [0, 1, 2]})}\n" * 3)
    ran = kvtiers("curve", path)
    assert "blocks of 512 tokens\n" in ran.out
    ran = kvtiers("curve", path, "--kv-bytes-per-token", 131_072)
    assert ran.out.count("131,072 KV bytes") == 1
    ran = kvtiers("curve", path, "--chain", path)
    assert ran.status == 2
    (tmp_path / "chain.yaml").write_text(CHAIN)
    ran = kvtiers("curve", path, "--chain", tmp_path / "chain.yaml")
    assert ran.status == 2 and "say what a token takes" in ran.err


def test_what_was_skipped_is_said(kvtiers: Kvtiers, trace: Path) -> None:
    trace.write_bytes(trace.read_bytes() + b'{"timestamp": 5, "inp')
    ran = kvtiers("curve", trace)
    assert (ran.status, ran.err) == (
        0,
        f"1 last lines that were cut off\n  {trace}:102: cut off\n",
    )
    trace.write_bytes(trace.read_bytes() + b"\n")
    ran = kvtiers("curve", trace)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"{trace}:102: it is no JSON object")


def test_engines_that_recorded_at_the_same_time_are_said(kvtiers: Kvtiers, trace: Path) -> None:
    """Four of them had one's cache to share: the curve was of none."""
    header = encode_header(FileHeader(16, 0.0, "other", 65536))
    other = trace.with_name("b.jsonl")
    other.write_bytes(header + trace.read_bytes().split(b"\n", 1)[1])
    ran = kvtiers("curve", trace.parent)
    assert ran.status == 0
    assert ran.err.startswith("2 engines recorded at the same time: name")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--json", "/none/such/out.json"], "/none/such/out.json: its folder is not there"),
        (["--kv-bytes-per-token", "0"], "Invalid value for '--kv-bytes-per-token'"),
    ],
)
def test_what_is_refused(kvtiers: Kvtiers, trace: Path, arguments: list[str], why: str) -> None:
    ran = kvtiers("curve", trace, *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert why in ran.err


def test_a_trace_without_full_blocks(kvtiers: Kvtiers, trace: Path) -> None:
    trace.write_bytes(encode_header(FileHeader(16, 0.0)))
    ran = kvtiers("curve", trace)
    assert (ran.status, ran.out) == (2, "")
    assert "no prompt has a full block of 16 tokens" in ran.err
